"""Number formats as arithmetic on bits, and the casts that kernels share.

Every conversion here is exact, or rounds to nearest even, in Triton's interpreter and on a card alike:
the interpreter truncates where the card rounds, so nothing may rely on a plain ``.to(tl.bfloat16)``.

    e2m1  (FP4)   sign | 2 exponent bits, bias 1 | 1 mantissa bit        0 .5 1 1.5 2 3 4 6
    e4m3  (FP8)   sign | 4 exponent bits, bias 7 | 3 mantissa bits       2^-9 .. 448; 0x7f and 0xff are NaN
    e8m0  (scale) 8 exponent bits, bias 127                              2^(s - 127); 0 marks an all-zero group

Placing a small float's exponent and mantissa in the top bits of a float32's gives its value times a power of two,
subnormals included, so one multiplication restores it.

Source: OCP Microscaling Formats (MX) specification 1.0; OCP 8-bit Floating Point specification 1.0.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def dot_dtype(x: Tensor) -> tl.dtype:
    """Operand type of ``tl.dot`` for activations ``x``.

    bf16 on a card; fp32 for fp32 activations and on the CPU, where the interpreter's bf16 dot is wrong.
    """
    return tl.float32 if x.device.type == "cpu" or x.dtype == torch.float32 else tl.bfloat16


@triton.jit
def cast(x, DTYPE: tl.constexpr):
    """Round fp32 ``x`` to nearest even in DTYPE (bf16, fp16 or fp32); NaN stays NaN."""
    if tl.bfloat16 == DTYPE:
        u = x.to(tl.uint32, bitcast=True)
        rounded = ((u + 0x7FFF + ((u >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, rounded, x)
    return x.to(DTYPE)


@triton.jit
def e2m1_to_f32(code):
    """Value of a 4-bit code held in the low bits of an integer tensor."""
    c = code.to(tl.uint32)
    return (((c & 8) << 28) | ((c & 7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def e4m3_to_f32(byte):
    """Value of an e4m3 byte; 0x7f and 0xff give NaN."""
    b = byte.to(tl.uint32)
    value = (((b & 0x80) << 24) | ((b & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where((b & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def e8m0_to_f32(byte):
    """2^(byte - 127); byte 0 gives 0 (the all-zero marker), byte 255 gives NaN."""
    b = byte.to(tl.uint32)
    value = (b << 23).to(tl.float32, bitcast=True)
    return tl.where(b == 255, float("nan"), value)
