"""Residual streams: begin one, add to one, add and normalise.

x <- round(y)              x <- round(x + y)              z = rms_norm(x)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.bits import cast
from ops.checks import describe, expect
from ops.compile import Spec


@triton.jit(do_not_specialize=["n"])
def _add_kernel(x_ptr, y_ptr, n, FRESH: tl.constexpr, BLOCK: tl.constexpr):
    # one program per block of elements
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(y_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    if not FRESH:
        y += tl.load(x_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(x_ptr + i, cast(y, x_ptr.dtype.element_ty), mask=i < n)


@triton.jit(do_not_specialize=["n_tokens"])
def _add_rms_norm_kernel(
    x_ptr, y_ptr, w_ptr, z_ptr, eps, n_tokens, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    # one program per block of tokens
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    live = (t < n_tokens) & (d < D)
    at = t * D + d
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + at, mask=live, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    x = cast(x + y, x_ptr.dtype.element_ty)
    tl.store(x_ptr + at, x, mask=live)
    x = x.to(tl.float32)
    unit = x * tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
    z = cast(unit, z_ptr.dtype.element_ty).to(tl.float32) * w
    tl.store(z_ptr + at, cast(z, z_ptr.dtype.element_ty), mask=live)


def begin_(x_td: Tensor, y_td: Tensor) -> Tensor:
    """Begin a stream with its first addend, whatever was there. WRITTEN: x_td, which is also returned.

    Args:
        x_td: bf16 or fp32, contiguous.
        y_td: the same shape, contiguous.

    Raises:
        ShapeError: shapes or strides disagree.
    """
    return _add(x_td, y_td, fresh=True)


def add_(x_td: Tensor, y_td: Tensor) -> Tensor:
    """Add ``y`` to ``x`` and round to the dtype of ``x``. WRITTEN: x_td, which is also returned.

    Args:
        x_td: bf16 or fp32, contiguous.
        y_td: the same shape, contiguous.

    Raises:
        ShapeError: shapes or strides disagree.
    """
    return _add(x_td, y_td, fresh=False)


def _add(x_td: Tensor, y_td: Tensor, *, fresh: bool) -> Tensor:
    _expect_alike(x_td, y_td)
    block = 16384 if x_td.device.type == "cpu" else 1024
    if x_td.numel():
        _add_kernel[(triton.cdiv(x_td.numel(), block),)](
            x_td, y_td, x_td.numel(), FRESH=fresh, BLOCK=block, num_warps=4
        )
    return x_td


def add_rms_norm_(x_td: Tensor, y_td: Tensor, w_d: Tensor, eps: float) -> Tensor:
    """Add ``y`` to ``x``, then normalise a copy. WRITTEN: x_td.

    Args:
        x_td: residual stream, bf16 or fp32, contiguous.
        y_td: what a sublayer adds to it, contiguous.
        w_d: gains of the norm, any float dtype.
        eps: added to the mean square.

    Returns:
        The normalised rows, in the dtype of ``x_td``.

    Raises:
        ShapeError: shapes or strides disagree.
    """
    _expect_alike(x_td, y_td)
    n_tokens, width = x_td.shape
    expect(w_d.shape == (width,), f"w_d is {describe(w_d)}, want [{width}]")
    z_td = torch.empty(n_tokens, width, dtype=x_td.dtype, device=x_td.device)
    rows = 16 if x_td.device.type == "cpu" else 1
    if n_tokens:
        _add_rms_norm_kernel[(triton.cdiv(n_tokens, rows),)](
            x_td, y_td, w_d, z_td, eps, n_tokens,
            D=width, BLOCK_T=rows, BLOCK_D=triton.next_power_of_2(width), num_warps=16 if width > 4096 else 4,
        )  # fmt: skip
    return z_td


def _expect_alike(x_td: Tensor, y_td: Tensor) -> None:
    expect(x_td.shape == y_td.shape, f"y_td is {describe(y_td)}, want {list(x_td.shape)}")
    expect(x_td.is_contiguous(), f"x_td is {describe(x_td)}, want it contiguous")
    expect(y_td.is_contiguous(), f"y_td is {describe(y_td)}, want it contiguous")


def compile_specs() -> list[Spec]:
    """Kimi K3's and Kimi-Linear's width."""
    types = dict.fromkeys(("x_ptr", "y_ptr", "w_ptr", "z_ptr"), "*bf16")
    types |= {"n": "i32", "n_tokens": "i32", "eps": "fp32"}
    return [
        Spec("add", _add_kernel, types, {"FRESH": False, "BLOCK": 1024}, {"num_warps": 4}),
        Spec(
            "add_rms_norm", _add_rms_norm_kernel, types, {"D": 2304, "BLOCK_T": 1, "BLOCK_D": 4096}, {"num_warps": 4}
        ),
    ]  # fmt: skip
