"""Kimi delta attention in chunks of 16 tokens, for prefill where prefill need not equal decode to the bit.

Inside a chunk, with inclusive cumulative log decay G and incoming memory S:

    L[i, j] = beta_i sum_c k_i k_j exp(G_i - G_j)   i > j          A[i, j] = sum_c q_i k_j exp(G_i - G_j)   i >= j
    V' = (I + L)^-1 beta (V - (K exp(G)) S)
    O = (Q exp(G)) S + A V'                        S <- diag(exp(G_last)) S + (K exp(G_last - G))^T V'

Every exponent is at most 0: differences are taken before exp, element by element, so no decay is too strong. The
inverse is by forward substitution; doubling products cancel at real decay magnitudes. A first kernel makes A and
M = (I + L)^-1 diag(beta) of all chunks side by side, a second carries the memory from chunk to chunk.

Source: Kimi Linear technical report; kimi-k3.md, section 2.6.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.compile import Spec
from ops.kda.gates import expect_kda, log_decay

CHUNK = 16  # tokens
CHANNELS = 8  # key channels of one step of the pairwise sums


@triton.jit
def _unit_lower_inverse(below):
    """(I + below)^-1 for a strictly lower triangular 16 x 16 matrix, row after row."""
    i = tl.arange(0, 16)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for r in range(1, 16):
        row = tl.sum(tl.where(i[:, None] == r, below, 0.0), axis=0)
        update = tl.sum(row[:, None] * inverse, axis=0)
        inverse -= tl.where(i[:, None] == r, update[None, :], 0.0)
    return inverse


@triton.jit(do_not_specialize=["most"])
def _prepare_kernel(
    q_ptr, k_ptr, decay_ptr, beta_ptr, a_log_ptr, dt_bias_ptr, pairs_ptr, solve_ptr, start_ptr,
    stride_q, stride_k, stride_decay, stride_beta, most,
    H: tl.constexpr, K: tl.constexpr, LOWER: tl.constexpr, SCALE: tl.constexpr, CC: tl.constexpr,
):  # fmt: skip
    # one program per chunk of a sequence and head: A and M
    b, h = tl.program_id(0) // most, tl.program_id(1)
    first, last = tl.load(start_ptr + b).to(tl.int64), tl.load(start_ptr + b + 1).to(tl.int64)
    nth = tl.program_id(0) % most
    if first + nth * 16 >= last:
        return
    i, c = tl.arange(0, 16), tl.arange(0, CC)
    t = first + nth * 16 + i
    row = t < last
    q_at, k_at, a_at = q_ptr + t * stride_q + h * K, k_ptr + t * stride_k + h * K, decay_ptr + t * stride_decay + h * K
    a_log = tl.load(a_log_ptr + h).to(tl.float32)
    qk, kk = tl.zeros((16, 16), tl.float32), tl.zeros((16, 16), tl.float32)
    q_square, k_square = tl.zeros((16,), tl.float32), tl.zeros((16,), tl.float32)
    lower = (i[:, None] >= i[None, :])[:, :, None]
    for c0 in range(0, K, CC):
        live = row[:, None] & (c0 + c < K)[None, :]
        q = tl.load(q_at[:, None] + c0 + c, mask=live, other=0.0).to(tl.float32)
        k = tl.load(k_at[:, None] + c0 + c, mask=live, other=0.0).to(tl.float32)
        a = tl.load(a_at[:, None] + c0 + c, mask=live, other=0.0).to(tl.float32)
        bias = tl.load(dt_bias_ptr + h * K + c0 + c, mask=c0 + c < K, other=0.0).to(tl.float32)[None, :]
        g = tl.cumsum(tl.where(live, log_decay(a, a_log, bias, LOWER), 0.0), axis=0)
        decay = tl.exp(tl.where(lower, g[:, None, :] - g[None, :, :], -float("inf"))) * k[None, :, :]
        qk += tl.sum(q[:, None, :] * decay, axis=2)
        kk += tl.sum(k[:, None, :] * decay, axis=2)
        q_square += tl.sum(q * q, axis=1)
        k_square += tl.sum(k * k, axis=1)
    q_norm, k_norm = tl.rsqrt(q_square + 1e-6) * SCALE, tl.rsqrt(k_square + 1e-6)
    beta = tl.sigmoid(tl.load(beta_ptr + t * stride_beta + h, mask=row, other=0.0).to(tl.float32))
    below = tl.where(i[:, None] > i[None, :], beta[:, None] * kk * k_norm[:, None] * k_norm[None, :], 0.0)
    at = (((first // 16 + b + nth) * H + h) * 16 + i[:, None]) * 16 + i[None, :]
    tl.store(pairs_ptr + at, qk * q_norm[:, None] * k_norm[None, :])
    tl.store(solve_ptr + at, _unit_lower_inverse(below) * beta[None, :])


@triton.jit
def _carry_kernel(
    mem_ptr, q_ptr, k_ptr, v_ptr, decay_ptr, a_log_ptr, dt_bias_ptr, pairs_ptr, solve_ptr, o_ptr,
    start_ptr, slot_ptr, past_ptr, stride_q, stride_k, stride_v, stride_decay,
    H: tl.constexpr, K: tl.constexpr, P: tl.constexpr, LOWER: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    # one program per sequence, head and block of value columns
    b, h = tl.program_id(0), tl.program_id(1)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    k, i = tl.arange(0, BLOCK_K), tl.arange(0, 16)
    first, last = tl.load(start_ptr + b).to(tl.int64), tl.load(start_ptr + b + 1).to(tl.int64)
    slot = tl.load(slot_ptr + b).to(tl.int64)
    live = (k < K)[:, None] & (p < P)[None, :]
    mem_at = mem_ptr + (slot * H + h) * K * P + k[:, None] * P + p[None, :]
    known = k < tl.where(tl.load(past_ptr + b) > 0, K, 0)  # a new sequence's slot is not read
    mem = tl.load(mem_at, mask=live & known[:, None], other=0.0)
    a_log = tl.load(a_log_ptr + h).to(tl.float32)
    bias = tl.load(dt_bias_ptr + h * K + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    for t0 in range(first, last, 16):
        t = (t0 + i)[:, None]
        live_k = (t < last) & (k < K)[None, :]
        live_p = (t < last) & (p < P)[None, :]
        q = tl.load(q_ptr + t * stride_q + h * K + k[None, :], mask=live_k, other=0.0).to(tl.float32)
        key = tl.load(k_ptr + t * stride_k + h * K + k[None, :], mask=live_k, other=0.0).to(tl.float32)
        a = tl.load(decay_ptr + t * stride_decay + h * K + k[None, :], mask=live_k, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + t * stride_v + h * P + p[None, :], mask=live_p, other=0.0).to(tl.float32)
        g = tl.where(live_k, log_decay(a, a_log, bias, LOWER), 0.0)
        sums, total = tl.cumsum(g, axis=0), tl.sum(g, axis=0)
        at = (((first // 16 + b + (t0 - first) // 16) * H + h) * 16 + i[:, None]) * 16 + i[None, :]
        key *= tl.rsqrt(tl.sum(key * key, axis=1) + 1e-6)[:, None]
        q *= tl.rsqrt(tl.sum(q * q, axis=1) + 1e-6)[:, None] * SCALE
        error = v - tl.dot(key * tl.exp(sums), mem, input_precision="tf32")
        new = tl.dot(tl.load(solve_ptr + at), error, input_precision="tf32")
        o = tl.dot(q * tl.exp(sums), mem, input_precision="tf32")
        o += tl.dot(tl.load(pairs_ptr + at), new, input_precision="tf32")
        tl.store(o_ptr + t * H * P + h * P + p[None, :], o, mask=live_p)
        # past a sequence's last token g is 0, so the whole chunk's sum is the last token's
        carried = tl.trans(key * tl.exp(total[None, :] - sums))
        mem = mem * tl.exp(total)[:, None] + tl.dot(carried, new, input_precision="tf32")
    touched = k < tl.where(last > first, K, 0)
    tl.store(mem_at, mem, mask=live & touched[:, None])


def kda_chunk_(
    mem_shkp: Tensor, q_thk: Tensor, k_thk: Tensor, v_thp: Tensor, decay_thk: Tensor, beta_th: Tensor,
    a_log_h: Tensor, dt_bias_hk: Tensor, lower_bound: float | None,
    start_b: Tensor, slot_b: Tensor, past_b: Tensor,
) -> Tensor:  # fmt: skip
    """Do what ``kda_recurrent_`` does, 16 tokens at a time. WRITTEN: rows ``slot_b`` of mem_shkp.

    Arguments, result and errors are those of ``ops.kda.recurrent.kda_recurrent_``; the products of a
    chunk run in tf32, so the two agree to about 1e-3.
    """
    expect_kda(mem_shkp, q_thk, k_thk, v_thp, decay_thk, beta_th, a_log_h, dt_bias_hk)
    _, heads, keys, values = mem_shkp.shape
    o_thp = torch.empty(len(q_thk), heads, values, dtype=torch.float32, device=mem_shkp.device)
    block_p = max(16, min(triton.next_power_of_2(values), 128 if mem_shkp.device.type == "cpu" else 16))
    most = triton.cdiv(len(q_thk), CHUNK) + 1
    pairs, solve = torch.empty(2, most + len(slot_b), heads, CHUNK, CHUNK, device=mem_shkp.device).unbind()
    if len(slot_b):
        _prepare_kernel[(len(slot_b) * most, heads)](
            q_thk, k_thk, decay_thk, beta_th, a_log_h, dt_bias_hk, pairs, solve, start_b,
            q_thk.stride(0), k_thk.stride(0), decay_thk.stride(0), beta_th.stride(0), most,
            H=heads, K=keys, LOWER=lower_bound, SCALE=keys**-0.5, CC=CHANNELS, num_warps=4, num_stages=1,
        )  # fmt: skip
        _carry_kernel[(len(slot_b), heads, triton.cdiv(values, block_p))](
            mem_shkp, q_thk, k_thk, v_thp, decay_thk, a_log_h, dt_bias_hk, pairs, solve, o_thp,
            start_b, slot_b, past_b, q_thk.stride(0), k_thk.stride(0), v_thp.stride(0), decay_thk.stride(0),
            H=heads, K=keys, P=values, LOWER=lower_bound, SCALE=keys**-0.5,
            BLOCK_K=max(16, triton.next_power_of_2(keys)), BLOCK_P=block_p, num_warps=8, num_stages=1,
        )  # fmt: skip
    return o_thp


def compile_specs() -> list[Spec]:
    """Kimi K3: 96 heads of 128 x 128; Kimi-Linear's unbounded gate at the same sizes."""
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "decay_ptr", "beta_ptr"), "*bf16")
    types |= dict.fromkeys(("mem_ptr", "a_log_ptr", "dt_bias_ptr", "pairs_ptr", "solve_ptr", "o_ptr"), "*fp32")
    types |= dict.fromkeys(("start_ptr", "slot_ptr", "past_ptr"), "*i32")
    types |= dict.fromkeys(("stride_q", "stride_k", "stride_v", "stride_decay", "stride_beta", "most"), "i32")
    sizes = {"H": 96, "K": 128, "SCALE": 128**-0.5}
    carry = sizes | {"P": 128, "BLOCK_K": 128, "BLOCK_P": 16}
    forms = (
        ("prepare", _prepare_kernel, sizes | {"CC": CHANNELS}, {"num_warps": 4, "num_stages": 1}),
        ("carry", _carry_kernel, carry, {"num_warps": 8, "num_stages": 1}),
    )
    return [
        Spec(f"kda_chunk_{name}{suffix}", kernel, types, constants | {"LOWER": lower}, options)
        for name, kernel, constants, options in forms
        for suffix, lower in (("", -5.0), ("_unbounded", None))
    ]
