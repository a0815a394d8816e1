"""Made-up expert rows in every format, with what they mean in float64."""

from typing import NamedTuple

import torch
from torch import Tensor

from ops.moe.experts import Bf16Rows, Mxfp4Rows, Nvfp4Rows, Rows

FORMATS = ["nvfp4", "mxfp4", "bf16"]
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


class Made(NamedTuple):
    """Rows and the weights that they hold."""

    rows: Rows
    gate_up: Tensor  # float64 [S, 2F, Z]
    down: Tensor  # float64 [S, Z, F]


def pack(codes: Tensor) -> Tensor:
    """Two 4-bit codes a byte along the last axis, the even one low."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def make_rows(format: str, n_rows: int, f: int, z: int, device: torch.device, used: list[int] | None = None) -> Made:
    """Random rows of about 1 / sqrt(K); rows not ``used`` decode to NaN."""
    torch.manual_seed(f * 1000 + z)
    gate_up, down = _matrix(format, n_rows, 2 * f, z), _matrix(format, n_rows, z, f)
    unused = [s for s in range(n_rows) if used is not None and s not in used]
    if format == "bf16":
        for w in (gate_up[0], down[0]):
            w[unused] = float("nan")
        rows: Rows = Bf16Rows(gate_up[0].to(device), down[0].to(device))
        return Made(rows, gate_up[0].double().to(device), down[0].double().to(device))
    for _, scale, _ in (gate_up, down):
        scale[unused] = 0xFF
    values = [matrix[2].to(device) for matrix in (gate_up, down)]
    banks = [part.to(device) for matrix in (gate_up, down) for part in matrix[:2]]
    if format == "mxfp4":
        rows = Mxfp4Rows(*(bank.transpose(1, 2).contiguous() for bank in banks))
        return Made(rows, *values)
    globals_s3 = torch.rand(n_rows, 3, device=device) * 0.02 + 0.01
    globals_s3[:, 1] *= 4
    globals_s3[unused] = float("nan")
    for at in (1, 3):
        banks[at] = banks[at].view(torch.float8_e4m3fn)
    gate, up, last = globals_s3.double().unbind(1)
    values[0][:, :f] *= gate[:, None, None]
    values[0][:, f:] *= up[:, None, None]
    return Made(Nvfp4Rows(*banks, globals_s3), values[0], values[1] * last[:, None, None])


def _matrix(format: str, s: int, n: int, k: int) -> tuple[Tensor, ...]:
    """Packed codes, scale bytes, float64 values without the global scale; or bf16 weights."""
    if format == "bf16":
        return ((torch.randn(s, n, k) / k**0.5).bfloat16(),)
    codes = torch.randint(16, (s, n, k), dtype=torch.uint8)
    if format == "nvfp4":
        scale = torch.randint(40, 90, (s, n, k // 16), dtype=torch.uint8)
        factor, group = scale.view(torch.float8_e4m3fn).double(), 16
    else:
        scale = torch.randint(120, 126, (s, n, k // 32), dtype=torch.uint8)
        factor, group = 2.0 ** (scale.double() - 127), 32
    return pack(codes), scale, E2M1[codes.long()] * factor.repeat_interleave(group, dim=2)
