"""Kimi delta attention as a recurrence: one token after the other, in prefill as in decode.

    S <- diag(exp(g_t)) S                       q and k of unit length, q times K^-0.5, beta through the logistic
    S <- S + beta_t k_t (v_t - S^T k_t)^T       S [K, P], one a head
    o_t = S^T q_t

One kernel serves every length, so a token's bits do not depend on how a sequence was cut into steps.

Source: Kimi Linear technical report; kimi-k3.md, section 2.5.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.compile import Spec
from ops.kda.gates import expect_kda, log_decay


class Tiles(NamedTuple):
    heads: int
    values: int
    warps: int


def tiles(heads: int, values: int, device: str) -> Tiles:
    """Heads and value columns are independent; the interpreter takes all heads in one program."""
    p = triton.next_power_of_2(values)
    return Tiles(triton.next_power_of_2(heads), p, 4) if device == "cpu" else Tiles(1, min(p, 32), 4)


@triton.jit
def _kda_recurrent_kernel(
    mem_ptr, q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, a_log_ptr, dt_bias_ptr, o_ptr, start_ptr, slot_ptr, past_ptr,
    stride_q, stride_k, stride_v, stride_decay, stride_beta,
    H: tl.constexpr, K: tl.constexpr, P: tl.constexpr, LOWER: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    # one program per sequence, block of heads and block of value columns
    b = tl.program_id(0)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    k = tl.arange(0, BLOCK_K)
    first, last = tl.load(start_ptr + b).to(tl.int64), tl.load(start_ptr + b + 1).to(tl.int64)
    slot = tl.load(slot_ptr + b).to(tl.int64)
    known = h < tl.where(tl.load(past_ptr + b) > 0, H, 0)  # a new sequence's slot is not read
    hk, hp = h[:, None] * K + k[None, :], h[:, None] * P + p[None, :]
    live_k = (h < H)[:, None] & (k < K)[None, :]
    live_p = (h < H)[:, None] & (p < P)[None, :]
    live = live_k[:, :, None] & (p < P)[None, None, :]
    mem_at = mem_ptr + slot * H * K * P + hk[:, :, None] * P + p[None, None, :]
    mem = tl.load(mem_at, mask=live & known[:, None, None], other=0.0)
    a_log = tl.load(a_log_ptr + h, mask=h < H, other=0.0).to(tl.float32)[:, None]
    dt_bias = tl.load(dt_bias_ptr + hk, mask=live_k, other=0.0).to(tl.float32)
    for t in range(first, last):
        q = tl.load(q_ptr + t * stride_q + hk, mask=live_k, other=0.0).to(tl.float32)
        key = tl.load(k_ptr + t * stride_k + hk, mask=live_k, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + t * stride_v + hp, mask=live_p, other=0.0).to(tl.float32)
        a = tl.load(decay_ptr + t * stride_decay + hk, mask=live_k, other=0.0).to(tl.float32)
        beta = tl.sigmoid(tl.load(beta_ptr + t * stride_beta + h, mask=h < H, other=0.0).to(tl.float32))[:, None]
        q *= tl.rsqrt(tl.sum(q * q, axis=1) + 1e-6)[:, None] * SCALE
        key *= tl.rsqrt(tl.sum(key * key, axis=1) + 1e-6)[:, None]
        mem *= tl.exp(log_decay(a, a_log, dt_bias, LOWER))[:, :, None]
        delta = beta * (v - tl.sum(mem * key[:, :, None], axis=1))
        mem += key[:, :, None] * delta[:, None, :]
        tl.store(o_ptr + t * H * P + hp, tl.sum(mem * q[:, :, None], axis=1), mask=live_p)
    touched = h < tl.where(last > first, H, 0)
    tl.store(mem_at, mem, mask=live & touched[:, None, None])


def kda_recurrent_(
    mem_shkp: Tensor, q_thk: Tensor, k_thk: Tensor, v_thp: Tensor, decay_thk: Tensor, beta_th: Tensor,
    a_log_h: Tensor, dt_bias_hk: Tensor, lower_bound: float | None,
    start_b: Tensor, slot_b: Tensor, past_b: Tensor,
) -> Tensor:  # fmt: skip
    """Run each sequence's new tokens through its memory. WRITTEN: rows ``slot_b`` of mem_shkp.

    Args:
        mem_shkp: memories, fp32, contiguous; a slot whose ``past`` is 0 is not read, others keep their bits.
        q_thk: queries after the convolution, bf16 or fp32, heads packed inside a token; not yet of unit length.
        k_thk: keys, likewise.
        v_thp: values, likewise.
        decay_thk: input of the decay gate, likewise.
        beta_th: input of the write gate, before the logistic function.
        a_log_h: any float dtype; entries past the heads are padding.
        dt_bias_hk: any float dtype, contiguous.
        lower_bound: lower bound of the log decay, or None for the unbounded gate.
        start_b: int32 [B + 1], first token of each sequence.
        slot_b: int32, slot of each sequence.
        past_b: int32, tokens that each sequence has seen before.

    Returns:
        [T, H, P] fp32.

    Raises:
        ShapeError: shapes, strides or dtypes disagree.
    """
    expect_kda(mem_shkp, q_thk, k_thk, v_thp, decay_thk, beta_th, a_log_h, dt_bias_hk)
    _, heads, keys, values = mem_shkp.shape
    o_thp = torch.empty(len(q_thk), heads, values, dtype=torch.float32, device=mem_shkp.device)
    tile = tiles(heads, values, mem_shkp.device.type)
    if len(slot_b):
        _kda_recurrent_kernel[(len(slot_b), triton.cdiv(heads, tile.heads), triton.cdiv(values, tile.values))](
            mem_shkp, q_thk, k_thk, v_thp, decay_thk, beta_th, a_log_h, dt_bias_hk, o_thp, start_b, slot_b, past_b,
            q_thk.stride(0), k_thk.stride(0), v_thp.stride(0), decay_thk.stride(0), beta_th.stride(0),
            H=heads, K=keys, P=values, LOWER=lower_bound, SCALE=keys**-0.5,
            BLOCK_H=tile.heads, BLOCK_K=triton.next_power_of_2(keys), BLOCK_P=tile.values, num_warps=tile.warps,
        )  # fmt: skip
    return o_thp


def compile_specs() -> list[Spec]:
    """Kimi K3: 96 heads of 128 x 128; Kimi-Linear's unbounded gate at the same sizes."""
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "decay_ptr", "beta_ptr"), "*bf16")
    types |= dict.fromkeys(("mem_ptr", "a_log_ptr", "dt_bias_ptr", "o_ptr"), "*fp32")
    types |= dict.fromkeys(("start_ptr", "slot_ptr", "past_ptr"), "*i32")
    types |= dict.fromkeys(("stride_q", "stride_k", "stride_v", "stride_decay", "stride_beta"), "i32")
    tile = tiles(96, 128, "cuda")
    sizes = {"H": 96, "K": 128, "P": 128, "SCALE": 128**-0.5}
    sizes |= {"BLOCK_H": tile.heads, "BLOCK_K": 128, "BLOCK_P": tile.values}
    return [
        Spec(name, _kda_recurrent_kernel, types, sizes | {"LOWER": lower}, {"num_warps": tile.warps})
        for name, lower in (("kda_recurrent", -5.0), ("kda_recurrent_unbounded", None))
    ]
