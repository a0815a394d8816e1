"""Kimi K3's published configuration, and the one function that scales it down.

Source: the released ``config.json`` (kimi-k3.md, section 1).
"""

from typing import Any

KIMI_K3: dict[str, Any] = {
    "model_type": "kimi_k3",
    "architectures": ["KimiK3ForConditionalGeneration"],
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "vocab_size": 163840,
        "num_hidden_layers": 93,
        "hidden_size": 7168,
        "intermediate_size": 33792,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584,
        "latent_moe_use_norm": True,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "num_expert_group": 1,
        "topk_group": 1,
        "use_grouped_topk": True,
        "topk_method": "noaux_tc",
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 12,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1048576,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "linear_attn_config": {
            "num_heads": 96,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
            "full_attn_layers": [*range(4, 93, 4), 93],
            "kda_layers": [i for i in range(1, 93) if i % 4],
        },
    },
}


def scale(
    config: dict[str, Any], *, layers: int, kda_heads: int, kda_head_dim: int = 128, **text: Any
) -> dict[str, Any]:
    """Return ``config`` with fewer layers and other widths; every rule of the architecture stays.

    Args:
        config: a ``config.json`` with a ``text_config``, such as :data:`KIMI_K3`.
        layers: new depth; each fourth layer and the last keep full attention.
        kda_heads: heads of the linear-attention layers.
        kda_head_dim: their size.
        text: keys of ``text_config`` to replace; an unknown key is a ``KeyError``.
    """
    unknown = set(text) - set(config["text_config"])
    if unknown:
        raise KeyError(f"{min(unknown)!r} is no key of text_config")
    full = sorted({*range(4, layers + 1, 4), layers})
    linear = config["text_config"]["linear_attn_config"] | {
        "num_heads": kda_heads,
        "head_dim": kda_head_dim,
        "full_attn_layers": full,
        "kda_layers": [i for i in range(1, layers + 1) if i not in full],
    }
    return config | {
        "text_config": config["text_config"] | text | {"num_hidden_layers": layers, "linear_attn_config": linear}
    }
