"""Second half of routed experts: hidden units of each route back to the latent width.

    y[r] = W_down h[r] * global_down

One program takes up to 16 routes of one expert and a block of outputs. The global scale is applied in fp32 after the
sum over f, then one cast. A route's sum runs over f in fixed blocks, whatever routes share its tile.

Letters: r routes (token * A + choice), f expert hidden, z expert latent.

Source: kimi-k3.md, section 2.4.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.bits import cast, dot_dtype
from ops.checks import describe, expect
from ops.compile import Spec
from ops.moe.align import TILE, Alignment
from ops.moe.experts import BF16, MXFP4, NVFP4, Rows, contract, down_bank, tiles


@triton.jit
def _down_kernel(
    h_ptr, w_ptr, scale_ptr, global_ptr, y_ptr, route_ptr, row_ptr, stride_h, stride_w, stride_s, stride_g, stride_y,
    Z: tl.constexpr, F: tl.constexpr, FORMAT: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    # one program per tile of routes and block of outputs
    tile = tl.program_id(0)
    row = tl.load(row_ptr + tile).to(tl.int64)
    if row < 0:
        return
    route = tl.load(route_ptr + tile * TILE + tl.arange(0, TILE)).to(tl.int64)[None, :]
    z = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    if scale_ptr is not None:
        scale_ptr += row * stride_s
    y = contract(
        h_ptr + route * stride_h, route >= 0, w_ptr + row * stride_w, scale_ptr, z, z < Z, Z, F, FORMAT, TILE, BLOCK_N,
        BLOCK_K, DOT,
    )  # fmt: skip
    if global_ptr is not None:
        y *= tl.load(global_ptr + row * stride_g + 2)
    out = y_ptr + route * stride_y + z
    tl.store(out, cast(y, y_ptr.dtype.element_ty), mask=(route >= 0) & (z < Z))


def expert_down(h_rf: Tensor, rows: Rows, alignment: Alignment) -> Tensor:
    """Output of every route's expert, not yet weighted.

    Args:
        h_rf: activated hidden units, bf16 or fp32, unit stride along f.
        rows: banks; rows that no route names are not read.
        alignment: routes grouped by row.

    Returns:
        y_rz [R, Z] in the dtype of ``h_rf``.

    Raises:
        ShapeError: inputs and banks disagree.
    """
    bank = down_bank(rows)
    expect(
        h_rf.shape[1] == bank.k and h_rf.stride(1) == 1, f"h_rf is {describe(h_rf)}, want [R, {bank.k}] of unit stride"
    )
    y_rz = torch.empty(h_rf.shape[0], bank.n, dtype=h_rf.dtype, device=h_rf.device)
    n, k, warps, stages = tiles(bank.n, bank.k, bank.format, h_rf.device.type)
    if len(y_rz):
        _down_kernel[(len(alignment.row_n), triton.cdiv(bank.n, n))](
            h_ptr=h_rf, y_ptr=y_rz, route_ptr=alignment.route_m, row_ptr=alignment.row_n, stride_h=h_rf.stride(0),
            stride_y=y_rz.stride(0), **bank.arguments(), Z=bank.n, F=bank.k, FORMAT=bank.format, TILE=TILE, BLOCK_N=n,
            BLOCK_K=k, DOT=dot_dtype(h_rf), num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return y_rz


def compile_specs() -> list[Spec]:
    """Kimi K3 in each format."""
    types = dict.fromkeys(("stride_h", "stride_w", "stride_s", "stride_g", "stride_y"), "i32")
    types |= {"h_ptr": "*bf16", "y_ptr": "*bf16", "route_ptr": "*i32", "row_ptr": "*i32"}
    shape = {"Z": 3584, "F": 3072, "TILE": TILE, "DOT": tl.bfloat16}
    packed = {"w_ptr": "*u8", "scale_ptr": "*u8"}
    forms = [
        ("nvfp4", NVFP4.value, packed | {"global_ptr": "*fp32"}, {}),
        ("mxfp4", MXFP4.value, packed, {"global_ptr": None}),
        ("bf16", BF16.value, {"w_ptr": "*bf16"}, {"scale_ptr": None, "global_ptr": None}),
    ]
    specs = []
    for name, form, pointers, absent in forms:
        n, k, warps, stages = tiles(3584, 3072, form, "cuda")
        constants = shape | absent | {"FORMAT": form, "BLOCK_N": n, "BLOCK_K": k}
        options = {"num_warps": warps, "num_stages": stages}
        specs.append(Spec(f"down_{name}", _down_kernel, types | pointers, constants, options))
    return specs
