"""Linear layers without bias, one kernel for every number of rows.

    y[t, n] = sum_k x[t, k] W[n, k]

W is bf16 or fp32; or e4m3 with one scale a row, W[n, k] = w8[n, k] s[n]; or e4m3 with one scale a square block,
W[n, k] = w8[n, k] s[n / b, k / b], whose last blocks may be partial.

The weight tile is the left operand, so on Hopper it feeds the tensor cores from registers, and tokens are padded to
tiles of 16. A row's sum runs over blocks of k in ascending order whatever else is in the batch, so its bits depend on
nothing but the row and the weight.

Source: kimi-k3.md, section 4 (scales multiply; the block size is stated, never inferred from shapes).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.bits import cast, dot_dtype, e4m3_to_f32
from ops.checks import describe, expect
from ops.compile import Spec

TOKENS = 16  # rows of a token tile: the smallest that the tensor cores take


class Tiles(NamedTuple):
    n: int
    k: int
    warps: int
    stages: int


def tiles(n: int, k: int, device: str, fp32: bool) -> Tiles:
    """A function of the weight's shape and of where it runs, never of the number of tokens.

    The interpreter pays by the program, so there one takes as many rows as it can.
    """
    if device == "cpu":
        return Tiles(min(triton.next_power_of_2(n), 512), 128, 4, 1)
    return Tiles(32, 64, 4, 2) if fp32 else Tiles(64, 128, 4, 3)


@triton.jit(do_not_specialize=["n_tokens"])
def _linear_kernel(
    x_ptr, w_ptr, s_ptr, y_ptr, stride_x, stride_y, n_tokens,
    N: tl.constexpr, K: tl.constexpr, SCALE: tl.constexpr, BLOCK_S: tl.constexpr, DOT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # one program per tile of outputs; neighbours share the weight tile through the L2 cache
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    w_at = w_ptr + n[:, None] * K + k[None, :]
    x_at = x_ptr + t[None, :] * stride_x + k[:, None]
    n_live, t_live = (n < N)[:, None], (t < n_tokens)[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        inside = k0 + k < K
        w = tl.load(w_at + k0, mask=n_live & inside[None, :], other=0)
        x = tl.load(x_at + k0, mask=t_live & inside[:, None], other=0.0).to(tl.float32).to(DOT)
        w = w.to(tl.float32) if SCALE == "none" else e4m3_to_f32(w)
        if SCALE == "block":
            s = tl.load(s_ptr + n // BLOCK_S * tl.cdiv(K, BLOCK_S) + k0 // BLOCK_S, mask=n < N, other=0.0)
            acc += tl.dot(w.to(DOT), x, input_precision="ieee") * s[:, None]
        else:
            acc = tl.dot(w.to(DOT), x, acc, input_precision="ieee")
    if SCALE == "row":
        acc *= tl.load(s_ptr + n, mask=n < N, other=0.0)[:, None]
    y = tl.trans(cast(acc, y_ptr.dtype.element_ty))
    tl.store(y_ptr + t[:, None] * stride_y + n[None, :], y, mask=(t < n_tokens)[:, None] & (n < N)[None, :])


def linear(x_tk: Tensor, w_nk: Tensor, *, out_tn: Tensor | None = None) -> Tensor:
    """Multiply by a bf16 or fp32 weight.

    Args:
        x_tk: activations, bf16 or fp32, unit stride along k.
        w_nk: weight, contiguous.
        out_tn: destination, bf16 or fp32, unit stride along n; allocated in the dtype of ``x_tk`` if None.

    Returns:
        ``out_tn``. Sums run in fp32.

    Raises:
        ShapeError: shapes, strides or dtypes disagree.
    """
    expect(w_nk.dtype in (torch.bfloat16, torch.float32), f"w_nk is {describe(w_nk)}, want bfloat16 or float32")
    return _launch(x_tk, w_nk, w_nk, "none", 1, out_tn)


def linear_row_fp8(x_tk: Tensor, w_nk: Tensor, scale_n: Tensor, *, out_tn: Tensor | None = None) -> Tensor:
    """Multiply by an e4m3 weight with one scale a row.

    Args:
        x_tk: activations, bf16 or fp32, unit stride along k.
        w_nk: float8_e4m3fn, contiguous.
        scale_n: fp32, multiplies.
        out_tn: as for :func:`linear`.

    Returns:
        ``out_tn``. Sums run in fp32; the scale is applied to the sum.

    Raises:
        ShapeError: shapes, strides or dtypes disagree.
    """
    expect(w_nk.dtype == torch.float8_e4m3fn, f"w_nk is {describe(w_nk)}, want float8_e4m3fn")
    want = w_nk.shape[:1]
    expect(scale_n.shape == want and scale_n.dtype == torch.float32, f"scale_n is {describe(scale_n)}, want {want}")
    return _launch(x_tk, w_nk.view(torch.uint8), scale_n, "row", 1, out_tn)


def linear_block_fp8(
    x_tk: Tensor, w_nk: Tensor, scale_nk: Tensor, block: int = 128, *, out_tn: Tensor | None = None
) -> Tensor:
    """Multiply by an e4m3 weight with one scale a ``block`` x ``block`` square.

    Args:
        x_tk: activations, bf16 or fp32, unit stride along k.
        w_nk: float8_e4m3fn, contiguous.
        scale_nk: fp32 [ceil(N / block), ceil(K / block)], contiguous, multiplies.
        block: side of a square, a power of two from 16 on.
        out_tn: as for :func:`linear`.

    Returns:
        ``out_tn``. Each block's sum is scaled in fp32 and added to the others in ascending order.

    Raises:
        ShapeError: shapes, strides or dtypes disagree.
    """
    n, k = w_nk.shape
    want = [triton.cdiv(n, block), triton.cdiv(k, block)]
    expect(w_nk.dtype == torch.float8_e4m3fn, f"w_nk is {describe(w_nk)}, want float8_e4m3fn")
    expect(
        list(scale_nk.shape) == want and scale_nk.dtype == torch.float32 and scale_nk.is_contiguous(),
        f"scale_nk is {describe(scale_nk)}, want torch.float32{want} for blocks of {block} in [{n}, {k}]",
    )
    return _launch(x_tk, w_nk.view(torch.uint8), scale_nk, "block", block, out_tn)


def _launch(x_tk: Tensor, w_nk: Tensor, scale: Tensor, kind: str, block: int, out_tn: Tensor | None) -> Tensor:
    n_tokens, (n, k) = len(x_tk), w_nk.shape
    if out_tn is None:
        out_tn = torch.empty(n_tokens, n, dtype=x_tk.dtype, device=x_tk.device)
    expect(
        x_tk.shape[1] == k and x_tk.stride(1) == 1, f"x_tk is {describe(x_tk)}, want [T, {k}] of unit stride along k"
    )
    expect(w_nk.is_contiguous(), f"w_nk is {describe(w_nk)}, want it contiguous")
    expect(
        out_tn.shape == (n_tokens, n) and out_tn.stride(1) == 1,
        f"out_tn is {describe(out_tn)}, want [{n_tokens}, {n}] of unit stride along n",
    )
    dot = dot_dtype(x_tk)
    tile = tiles(n, k, x_tk.device.type, dot == tl.float32)
    if n_tokens:
        _linear_kernel[(triton.cdiv(n_tokens, TOKENS), triton.cdiv(n, tile.n))](
            x_tk, w_nk, scale, out_tn, x_tk.stride(0), out_tn.stride(0), n_tokens,
            N=n, K=k, SCALE=kind, BLOCK_S=block, DOT=dot, BLOCK_T=TOKENS, BLOCK_N=tile.n,
            BLOCK_K=min(tile.k, block) if kind == "block" else tile.k, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out_tn


def compile_specs() -> list[Spec]:
    """Kimi K3's linear layers in each format, and the router in fp32 out."""
    types = {
        "x_ptr": "*bf16",
        "s_ptr": "*fp32",
        "y_ptr": "*bf16",
        "stride_x": "i32",
        "stride_y": "i32",
        "n_tokens": "i32",
    }

    def spec(name: str, w: str, kind: str, n: int, k: int, fp32: bool = False) -> Spec:
        tile = tiles(n, k, "cuda", fp32)
        sizes = {"N": n, "K": k, "SCALE": kind, "BLOCK_S": 128, "DOT": tl.float32 if fp32 else tl.bfloat16}
        sizes |= {"BLOCK_T": TOKENS, "BLOCK_N": tile.n, "BLOCK_K": tile.k}
        return Spec(
            name, _linear_kernel, types | {"w_ptr": w}, sizes, {"num_warps": tile.warps, "num_stages": tile.stages}
        )

    return [
        spec("linear", "*bf16", "none", 14336, 7168),
        spec("linear_fp32", "*bf16", "none", 14336, 7168, fp32=True),
        spec("linear_row_fp8", "*u8", "row", 163840, 7168),
        spec("linear_block_fp8", "*u8", "block", 12288, 7168),
    ]
