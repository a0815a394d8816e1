"""Block formats: exact values, coordinates of scales, the outside implementation, and the round trip's error."""

from pathlib import Path

import numpy as np
import pytest

from formats.dtypes import e2m1_values, e4m3_to_f32
from formats.quantize import (
    block_fp8_dequantize,
    block_fp8_quantize,
    mxfp4_dequantize,
    mxfp4_quantize,
    nvfp4_dequantize,
    nvfp4_quantize,
    pack_e2m1,
    unpack_e2m1,
)

ALL_BYTES = np.arange(256, dtype=np.uint8)
MODELOPT = Path(__file__).parent / "data" / "modelopt_nvfp4.npz"


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(seed)).standard_normal(shape, np.float32)


def codes_16_by_scale_256() -> np.ndarray:
    """[256, 8] packed: row s holds the 16 codes in ascending order."""
    return np.tile(pack_e2m1(np.arange(16, dtype=np.uint8)), (256, 1))


def test_nibbles_low_first() -> None:
    assert unpack_e2m1(np.array([[0x21, 0xF7]], np.uint8)).tolist() == [[0.5, 1, 6, -6]]


@pytest.mark.parametrize("global_scale", [1.0, 2.0**-13, 3.1e-5])
def test_nvfp4_every_code_with_every_scale(global_scale: float) -> None:
    got = nvfp4_dequantize(codes_16_by_scale_256(), ALL_BYTES[:, None], np.float32(global_scale))
    scale = e4m3_to_f32(ALL_BYTES) * np.float32(global_scale)
    want = (scale[:, None].astype(np.float64) * e2m1_values()).astype(np.float32)
    assert np.array_equal(got, want, equal_nan=True)


def test_mxfp4_every_code_with_every_scale() -> None:
    packed = np.tile(codes_16_by_scale_256(), 2)
    with np.errstate(over="ignore"):
        got = mxfp4_dequantize(packed, ALL_BYTES[:, None])
        want = (np.ldexp(np.tile(e2m1_values(), 2).astype(np.float64), ALL_BYTES[:, None].astype(int) - 127)).astype(
            np.float32
        )
    assert np.array_equal(got[1:255], want[1:255])
    assert (got[0] == 0).all() and np.isnan(got[255]).all()


@pytest.mark.parametrize("name", ["own", "given"])
def test_nvfp4_equals_modelopt(name: str) -> None:
    stored = np.load(MODELOPT)
    packed, scale, scale_2 = (stored[f"{name}_{part}"] for part in ("packed", "scale", "scale_2"))
    got = nvfp4_dequantize(packed, scale, scale_2)
    # Equal to the bit but for code 8, OCP's -0, which ModelOpt's table gives as +0: so compare values, not bits.
    assert np.array_equal(got, stored[f"{name}_values"])
    ours = nvfp4_quantize(stored["weights"], None if name == "own" else float(scale_2))
    assert all(map(np.array_equal, ours, (packed, scale, scale_2)))


