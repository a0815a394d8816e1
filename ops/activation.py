"""Gates of the feed-forward and attention outputs, element by element, in fp32 with one cast at the end.

    SiLU:  y = g sg(g) u
    SiTU:  y = beta tanh(g / beta) sg(g) * linear_beta tanh(u / linear_beta)       u as it is without linear_beta
    sigmoid gate:  y = x sg(g)

sg is the logistic function. g is the first half of a row, u the second.

Source: kimi-k3.md, sections 2.3 and 2.7.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.bits import cast
from ops.checks import describe, expect
from ops.compile import Spec


class Situ(NamedTuple):
    """Bounds of the SiTU gate."""

    beta: float
    linear_beta: float | None


@triton.jit
def tanh(x):
    """Hyperbolic tangent from one exponential of a negative number, so that nothing overflows.

    Near zero 1 - e would keep few digits, so there it is the beginning of the Taylor series.
    """
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    square = x * x
    series = x * (1.0 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    return tl.where(square < 0.0225, series, tl.where(x < 0, -t, t))


@triton.jit
def glu(g, u, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):
    """Gate ``g`` times up ``u``: SiTU, or SiLU where BETA is None."""
    if LINEAR_BETA is not None:
        u = LINEAR_BETA * tanh(u / LINEAR_BETA)
    bounded = g if BETA is None else BETA * tanh(g / BETA)
    return bounded * tl.sigmoid(g) * u


class Tiles(NamedTuple):
    rows: int
    columns: int


def tiles(width: int, device: str) -> Tiles:
    """Elements are independent, so any tile gives the same bits; the interpreter wants few programs."""
    block = triton.next_power_of_2(width)
    return Tiles(16, min(block, 4096)) if device == "cpu" else Tiles(1, min(block, 2048))


@triton.jit(do_not_specialize=["n_tokens"])
def _glu_kernel(
    x_ptr, y_ptr, stride_x, stride_y, n_tokens, F: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    # one program per block of tokens and of columns
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    f = (tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F))[None, :]
    live = (t < n_tokens) & (f < F)
    g = tl.load(x_ptr + t * stride_x + f, mask=live, other=0.0).to(tl.float32)
    u = tl.load(x_ptr + t * stride_x + F + f, mask=live, other=0.0).to(tl.float32)
    y = glu(g, u, BETA, LINEAR_BETA)
    tl.store(y_ptr + t * stride_y + f, cast(y, y_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["n_tokens"])
def _sigmoid_gate_kernel(
    x_ptr, g_ptr, y_ptr, stride_x, stride_g, stride_y, n_tokens, N: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # one program per block of tokens and of columns
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    live = (t < n_tokens) & (n < N)
    x = tl.load(x_ptr + t * stride_x + n, mask=live, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + t * stride_g + n, mask=live, other=0.0).to(tl.float32)
    tl.store(y_ptr + t * stride_y + n, cast(x * tl.sigmoid(g), y_ptr.dtype.element_ty), mask=live)


def silu_gate(x_t2f: Tensor) -> Tensor:
    """SiLU of the first half times the second half.

    Args:
        x_t2f: gate and up, bf16 or fp32, unit stride along the last axis.

    Returns:
        [T, F] in the dtype of ``x_t2f``.

    Raises:
        ShapeError: the last axis is odd or strided.
    """
    return _glu(x_t2f, None, None)


def situ_gate(x_t2f: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """SiTU of the first half times the second, each bounded.

    Args:
        x_t2f: gate and up, bf16 or fp32, unit stride along the last axis.
        beta: bound of the gate.
        linear_beta: bound of the up half; None leaves it unbounded.

    Returns:
        [T, F] in the dtype of ``x_t2f``.

    Raises:
        ShapeError: the last axis is odd or strided.
    """
    return _glu(x_t2f, beta, linear_beta)


def _glu(x_t2f: Tensor, beta: float | None, linear_beta: float | None) -> Tensor:
    n_tokens, width = x_t2f.shape
    expect(
        width % 2 == 0 and x_t2f.stride(1) == 1, f"x_t2f is {describe(x_t2f)}, want an even last axis of unit stride"
    )
    y_tf = torch.empty(n_tokens, width // 2, dtype=x_t2f.dtype, device=x_t2f.device)
    rows, columns = tiles(width // 2, x_t2f.device.type)
    if n_tokens:
        _glu_kernel[(triton.cdiv(n_tokens, rows), triton.cdiv(width // 2, columns))](
            x_t2f, y_tf, x_t2f.stride(0), y_tf.stride(0), n_tokens,
            F=width // 2, BETA=beta, LINEAR_BETA=linear_beta, BLOCK_T=rows, BLOCK_F=columns, num_warps=4,
        )  # fmt: skip
    return y_tf


def sigmoid_gate(x_tn: Tensor, gate_tn: Tensor) -> Tensor:
    """``x`` times the logistic function of ``gate``.

    Args:
        x_tn: bf16 or fp32.
        gate_tn: before the logistic function, may be a column slice.

    Returns:
        [T, N] in the dtype of ``x_tn``.

    Raises:
        ShapeError: shapes or strides disagree.
    """
    n_tokens, width = x_tn.shape
    expect(gate_tn.shape == x_tn.shape, f"gate_tn is {describe(gate_tn)}, want {list(x_tn.shape)}")
    expect(x_tn.stride(1) == 1 == gate_tn.stride(1), f"gate_tn is {describe(gate_tn)}, want unit stride along n")
    y_tn = torch.empty(n_tokens, width, dtype=x_tn.dtype, device=x_tn.device)
    rows, columns = tiles(width, x_tn.device.type)
    if n_tokens:
        _sigmoid_gate_kernel[(triton.cdiv(n_tokens, rows), triton.cdiv(width, columns))](
            x_tn, gate_tn, y_tn, x_tn.stride(0), gate_tn.stride(0), y_tn.stride(0), n_tokens,
            N=width, BLOCK_T=rows, BLOCK_N=columns, num_warps=4,
        )  # fmt: skip
    return y_tn


def compile_specs() -> list[Spec]:
    """Kimi K3: shared experts' gate, MLA's output gate."""
    pointers = dict.fromkeys(("x_ptr", "g_ptr", "y_ptr"), "*bf16")
    scalars = dict.fromkeys(("stride_x", "stride_g", "stride_y", "n_tokens"), "i32")
    situ = {"F": 6144, "BETA": 4.0, "LINEAR_BETA": 25.0, "BLOCK_T": 1, "BLOCK_F": 2048}
    gate = {"N": 12288, "BLOCK_T": 1, "BLOCK_N": 2048}
    silu = situ | {"BETA": None, "LINEAR_BETA": None}
    return [
        Spec("silu_gate", _glu_kernel, pointers | scalars, silu, {"num_warps": 4}),
        Spec("situ_gate", _glu_kernel, pointers | scalars, situ, {"num_warps": 4}),
        Spec("sigmoid_gate", _sigmoid_gate_kernel, pointers | scalars, gate, {"num_warps": 4}),
    ]
