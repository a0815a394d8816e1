"""Weighted sum of a token's experts.

    r[t] = sum_a weight[t, a] * y[t A + a]          a = 0 .. A-1 in that order, fp32, one cast

Letters: t tokens, a active experts, r routes (token * A + choice), z expert latent.

Source: kimi-k3.md, section 2.4.
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
    columns: int


def tiles(width: int, device: str) -> Tiles:
    """Outputs are independent, so any tile gives the same bits; the interpreter wants few programs."""
    block = triton.next_power_of_2(width)
    return Tiles(16, min(block, 4096)) if device == "cpu" else Tiles(1, min(block, 1024))


@triton.jit(do_not_specialize=["n_tokens"])
def _combine_kernel(
    y_ptr, weight_ptr, out_ptr, stride_y, stride_w, stride_o, n_tokens, Z: tl.constexpr, A: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_Z: tl.constexpr,
):  # fmt: skip
    # one program per block of tokens and of columns
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    z = (tl.program_id(1) * BLOCK_Z + tl.arange(0, BLOCK_Z))[None, :]
    live = (t < n_tokens) & (z < Z)
    total = tl.full([BLOCK_T, BLOCK_Z], 0, tl.float32)
    for a in range(A):
        w = tl.load(weight_ptr + t * stride_w + a, mask=t < n_tokens, other=0.0)
        total += w * tl.load(y_ptr + (t * A + a) * stride_y + z, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * stride_o + z, cast(total, out_ptr.dtype.element_ty), mask=live)


def combine(y_rz: Tensor, weight_ta: Tensor) -> Tensor:
    """Sum each token's expert outputs, weighted.

    Args:
        y_rz: outputs of all routes, bf16 or fp32, unit stride along z.
        weight_ta: fp32 weights of the routes, unit stride along a.

    Returns:
        r_tz in the dtype of ``y_rz``.

    Raises:
        ShapeError: shapes or strides disagree.
    """
    n_tokens, n_active = weight_ta.shape
    width = y_rz.shape[1]
    right = weight_ta.dtype == torch.float32 and weight_ta.stride(1) == 1
    expect(right, f"weight_ta is {describe(weight_ta)}, want float32 of unit stride")
    right = y_rz.shape[0] == n_tokens * n_active and y_rz.stride(1) == 1
    expect(right, f"y_rz is {describe(y_rz)}, want {n_tokens * n_active} rows of unit stride")
    r_tz = torch.empty(n_tokens, width, dtype=y_rz.dtype, device=y_rz.device)
    rows, columns = tiles(width, y_rz.device.type)
    if n_tokens:
        _combine_kernel[(triton.cdiv(n_tokens, rows), triton.cdiv(width, columns))](
            y_rz, weight_ta, r_tz, y_rz.stride(0), weight_ta.stride(0), r_tz.stride(0), n_tokens,
            Z=width, A=n_active, BLOCK_T=rows, BLOCK_Z=columns, num_warps=4,
        )  # fmt: skip
    return r_tz


def compile_specs() -> list[Spec]:
    """Kimi K3: 16 experts of width 3584."""
    types = {"y_ptr": "*bf16", "weight_ptr": "*fp32", "out_ptr": "*bf16"}
    types |= dict.fromkeys(("stride_y", "stride_w", "stride_o", "n_tokens"), "i32")
    rows, columns = tiles(3584, "cuda")
    constants = {"Z": 3584, "A": 16, "BLOCK_T": rows, "BLOCK_Z": columns}
    return [Spec("combine", _combine_kernel, types, constants, {"num_warps": 4})]
