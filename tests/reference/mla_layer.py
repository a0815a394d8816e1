"""A whole layer of multi-head latent attention, keys and values expanded (kimi-k3.md, sections 2.7 and 9)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.reference.mla import attention
from tests.reference.norm import rms_norm

LATENT_EPS = 1e-6


def layer(x: Tensor, w: Mapping[str, Tensor], text: Mapping[str, Any]) -> Tensor:
    """x [T, D] normed; w by their names after ``self_attn.``."""
    heads, rank, nope = text["num_attention_heads"], text["kv_lora_rank"], text["qk_nope_head_dim"]
    if text.get("q_lora_rank"):
        q = rms_norm(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"], LATENT_EPS) @ w["q_b_proj.weight"].T
    else:
        q = x @ w["q_proj.weight"].T
    c, shared_key = (x @ w["kv_a_proj_with_mqa.weight"].T).split([rank, text["qk_rope_head_dim"]], -1)
    latent = torch.cat([rms_norm(c, w["kv_a_layernorm.weight"], LATENT_EPS), shared_key], -1)
    o = attention(q.unflatten(1, (heads, -1)), latent, w["kv_b_proj.weight"].view(heads, -1, rank), nope).flatten(1)
    if "g_proj.weight" in w:
        o = o * torch.sigmoid(x @ w["g_proj.weight"].T)
    return o @ w["o_proj.weight"].T
