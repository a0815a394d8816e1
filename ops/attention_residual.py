"""Attention residuals: each sublayer reads a softmax mix of earlier blocks instead of a running sum.

    k[n, t] = v[n, t] / sqrt(mean_d(v^2) + eps)            s[n, t] = sum_d k[n, t, d] w[d] p[d]
    h[t] = round(sum_n softmax_n(s)[n, t] v[n, t])         y[t] = rms_norm(h[t])

The raw candidates are mixed, the normalised ones only scored. Letters: n candidates (closed blocks, then the open one).

Source: kimi-k3.md, section 2.1.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.bits import cast
from ops.checks import describe, expect
from ops.compile import Spec


@triton.jit(do_not_specialize=["count", "n_tokens"])
def _mix_rms_norm_kernel(
    v_ptr, w_ptr, p_ptr, gain_ptr, y_ptr, stride_v, count, eps, n_tokens,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # one program per block of tokens; the softmax over candidates runs online
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    live = (t < n_tokens) & (d < D)
    w = tl.load(w_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    w *= tl.load(p_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    top = tl.full((BLOCK_T,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    h = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for n in range(count):
        v = tl.load(v_ptr + n * stride_v + t * D + d, mask=live, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(v * v, axis=1) / D + eps)
        score = tl.sum(v * scale[:, None] * w, axis=1)
        new_top = tl.maximum(top, score)
        keep, weight = tl.exp(top - new_top), tl.exp(score - new_top)
        h = h * keep[:, None] + v * weight[:, None]
        total = total * keep + weight
        top = new_top
    x = cast(h / total[:, None], v_ptr.dtype.element_ty).to(tl.float32)
    unit = x * tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
    gain = tl.load(gain_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    y = cast(unit, y_ptr.dtype.element_ty).to(tl.float32) * gain
    tl.store(y_ptr + t * D + d, cast(y, y_ptr.dtype.element_ty), mask=live)


def mix_rms_norm(v_ntd: Tensor, count: int, w_d: Tensor, p_d: Tensor, gain_d: Tensor, eps: float) -> Tensor:
    """Mix the first ``count`` candidates of each token and normalise the mix.

    Args:
        v_ntd: candidates, bf16 or fp32, contiguous.
        count: how many are live, at least 1.
        w_d: gains of the scoring norm, any float dtype.
        p_d: scoring projection, any float dtype.
        gain_d: gains of the norm that follows the mix, any float dtype.
        eps: added to the mean square, in both norms.

    Returns:
        [T, D] in the dtype of ``v_ntd``.

    Raises:
        ShapeError: shapes or strides disagree, or ``count`` is out of range.
    """
    n_max, n_tokens, width = v_ntd.shape
    expect(0 < count <= n_max, f"count is {count}, want 1 to {n_max}")
    expect(v_ntd.is_contiguous(), f"v_ntd is {describe(v_ntd)}, want it contiguous")
    for x in (w_d, p_d, gain_d):
        expect(x.shape == (width,) and x.stride(0) == 1, f"w_d, p_d or gain_d is {describe(x)}, want [{width}]")
    y_td = torch.empty(n_tokens, width, dtype=v_ntd.dtype, device=v_ntd.device)
    rows = 16 if v_ntd.device.type == "cpu" else 1
    if n_tokens:
        _mix_rms_norm_kernel[(triton.cdiv(n_tokens, rows),)](
            v_ntd, w_d, p_d, gain_d, y_td, v_ntd.stride(0), count, eps, n_tokens,
            D=width, BLOCK_T=rows, BLOCK_D=triton.next_power_of_2(width), num_warps=16 if width > 4096 else 4,
        )  # fmt: skip
    return y_td


def compile_specs() -> list[Spec]:
    """Kimi K3's width."""
    types = dict.fromkeys(("v_ptr", "w_ptr", "p_ptr", "gain_ptr", "y_ptr"), "*bf16")
    types |= {"stride_v": "i64", "count": "i32", "n_tokens": "i32", "eps": "fp32"}
    mix = {"D": 7168, "BLOCK_T": 1, "BLOCK_D": 8192}
    return [Spec("mix_rms_norm", _mix_rms_norm_kernel, types, mix, {"num_warps": 16})]
