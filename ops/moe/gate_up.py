"""First half of routed experts: gate and up of each route's token, activated.

    h[r] = act(W_gate x[r // A] * global_gate, W_up x[r // A] * global_up)

One program takes up to 16 routes of one expert and a block of hidden units, both halves of them, each with its own
global scale, applied in fp32 after the sum over z; one cast at the end. A route's sum runs over z in fixed blocks,
whatever routes share its tile.

Letters: t tokens, z expert latent, r routes (token * A + choice), f expert hidden.

Source: kimi-k3.md, sections 2.3 and 2.4.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.activation import Situ, glu
from ops.bits import cast, dot_dtype
from ops.checks import describe, expect
from ops.compile import Spec
from ops.moe.align import TILE, Alignment
from ops.moe.experts import BF16, MXFP4, NVFP4, Rows, contract, gate_up_bank, tiles


@triton.jit
def _gate_up_kernel(
    x_ptr, w_ptr, scale_ptr, global_ptr, h_ptr, route_ptr, row_ptr, stride_x, stride_w, stride_s, stride_g, stride_h,
    F: tl.constexpr, Z: tl.constexpr, A: tl.constexpr, FORMAT: tl.constexpr, BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    # one program per tile of routes and block of hidden units: BLOCK_N / 2 rows of gate over as many of up
    tile = tl.program_id(0)
    row = tl.load(row_ptr + tile).to(tl.int64)
    if row < 0:
        return
    route = tl.load(route_ptr + tile * TILE + tl.arange(0, TILE))[None, :]
    i = tl.arange(0, BLOCK_N)[:, None]
    is_up = i >= BLOCK_N // 2
    f = tl.program_id(1) * (BLOCK_N // 2) + i % (BLOCK_N // 2)
    if scale_ptr is not None:
        scale_ptr += row * stride_s
    acc = contract(
        x_ptr + (route // A).to(tl.int64) * stride_x, route >= 0, w_ptr + row * stride_w, scale_ptr,
        tl.where(is_up, f + F, f), f < F, 2 * F, Z, FORMAT, TILE, BLOCK_N, BLOCK_K, DOT,
    )  # fmt: skip
    if global_ptr is not None:
        acc *= tl.load(global_ptr + row * stride_g + is_up.to(tl.int32))
    gate, up = tl.split(acc.reshape([2, BLOCK_N // 2, TILE]).permute(1, 2, 0))
    h = glu(gate, up, BETA, LINEAR_BETA)
    f = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)[:, None]
    out = h_ptr + route.to(tl.int64) * stride_h + f
    tl.store(out, cast(h, h_ptr.dtype.element_ty), mask=(route >= 0) & (f < F))


def expert_gate_up(x_tz: Tensor, rows: Rows, alignment: Alignment, n_active: int, activation: Situ | None) -> Tensor:
    """Activated gate times up of every route.

    Args:
        x_tz: inputs of the experts, bf16 or fp32, unit stride along z.
        rows: banks; rows that no route names are not read.
        alignment: routes grouped by row.
        n_active: experts a token.
        activation: bounds of SiTU, or None for SiLU.

    Returns:
        h_rf [T n_active, F] in the dtype of ``x_tz``.

    Raises:
        ShapeError: inputs and banks disagree.
    """
    bank = gate_up_bank(rows)
    width = bank.n // 2
    expect(
        x_tz.shape[1] == bank.k and x_tz.stride(1) == 1, f"x_tz is {describe(x_tz)}, want [T, {bank.k}] of unit stride"
    )
    h_rf = torch.empty(x_tz.shape[0] * n_active, width, dtype=x_tz.dtype, device=x_tz.device)
    n, k, warps, stages = tiles(bank.n, bank.k, bank.format, x_tz.device.type)
    beta, linear_beta = (None, None) if activation is None else activation
    if len(h_rf):
        _gate_up_kernel[(len(alignment.row_n), triton.cdiv(bank.n, n))](
            x_ptr=x_tz, h_ptr=h_rf, route_ptr=alignment.route_m, row_ptr=alignment.row_n, stride_x=x_tz.stride(0),
            stride_h=h_rf.stride(0), **bank.arguments(), F=width, Z=bank.k, A=n_active, FORMAT=bank.format, BETA=beta,
            LINEAR_BETA=linear_beta, TILE=TILE, BLOCK_N=n, BLOCK_K=k, DOT=dot_dtype(x_tz), num_warps=warps,
            num_stages=stages,
        )  # fmt: skip
    return h_rf


def compile_specs() -> list[Spec]:
    """Kimi K3 in each format; bf16 with Kimi-Linear's gate."""
    types = dict.fromkeys(("stride_x", "stride_w", "stride_s", "stride_g", "stride_h"), "i32")
    types |= {"x_ptr": "*bf16", "h_ptr": "*bf16", "route_ptr": "*i32", "row_ptr": "*i32"}
    shape = {"F": 3072, "Z": 3584, "A": 16, "TILE": TILE, "DOT": tl.bfloat16}
    situ: dict[str, float | None] = {"BETA": 4.0, "LINEAR_BETA": 25.0}
    silu: dict[str, float | None] = dict.fromkeys(situ)
    packed = {"w_ptr": "*u8", "scale_ptr": "*u8"}
    forms = [
        ("nvfp4", NVFP4.value, packed | {"global_ptr": "*fp32"}, situ),
        ("mxfp4", MXFP4.value, packed, situ | {"global_ptr": None}),
        ("bf16", BF16.value, {"w_ptr": "*bf16"}, silu | {"scale_ptr": None, "global_ptr": None}),
    ]
    specs = []
    for name, form, pointers, absent in forms:
        n, k, warps, stages = tiles(6144, 3584, form, "cuda")
        constants = shape | absent | {"FORMAT": form, "BLOCK_N": n, "BLOCK_K": k}
        options = {"num_warps": warps, "num_stages": stages}
        specs.append(Spec(f"gate_up_{name}", _gate_up_kernel, types | pointers, constants, options))
    return specs
