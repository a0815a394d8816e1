"""From an FTW folder to the model's parameters on a device.

Names are the folder's (ftw.md, section 3). Which format a weight has is read off the tensors beside it:
``weight_scale_inv`` block FP8, ``weight_scale`` FP8 with a scale a row, neither bf16.
"""

from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.params import BlockFp8, Dense, Kda, Layer, Mix, Mla, Mlp, Moe, Params, RowFp8, Rows, Stack, Weight
from formats.errors import FormatError
from formats.reader import FtwReader


class Source(NamedTuple):
    """Where tensors come from and go to."""

    reader: FtwReader
    device: torch.device


def load_params(cfg: ModelConfig, reader: FtwReader, rows: list[Rows], device: torch.device) -> Params:
    """Load every resident tensor.

    Args:
        cfg: shape of the model in ``reader``'s folder.
        reader: open FTW folder.
        rows: device banks of each layer with experts, see ``engine.experts``.
        device: where to.

    Raises:
        FormatError: a tensor is missing, or its shape is not what the configuration says.
    """
    s = Source(reader, device)
    k3 = cfg.residual_block is not None
    embed = weight(s, "model.embed_tokens", (cfg.vocab, cfg.width))
    if isinstance(embed, BlockFp8):
        raise FormatError(f"{reader.index.root}: model.embed_tokens is block FP8, want bf16 or FP8 with a scale a row")
    return Params(
        embed=embed,
        layers=tuple(_layer(cfg, s, i, rows) for i in range(cfg.layers)),
        out_mix=_mix(cfg, s, "model.output_attn_res") if k3 else None,
        norm_d=tensor(s, "model.norm.weight", (cfg.width,)),
        head=embed if cfg.tied_embeddings else weight(s, "lm_head", (cfg.vocab, cfg.width)),
    )


def _layer(cfg: ModelConfig, s: Source, i: int, rows: list[Rows]) -> Layer:
    at, k3 = f"model.layers.{i}", cfg.residual_block is not None
    return Layer(
        attention_mix=_mix(cfg, s, f"{at}.self_attention_res") if k3 else None,
        attention_norm_d=tensor(s, f"{at}.input_layernorm.weight", (cfg.width,)),
        attention=(_kda if cfg.kinds[i] == "kda" else _mla)(cfg, s, f"{at}.self_attn"),
        ffn_mix=_mix(cfg, s, f"{at}.mlp_res") if k3 else None,
        ffn_norm_d=tensor(s, f"{at}.post_attention_layernorm.weight", (cfg.width,)),
        ffn=_moe(cfg, s, f"{at}.block_sparse_moe", rows[cfg.moe_index(i)])
        if cfg.is_moe(i)
        else Mlp(weight(s, f"{at}.mlp.gate_up_proj"), weight(s, f"{at}.mlp.down_proj")),
    )


def _mix(cfg: ModelConfig, s: Source, at: str) -> Mix:
    return Mix(tensor(s, f"{at}_norm.weight", (cfg.width,)), tensor(s, f"{at}_proj.weight", (1, cfg.width))[0])


def _kda(cfg: ModelConfig, s: Source, at: str) -> Kda:
    size = cfg.kda_heads * cfg.kda_head_dim
    low_rank = f"{at}.g_a_proj.weight" in s.reader.names
    entry = stack(s, [f"{at}.{name}_proj" for name in ("q", "k", "v", "g_a" if low_rank else "g", "f_a", "b")])
    if entry.splits[0][:3] != (size, size, size):
        raise FormatError(
            f"{at}: rows and formats of q, k and v are {entry.splits}, want {size} rows each in one format"
        )
    return Kda(
        entry=entry,
        decay=weight(s, f"{at}.f_b_proj", (size, cfg.kda_head_dim)),
        gate=weight(s, f"{at}.g_b_proj", (size, cfg.kda_head_dim)) if low_rank else None,
        conv_cj=_pile(s, [f"{at}.{name}_conv1d.weight" for name in "qkv"]).view(3 * size, cfg.conv_taps),
        a_log_h=tensor(s, f"{at}.A_log").view(-1),
        dt_bias_hk=tensor(s, f"{at}.dt_bias", (size,)).view(cfg.kda_heads, cfg.kda_head_dim),
        norm_p=tensor(s, f"{at}.o_norm.weight", (cfg.kda_head_dim,)),
        out=weight(s, f"{at}.o_proj", (cfg.width, size)),
    )


