"""Rows of routed experts in three formats, and the decoding that the expert kernels share.

A row holds one expert: gate over up [2F, Z] and down [Z, F]. With N output rows and K inputs of a matrix,

    nvfp4   codes [N, K/2], low nibble even k; scale e4m3 [N, K/16]; one fp32 a matrix   w = code * scale * global
    mxfp4   codes [K/2, N], low nibble even k; scale e8m0 [K/32, N]                      w = code * scale
    bf16    [N, K]; fp32 is taken too

code * scale is exact in bf16. The global scale is left to the kernel, after its K loop; gate, up and down have
one each.
A block of K falls into two tiles: even and odd k in the FP4 formats, first and second half otherwise.

Letters: s rows, z expert latent, f expert hidden, 2f gate over up, g scale groups, j packed bytes.

Source: ftw.md, sections 1.6 and 2; kimi-k3.md, section 4.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.bits import e2m1_to_f32, e4m3_to_f32, e8m0_to_f32
from ops.checks import describe, expect


class Nvfp4Rows(NamedTuple):
    """Experts in NVFP4."""

    gate_up_packed: Tensor  # uint8 [S, 2F, Z/2]
    gate_up_scale: Tensor  # e4m3 [S, 2F, Z/16]
    down_packed: Tensor  # uint8 [S, Z, F/2]
    down_scale: Tensor  # e4m3 [S, Z, F/16]
    global_s3: Tensor  # fp32 [S, 3]: of gate, up and down


class Mxfp4Rows(NamedTuple):
    """Experts in MXFP4, transposed."""

    gate_up_blocks: Tensor  # uint8 [S, Z/2, 2F]
    gate_up_scales: Tensor  # uint8 [S, Z/32, 2F]
    down_blocks: Tensor  # uint8 [S, F/2, Z]
    down_scales: Tensor  # uint8 [S, F/32, Z]


class Bf16Rows(NamedTuple):
    """Experts as they were trained."""

    gate_up: Tensor  # bf16 or fp32 [S, 2F, Z]
    down: Tensor  # bf16 or fp32 [S, Z, F]


Rows = Nvfp4Rows | Mxfp4Rows | Bf16Rows
BF16, NVFP4, MXFP4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class Bank(NamedTuple):
    """One matrix of every expert, as a kernel takes it."""

    w: Tensor
    scale: Tensor | None
    scales_s3: Tensor | None  # fp32 global scales
    n: int
    k: int
    format: int

    def arguments(self) -> dict[str, Any]:
        """Pointers and strides by their names in the kernels; strides count from row to row of the bank."""
        return {
            "w_ptr": self.w,
            "scale_ptr": self.scale,
            "global_ptr": self.scales_s3,
            "stride_w": self.w.stride(0),
            "stride_s": 0 if self.scale is None else self.scale.stride(0),
            "stride_g": 0 if self.scales_s3 is None else self.scales_s3.stride(0),
        }


def gate_up_bank(rows: Rows) -> Bank:
    """Gate over up of ``rows``, checked."""
    match rows:
        case Nvfp4Rows():
            return _nvfp4(rows.gate_up_packed, rows.gate_up_scale, rows.global_s3)
        case Mxfp4Rows():
            return _mxfp4(rows.gate_up_blocks, rows.gate_up_scales)
        case Bf16Rows():
            return _bf16(rows.gate_up)


def down_bank(rows: Rows) -> Bank:
    """Down of ``rows``, checked."""
    match rows:
        case Nvfp4Rows():
            return _nvfp4(rows.down_packed, rows.down_scale, rows.global_s3)
        case Mxfp4Rows():
            return _mxfp4(rows.down_blocks, rows.down_scales)
        case Bf16Rows():
            return _bf16(rows.down)


def _nvfp4(packed: Tensor, scale: Tensor, scales_s3: Tensor) -> Bank:
    s, n, j = packed.shape
    _expect_rows(packed, (s, n, j), (torch.uint8,))
    expect(j % 8 == 0, f"packed codes are {describe(packed)}, want whole groups of 16")
    _expect_rows(scale, (s, n, j // 8), (torch.float8_e4m3fn,))
    right = scales_s3.shape == (s, 3) and scales_s3.dtype == torch.float32 and scales_s3.stride(1) == 1
    expect(right, f"global_s3 is {describe(scales_s3)}, want float32 [{s}, 3]")
    return Bank(packed, scale.view(torch.uint8), scales_s3, n, 2 * j, NVFP4.value)


def _mxfp4(blocks: Tensor, scales: Tensor) -> Bank:
    s, j, n = blocks.shape
    _expect_rows(blocks, (s, j, n), (torch.uint8,))
    expect(j % 16 == 0, f"blocks are {describe(blocks)}, want whole groups of 32")
    _expect_rows(scales, (s, j // 16, n), (torch.uint8, torch.float8_e8m0fnu))
    return Bank(blocks, scales.view(torch.uint8), None, n, 2 * j, MXFP4.value)


def _bf16(w: Tensor) -> Bank:
    _expect_rows(w, tuple(w.shape), (torch.bfloat16, torch.float32))
    return Bank(w, None, None, w.shape[1], w.shape[2], BF16.value)


def _expect_rows(bank: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    """Rows may lie apart, each is dense."""
    dense = bank.dim() == 3 and bank.stride()[1:] == (bank.shape[2], 1)
    expect(
        bank.shape == shape and bank.dtype in dtypes and dense,
        f"bank is {describe(bank)}, want {dtypes[0]}{list(shape)}",
    )


class Tiles(NamedTuple):
    n: int
    k: int
    warps: int
    stages: int


def tiles(n: int, k: int, format: int, device: str) -> Tiles:
    """Blocks of outputs and of inputs. The latter orders the sum, so it may follow the matrix only."""
    if device == "cpu":
        return Tiles(min(triton.next_power_of_2(n), 512), min(max(triton.next_power_of_2(k), 32), 512), 4, 1)
    return Tiles(n=64, k=64 if format == BF16.value else 128, warps=4, stages=3)


@triton.jit
def _weights(
    w_ptr, scale_ptr, n, start, live, N: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Both tiles [n, k] of rows ``n`` and of the block of K at ``start``, without the global scale."""
    HALF: tl.constexpr = BLOCK_K // 2
    EVEN: tl.constexpr = K % BLOCK_K == 0
    if FORMAT == BF16:
        k = start + tl.arange(0, HALF)[None, :]
        at = n * K + k
        a = tl.load(w_ptr + at, mask=live if EVEN else live & (k < K), other=0.0)
        b = tl.load(w_ptr + at + HALF, mask=live if EVEN else live & (k + HALF < K), other=0.0)
        return a.to(tl.float32), b.to(tl.float32)
    else:
        PER: tl.constexpr = 8 if FORMAT == NVFP4 else 16  # bytes a scale
        j = start // 2 + tl.arange(0, HALF)[None, :]
        g = start // (2 * PER) + tl.arange(0, HALF // PER)[None, :]
        j_at = n * (K // 2) + j if FORMAT == NVFP4 else j * N + n
        g_at = n * (K // 16) + g if FORMAT == NVFP4 else g * N + n
        byte = tl.load(w_ptr + j_at, mask=live if EVEN else live & (j < K // 2), other=0)
        s = tl.load(scale_ptr + g_at, mask=live if EVEN else live & (g < K // (2 * PER)), other=0)
        s = e4m3_to_f32(s) if FORMAT == NVFP4 else e8m0_to_f32(s)
        s = tl.broadcast_to(s[:, :, None], [n.shape[0], HALF // PER, PER]).reshape([n.shape[0], HALF])
        return e2m1_to_f32(byte & 15) * s, e2m1_to_f32(byte >> 4) * s


@triton.jit
def contract(
    x_ptr, x_live, w_ptr, scale_ptr, n, n_live, N: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr,
    TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Sum over k of w[n, k] x[route, k] as [BLOCK_N, TILE] in fp32, without the global scale.

    ``x_ptr`` [1, TILE] points at the routes' inputs, ``w_ptr`` and ``scale_ptr`` at one row of the bank, ``n``
    [BLOCK_N, 1] are its output rows. What is not live counts as zero and is not read.
    """
    HALF: tl.constexpr = BLOCK_K // 2
    EVEN: tl.constexpr = K % BLOCK_K == 0
    i = tl.arange(0, HALF)[:, None]
    acc = tl.full([BLOCK_N, TILE], 0.0, tl.float32)
    for start in range(0, K, BLOCK_K):
        k_a = start + i if FORMAT == BF16 else start + 2 * i
        k_b = k_a + HALF if FORMAT == BF16 else k_a + 1
        x_a = tl.load(x_ptr + k_a, mask=x_live if EVEN else x_live & (k_a < K), other=0.0)
        x_b = tl.load(x_ptr + k_b, mask=x_live if EVEN else x_live & (k_b < K), other=0.0)
        w_a, w_b = _weights(w_ptr, scale_ptr, n, start, n_live, N, K, FORMAT, BLOCK_K)
        acc = tl.dot(w_a.to(DOT), x_a.to(tl.float32).to(DOT), acc, input_precision="ieee")
        acc = tl.dot(w_b.to(DOT), x_b.to(tl.float32).to(DOT), acc, input_precision="ieee")
    return acc
