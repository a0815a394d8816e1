"""From a row of logits to a token.

    temperature  x / T, where T > 0; T = 0 takes the largest logit and no filter
    top-k        keep the k largest logits
    top-p        of what is left, renormalised, keep the smallest set of the likeliest tokens that holds p
    min-p        of what is left, keep tokens at least min_p times as likely as the likeliest
    draw         the kept token with the largest x / T - log(E), E exponential: the Gumbel-max rule

The filters apply in this order. Top-k and top-p search their threshold by bisection of the logits' 32-bit keys, whose
order as integers is that of the floats; tokens tied at a threshold are all kept. The exponential number comes from
Philox at the counter (token, position) under the row's seed, so a row's token depends on nothing outside the row.
Equal scores go to the lowest token. A row with NaN, or without a finite maximum, gives -1.

Letters: b sequences, v vocabulary.

Source: Salmon and others 2011 (Philox); Gumbel 1954, as used by Maddison and others 2014.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.checks import describe, expect
from ops.compile import Spec


class Tiles(NamedTuple):
    block: int
    warps: int


def tiles(vocab: int, device: str) -> Tiles:
    """Logits that one step of a loop takes; it orders the sums, so it follows the vocabulary only."""
    return Tiles(min(triton.next_power_of_2(vocab), 65536 if device == "cpu" else 4096), 16)


@triton.jit
def _largest(x_ptr, V: tl.constexpr, BLOCK: tl.constexpr):
    """Largest logit and its lowest index, -1 where the row has NaN or no finite maximum."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.zeros([BLOCK], tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + v, mask=v < V, other=float("-inf")).to(tl.float32)
        at = tl.where(x > best, v, at)
        best = tl.where(x > best, x, best)
        broken = tl.where(x == x, broken, 1)
    top = tl.max(best)
    token = tl.min(tl.where(best == top, at, V))
    finite = (tl.max(broken) == 0) & (tl.abs(top) < float("inf"))
    return top, tl.where(finite, token, -1)


@triton.jit
def _key(x):
    """Unsigned integer that orders as ``x``; both zeros have one key."""
    u = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where(u >> 31 == 1, ~u, u | 0x80000000)


@triton.jit
def _held(x_ptr, threshold, top, temperature, MASS: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):
    """Number of tokens whose key reaches ``threshold``, or with MASS their unnormalised probability."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + v, mask=v < V, other=float("-inf")).to(tl.float32)
        weight = tl.exp((x - top) / temperature) if MASS else 1.0
        total += tl.where((v < V) & (_key(x) >= threshold), weight, 0.0)
    return tl.sum(total)


@triton.jit
def _threshold(x_ptr, least, wanted, top, temperature, MASS: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):
    """Largest key, at least ``least``, whose tokens hold ``wanted``: the highest bit is settled first."""
    key = tl.zeros([], tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):
        candidate = key | bit
        bit = bit >> 1
        held = _held(x_ptr, tl.maximum(candidate, least), top, temperature, MASS, V, BLOCK)
        key = tl.where(held >= wanted, candidate, key)
    return tl.maximum(key, least)


@triton.jit
def _exponential(seed, token, position):
    """Exponential number of a counter, in steps of 2^-32 near zero, where the draw is decided."""
    bits, _, _, _ = tl.philox(seed, token, position, 0, 0)
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)  # 2^-32; below 1
    small = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    return tl.where(u < 0.015625, small, -tl.log(1.0 - u))


@triton.jit
def _draw(x_ptr, least, top, temperature, min_p, seed, position, V: tl.constexpr, BLOCK: tl.constexpr):
    """Kept token with the largest perturbed logit."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.full([BLOCK], V, tl.int32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + v, mask=v < V, other=float("-inf")).to(tl.float32)
        scaled = (x - top) / temperature
        kept = (v < V) & (_key(x) >= least) & (tl.exp(scaled) >= min_p)
        noise = tl.log(_exponential(seed, v.to(tl.uint32), position.to(tl.uint32)))
        score = tl.where(kept, scaled - noise, float("-inf"))
        at = tl.where(score > best, v, at)
        best = tl.where(score > best, score, best)
    return tl.min(tl.where(best == tl.max(best), at, V))


@triton.jit
def _argmax_kernel(x_ptr, out_ptr, stride_x, V: tl.constexpr, BLOCK: tl.constexpr):
    # one program per row
    b = tl.program_id(0).to(tl.int64)
    _, token = _largest(x_ptr + b * stride_x, V, BLOCK)
    tl.store(out_ptr + b, token)


@triton.jit
def _sample_kernel(
    x_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, out_ptr, stride_x, V: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # one program per row
    b = tl.program_id(0).to(tl.int64)
    x_ptr += b * stride_x
    temperature = tl.load(temperature_ptr + b)
    top_k = tl.load(top_k_ptr + b)
    top_p = tl.load(top_p_ptr + b)
    top, token = _largest(x_ptr, V, BLOCK)
    if (temperature > 0) & (token >= 0):
        least = tl.zeros([], tl.uint32)
        if (top_k > 0) & (top_k < V):
            least = _threshold(x_ptr, least, top_k.to(tl.float32), top, temperature, False, V, BLOCK)
        if top_p < 1:
            wanted = top_p * _held(x_ptr, least, top, temperature, True, V, BLOCK)
            least = _threshold(x_ptr, least, wanted, top, temperature, True, V, BLOCK)
        # the likeliest token stays, however small top_p is
        least = tl.minimum(least, _key(top))
        min_p = tl.load(min_p_ptr + b)
        token = _draw(
            x_ptr, least, top, temperature, min_p, tl.load(seed_ptr + b), tl.load(position_ptr + b), V, BLOCK
        )
    tl.store(out_ptr + b, token)


@triton.jit
def _log_prob_kernel(x_ptr, id_ptr, out_ptr, stride_x, V: tl.constexpr, BLOCK: tl.constexpr):
    # one program per row
    b = tl.program_id(0).to(tl.int64)
    x_ptr += b * stride_x
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(x_ptr + v, mask=v < V, other=float("-inf")).to(tl.float32))
    top = tl.max(best)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        total += tl.exp(tl.load(x_ptr + v, mask=v < V, other=float("-inf")).to(tl.float32) - top)
    x = tl.load(x_ptr + tl.load(id_ptr + b)).to(tl.float32)
    tl.store(out_ptr + b, x - top - tl.log(tl.sum(total)))


