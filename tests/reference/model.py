"""Kimi K3 and Kimi-Linear in float64, from all tokens at once to all logits (kimi-k3.md, sections 2 and 9)."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, tensor

from tests.reference import kda_layer, mla_layer, moe
from tests.reference.attention_residual import mix
from tests.reference.norm import rms_norm


def logits(
    config: Mapping[str, Any], weights: Mapping[str, Tensor], ids: Sequence[int], choose: moe.Choose = moe.highest
) -> Tensor:
    """Logits [T, V] of one sequence.

    Args:
        config: parsed ``config.json``.
        weights: float64, by their names in a checkpoint without ``language_model.``.
        ids: tokens.
        choose: picks the experts, layer after layer.
    """
    text = config.get("text_config", config)
    x = weights["model.embed_tokens.weight"][tensor(ids)]
    run = _mixed if text.get("attn_res_block_size") else _plain
    y = rms_norm(run(x, weights, text, choose), weights["model.norm.weight"], text["rms_norm_eps"])
    return y @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T


def _plain(x: Tensor, weights: Mapping[str, Tensor], text: Mapping[str, Any], choose: moe.Choose) -> Tensor:
    for i in range(text["num_hidden_layers"]):
        w = part(weights, f"model.layers.{i}.")
        x = x + _attention(rms_norm(x, w["input_layernorm.weight"], text["rms_norm_eps"]), w, text, i)
        x = x + _ffn(rms_norm(x, w["post_attention_layernorm.weight"], text["rms_norm_eps"]), w, text, choose)
    return x


def _mixed(x: Tensor, weights: Mapping[str, Tensor], text: Mapping[str, Any], choose: moe.Choose) -> Tensor:
    eps = text["rms_norm_eps"]
    blocks: list[Tensor] = []
    prefix: Tensor | None = x
    for i in range(text["num_hidden_layers"]):
        w = part(weights, f"model.layers.{i}.")
        h = prefix
        if blocks:
            gain, proj = w["self_attention_res_norm.weight"], w["self_attention_res_proj.weight"]
            h = mix([*blocks, prefix], gain, proj, eps)
        if i % text["attn_res_block_size"] == 0:
            blocks.append(prefix)
            prefix = None
        a = _attention(rms_norm(h, w["input_layernorm.weight"], eps), w, text, i)
        prefix = a if prefix is None else prefix + a
        h = mix([*blocks, prefix], w["mlp_res_norm.weight"], w["mlp_res_proj.weight"], eps)
        prefix = prefix + _ffn(rms_norm(h, w["post_attention_layernorm.weight"], eps), w, text, choose)
    gain, proj = weights["model.output_attn_res_norm.weight"], weights["model.output_attn_res_proj.weight"]
    return mix([*blocks, prefix], gain, proj, eps)


def _attention(h: Tensor, w: Mapping[str, Tensor], text: Mapping[str, Any], i: int) -> Tensor:
    full = i + 1 in text["linear_attn_config"]["full_attn_layers"]
    return (mla_layer if full else kda_layer).layer(h, part(w, "self_attn."), text)


def _ffn(h: Tensor, w: Mapping[str, Tensor], text: Mapping[str, Any], choose: moe.Choose) -> Tensor:
    experts = part(w, "block_sparse_moe.")
    if experts:
        return moe.layer(h, experts, text, choose)
    return moe.mlp(h, *(w[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down")), text)


def part(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The weights whose names begin with ``prefix``, without it."""
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
