"""Small made-up checkpoints of every kind that ``formats`` converts; no torch is needed to make one."""

from pathlib import Path
from typing import Any

from engine.presets import KIMI_K3, scale
from formats.synthetic import write_checkpoint

K3 = scale(
    KIMI_K3,
    layers=4,
    kda_heads=3,
    kda_head_dim=128,
    vocab_size=96,
    hidden_size=256,
    intermediate_size=80,
    num_attention_heads=2,
    q_lora_rank=128,
    kv_lora_rank=128,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    num_experts=5,
    num_experts_per_token=2,
    moe_intermediate_size=64,
    routed_expert_hidden_size=96,
    attn_res_block_size=2,
)

_FULL_RANK = {"use_full_rank_gate": False, "gate_lower_bound": None}
LINEAR: dict[str, Any] = {
    **K3["text_config"],
    "model_type": "kimi_linear",
    "attn_res_block_size": None,
    "routed_expert_hidden_size": None,
    "mla_use_output_gate": False,
    "q_lora_rank": None,
    "linear_attn_config": K3["text_config"]["linear_attn_config"] | _FULL_RANK,
}

# name: configuration, format of the experts, format of the attention weights, shards
KINDS: dict[str, tuple[dict[str, Any], str, str, int]] = {
    "k3": (K3, "nvfp4", "fp8", 3),
    "k3-mxfp4": (K3, "mxfp4", "bf16", 1),
    "linear": (LINEAR, "bf16", "bf16", 2),
}


def make_source(kind: str, root: Path, seed: int = 3) -> Path:
    """Write a checkpoint with a few files beside it."""
    config, experts, attention, shards = KINDS[kind]
    write_checkpoint(root, config, seed=seed, experts=experts, attention=attention, shards=shards)
    (root / "tiktoken.model").write_bytes(b"IQ== 0\n")
    (root / "code").mkdir()
    (root / "code" / "model.py").write_text("pass\n")
    for name in (".cache/a", ".git/b", "weights.gguf"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("not to be copied")
    return root
