"""Linear layers of every format against float64, and the promise that a row's bits are its own."""

import pytest
import torch
from torch import Tensor

from ops.checks import ShapeError
from ops.linear import linear, linear_block_fp8, linear_row_fp8
from tests.reference.numbers import TOLERANCE, block_fp8, relative_error

E4M3 = torch.float8_e4m3fn


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("t", "n", "k"), [(0, 16, 16), (1, 96, 128), (33, 63, 160), (17, 300, 40)])
def test_dense(device: torch.device, dtype: torch.dtype, t: int, n: int, k: int) -> None:
    x, w = random(t, k).to(dtype), random(n, k, seed=1).bfloat16()
    out = poisoned(t, n, dtype=torch.float32, device=device)
    linear(x.to(device), w.to(device), out_tn=out)
    assert relative_error(out, x.double() @ w.double().T) < TOLERANCE[torch.float32]
    y = linear(x.to(device), w.to(device))
    assert y.dtype == dtype and relative_error(y, x.double() @ w.double().T) < TOLERANCE[dtype]


@pytest.mark.parametrize(("n", "k", "block"), [(256, 128, 128), (160, 192, 128), (96, 300, 128), (100, 50, 32)])
def test_block_fp8(device: torch.device, n: int, k: int, block: int) -> None:
    """B04: partial last blocks; B06: every scale differs from its neighbours."""
    w = random(n, k, seed=1).mul(100).to(E4M3)
    grid = (-(-n // block), -(-k // block))
    scale = torch.arange(1, grid[0] * grid[1] + 1, dtype=torch.float32).view(grid) / 7
    x = random(5, k).bfloat16()
    out = poisoned(5, n, dtype=torch.float32, device=device)
    linear_block_fp8(x.to(device), w.to(device), scale.to(device), block, out_tn=out)
    assert relative_error(out, x.double() @ block_fp8(w, scale, block).T) < TOLERANCE[torch.float32]


def test_block_fp8_reads_each_scale_in_its_place(device: torch.device) -> None:
    """B03, B04: one-hot activations give scale times weight exactly, for a partial grid that is not square."""
    n, k = 300, 170
    w = torch.ones(n, k, dtype=E4M3)
    scale = torch.tensor([[1.0, 2.0], [3.0, 5.0], [7.0, 11.0]])
    for column in (0, 127, 128, 169):
        x = torch.zeros(1, k).index_fill_(1, torch.tensor([column]), 1.0)
        y = linear_block_fp8(x.to(device), w.to(device), scale.to(device)).cpu()
        assert torch.equal(y[0], scale[:, column // 128].repeat_interleave(128)[:n])


def test_row_fp8(device: torch.device) -> None:
    w = random(130, 96, seed=1).mul(100).to(E4M3)
    scale = random(130, seed=2).abs() + 0.01
    x = random(3, 96).bfloat16()
    y = linear_row_fp8(x.to(device), w.to(device), scale.to(device))
    assert relative_error(y, x.double() @ (w.double() * scale.double()[:, None]).T) < TOLERANCE[torch.bfloat16]


def test_rows_do_not_see_each_other(device: torch.device) -> None:
    x = random(40, 192).bfloat16().to(device)
    w = random(200, 192, seed=1).bfloat16().to(device)
    together = linear(x, w)
    assert torch.equal(together, linear(x, w))
    for t in (0, 15, 16, 39):
        assert torch.equal(together[t], linear(x[t : t + 1], w)[0])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3)).to(device)
    assert torch.equal(together[order], linear(x[order], w))


def test_column_slice_in_and_out(device: torch.device) -> None:
    wide = random(6, 64).to(device)
    w = random(24, 32, seed=1).to(device)
    out = poisoned(6, 50, dtype=torch.float32, device=device)
    linear(wide[:, 16:48], w, out_tn=out[:, 10:34])
    assert torch.equal(out[:, 10:34], linear(wide[:, 16:48].contiguous(), w))
    assert out[:, :10].isnan().all() and out[:, 34:].isnan().all()


def test_refusals(device: torch.device) -> None:
    x, w = random(2, 300).to(device), random(1000, 300).to(E4M3).to(device)
    with pytest.raises(ShapeError, match=r"want torch.float32\[8, 3\] for blocks of 128"):
        linear_block_fp8(x, w, torch.ones(8, 2, device=device))
    with pytest.raises(ShapeError, match="want bfloat16 or float32"):
        linear(x, w)
    with pytest.raises(ShapeError, match="unit stride along k"):
        linear(x.T, random(4, 2).to(device))
