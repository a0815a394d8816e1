"""Number formats in float64, straight from their definitions, and the tolerances of what is computed in them."""

import torch
from torch import Tensor

# relative error of one kernel's output, by the dtype it is rounded to
TOLERANCE = {torch.bfloat16: 4e-3, torch.float32: 2e-6}

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def relative_error(a: Tensor, b: Tensor) -> float:
    """Frobenius norm of the difference over that of ``b``; NaN never passes a comparison."""
    a, b = a.double().cpu(), b.double().cpu()
    return ((a - b).norm() / b.norm().clamp_min(1e-300)).item() if b.numel() else 0.0


def unpack_e2m1(packed: Tensor) -> Tensor:
    """uint8 [..., K / 2] to values [..., K]; the low nibble is the even column."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    return E2M1[codes.long()]


def nvfp4(packed: Tensor, scale: Tensor, global_scale: Tensor | float) -> Tensor:
    """code * e4m3 scale of 16 columns * global scale."""
    return unpack_e2m1(packed) * scale.double().repeat_interleave(16, -1) * global_scale


def mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """code * 2^(s - 127) of 32 columns; s = 0 marks zeros."""
    power = torch.where(scale == 0, 0.0, torch.exp2(scale.double() - 127))
    return unpack_e2m1(packed) * power.repeat_interleave(32, -1)


def block_fp8(w: Tensor, scale: Tensor, block: int = 128) -> Tensor:
    """e4m3 value * scale of its block."""
    n, k = w.shape
    return w.double() * scale.double().repeat_interleave(block, 0)[:n].repeat_interleave(block, 1)[:, :k]
