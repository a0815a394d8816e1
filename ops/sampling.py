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

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.checks import describe, expect
from ops.compile import Spec


class Tiles(NamedTuple):
    rows: int
    block: int
    digit: int
    warps: int


def tiles(vocab: int, device: str) -> Tiles:
    """Rows of a program, logits of a loop's step, bits that one pass of a bisection settles.

    The step orders the sums, so it follows the vocabulary only. The interpreter wants few programs and few passes.
    """
    block = min(triton.next_power_of_2(vocab), 16384 if device == "cpu" else 2048)
    return Tiles(min(max(2048 // block, 1), 64), block, 4, 4) if device == "cpu" else Tiles(1, block, 2, 8)


@triton.jit
def _logits(x_ptr, v, live, V: tl.constexpr):
    """Logits [rows, tokens v]; past the end, and in rows not ``live``, minus infinity."""
    return tl.load(x_ptr + v, mask=live & (v < V), other=float("-inf")).to(tl.float32)


@triton.jit
def _largest(x_ptr, live, V: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK: tl.constexpr):
    """Largest logit and its lowest index, -1 where a row has NaN or no finite maximum."""
    best = tl.full([BLOCK_B, BLOCK], float("-inf"), tl.float32)
    at = tl.full([BLOCK_B, BLOCK], 0, tl.int32)
    broken = tl.full([BLOCK_B, BLOCK], 0, tl.int32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)[None, :]
        x = _logits(x_ptr, v, live, V)
        at = tl.where(x > best, v, at)
        best = tl.where(x > best, x, best)
        broken = tl.where(x == x, broken, 1)
    top = tl.max(best, axis=1)[:, None]
    token = tl.min(tl.where(best == top, at, V), axis=1)[:, None]
    finite = (tl.max(broken, axis=1)[:, None] == 0) & (tl.abs(top) < float("inf"))
    return top, tl.where(finite, token, -1)


@triton.jit
def _key(x):
    """Unsigned integer that orders as ``x``; both zeros have one key."""
    u = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where(u >> 31 == 1, ~u, u | 0x80000000)


@triton.jit
def _held(
    x_ptr, live, least, top, temperature, MASS: tl.constexpr, V: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Tokens of each row that reach each of its D keys ``least``; with MASS their unnormalised probability."""
    total = tl.full([BLOCK_B, D, BLOCK], 0, tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)[None, :]
        x = _logits(x_ptr, v, live, V)
        weight = tl.where(v < V, tl.exp((x - top) / temperature) if MASS else 1.0, 0.0)
        total += tl.where(_key(x)[:, None, :] >= least[:, :, None], weight[:, None, :], 0.0)
    return tl.sum(total, axis=2)


@triton.jit
def _threshold(
    x_ptr, live, least, wanted, top, temperature, MASS: tl.constexpr, V: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK: tl.constexpr, DIGIT: tl.constexpr,
):  # fmt: skip
    """Largest key of each row, at least ``least``, whose tokens hold ``wanted``: the highest bits are settled first."""
    D: tl.constexpr = 2**DIGIT
    d = tl.arange(0, D)[None, :].to(tl.uint32)
    key = tl.full([BLOCK_B, 1], 0, tl.uint32)
    unit = tl.full([1, 1], 2 ** (32 - DIGIT), tl.uint32)
    for _ in range(32 // DIGIT):
        held = _held(x_ptr, live, tl.maximum(key + d * unit, least), top, temperature, MASS, V, BLOCK_B, BLOCK, D)
        key += tl.max(tl.where(held >= wanted, d, 0), axis=1)[:, None] * unit
        unit = unit >> DIGIT
    # the likeliest token stays, however little is wanted
    return tl.minimum(tl.maximum(key, least), _key(top))


@triton.jit
def _exponential(seed, token, position):
    """Exponential number of a counter, in steps of 2^-32 near zero, where the draw is decided."""
    none = tl.zeros_like(token)
    bits, _, _, _ = tl.philox(seed, token, none + position, none, none)
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)  # 2^-32; below 1
    small = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    return tl.where(u < 0.015625, small, -tl.log(1.0 - u))


@triton.jit
def _draw(
    x_ptr, live, least, top, temperature, min_p, seed, position, V: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Kept token of each row with the largest perturbed logit."""
    best = tl.full([BLOCK_B, BLOCK], float("-inf"), tl.float32)
    at = tl.full([BLOCK_B, BLOCK], V, tl.int32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)[None, :]
        x = _logits(x_ptr, v, live, V)
        scaled = (x - top) / temperature
        kept = (v < V) & (_key(x) >= least) & (tl.exp(scaled) >= min_p)
        token = tl.full([BLOCK_B, BLOCK], 0, tl.uint32) + v.to(tl.uint32)
        score = tl.where(kept, scaled - tl.log(_exponential(seed, token, position.to(tl.uint32))), float("-inf"))
        at = tl.where(score > best, v, at)
        best = tl.where(score > best, score, best)
    return tl.min(tl.where(best == tl.max(best, axis=1)[:, None], at, V), axis=1)[:, None]


@triton.jit(do_not_specialize=["n_rows"])
def _argmax_kernel(
    x_ptr, out_ptr, stride_x, n_rows, V: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    # one program per block of rows
    b = (tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)[:, None]
    _, token = _largest(x_ptr + b * stride_x, b < n_rows, V, BLOCK_B, BLOCK)
    tl.store(out_ptr + b, token, mask=b < n_rows)


@triton.jit(do_not_specialize=["n_rows"])
def _sample_kernel(
    x_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, out_ptr, stride_x, n_rows,
    V: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK: tl.constexpr, DIGIT: tl.constexpr,
):  # fmt: skip
    # one program per block of rows
    b = (tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)[:, None]
    live = b < n_rows
    x_ptr += b * stride_x
    temperature = tl.load(temperature_ptr + b, mask=live, other=0.0)
    top_k = tl.load(top_k_ptr + b, mask=live, other=0)
    top_p = tl.load(top_p_ptr + b, mask=live, other=1.0)
    top, token = _largest(x_ptr, live, V, BLOCK_B, BLOCK)
    drawn = (temperature > 0) & (token >= 0)
    temperature = tl.where(drawn, temperature, 1.0)
    least = tl.full([BLOCK_B, 1], 0, tl.uint32)
    few = drawn & (top_k > 0) & (top_k < V)
    if tl.max(few.to(tl.int32)) > 0:
        key = _threshold(x_ptr, live, least, top_k.to(tl.float32), top, temperature, False, V, BLOCK_B, BLOCK, DIGIT)
        least = tl.where(few, key, least)
    likely = drawn & (top_p < 1)
    if tl.max(likely.to(tl.int32)) > 0:
        wanted = top_p * _held(x_ptr, live, least, top, temperature, True, V, BLOCK_B, BLOCK, 1)
        key = _threshold(x_ptr, live, least, wanted, top, temperature, True, V, BLOCK_B, BLOCK, DIGIT)
        least = tl.where(likely, key, least)
    if tl.max(drawn.to(tl.int32)) > 0:
        min_p = tl.load(min_p_ptr + b, mask=live, other=0.0)
        seed = tl.load(seed_ptr + b, mask=live, other=0)
        position = tl.load(position_ptr + b, mask=live, other=0)
        choice = _draw(x_ptr, live, least, top, temperature, min_p, seed, position, V, BLOCK_B, BLOCK)
        token = tl.where(drawn, choice, token)
    tl.store(out_ptr + b, token, mask=live)


@triton.jit(do_not_specialize=["n_rows"])
def _log_prob_kernel(
    x_ptr, id_ptr, out_ptr, stride_x, n_rows, V: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    # one program per block of rows
    b = (tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)[:, None]
    live = b < n_rows
    x_ptr += b * stride_x
    best = tl.full([BLOCK_B, BLOCK], float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        best = tl.maximum(best, _logits(x_ptr, start + tl.arange(0, BLOCK)[None, :], live, V))
    top = tl.max(best, axis=1)[:, None]
    total = tl.full([BLOCK_B, BLOCK], 0, tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)[None, :]
        total += tl.where(live, tl.exp(_logits(x_ptr, v, live, V) - top), 1.0)
    x = tl.load(x_ptr + tl.load(id_ptr + b, mask=live, other=0), mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + b, x - top - tl.log(tl.sum(total, axis=1)[:, None]), mask=live)


def argmax(logits_bv: Tensor) -> Tensor:
    """Take the largest logit of each row.

    Args:
        logits_bv: fp32 or bf16, unit stride along v.

    Returns:
        int32 [B], the lowest token on ties, -1 where a row has NaN or no finite maximum.

    Raises:
        ShapeError: the vocabulary is strided or empty.
    """
    return _launch(_argmax_kernel, torch.int32, logits_bv, (), {})


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
    fp32, int32, int64 = torch.float32, torch.int32, torch.int64
    options = (temperature_b, top_k_b, top_p_b, min_p_b, seed_b, position_b)
    for option, dtype in zip(options, (fp32, int32, fp32, fp32, int64, int32), strict=True):
        _expect_one_a_row(option, dtype, logits_bv)
    digit = tiles(logits_bv.shape[1], logits_bv.device.type).digit
    return _launch(_sample_kernel, int32, logits_bv, options, {"DIGIT": digit})


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
    _expect_one_a_row(id_b, torch.int32, logits_bv)
    return _launch(_log_prob_kernel, torch.float32, logits_bv, (id_b,), {})


def _expect_one_a_row(option_b: Tensor, dtype: torch.dtype, logits_bv: Tensor) -> None:
    right = option_b.shape == logits_bv.shape[:1] and option_b.dtype == dtype and option_b.is_contiguous()
    expect(right, f"option is {describe(option_b)}, want {dtype}[{logits_bv.shape[0]}]")


def _launch(
    kernel: Any, dtype: torch.dtype, logits_bv: Tensor, arguments: tuple[Tensor, ...], constants: dict[str, int]
) -> Tensor:
    """Run ``kernel`` over the rows; returns its output, one value a row."""
    n_rows, vocab = logits_bv.shape
    expect(vocab > 0 and logits_bv.stride(1) == 1, f"logits_bv is {describe(logits_bv)}, want unit stride along v")
    out_b = torch.empty(n_rows, dtype=dtype, device=logits_bv.device)
    tile = tiles(vocab, logits_bv.device.type)
    if n_rows:
        kernel[(triton.cdiv(n_rows, tile.rows),)](
            logits_bv, *arguments, out_b, logits_bv.stride(0), n_rows, V=vocab, BLOCK_B=tile.rows, BLOCK=tile.block,
            num_warps=tile.warps, **constants,
        )  # fmt: skip
    return out_b


def compile_specs() -> list[Spec]:
    """Kimi K3's vocabulary."""
    tile = tiles(163840, "cuda")
    constants, options = {"V": 163840, "BLOCK_B": tile.rows, "BLOCK": tile.block}, {"num_warps": tile.warps}
    row = {"x_ptr": "*fp32", "stride_x": "i32", "n_rows": "i32"}
    draw = {"temperature_ptr": "*fp32", "top_k_ptr": "*i32", "top_p_ptr": "*fp32", "min_p_ptr": "*fp32"}
    draw |= {"seed_ptr": "*i64", "position_ptr": "*i32", "out_ptr": "*i32"}
    return [
        Spec("argmax", _argmax_kernel, row | {"out_ptr": "*i32"}, constants, options),
        Spec("sample", _sample_kernel, row | draw, constants | {"DIGIT": tile.digit}, options),
        Spec("log_prob", _log_prob_kernel, row | {"id_ptr": "*i32", "out_ptr": "*fp32"}, constants, options),
    ]
