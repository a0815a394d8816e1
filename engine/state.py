"""All that survives a step.

Per token only the MLA layers keep something: one latent row. The KDA layers keep a fixed amount per sequence: the
memory, and the last rows that went into the short convolution.

Letters as in the style guide; c is the number of convolution taps less one, d the convolved channels (q, k and v).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from engine.config import PAGE, ModelConfig


class State(NamedTuple):
    """Row s of ``mem`` and ``window`` belongs to one sequence; latent pages to whoever's plan names them.

    A row's content counts only once its sequence has seen a token: no one clears a slot.
    """

    mem_lshkp: Tensor  # recurrent memory of the KDA layers, fp32
    window_lscd: Tensor  # last inputs of their convolutions
    latent_lyur: Tensor  # [MLA layers, pages, places, kv_rank + rope_dim]


def new_state(cfg: ModelConfig, slots: int, pages: int, dtype: torch.dtype, device: torch.device) -> State:
    """Allocate room for ``slots`` sequences and ``pages * PAGE`` tokens; contents are arbitrary."""
    kda, mla = cfg.kinds.count("kda"), cfg.kinds.count("mla")
    channels = 3 * cfg.kda_heads * cfg.kda_head_dim
    head = (cfg.kda_heads, cfg.kda_head_dim, cfg.kda_head_dim)
    return State(
        mem_lshkp=torch.empty(kda, slots, *head, dtype=torch.float32, device=device),
        window_lscd=torch.empty(kda, slots, cfg.conv_taps - 1, channels, dtype=dtype, device=device),
        latent_lyur=torch.empty(mla, pages, PAGE, cfg.latent_row, dtype=dtype, device=device),
    )