def _mla(cfg: ModelConfig, s: Source, at: str) -> Mla:
    query, keys_values = cfg.nope_dim + cfg.rope_dim, cfg.nope_dim + cfg.value_dim
    gated = f"{at}.g_proj.weight" in s.reader.names
    names = ["q_a_proj" if cfg.q_rank else "q_proj", *["g_proj"] * gated, "kv_a_proj_with_mqa"]
    kv = tensor(s, f"{at}.kv_b_proj.weight", (cfg.heads * keys_values, cfg.kv_rank))
    return Mla(
        entry=stack(s, [f"{at}.{name}" for name in names]),
        q_norm_r=tensor(s, f"{at}.q_a_layernorm.weight", (cfg.q_rank,)) if cfg.q_rank else None,
        q=weight(s, f"{at}.q_b_proj", (cfg.heads * query, cfg.q_rank)) if cfg.q_rank else None,
        kv_norm_r=tensor(s, f"{at}.kv_a_layernorm.weight", (cfg.kv_rank,)),
        kv_hxr=kv.view(cfg.heads, keys_values, cfg.kv_rank),
        out=weight(s, f"{at}.o_proj", (cfg.width, cfg.heads * cfg.value_dim)),
    )


def _moe(cfg: ModelConfig, s: Source, at: str, rows: Rows) -> Moe:
    latent = f"{at}.routed_expert_down_proj.weight" in s.reader.names
    shared = [f"{at}.shared_experts.gate_up_proj"]
    return Moe(
        router=Dense(tensor(s, f"{at}.gate.weight", (cfg.experts, cfg.width))),
        bias_e=tensor(s, f"{at}.e_score_correction_bias", (cfg.experts,)),
        entry=stack(s, [f"{at}.routed_expert_down_proj", *shared] if latent else shared),
        norm_z=tensor(s, f"{at}.routed_expert_norm.weight", (cfg.expert_input,)) if latent else None,
        up=weight(s, f"{at}.routed_expert_up_proj", (cfg.width, cfg.expert_input)) if latent else None,
        shared_down=weight(s, f"{at}.shared_experts.down_proj"),
        rows=rows,
    )


def tensor(s: Source, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
    """One resident tensor on the device, in its stored dtype."""
    return _pile(s, [name], shape)


def weight(s: Source, name: str, shape: tuple[int, int] | None = None) -> Weight:
    """A linear weight ``NAME.weight`` with the scales that lie beside it."""
    return _weight(s, [name], shape)


def stack(s: Source, names: list[str]) -> Stack:
    """Weights that read one activation, neighbours of one format piled into one tensor."""
    runs = [list(run) for _, run in groupby(names, key=lambda name: _scales(s, name))]
    splits = tuple(tuple(s.reader.shape(f"{name}.weight")[0] for name in run) for run in runs)
    return Stack(tuple(_weight(s, run) for run in runs), splits)


def _scales(s: Source, name: str) -> str:
    """Suffix of the scale tensor beside a weight, or nothing."""
    suffixes = ("weight_scale_inv", "weight_scale")
    return next((suffix for suffix in suffixes if f"{name}.{suffix}" in s.reader.names), "")


def _weight(s: Source, names: list[str], shape: tuple[int, int] | None = None) -> Weight:
    w_nk = _pile(s, [f"{name}.weight" for name in names], shape)
    suffix = _scales(s, names[0])
    if not suffix:
        return Dense(w_nk)
    scales = _pile(s, [f"{name}.{suffix}" for name in names])
    return BlockFp8(w_nk, scales) if suffix == "weight_scale_inv" else RowFp8(w_nk, scales)


def _pile(s: Source, names: list[str], shape: tuple[int, ...] | None = None) -> Tensor:
    """Copy tensors one under the other into a new one on the device."""
    stored = [s.reader.tensor(name) for name in names]
    for name, (_, array) in zip(names, stored, strict=True):
        if shape is not None and array.shape != shape:
            raise FormatError(f"{name} is {list(array.shape)}, want {list(shape)} by config.json")
    rows = sum(len(array) for _, array in stored)
    out = torch.empty(rows, *stored[0][1].shape[1:], dtype=getattr(torch, stored[0][0]), device=s.device)
    begin = 0
    for _, array in stored:
        copy_(out[begin : begin + len(array)], array)
        begin += len(array)
    return out


def copy_(out: Tensor, array: np.ndarray) -> None:
    """Copy stored bytes into ``out``. WRITTEN: out."""
    out.view(torch.uint8).copy_(torch.from_numpy(np.array(array).view(np.uint8)))
