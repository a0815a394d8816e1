"""Every code of every small format against torch, and rounding against the nearest value there is."""

import numpy as np
import pytest
import torch

from formats.dtypes import (
    BY_SAFETENSORS,
    DTYPES,
    bf16_to_f32,
    e2m1_values,
    e4m3_to_f32,
    e8m0_values,
    f32_to_bf16,
    f32_to_e2m1,
    f32_to_e4m3,
)

ALL_BYTES = np.arange(256, dtype=np.uint8)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bit for bit, any NaN for any NaN."""
    return bool(np.all((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))))


def around(values: np.ndarray) -> np.ndarray:
    """Each value, each middle between neighbours, one float32 step to both sides of all, and their negatives."""
    values = np.unique(values[np.isfinite(values)].astype(np.float32))
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2])
    points = np.concatenate([points, np.nextafter(points, np.inf), np.nextafter(points, -np.inf)])
    return np.concatenate([points, -points]).astype(np.float32)


@pytest.mark.parametrize("name", DTYPES)
def test_sizes_are_torchs(name: str) -> None:
    dtype = DTYPES[name]
    assert dtype.size == dtype.storage.itemsize == torch.empty(0, dtype=getattr(torch, name)).element_size()
    assert BY_SAFETENSORS[dtype.safetensors] is dtype


def test_e4m3_values_are_torchs() -> None:
    assert same(e4m3_to_f32(ALL_BYTES), torch.from_numpy(ALL_BYTES.copy()).view(torch.float8_e4m3fn).float().numpy())


def test_e8m0_values_are_torchs_but_for_the_zero_marker() -> None:
    want = torch.from_numpy(ALL_BYTES.copy()).view(torch.float8_e8m0fnu).float().numpy()
    assert same(e8m0_values()[1:], want[1:])
    assert e8m0_values()[0] == 0


def test_e2m1_values() -> None:
    assert e2m1_values().tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert np.signbit(e2m1_values()[8])


def test_bf16_rounds_like_torch() -> None:
    every = bf16_to_f32(np.arange(1 << 16, dtype=np.uint16))
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    x = (every.view(np.uint32)[:, None] | low).reshape(-1).view(np.float32)
    want = torch.from_numpy(x.copy()).bfloat16().float().numpy()
    assert same(bf16_to_f32(f32_to_bf16(x)), want)


def test_nan_with_low_bits_only_stays_nan() -> None:
    x = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(bf16_to_f32(f32_to_bf16(x))).all()


def test_e4m3_rounds_like_torch_within_range() -> None:
    x = around(e4m3_to_f32(ALL_BYTES))
    x = x[np.abs(x) <= 448]
    assert len(x) > 1000
    assert (f32_to_e4m3(x) == torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()).all()


def test_e4m3_saturates() -> None:
    x = np.array([448.1, 464, 480, 1e9, np.inf, -np.inf, -500, 1e-30, -1e-45, 0.0, -0.0], np.float32)
    want = np.array([448, 448, 448, 448, 448, -448, -448, 0.0, -0.0, 0.0, -0.0], np.float32)
    assert same(e4m3_to_f32(f32_to_e4m3(x)), want)
    assert np.isnan(e4m3_to_f32(f32_to_e4m3(np.array([np.nan, -np.nan], np.float32)))).all()


def test_e2m1_takes_the_nearest_and_ties_go_to_the_even_code() -> None:
    values = e2m1_values()[:8]
    for x in around(values[values <= 6]):
        distance = np.abs(values - abs(x))
        nearest = np.flatnonzero(distance == distance.min())
        want = nearest[0] if len(nearest) == 1 else nearest[nearest % 2 == 0][0]
        got = int(f32_to_e2m1(np.array([x]))[0])
        assert got == want + (8 if x < 0 else 0), x
    assert f32_to_e2m1(np.array([7, 1e9, -np.inf], np.float32)).tolist() == [7, 7, 15]
