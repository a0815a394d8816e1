"""Root-mean-square normalisation of rows, plain and sigmoid-gated.

    plain:  y[t, d] = w[d] * round(x[t, d] / sqrt(mean_d(x[t, d]^2) + eps))           round: to the dtype of x
    gated:  y[t, h, p] = o[t, h, p] / sqrt(mean_p(o^2) + eps) * w[p] * sg(gate[t, h, p])      fp32, one cast

Source: Zhang and Sennrich 2019, equation 4; kimi-k3.md, sections 2.2 and 2.5.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.bits import cast
from ops.checks import describe, expect
from ops.compile import Spec


class Tiles(NamedTuple):
    rows: int
    warps: int


def tiles(width: int, device: str) -> Tiles:
    """A row is reduced whole, so the number of rows a program takes does not show in the bits."""
    return Tiles(16, 4) if device == "cpu" else Tiles(1, 16 if width > 4096 else 4)


@triton.jit
def normalise(x, w, eps, D: tl.constexpr, DTYPE: tl.constexpr):
    """Rows of fp32 ``x`` (zeros past D) over their root mean square, rounded to DTYPE, times ``w``."""
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)
    return cast(x * scale[:, None], DTYPE).to(tl.float32) * w


@triton.jit(do_not_specialize=["n_tokens"])
def _rms_norm_kernel(
    x_ptr, w_ptr, y_ptr, stride_x, stride_y, eps, n_tokens, D: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    # one program per block of tokens
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    live = (t < n_tokens) & (d < D)
    x = tl.load(x_ptr + t * stride_x + d, mask=live, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    y = normalise(x, w, eps, D, x_ptr.dtype.element_ty)
    tl.store(y_ptr + t * stride_y + d, cast(y, y_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["n_rows"])
def _gated_rms_norm_kernel(
    o_ptr, g_ptr, w_ptr, y_ptr, stride_o, stride_g, stride_y, eps, n_rows, H: tl.constexpr, P: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    # one program per block of rows; a row is one head of one token
    r = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
    p = tl.arange(0, BLOCK_P)[None, :]
    live = (r < n_rows) & (p < P)
    t, column = r // H, (r % H) * P + p
    o = tl.load(o_ptr + t * stride_o + column, mask=live, other=0.0)
    g = tl.load(g_ptr + t * stride_g + column, mask=live, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + p, mask=p < P, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(o * o, axis=1) / P + eps)
    y = o * scale[:, None] * w * tl.sigmoid(g)
    tl.store(y_ptr + t * stride_y + column, cast(y, y_ptr.dtype.element_ty), mask=live)


def rms_norm(x_td: Tensor, w_d: Tensor, eps: float, *, out_td: Tensor | None = None) -> Tensor:
    """Scale each row to unit root mean square, then by ``w_d``.

    Args:
        x_td: activations, bf16 or fp32, unit stride along d.
        w_d: gains, any float dtype.
        eps: added to the mean square; units of x squared.
        out_td: destination, allocated if None; may be ``x_td`` itself.

    Returns:
        ``out_td`` in the dtype of ``x_td``. Sums run in fp32.

    Raises:
        ShapeError: shapes or strides disagree.
    """
    n_tokens, width = x_td.shape
    out_td = torch.empty(n_tokens, width, dtype=x_td.dtype, device=x_td.device) if out_td is None else out_td
    expect(w_d.shape == (width,), f"w_d is {describe(w_d)}, want [{width}]")
    expect(out_td.shape == x_td.shape, f"out_td is {describe(out_td)}, want {list(x_td.shape)}")
    expect(x_td.stride(1) == 1 == out_td.stride(1), f"x_td is {describe(x_td)}, want unit stride along d")
    rows, warps = tiles(width, x_td.device.type)
    if n_tokens:
        _rms_norm_kernel[(triton.cdiv(n_tokens, rows),)](
            x_td, w_d, out_td, x_td.stride(0), out_td.stride(0), eps, n_tokens,
            D=width, BLOCK_T=rows, BLOCK_D=triton.next_power_of_2(width), num_warps=warps,
        )  # fmt: skip
    return out_td


def gated_rms_norm(o_thp: Tensor, gate_thp: Tensor, w_p: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Normalise each head's output, scale by ``w_p`` and by the logistic function of the gate.

    Args:
        o_thp: fp32, heads contiguous inside a token.
        gate_thp: before the logistic function, heads contiguous inside a token.
        w_p: gains, any float dtype.
        eps: added to the mean square.
        dtype: of the result.

    Returns:
        [T, H, P] in ``dtype``.

    Raises:
        ShapeError: shapes or strides disagree.
    """
    n_tokens, heads, size = o_thp.shape
    expect(gate_thp.shape == o_thp.shape, f"gate_thp is {describe(gate_thp)}, want {list(o_thp.shape)}")
    expect(w_p.shape == (size,), f"w_p is {describe(w_p)}, want [{size}]")
    for x in (o_thp, gate_thp):
        expect(x.stride()[1:] == (size, 1), f"o_thp or gate_thp is {describe(x)}, want heads side by side")
    y_thp = torch.empty(n_tokens, heads, size, dtype=dtype, device=o_thp.device)
    n_rows = n_tokens * heads
    rows = 16 if o_thp.device.type == "cpu" else 4
    if n_rows:
        _gated_rms_norm_kernel[(triton.cdiv(n_rows, rows),)](
            o_thp, gate_thp, w_p, y_thp, o_thp.stride(0), gate_thp.stride(0), y_thp.stride(0), eps, n_rows,
            H=heads, P=size, BLOCK_R=rows, BLOCK_P=triton.next_power_of_2(size), num_warps=4,
        )  # fmt: skip
    return y_thp


def compile_specs() -> list[Spec]:
    """Kimi K3: a layer's input norm; the KDA output norm."""
    pointers = {"x_ptr": "*bf16", "y_ptr": "*bf16", "w_ptr": "*bf16", "o_ptr": "*fp32", "g_ptr": "*bf16"}
    strides = dict.fromkeys(("stride_x", "stride_y", "stride_o", "stride_g", "n_tokens", "n_rows"), "i32")
    types = pointers | strides | {"eps": "fp32"}
    plain = {"D": 7168, "BLOCK_T": 1, "BLOCK_D": 8192}
    gated = {"H": 96, "P": 128, "BLOCK_R": 4, "BLOCK_P": 128}
    return [
        Spec("rms_norm", _rms_norm_kernel, types, plain, {"num_warps": 16}),
        Spec("gated_rms_norm", _gated_rms_norm_kernel, types, gated, {"num_warps": 4}),
    ]