def argmax(logits_bv: Tensor) -> Tensor:
    """Take the largest logit of each row.

    Args:
        logits_bv: fp32 or bf16, unit stride along v.

    Returns:
        int32 [B], the lowest token on ties, -1 where a row has NaN or no finite maximum.

    Raises:
        ShapeError: the vocabulary is strided or empty.
    """
    n_rows, vocab, block, warps = _rows(logits_bv)
    out_b = torch.empty(n_rows, dtype=torch.int32, device=logits_bv.device)
    if n_rows:
        _argmax_kernel[(n_rows,)](logits_bv, out_b, logits_bv.stride(0), V=vocab, BLOCK=block, num_warps=warps)
    return out_b


def sample(
    logits_bv: Tensor,
    temperature_b: Tensor,
    top_k_b: Tensor,
    top_p_b: Tensor,
    min_p_b: Tensor,
    seed_b: Tensor,
    position_b: Tensor,
) -> Tensor:
    """Draw a token from each row.

    Args:
        logits_bv: fp32 or bf16, unit stride along v.
        temperature_b: fp32, 0 takes the largest logit.
        top_k_b: int32 tokens kept, 0 for all.
        top_p_b: fp32 probability kept, 1 for all.
        min_p_b: fp32 least probability as a share of the likeliest token's, 0 for none, at most 1.
        seed_b: int64, all 64 bits count.
        position_b: int32 place that the token will take.

    Returns:
        int32 [B], -1 where a row has NaN or no finite maximum.

    Raises:
        ShapeError: shapes, dtypes or strides disagree.
    """
    n_rows, vocab, block, warps = _rows(logits_bv)
    fp32, int32, int64 = torch.float32, torch.int32, torch.int64
    options = (temperature_b, top_k_b, top_p_b, min_p_b, seed_b, position_b)
    for option, dtype in zip(options, (fp32, int32, fp32, fp32, int64, int32), strict=True):
        right = option.shape == (n_rows,) and option.dtype == dtype and option.is_contiguous()
        expect(right, f"option is {describe(option)}, want {dtype}[{n_rows}]")
    out_b = torch.empty(n_rows, dtype=torch.int32, device=logits_bv.device)
    if n_rows:
        _sample_kernel[(n_rows,)](logits_bv, *options, out_b, logits_bv.stride(0), V=vocab, BLOCK=block, num_warps=warps)
    return out_b


def log_prob(logits_bv: Tensor, id_b: Tensor) -> Tensor:
    """Natural logarithm of the softmax of each row at one token.

    Args:
        logits_bv: fp32 or bf16, unit stride along v.
        id_b: int32 token of each row, inside the vocabulary.

    Returns:
        fp32 [B].

    Raises:
        ShapeError: shapes, dtypes or strides disagree.
    """
    n_rows, vocab, block, warps = _rows(logits_bv)
    right = id_b.shape == (n_rows,) and id_b.dtype == torch.int32 and id_b.is_contiguous()
    expect(right, f"id_b is {describe(id_b)}, want int32[{n_rows}]")
    out_b = torch.empty(n_rows, dtype=torch.float32, device=logits_bv.device)
    if n_rows:
        _log_prob_kernel[(n_rows,)](logits_bv, id_b, out_b, logits_bv.stride(0), V=vocab, BLOCK=block, num_warps=warps)
    return out_b


def _rows(logits_bv: Tensor) -> tuple[int, int, int, int]:
    n_rows, vocab = logits_bv.shape
    expect(vocab > 0 and logits_bv.stride(1) == 1, f"logits_bv is {describe(logits_bv)}, want unit stride along v")
    return n_rows, vocab, *tiles(vocab, logits_bv.device.type)


def compile_specs() -> list[Spec]:
    """Kimi K3's vocabulary."""
    block, warps = tiles(163840, "cuda")
    constants, options = {"V": 163840, "BLOCK": block}, {"num_warps": warps}
    row = {"x_ptr": "*fp32", "stride_x": "i32"}
    draw = {"temperature_ptr": "*fp32", "top_k_ptr": "*i32", "top_p_ptr": "*fp32", "min_p_ptr": "*fp32"}
    draw |= {"seed_ptr": "*i64", "position_ptr": "*i32", "out_ptr": "*i32"}
    return [
        Spec("argmax", _argmax_kernel, row | {"out_ptr": "*i32"}, constants, options),
        Spec("sample", _sample_kernel, row | draw, constants, options),
        Spec("log_prob", _log_prob_kernel, row | {"id_ptr": "*i32", "out_ptr": "*fp32"}, constants, options),
    ]