def test_scales_belong_to_their_own_groups() -> None:
    rows, columns = 9, 14 * 32
    grid = 1 + np.arange(rows * columns // 16, dtype=np.uint8).reshape(rows, -1) % 126
    ones = np.full((rows, columns // 2), 0x22, np.uint8)
    want = np.array([[e4m3_to_f32(grid)[n, k // 16] for k in range(columns)] for n in range(rows)])
    assert np.array_equal(nvfp4_dequantize(ones, grid, 1.0), want)
    half = grid[:, ::2]
    want = np.array([[2.0 ** (int(half[n, k // 32]) - 127) for k in range(columns)] for n in range(rows)], np.float32)
    assert np.array_equal(mxfp4_dequantize(ones, half), want)


@pytest.mark.parametrize("shape", [(1000, 300), (96, 7), (128, 256), (1, 1), (129, 128)])
def test_partial_blocks_of_fp8(shape: tuple[int, int]) -> None:
    n, k = shape
    grid = 1 + np.arange(-(-n // 128) * -(-k // 128), dtype=np.float32).reshape(-(-n // 128), -1)
    got = block_fp8_dequantize(np.full(shape, 0x38, np.uint8), grid)
    assert np.array_equal(got, grid[np.arange(n)[:, None] // 128, np.arange(k) // 128])
    byte, scale = block_fp8_quantize(normal(n, k))
    assert byte.shape == shape and scale.shape == (grid.shape[0], 1, grid.shape[1], 1)
    whole = np.zeros((grid.shape[0] * 128, grid.shape[1] * 128), np.float32)
    whole[:n, :k] = np.abs(normal(n, k))
    largest = whole.reshape(grid.shape[0], 128, grid.shape[1], 128).max(axis=(1, 3))
    assert np.array_equal(scale[:, 0, :, 0], largest / np.float32(448))


def test_scale_grid_of_another_block_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scale is \[8, 3\], want \[1, 1\] for 100 x 100"):
        block_fp8_dequantize(np.zeros((100, 100), np.uint8), np.ones((8, 3), np.float32))
    with pytest.raises(ValueError, match="want"):
        block_fp8_dequantize(np.zeros((256, 384), np.uint8), np.ones((3, 2), np.float32))


def test_round_trips_stay_within_half_a_step() -> None:
    w = normal(64, 256, seed=3)
    # Codes 4 and 6 are 2 apart and a scale byte is off by up to 1/16: (1 + 1/16) / 6 of a group's largest.
    largest = np.repeat(np.abs(w).reshape(64, -1, 16).max(-1), 16, axis=-1)
    assert (np.abs(nvfp4_dequantize(*nvfp4_quantize(w)) - w) <= largest * (1 + 1 / 16) / 6 + 1e-7).all()
    # MXFP4 saturates what lies between 6 and 8: at worst a quarter of the largest.
    largest = np.repeat(np.abs(w).reshape(64, -1, 32).max(-1), 32, axis=-1)
    assert (np.abs(mxfp4_dequantize(*mxfp4_quantize(w)) - w) <= largest / 4).all()
    byte, scale = block_fp8_quantize(w)
    assert (np.abs(block_fp8_dequantize(byte, scale) - w) <= np.maximum(np.abs(w) / 16, scale.max() * 2**-10)).all()


@pytest.mark.parametrize("quantised", ["nvfp4", "mxfp4", "fp8"])
def test_values_of_a_format_survive(quantised: str) -> None:
    codes = np.arange(64 * 128, dtype=np.uint8).reshape(64, 128)
    if quantised == "nvfp4":
        scale = (0x38 + np.arange(64 * 16) % 8).astype(np.uint8).reshape(64, 16)
        packed, got, _ = nvfp4_quantize(nvfp4_dequantize(codes, scale, 0.25), 0.25)
        values = nvfp4_dequantize(packed, got, 0.25), nvfp4_dequantize(codes, scale, 0.25)
    elif quantised == "mxfp4":
        scale = (100 + np.arange(64 * 8) % 30).astype(np.uint8).reshape(64, 8)
        values = mxfp4_dequantize(*mxfp4_quantize(mxfp4_dequantize(codes, scale))), mxfp4_dequantize(codes, scale)
    else:
        codes[(codes & 0x7F) == 0x7F] = 0x7E
        scale = np.full((1, 1), 0.5, np.float32)
        values = (
            block_fp8_dequantize(*block_fp8_quantize(block_fp8_dequantize(codes, scale))),
            block_fp8_dequantize(codes, scale),
        )
    assert np.array_equal(*values)


def test_zero_groups_stay_zero() -> None:
    w = normal(4, 64)
    w[2] = 0
    for back in (
        nvfp4_dequantize(*nvfp4_quantize(w)),
        mxfp4_dequantize(*mxfp4_quantize(w)),
        block_fp8_dequantize(*block_fp8_quantize(w)),
    ):
        assert (back[2] == 0).all() and np.isfinite(back).all()
    assert (nvfp4_dequantize(*nvfp4_quantize(w[2:3])) == 0).all()
    assert mxfp4_quantize(w)[1][2].tolist() == [0, 0]


def test_ragged_groups_are_refused() -> None:
    with pytest.raises(ValueError, match=r"w_nk is \[2, 24\], want a multiple of 16"):
        nvfp4_quantize(normal(2, 24))
