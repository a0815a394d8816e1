"""Small models for tests: the real configurations scaled down, made up, converted, and opened."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.generate import Model, extend, new_sequence, open_model
from engine.presets import KIMI_K3, scale
from formats.convert import convert
from formats.synthetic import write_checkpoint

SMALL_K3 = scale(
    KIMI_K3,
    layers=4,
    kda_heads=2,
    kda_head_dim=64,
    vocab_size=320,
    hidden_size=128,
    intermediate_size=192,
    num_attention_heads=2,
    q_lora_rank=128,
    kv_lora_rank=128,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    num_experts=16,
    num_experts_per_token=3,
    moe_intermediate_size=64,
    routed_expert_hidden_size=96,
    attn_res_block_size=3,
)

SMALL_LINEAR: dict[str, Any] = {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "vocab_size": 200,
    "num_hidden_layers": 5,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "mla_use_nope": True,
    "num_experts": 12,
    "num_experts_per_token": 3,
    "num_shared_experts": 1,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "routed_scaling_factor": 2.446,
    "num_expert_group": 1,
    "topk_group": 1,
    "use_grouped_topk": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "model_max_length": 1048576,
    "tie_word_embeddings": False,
    "eos_token_id": 163586,
    "linear_attn_config": {
        "num_heads": 3,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [4, 5],
        "kda_layers": [1, 2, 3],
    },
}

# name: configuration, format of the experts, format of the attention weights
KINDS = {
    "k3": (SMALL_K3, "nvfp4", "fp8"),
    "k3-mxfp4": (SMALL_K3, "mxfp4", "bf16"),
    "linear": (SMALL_LINEAR, "bf16", "bf16"),
}


def make_model(kind: str, folder: Path, seed: int = 8) -> Path:
    """Write the source checkpoint ``folder/source`` and its conversion; returns the latter's folder."""
    config, experts, attention = KINDS[kind]
    write_checkpoint(folder / "source", config, seed=seed, experts=experts, attention=attention)
    convert(folder / "source", folder / "ftw")
    return folder / "ftw"


def run_chunks(model: Model, ids: list[int], chunk: int, then: int | None = None) -> Tensor:
    """Logits of every token, the sequence fed ``chunk`` tokens a step, or ``chunk`` and after it ``then``."""
    sequence = new_sequence(model, len(ids))
    for tensor in sequence.state:
        tensor.fill_(float("nan"))
    parts = []
    starts = [0, *range(chunk, len(ids), then or chunk)]
    for past, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        part = ids[past:end]
        parts.append(extend(model, sequence, part, past, range(len(part))))
    return torch.cat(parts)


def made_up_ids(n: int, vocab: int, seed: int = 0) -> list[int]:
    return torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def open_small(folder: Path, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Model:
    return open_model(folder, device, dtype=dtype)
