"""The per-head projections that let attention run on latent rows: kv_b's key half before it, its value half after.

    absorb:  q'[t, h, r] = sum_k q[t, h, k] W[h, k, r]             k < nope; the rope columns of q follow unchanged
    expand:  o[t, h, p]  = sum_r z[t, h, r] W[h, nope + p, r]

W is kv_b_proj's weight viewed as [H, nope + P, R]. Tiles as in ``ops.linear``: 16 tokens, ascending order of the sum.

Source: kimi-k3.md, section 2.7 (absorbed decode).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.bits import cast, dot_dtype
from ops.checks import describe, expect
from ops.compile import Spec

TOKENS = 16


@triton.jit(do_not_specialize=["n_tokens"])
def _head_linear_kernel(
    x_ptr, w_ptr, y_ptr, stride_x, stride_y, n_tokens,
    N: tl.constexpr, K: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, COPY: tl.constexpr,
    W_HEAD: tl.constexpr, W_BEGIN: tl.constexpr, W_N: tl.constexpr, W_K: tl.constexpr, DOT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    # one program per tile of tokens, head and block of outputs; X and Y are columns a head in x and y
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_at = x_ptr + t * stride_x + h * X
    y_at = y_ptr + t * stride_y + h * Y
    w_at = w_ptr + h * W_HEAD + W_BEGIN + n[:, None] * W_N
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        w = tl.load(w_at + k[None, :] * W_K, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
        x = tl.load(x_at[None, :] + k[:, None], mask=(t < n_tokens)[None, :] & (k < K)[:, None], other=0.0)
        acc = tl.dot(w.to(tl.float32).to(DOT), x.to(tl.float32).to(DOT), acc, input_precision="ieee")
    y = tl.trans(cast(acc, y_ptr.dtype.element_ty))
    tl.store(y_at[:, None] + n[None, :], y, mask=(t < n_tokens)[:, None] & (n < N)[None, :])
    if COPY > 0 and tl.program_id(2) == 0:
        c = tl.arange(0, BLOCK_C)[None, :]
        live = (t < n_tokens)[:, None] & (c < COPY)
        tl.store(y_at[:, None] + N + c, tl.load(x_at[:, None] + K + c, mask=live, other=0.0), mask=live)


def absorb_queries(q_thx: Tensor, w_hxr: Tensor, rope: int) -> Tensor:
    """Take queries to the latent space.

    Args:
        q_thx: [T, H, nope + rope], bf16 or fp32, heads packed inside a token.
        w_hxr: [H, nope + P, R], bf16 or fp32, contiguous.
        rope: columns at the end of each query that are copied.

    Returns:
        [T, H, R + rope], contiguous, in the dtype of ``q_thx``.

    Raises:
        ShapeError: shapes or strides disagree.
    """
    (_, heads, width), (_, rows, rank) = q_thx.shape, w_hxr.shape
    expect(0 < width - rope <= rows, f"q_thx is {describe(q_thx)}, want {rope} columns more than nope <= {rows}")
    geometry = {"N": rank, "K": width - rope, "COPY": rope, "W_BEGIN": 0, "W_N": 1, "W_K": rank}
    return _launch(q_thx, w_hxr, heads, rank + rope, geometry)


def expand_values(z_thr: Tensor, w_hxr: Tensor, nope: int) -> Tensor:
    """Take attended latent rows to each head's values.

    Args:
        z_thr: [T, H, R], bf16 or fp32, heads packed inside a token.
        w_hxr: [H, nope + P, R], bf16 or fp32, contiguous.
        nope: rows of ``w_hxr`` that belong to the keys.

    Returns:
        [T, H, P], contiguous, in the dtype of ``z_thr``.

    Raises:
        ShapeError: shapes or strides disagree.
    """
    (_, heads, rank), (_, rows, w_rank) = z_thr.shape, w_hxr.shape
    expect(w_rank == rank and nope < rows, f"w_hxr is {describe(w_hxr)}, want [{heads}, more than {nope}, {rank}]")
    geometry = {"N": rows - nope, "K": rank, "COPY": 0, "W_BEGIN": nope * rank, "W_N": rank, "W_K": 1}
    return _launch(z_thr, w_hxr, heads, rows - nope, geometry)


def _launch(x_thk: Tensor, w_hxr: Tensor, heads: int, width: int, geometry: dict[str, int]) -> Tensor:
    n_tokens, _, size = x_thk.shape
    expect(x_thk.stride()[1:] == (size, 1), f"x is {describe(x_thk)}, want heads packed inside a token")
    expect(len(w_hxr) == heads and w_hxr.is_contiguous(), f"w_hxr is {describe(w_hxr)}, want {heads} heads, contiguous")
    y_thn = torch.empty(n_tokens, heads, width, dtype=x_thk.dtype, device=x_thk.device)
    dot = dot_dtype(x_thk)
    sizes = _sizes(size, width, w_hxr.stride(0), geometry, x_thk.device.type == "cpu")
    if n_tokens:
        _head_linear_kernel[(triton.cdiv(n_tokens, TOKENS), heads, triton.cdiv(geometry["N"], sizes["BLOCK_N"]))](
            x_thk, w_hxr, y_thn, x_thk.stride(0), y_thn.stride(0), n_tokens, DOT=dot, **sizes, num_warps=4, num_stages=2
        )
    return y_thn


def _sizes(x_columns: int, y_columns: int, w_head: int, geometry: dict[str, int], cpu: bool) -> dict[str, int]:
    n = max(16, triton.next_power_of_2(geometry["N"]))
    blocks = {"BLOCK_T": TOKENS, "BLOCK_N": n if cpu else min(n, 64), "BLOCK_K": 64}
    blocks["BLOCK_C"] = triton.next_power_of_2(max(geometry["COPY"], 1))
    return geometry | blocks | {"X": x_columns, "Y": y_columns, "W_HEAD": w_head}


def compile_specs() -> list[Spec]:
    """Kimi K3: 96 heads, nope 128, rope 64, values 128, rank 512."""
    types = dict.fromkeys(("x_ptr", "w_ptr", "y_ptr"), "*bf16")
    types |= dict.fromkeys(("stride_x", "stride_y", "n_tokens"), "i32")
    absorb = {"N": 512, "K": 128, "COPY": 64, "W_BEGIN": 0, "W_N": 1, "W_K": 512}
    expand = {"N": 128, "K": 512, "COPY": 0, "W_BEGIN": 128 * 512, "W_N": 512, "W_K": 1}
    dot, options = {"DOT": tl.bfloat16}, {"num_warps": 4, "num_stages": 2}
    return [
        Spec("absorb_queries", _head_linear_kernel, types, _sizes(192, 576, 256 * 512, absorb, False) | dot, options),
        Spec("expand_values", _head_linear_kernel, types, _sizes(512, 128, 256 * 512, expand, False) | dot, options),
    ]
