"""Number formats by name, and their conversions in numpy.

A dtype is named as in torch without the ``torch.``. numpy has no bf16 and no FP8: such values are stored as ``uint16``
and ``uint8`` holding their bits, the *storage dtype*.

    e2m1  (FP4)   sign | 2 exponent bits, bias 1 | 1 mantissa bit        0 .5 1 1.5 2 3 4 6
    e4m3  (FP8)   sign | 4 exponent bits, bias 7 | 3 mantissa bits       2^-9 .. 448; 0x7f and 0xff are NaN
    e8m0  (scale) 8 exponent bits, bias 127                              2^(s - 127); 0 marks an all-zero group

Source: OCP Microscaling Formats (MX) specification 1.0; OCP 8-bit Floating Point specification 1.0.
"""

from functools import cache
from typing import NamedTuple

import numpy as np

SAFETENSORS_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "int64": "I64",
    "uint64": "U64",
    "float64": "F64",
}
STORED_AS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8", "float8_e8m0fnu": "uint8"}
E4M3_MAX = 448.0
E2M1_MAX = 6.0


class DType(NamedTuple):
    """One number format on disk."""

    name: str
    safetensors: str
    storage: np.dtype
    size: int


DTYPES = {
    name: DType(
        name, short, np.dtype(STORED_AS.get(name, name)).newbyteorder("<"), np.dtype(STORED_AS.get(name, name)).itemsize
    )
    for name, short in SAFETENSORS_NAMES.items()
}
BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in DTYPES.values()}


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """Widen stored bf16; exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """Round to the nearest bf16, ties to even; NaN stays NaN. Returns the stored bits."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((u + np.uint32(0x7FFF) + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    nan = np.isnan(u.view(np.float32))
    return np.where(nan, (u >> 16).astype(np.uint16) | 0x40, rounded) if nan.any() else rounded


@cache
def e4m3_values() -> np.ndarray:
    """float32 value of each of the 256 e4m3 bytes, read-only."""
    byte = np.arange(256, dtype=np.uint32)
    values = (((byte & 0x80) << 24) | ((byte & 0x7F) << 20)).view(np.float32) * np.float32(2.0**120)
    values[[0x7F, 0xFF]] = np.nan
    values.setflags(write=False)
    return values


@cache
def e2m1_values() -> np.ndarray:
    """float32 value of each of the 16 e2m1 codes, read-only."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.concatenate([magnitudes, -magnitudes])
    values.setflags(write=False)
    return values


@cache
def e8m0_values() -> np.ndarray:
    """float32 value of each of the 256 e8m0 bytes: 0 is the all-zero marker, 255 NaN; read-only."""
    values = (np.arange(256, dtype=np.uint32) << 23).view(np.float32)
    values[255] = np.nan
    values.setflags(write=False)
    return values


def e4m3_to_f32(byte: np.ndarray) -> np.ndarray:
    """Widen stored e4m3; exact."""
    return e4m3_values()[byte]


def f32_to_e4m3(x: np.ndarray) -> np.ndarray:
    """Round to the nearest e4m3, ties to even; beyond 448 saturates, NaN stays NaN. Returns the stored bytes."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    magnitude = u & 0x7FFFFFFF
    sign = ((u >> 24) & 0x80).astype(np.uint8)
    # Normal range: drop 20 mantissa bits, then shift the exponent's bias from 127 to 7.
    code = np.maximum((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20, 120 << 3) - (120 << 3)
    small = magnitude < np.float32(2.0**-6).view(np.uint32)
    if small.any():
        code[small] = np.rint(magnitude[small].view(np.float32) * np.float32(512)).astype(np.uint32)
    code = np.where(magnitude > 0x7F800000, 0x7F, np.minimum(code, 0x7E))
    return code.astype(np.uint8) | sign


def f32_to_e2m1(x: np.ndarray) -> np.ndarray:
    """Round to the nearest e2m1, ties to even; beyond 6 saturates. Returns codes, one a byte; -0.0 gives code 0."""
    magnitude = np.abs(x)
    code = np.zeros(x.shape, np.uint8)
    for step, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        # Middle `step` lies between codes `step` and `step + 1`; a tie goes to the even one.
        code += magnitude >= middle if step % 2 else magnitude > middle
    return code | ((x < 0).astype(np.uint8) << 3)
