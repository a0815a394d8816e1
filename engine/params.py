"""The model's weights as tensors on the device, named by what they do.

A linear weight is one of three formats. Weights that read the same activation and share a format lie one under the
other in one tensor, so that one launch serves them: ``Stack``.
"""

from typing import NamedTuple

from torch import Tensor

from ops.moe.experts import Bf16Rows, Mxfp4Rows, Nvfp4Rows


class Dense(NamedTuple):
    """bf16 or fp32 weight."""

    w_nk: Tensor


class BlockFp8(NamedTuple):
    """e4m3 weight with one fp32 scale for each 128 x 128 block."""

    w_nk: Tensor
    scale_nk: Tensor


class RowFp8(NamedTuple):
    """e4m3 weight with one fp32 scale a row."""

    w_nk: Tensor
    scale_n: Tensor


Weight = Dense | BlockFp8 | RowFp8


class Stack(NamedTuple):
    """Weights that read the same activation. ``splits[i]`` are the output widths inside ``weights[i]``, in order."""

    weights: tuple[Weight, ...]
    splits: tuple[tuple[int, ...], ...]


class Mix(NamedTuple):
    """Attention-residual mix: norm gains and the projection that scores a candidate."""

    norm_d: Tensor
    proj_d: Tensor


class Kda(NamedTuple):
    """Kimi delta attention."""

    entry: Stack  # q, k, v, output gate (or its low-rank input), decay input, beta
    decay: Weight  # f_b_proj
    gate: Weight | None  # g_b_proj; None: the gate is full rank and part of ``entry``
    conv_cj: Tensor  # taps of q, k and v one under the other, fp32
    a_log_h: Tensor
    dt_bias_hk: Tensor
    norm_p: Tensor
    out: Weight


class Mla(NamedTuple):
    """Multi-head latent attention without positions."""

    entry: Stack  # query (or its low-rank input), output gate if any, latent
    q_norm_r: Tensor | None  # None: the query projection is full rank
    q: Weight | None
    kv_norm_r: Tensor
    kv_hxr: Tensor  # kv_b_proj, per head keys then values
    out: Weight


class Mlp(NamedTuple):
    """Gated feed-forward; ``gate_up`` holds the gate rows, then the up rows."""

    gate_up: Weight
    down: Weight


Rows = Nvfp4Rows | Mxfp4Rows | Bf16Rows


class Moe(NamedTuple):
    """Routed experts beside a shared one."""

    router: Dense
    bias_e: Tensor
    entry: Stack  # latent input projection if any, shared gate and up
    norm_z: Tensor | None  # None: experts read and write the full width
    up: Weight | None
    shared_down: Weight
    rows: Rows  # expert rows on the device; ``fetch`` says which row is which expert


class Layer(NamedTuple):
    """One layer: attention and feed-forward, each behind a norm and, in K3, behind a residual mix."""

    attention_mix: Mix | None
    attention_norm_d: Tensor
    attention: Kda | Mla
    ffn_mix: Mix | None
    ffn_norm_d: Tensor
    ffn: Mlp | Moe


class Params(NamedTuple):
    """The whole model."""

    embed: Dense | RowFp8
    layers: tuple[Layer, ...]
    out_mix: Mix | None
    norm_d: Tensor
    head: Weight
