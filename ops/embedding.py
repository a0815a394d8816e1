"""Rows of a table: token embeddings, or the activations of chosen tokens.

y[t, d] = table[ids[t], d]  (* scale[ids[t]] for an e4m3 table)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.bits import cast, e4m3_to_f32
from ops.checks import describe, expect
from ops.compile import Spec


@triton.jit(do_not_specialize=["n_tokens"])
def _gather_kernel(
    ids_ptr, table_ptr, scale_ptr, y_ptr, stride_table, stride_y, n_tokens, D: tl.constexpr, FP8: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # one program per block of tokens and of columns
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    row = tl.load(ids_ptr + t, mask=t < n_tokens, other=0).to(tl.int64)
    live = (t < n_tokens)[:, None] & (d < D)
    x = tl.load(table_ptr + row[:, None] * stride_table + d, mask=live, other=0)
    if FP8:
        x = e4m3_to_f32(x) * tl.load(scale_ptr + row)[:, None]
    y = cast(x.to(tl.float32), y_ptr.dtype.element_ty)
    tl.store(y_ptr + t.to(tl.int64)[:, None] * stride_y + d, y, mask=live)


def gather_rows(ids_t: Tensor, table_vd: Tensor, *, out_td: Tensor | None = None) -> Tensor:
    """Copy rows of a bf16 or fp32 table.

    Args:
        ids_t: int32 row numbers, each inside the table.
        table_vd: unit stride along d.
        out_td: destination, bf16 or fp32; allocated in the table's dtype if None.

    Returns:
        ``out_td``.

    Raises:
        ShapeError: shapes, strides or dtypes disagree.
    """
    return _gather(ids_t, table_vd, None, out_td)


def gather_rows_fp8(ids_t: Tensor, table_vd: Tensor, scale_v: Tensor, *, out_td: Tensor) -> Tensor:
    """Dequantise rows of an e4m3 table with one scale a row into ``out_td``.

    Args:
        ids_t: int32 row numbers, each inside the table.
        table_vd: float8_e4m3fn, unit stride along d.
        scale_v: fp32.
        out_td: destination, bf16 or fp32.

    Returns:
        ``out_td``.

    Raises:
        ShapeError: shapes, strides or dtypes disagree.
    """
    expect(table_vd.dtype == torch.float8_e4m3fn, f"table_vd is {describe(table_vd)}, want float8_e4m3fn")
    expect(scale_v.shape == table_vd.shape[:1], f"scale_v is {describe(scale_v)}, want [{len(table_vd)}]")
    return _gather(ids_t, table_vd.view(torch.uint8), scale_v, out_td)


def _gather(ids_t: Tensor, table_vd: Tensor, scale_v: Tensor | None, out_td: Tensor | None) -> Tensor:
    n_tokens, width = len(ids_t), table_vd.shape[1]
    if out_td is None:
        out_td = torch.empty(n_tokens, width, dtype=table_vd.dtype, device=table_vd.device)
    expect(ids_t.dtype == torch.int32, f"ids_t is {describe(ids_t)}, want int32")
    expect(out_td.shape == (n_tokens, width), f"out_td is {describe(out_td)}, want [{n_tokens}, {width}]")
    expect(table_vd.stride(1) == 1 == out_td.stride(1), f"table_vd is {describe(table_vd)}, want unit stride along d")
    cpu = table_vd.device.type == "cpu"
    rows, columns = (16, triton.next_power_of_2(width)) if cpu else (1, 1024)
    if n_tokens:
        _gather_kernel[(triton.cdiv(n_tokens, rows), triton.cdiv(width, columns))](
            ids_t, table_vd, table_vd if scale_v is None else scale_v, out_td, table_vd.stride(0), out_td.stride(0),
            n_tokens, D=width, FP8=scale_v is not None, BLOCK_T=rows, BLOCK_D=columns, num_warps=4,
        )  # fmt: skip
    return out_td


def compile_specs() -> list[Spec]:
    """Kimi K3's embedding, bf16 and FP8."""
    types = {"ids_ptr": "*i32", "scale_ptr": "*fp32", "y_ptr": "*bf16"}
    types |= dict.fromkeys(("stride_table", "stride_y", "n_tokens"), "i32")
    sizes = {"D": 7168, "BLOCK_T": 1, "BLOCK_D": 1024}
    return [
        Spec("gather_rows", _gather_kernel, types | {"table_ptr": "*bf16"}, sizes | {"FP8": False}, {"num_warps": 4}),
        Spec("gather_rows_fp8", _gather_kernel, types | {"table_ptr": "*u8"}, sizes | {"FP8": True}, {"num_warps": 4}),
    ]
