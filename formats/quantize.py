"""Block number formats in numpy: NVFP4, MXFP4 and block FP8, there and back.

    NVFP4      w = e2m1 code * e4m3 scale of 16 columns * one float32 scale
    MXFP4      w = e2m1 code * 2^(s - 127), s of 32 columns; s = 0 marks an all-zero group
    block FP8  w = e4m3 * float32 scale of a 128 x 128 block; edge blocks are partial

Byte b of a packed row holds column 2b in the low nibble and 2b + 1 in the high one. All scales multiply.

Letters: n rows, k columns, j packed bytes, g scale groups.
Source: OCP Microscaling Formats (MX) specification 1.0; NVIDIA Model Optimizer (kimi-k3.md, section 4).
"""

import numpy as np

from formats.dtypes import E2M1_MAX, E4M3_MAX, e2m1_values, e4m3_to_f32, e8m0_values, f32_to_e2m1, f32_to_e4m3

NVFP4_GROUP = 16
MXFP4_GROUP = 32
E4M3_TINY = 2.0**-9


def pack_e2m1(code_nk: np.ndarray) -> np.ndarray:
    """Put pairs of 4-bit codes into bytes, the even column low."""
    return code_nk[..., 0::2] | (code_nk[..., 1::2] << 4)


def unpack_e2m1(packed_nj: np.ndarray) -> np.ndarray:
    """float32 values of packed codes, two a byte."""
    code_njc = np.stack([packed_nj & 15, packed_nj >> 4], axis=-1)
    return e2m1_values()[code_njc].reshape(*packed_nj.shape[:-1], -1)


def _groups(w_nk: np.ndarray, size: int) -> np.ndarray:
    if w_nk.shape[-1] % size:
        raise ValueError(f"w_nk is {list(w_nk.shape)}, want a multiple of {size} columns")
    return np.asarray(w_nk, np.float32).reshape(*w_nk.shape[:-1], -1, size)


def nvfp4_quantize(w_nk: np.ndarray, global_scale: float | None = None) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Quantise to NVFP4.

    Args:
        w_nk: weights; columns a multiple of 16.
        global_scale: the float32 scale; by default the one that puts the largest weight at 6 * 448.

    Returns:
        Packed codes uint8 [n, k/2], e4m3 scale bytes [n, k/16], global scale.
    """
    w_ngk = _groups(w_nk, NVFP4_GROUP)
    largest_ng = np.abs(w_ngk).max(axis=-1)
    if global_scale is None:
        global_scale = largest_ng.max(initial=np.float32(0)) / np.float32(E2M1_MAX * E4M3_MAX) or 1.0
    factor = np.float32(global_scale)
    wanted_ng = np.clip(largest_ng / (np.float32(E2M1_MAX) * factor), E4M3_TINY, E4M3_MAX)
    scale_ng = f32_to_e4m3(np.where(largest_ng > 0, wanted_ng, 1))
    step_ng = e4m3_to_f32(scale_ng) * factor
    return pack_e2m1(f32_to_e2m1(w_ngk / step_ng[..., None]).reshape(w_nk.shape)), scale_ng, factor


def nvfp4_dequantize(packed_nj: np.ndarray, scale_ng: np.ndarray, global_scale: float | np.floating) -> np.ndarray:
    """float32 weights [n, k] of NVFP4. The two scales are multiplied first, as ModelOpt does; both products round."""
    scale_ng = e4m3_to_f32(scale_ng) * np.float32(global_scale)
    return unpack_e2m1(packed_nj) * np.repeat(scale_ng, NVFP4_GROUP, axis=-1)


def mxfp4_quantize(w_nk: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantise to MXFP4, the group's largest weight in the top binade of e2m1.

    Args:
        w_nk: weights; columns a multiple of 32.

    Returns:
        Packed codes uint8 [n, k/2], e8m0 scale bytes [n, k/32].
    """
    w_ngk = _groups(w_nk, MXFP4_GROUP)
    largest_ng = np.abs(w_ngk).max(axis=-1)
    # frexp's mantissa lies in [0.5, 1), so its exponent is floor(log2) + 1; 4 = 2^2 opens the top binade.
    exponent_ng = np.clip(np.frexp(largest_ng)[1] - 1 - 2, -126, 127)
    scale_ng = np.where(largest_ng > 0, exponent_ng + 127, 0).astype(np.uint8)
    code_ngk = f32_to_e2m1(np.ldexp(w_ngk, -exponent_ng[..., None]))
    return pack_e2m1(code_ngk.reshape(w_nk.shape)), scale_ng


def mxfp4_dequantize(packed_nj: np.ndarray, scale_ng: np.ndarray) -> np.ndarray:
    """float32 weights [n, k] of MXFP4; exact."""
    return unpack_e2m1(packed_nj) * np.repeat(e8m0_values()[scale_ng], MXFP4_GROUP, axis=-1)


def block_fp8_quantize(w_nk: np.ndarray, block: int = 128) -> tuple[np.ndarray, np.ndarray]:
    """Quantise to e4m3 with a scale a block.

    Args:
        w_nk: weights, any size.
        block: rows and columns that share a scale.

    Returns:
        e4m3 bytes [n, k] and float32 scales [ceil(n/block), 1, ceil(k/block), 1], ModelOpt's shape.
    """
    n, k = w_nk.shape
    # maximum.reduceat takes partial edge blocks as they are.
    largest = np.maximum.reduceat(np.abs(w_nk), np.arange(0, n, block), axis=0)
    largest = np.maximum.reduceat(largest, np.arange(0, k, block), axis=1)
    scale = np.where(largest > 0, largest / np.float32(E4M3_MAX), 1).astype(np.float32)
    return f32_to_e4m3(w_nk / _spread(scale, n, k, block)), scale[:, None, :, None]


def block_fp8_dequantize(byte_nk: np.ndarray, scale: np.ndarray, block: int = 128) -> np.ndarray:
    """float32 weights [n, k] of block FP8.

    Args:
        byte_nk: e4m3 bytes.
        scale: [ceil(n/block), ceil(k/block)] or ModelOpt's shape with an axis of one after each.
        block: rows and columns that share a scale; never inferred, a partial last block hides it.

    Raises:
        ValueError: the scale grid does not fit.
    """
    n, k = byte_nk.shape
    grid = -(-n // block), -(-k // block)
    if scale.shape not in (grid, (grid[0], 1, grid[1], 1)):
        raise ValueError(f"scale is {list(scale.shape)}, want {list(grid)} for {n} x {k} in blocks of {block}")
    return e4m3_to_f32(byte_nk) * _spread(scale.reshape(grid), n, k, block)


def _spread(scale: np.ndarray, n: int, k: int, block: int) -> np.ndarray:
    """Repeat a scale grid over the weights it belongs to."""
    return np.repeat(np.repeat(scale, block, axis=1)[:, :k], block, axis=0)[:n]
