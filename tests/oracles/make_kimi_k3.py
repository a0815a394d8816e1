"""Logits of a small Kimi K3 by Moonshot's own modelling code, as shipped in llmcompressor.

From the repository's root, in an environment with torch 2.13.0, triton 3.9.0, transformers 5.24.0, einops, and, both
installed with ``--no-deps``, llmcompressor 0.14.0.1 and fla-core 0.6.0:

    PYTHONPATH=. python tests/oracles/make_kimi_k3.py

Kernels that need a GPU are replaced: the recurrence and the gate by fla-core's plain references, the convolution and
the gated norm by torch's.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from typing import Any

import torch
from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
from fla.ops.kda.naive import naive_recurrent_kda
from torch import Tensor, nn
from torch.nn import functional

from engine.presets import KIMI_K3, scale
from tests.oracles.store import compute_in_float64, made_up_ids, save_case, weights

SEED = 3
CONFIG = scale(
    KIMI_K3,
    layers=10,
    kda_heads=3,
    kda_head_dim=32,
    vocab_size=256,
    hidden_size=96,
    intermediate_size=160,
    num_attention_heads=2,
    num_key_value_heads=2,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=48,
    num_experts=12,
    num_experts_per_token=3,
    moe_intermediate_size=48,
    routed_expert_hidden_size=64,
    attn_res_block_size=4,
)


def import_modelling() -> Any:
    """Import Moonshot's module without running llmcompressor's own initialisation."""
    for name in ("llmcompressor", "llmcompressor.modeling"):
        parent = sys.modules.get(name.rpartition(".")[0])
        spec = PathFinder.find_spec(name, parent.__path__ if parent else None)
        assert spec is not None, f"{name} is not installed"
        sys.modules[name] = module_from_spec(spec)
    from llmcompressor.modeling.kimi_k3 import modeling_kimi_linear

    return modeling_kimi_linear


class Convolution(nn.Module):
    """fla's ShortConvolution with SiLU, without a cache."""

    def __init__(self, hidden_size: int, kernel_size: int, activation: str) -> None:
        super().__init__()
        assert activation == "silu"
        self.weight = nn.Parameter(torch.empty(hidden_size, 1, kernel_size))

    def forward(self, x: Tensor, **_: object) -> tuple[Tensor, None]:
        taps = self.weight.shape[-1]
        padded = functional.pad(x.transpose(1, 2), (taps - 1, 0))
        y = functional.conv1d(padded, self.weight, groups=len(self.weight))
        return functional.silu(y.transpose(1, 2)), None


class GatedNorm(nn.Module):
    """fla's FusedRMSNormGated with a sigmoid gate."""

    def __init__(self, size: int, eps: float, activation: str) -> None:
        super().__init__()
        assert activation == "sigmoid"
        self.weight, self.eps = nn.Parameter(torch.empty(size)), eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weight, self.eps) * torch.sigmoid(gate)


def kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None,
    **_: object,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """fla's chunk_kda by its own plain parts: it normalises q and k and activates g and beta itself."""
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    if lower_bound is None:
        g = naive_kda_gate(g, A_log, dt_bias, output_dtype=torch.float64)
    else:
        g = naive_kda_lowerbound_gate(g, A_log, dt_bias, lower_bound, output_dtype=torch.float64)
    return naive_recurrent_kda(q, k, v, g, beta.sigmoid())


def main() -> None:
    code = import_modelling()
    code.ShortConvolution, code.FusedRMSNormGated, code.chunk_kda = Convolution, GatedNorm, kda
    compute_in_float64()
    text = CONFIG["text_config"]
    model = code.KimiLinearForCausalLM(code.KimiLinearConfig(**text, use_cache=False, attn_implementation="eager"))
    heads = text["linear_attn_config"]["num_heads"]
    trimmed = {n: w[:heads] if n.endswith("A_log") else w for n, w in weights(CONFIG, SEED).items()}
    model.load_state_dict(trimmed)
    ids = made_up_ids(24, text["vocab_size"])
    with torch.no_grad():
        logits = model.double().eval()(torch.tensor([ids]), use_cache=False).logits[0]
    save_case(__file__, "kimi_k3", CONFIG, SEED, ids, logits)


if __name__ == "__main__":
    main()
