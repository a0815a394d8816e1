"""The latent cache of multi-head latent attention: one row a token, shared by all heads.

    row = [rms_norm(c) | kr]          c: the first R columns of kv_a's output, kr: the rest, untouched

Rows lie in pages of U places; a place is page * U + u, and place -1 is padding.

Source: kimi-k3.md, section 2.7.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.bits import cast
from ops.checks import describe, expect
from ops.compile import Spec


@triton.jit(do_not_specialize=["n_tokens"])
def _append_kernel(
    cache_ptr, kv_ptr, gain_ptr, place_ptr, stride_kv, eps, n_tokens,
    R: tl.constexpr, ROPE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_ROPE: tl.constexpr,
):  # fmt: skip
    # one program per block of tokens
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    r = tl.arange(0, BLOCK_R)[None, :]
    place = tl.load(place_ptr + t, mask=t < n_tokens, other=-1)[:, None]
    kv = kv_ptr + t[:, None] * stride_kv
    row = cache_ptr + place * (R + ROPE)
    live = (place >= 0) & (r < R)
    c = tl.load(kv + r, mask=live, other=0.0).to(tl.float32)
    unit = c * tl.rsqrt(tl.sum(c * c, axis=1) / R + eps)[:, None]
    gain = tl.load(gain_ptr + r, mask=r < R, other=0.0).to(tl.float32)
    c = cast(unit, kv_ptr.dtype.element_ty).to(tl.float32) * gain
    tl.store(row + r, cast(c, cache_ptr.dtype.element_ty), mask=live)
    if ROPE > 0:
        x = tl.arange(0, BLOCK_ROPE)[None, :]
        kr = tl.load(kv + R + x, mask=(place >= 0) & (x < ROPE), other=0.0)
        tl.store(row + R + x, kr, mask=(place >= 0) & (x < ROPE))


def append_latent_(cache_yur: Tensor, kv_tr: Tensor, gain_r: Tensor, eps: float, place_t: Tensor) -> None:
    """Write the latent rows of new tokens. WRITTEN: places ``place_t`` of cache_yur.

    Args:
        cache_yur: [pages, places, R + rope], contiguous, in the dtype of ``kv_tr``.
        kv_tr: output of kv_a_proj_with_mqa, bf16 or fp32, unit stride along r.
        gain_r: gains of the norm over the first R columns, any float dtype.
        eps: added to the mean square.
        place_t: int64; -1 skips the token.

    Raises:
        ShapeError: shapes, strides or dtypes disagree.
    """
    (n_tokens, width), rank = kv_tr.shape, len(gain_r)
    expect(
        cache_yur.shape[2] == width and cache_yur.is_contiguous() and cache_yur.dtype == kv_tr.dtype,
        f"cache_yur is {describe(cache_yur)}, want {kv_tr.dtype}[pages, places, {width}]",
    )
    expect(kv_tr.stride(1) == 1 and rank <= width, f"kv_tr is {describe(kv_tr)}, want unit stride along r")
    expect(place_t.dtype == torch.int64 and len(place_t) == n_tokens, f"place_t is {describe(place_t)}, want int64[T]")
    rows = 16 if kv_tr.device.type == "cpu" else 1
    if n_tokens:
        _append_kernel[(triton.cdiv(n_tokens, rows),)](
            cache_yur, kv_tr, gain_r, place_t, kv_tr.stride(0), eps, n_tokens,
            R=rank, ROPE=width - rank, BLOCK_T=rows, BLOCK_R=triton.next_power_of_2(rank),
            BLOCK_ROPE=triton.next_power_of_2(max(width - rank, 1)), num_warps=4,
        )  # fmt: skip


def compile_specs() -> list[Spec]:
    """Kimi K3: rank 512, 64 more columns."""
    types = {"cache_ptr": "*bf16", "kv_ptr": "*bf16", "gain_ptr": "*bf16", "place_ptr": "*i64"}
    types |= {"stride_kv": "i32", "eps": "fp32", "n_tokens": "i32"}
    sizes = {"R": 512, "ROPE": 64, "BLOCK_T": 1, "BLOCK_R": 512, "BLOCK_ROPE": 64}
    return [Spec("append_latent", _append_kernel, types, sizes, {"num_warps": 4})]
