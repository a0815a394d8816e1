"""A whole layer of Kimi delta attention (kimi-k3.md, sections 2.5 and 9)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.reference.kda import causal_conv_silu, log_decay, recurrence
from tests.reference.norm import rms_norm


def layer(x: Tensor, w: Mapping[str, Tensor], text: Mapping[str, Any]) -> Tensor:
    """x [T, D] normed; w by their names after ``self_attn.``."""
    linear = text["linear_attn_config"]
    heads = (linear["num_heads"], linear["head_dim"])
    q, k, v = (
        causal_conv_silu(x @ w[f"{name}_proj.weight"].T, w[f"{name}_conv1d.weight"][:, 0]).unflatten(1, heads)
        for name in "qkv"
    )
    a = (x @ w["f_a_proj.weight"].T @ w["f_b_proj.weight"].T).unflatten(1, heads)
    a_log, dt_bias = w["A_log"].flatten()[: heads[0]], w["dt_bias"].view(heads)
    g = log_decay(a, a_log, dt_bias, linear.get("gate_lower_bound"))
    o, _ = recurrence(q, k, v, g, torch.sigmoid(x @ w["b_proj.weight"].T))
    low_rank = "g_a_proj.weight" in w
    gate = x @ w["g_a_proj.weight"].T @ w["g_b_proj.weight"].T if low_rank else x @ w["g_proj.weight"].T
    o = rms_norm(o, w["o_norm.weight"], text["rms_norm_eps"]) * torch.sigmoid(gate).unflatten(1, heads)
    return o.flatten(1) @ w["o_proj.weight"].T
