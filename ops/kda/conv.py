"""Causal depthwise convolution over time with SiLU, and the window of inputs that the next step needs.

    y[t, c] = silu(sum_j w[c, j] u[t - (J - 1) + j, c])          u = 0 before a sequence's first token

J taps, the last one at the current token. Inputs of earlier steps come from the window: its row r is the input
J - 1 - r tokens before the step's first. The order of the sum is that of j, so a step's length does not show.

Letters: t tokens, c channels, j taps, b sequences, s state slots, r rows of the window.

Source: kimi-k3.md, section 2.5.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.bits import cast
from ops.checks import describe, expect
from ops.compile import Spec


@triton.jit(do_not_specialize=["n_tokens"])
def _conv_kernel(
    x_ptr, w_ptr, window_ptr, seq_ptr, start_ptr, slot_ptr, past_ptr, y_ptr, stride_x, n_tokens,
    C: tl.constexpr, TAPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    # one program per block of tokens and of channels
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    b = tl.load(seq_ptr + t, mask=t < n_tokens, other=0)
    first = tl.load(start_ptr + b)[:, None]
    slot = tl.load(slot_ptr + b).to(tl.int64)[:, None]
    seen = (tl.load(past_ptr + b) > 0)[:, None]
    t = t.to(tl.int64)[:, None]
    live = (t < n_tokens) & (c < C)
    y = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for j in tl.static_range(TAPS):
        source = t - (TAPS - 1) + j
        row = source - first + (TAPS - 1)
        here = source >= first
        now = tl.load(x_ptr + source * stride_x + c, mask=live & here, other=0.0).to(tl.float32)
        before = window_ptr + (slot * (TAPS - 1) + row) * C + c
        then = tl.load(before, mask=live & seen & (source < first), other=0.0).to(tl.float32)
        w = tl.load(w_ptr + c * TAPS + j, mask=c < C, other=0.0).to(tl.float32)
        y += w * tl.where(here, now, then)
    y *= tl.sigmoid(y)
    tl.store(y_ptr + t * C + c, cast(y, y_ptr.dtype.element_ty), mask=live)


@triton.jit
def _window_kernel(
    window_ptr, x_ptr, start_ptr, slot_ptr, past_ptr, stride_x,
    C: tl.constexpr, TAPS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    # one program per sequence and block of channels; rows ascend, so none is read after it was written
    b = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = tl.load(start_ptr + b).to(tl.int64)
    count = tl.load(start_ptr + b + 1) - first
    seen = tl.load(past_ptr + b) > 0
    window = window_ptr + tl.load(slot_ptr + b).to(tl.int64) * (TAPS - 1) * C + c
    live = c < tl.where(count > 0, C, 0)
    for r in tl.static_range(TAPS - 1):
        at = count + r - (TAPS - 1)
        old = tl.load(window + (count + r) * C, mask=live & (c < tl.where(seen & (at < 0), C, 0)), other=0.0)
        new = tl.load(x_ptr + (first + at) * stride_x + c, mask=live & (c < tl.where(at >= 0, C, 0)), other=0.0)
        tl.store(window + r * C, tl.where(at < 0, old, new), mask=live)


def causal_conv_silu(
    x_tc: Tensor, w_cj: Tensor, window_src: Tensor, seq_t: Tensor, start_b: Tensor, slot_b: Tensor, past_b: Tensor
) -> Tensor:
    """Convolve each sequence's new inputs, continuing from its window.

    Args:
        x_tc: inputs, bf16 or fp32, unit stride along c.
        w_cj: taps, any float dtype, contiguous.
        window_src: earlier inputs of each slot, contiguous; a slot whose ``past`` is 0 is not read.
        seq_t: int32, sequence of a token.
        start_b: int32 [B + 1], first token of each sequence.
        slot_b: int32, slot of each sequence.
        past_b: int32, tokens that each sequence has seen before.

    Returns:
        [T, C], contiguous, in the dtype of ``x_tc``.

    Raises:
        ShapeError: shapes or strides disagree.
    """
    (n_tokens, channels), taps = x_tc.shape, w_cj.shape[1]
    _expect_window(window_src, x_tc, taps)
    expect(
        w_cj.shape == (channels, taps) and w_cj.is_contiguous(), f"w_cj is {describe(w_cj)}, want [{channels}, taps]"
    )
    y_tc = torch.empty(n_tokens, channels, dtype=x_tc.dtype, device=x_tc.device)
    cpu = x_tc.device.type == "cpu"
    rows, columns = (16, min(triton.next_power_of_2(channels), 4096)) if cpu else (1, 1024)
    if n_tokens:
        _conv_kernel[(triton.cdiv(n_tokens, rows), triton.cdiv(channels, columns))](
            x_tc, w_cj, window_src, seq_t, start_b, slot_b, past_b, y_tc, x_tc.stride(0), n_tokens,
            C=channels, TAPS=taps, BLOCK_T=rows, BLOCK_C=columns, num_warps=4,
        )  # fmt: skip
    return y_tc


def conv_window_(window_src: Tensor, x_tc: Tensor, start_b: Tensor, slot_b: Tensor, past_b: Tensor) -> None:
    """Keep each sequence's last inputs for its next step. WRITTEN: rows ``slot_b`` of window_src.

    Args:
        window_src: as for :func:`causal_conv_silu`; slots of sequences without new tokens keep their bits.
        x_tc: the step's inputs.
        start_b: int32 [B + 1], first token of each sequence.
        slot_b: int32, slot of each sequence.
        past_b: int32, tokens that each sequence has seen before.

    Raises:
        ShapeError: shapes or strides disagree.
    """
    channels, taps = x_tc.shape[1], window_src.shape[1] + 1
    _expect_window(window_src, x_tc, taps)
    columns = min(triton.next_power_of_2(channels), 4096) if x_tc.device.type == "cpu" else 1024
    if len(slot_b):
        _window_kernel[(len(slot_b), triton.cdiv(channels, columns))](
            window_src, x_tc, start_b, slot_b, past_b, x_tc.stride(0),
            C=channels, TAPS=taps, BLOCK_C=columns, num_warps=4,
        )  # fmt: skip


def _expect_window(window_src: Tensor, x_tc: Tensor, taps: int) -> None:
    channels = x_tc.shape[1]
    expect(x_tc.stride(1) == 1, f"x_tc is {describe(x_tc)}, want unit stride along c")
    expect(
        window_src.shape[1:] == (taps - 1, channels) and window_src.is_contiguous() and window_src.dtype == x_tc.dtype,
        f"window_src is {describe(window_src)}, want {x_tc.dtype}[slots, {taps - 1}, {channels}]",
    )


def compile_specs() -> list[Spec]:
    """Kimi K3: q, k and v of 96 heads."""
    types = {"x_ptr": "*bf16", "w_ptr": "*fp32", "window_ptr": "*bf16", "y_ptr": "*bf16"}
    types |= dict.fromkeys(("seq_ptr", "start_ptr", "slot_ptr", "past_ptr"), "*i32")
    types |= {"stride_x": "i32", "n_tokens": "i32"}
    sizes = {"C": 36864, "TAPS": 4, "BLOCK_C": 1024}
    return [
        Spec("causal_conv_silu", _conv_kernel, types, sizes | {"BLOCK_T": 1}, {"num_warps": 4}),
        Spec("conv_window", _window_kernel, types, sizes, {"num_warps": 4}),
    ]
