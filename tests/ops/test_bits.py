"""Number formats, every code of them, against their definitions; and the rounding casts."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.bits import cast, e2m1_to_f32, e4m3_to_f32, e8m0_to_f32
from tests.reference.numbers import E2M1


@triton.jit
def _product_kernel(code_ptr, scale_ptr, out_ptr, EIGHT: tl.constexpr):
    code = tl.load(code_ptr + tl.arange(0, 16))[:, None]
    byte = tl.load(scale_ptr + tl.arange(0, 256))[None, :]
    scale = e4m3_to_f32(byte) if EIGHT == "e4m3" else e8m0_to_f32(byte)
    at = tl.arange(0, 16)[:, None] * 256 + tl.arange(0, 256)[None, :]
    tl.store(out_ptr + at, e2m1_to_f32(code) * scale)


@triton.jit
def _cast_kernel(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, cast(tl.load(x_ptr + i), y_ptr.dtype.element_ty))


def products(device: torch.device, eight: str) -> Tensor:
    """Every 4-bit code times every scale byte, as the kernels compute it."""
    codes = torch.arange(16, dtype=torch.uint8, device=device)
    scales = torch.arange(256, dtype=torch.uint8, device=device)
    out = torch.empty(16, 256, dtype=torch.float32, device=device)
    _product_kernel[(1,)](codes, scales, out, EIGHT=eight)
    return out.cpu()


def test_nvfp4_is_exact_over_all_codes_and_scales(device: torch.device) -> None:
    scale = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    want = E2M1[:, None] * scale
    got = products(device, "e4m3").double()
    assert want.isnan().sum() == 2 * 16, "0x7f and 0xff are NaN"
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


def test_mxfp4_is_exact_over_all_codes_and_scales(device: torch.device) -> None:
    """A product below the least normal float may become zero on a card; the format's own marker, 0, is zero."""
    byte = torch.arange(256, dtype=torch.float64)
    scale = torch.where(byte == 0, 0.0, torch.exp2(byte - 127))
    want = E2M1[:, None] * scale
    got = products(device, "e8m0").double()
    assert got[:, 255].isnan().all() and (got[:, 0] == 0).all()
    normal = (want.abs() >= 2.0**-126) & (want.abs() < 2.0**128) & (byte < 255)
    assert torch.equal(got[normal], want[normal])
    assert (got[:, 1:4] - want[:, 1:4]).abs().max() < 2.0**-126


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_cast_rounds_to_nearest_even(device: torch.device, dtype: torch.dtype) -> None:
    """Random bits, ties between neighbours, the end of the range, infinities and NaN, against torch's cast.

    Subnormal floats are left out: the interpreter gets them wrong, by less than 2^-126.
    """
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    bits[:1024] = bits[:1024] & 0xFFFF0000 | 0x8000  # exactly between two bf16
    bits[1024:1030] = [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7F7FFFFF, 0x00800000]
    x = torch.from_numpy(bits.view(np.float32))
    if dtype == torch.float16:
        x = torch.cat([x[1024:1028], torch.linspace(-70000, 70000, 4092)])
    y = torch.empty(4096, dtype=dtype, device=device)
    _cast_kernel[(1,)](x.to(device), y, N=4096)
    normal = (x.abs() >= 2.0**-126) | x.isnan()
    y, want = y.cpu()[normal], x.to(dtype)[normal]
    assert torch.equal(y.isnan(), want.isnan())
    assert torch.equal(y.nan_to_num(), want.nan_to_num())
