"""Logits of a small Kimi-Linear by transformers' own implementation.

From the repository's root, in an environment with torch 2.13.0 and transformers 5.24.0:

    PYTHONPATH=. python tests/oracles/make_kimi_linear.py
"""

import re
import sys
from typing import Any

import torch
from torch import Tensor

from tests.oracles.store import compute_in_float64, made_up_ids, save_case, weights

SEED = 5
CONFIG: dict[str, Any] = {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "vocab_size": 200,
    "num_hidden_layers": 6,
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
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [4, 6],
        "kda_layers": [1, 2, 3, 5],
    },
}
GROUPS = CONFIG | {"num_expert_group": 4, "topk_group": 2, "moe_renormalize": False}


def renamed(source: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's tensors under transformers' names, experts and convolutions stacked."""
    out: dict[str, Tensor] = {}
    piles: dict[str, dict[tuple[int, int], Tensor]] = {}
    for name, w in source.items():
        name = name.replace(".block_sparse_moe.", ".mlp.")
        name = re.sub(r"self_attn\.(f_a_proj|f_b_proj|dt_bias|A_log)", r"self_attn.forget_gate.\1", name)
        if conv := re.fullmatch(r"(.*)\.([qkv])_conv1d\.weight", name):
            piles.setdefault(f"{conv[1]}.conv1d.weight", {})[0, "qkv".index(conv[2])] = w
        elif expert := re.fullmatch(r"(.*\.experts)\.(\d+)\.w([123])\.weight", name):
            bank = "down_proj" if expert[3] == "2" else "gate_up_proj"
            piles.setdefault(f"{expert[1]}.{bank}", {})[int(expert[2]), int(expert[3])] = w
        else:
            out[name] = w
    for name, parts in piles.items():
        count = 1 + max(row for row, _ in parts)
        rows = [torch.cat([parts[key] for key in sorted(parts) if key[0] == row]) for row in range(count)]
        out[name] = torch.stack(rows) if ".experts." in name else rows[0]
    return out


def main() -> None:
    sys.modules["fla"] = None  # where it is installed, transformers would call its GPU kernels
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    compute_in_float64()
    for name, config in (("kimi_linear", CONFIG), ("kimi_linear_groups", GROUPS)):
        parsed = KimiLinearConfig(**config, attn_implementation="eager", experts_implementation="eager")
        model = KimiLinearForCausalLM(parsed).double().eval()
        wanted = model.state_dict()
        found = {key: w.reshape(wanted[key].shape) for key, w in renamed(weights(config, SEED)).items()}
        model.load_state_dict(found)
        ids = made_up_ids(70, config["vocab_size"])
        with torch.no_grad():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0]
        save_case(__file__, name, config, SEED, ids, logits)


if __name__ == "__main__":
    main()
