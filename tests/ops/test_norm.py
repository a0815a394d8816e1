"""Norms of rows, plain, gated and fused with the residual stream, against float64."""

import pytest
import torch
from torch import Tensor

from ops.attention_residual import mix_rms_norm
from ops.checks import ShapeError
from ops.norm import gated_rms_norm, rms_norm
from ops.residual import add_, add_rms_norm_, begin_
from tests.reference import attention_residual, norm
from tests.reference.numbers import TOLERANCE, relative_error

EPS = 1e-5
DTYPES = [torch.bfloat16, torch.float32]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("t", "d"), [(0, 8), (1, 128), (19, 96), (33, 200)])
def test_rms_norm(device: torch.device, dtype: torch.dtype, t: int, d: int) -> None:
    x, w = random(t, d).mul(3).to(dtype), random(d, seed=1).bfloat16()
    y = rms_norm(x.to(device), w.to(device), EPS)
    assert y.dtype == dtype
    assert relative_error(y, norm.rms_norm(x.double(), w.double(), EPS)) < TOLERANCE[dtype]


def test_epsilon_counts(device: torch.device) -> None:
    """Rows near zero: without eps, or with it outside the root, they would come out far larger."""
    x, w = random(3, 64) * 1e-3, random(64, seed=1)
    y = rms_norm(x.to(device), w.to(device), EPS)
    assert relative_error(y, norm.rms_norm(x.double(), w.double(), EPS)) < TOLERANCE[torch.float32]


def test_rms_norm_of_a_slice_in_place(device: torch.device) -> None:
    wide, w = random(5, 96), random(32, seed=1)
    buffer = wide.to(device, copy=True)
    rms_norm(buffer[:, 16:48], w.to(device), EPS, out_td=buffer[:, 16:48])
    assert relative_error(buffer[:, 16:48], norm.rms_norm(wide[:, 16:48].double(), w.double(), EPS)) < 2e-6
    assert torch.equal(buffer[:, :16].cpu(), wide[:, :16]) and torch.equal(buffer[:, 48:].cpu(), wide[:, 48:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("t", "h", "p"), [(1, 2, 64), (19, 3, 40)])
def test_gated_rms_norm(device: torch.device, dtype: torch.dtype, t: int, h: int, p: int) -> None:
    o, w = random(t, h, p), random(p, seed=1)
    gate = random(t, h * p + 7, seed=2).mul(3).to(dtype)
    gate_thp = gate.to(device)[:, 7:].unflatten(1, (h, p))
    y = gated_rms_norm(o.to(device), gate_thp, w.to(device), EPS, dtype)
    want = norm.rms_norm(o.double(), w.double(), EPS) * gate[:, 7:].double().sigmoid().unflatten(1, (h, p))
    assert y.dtype == dtype and relative_error(y, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_stream(device: torch.device, dtype: torch.dtype) -> None:
    x, y, w = random(19, 96).to(dtype), random(19, 96, seed=1).to(dtype), random(96, seed=2)
    total = (x.double() + y.double()).to(dtype)
    stream = x.to(device, copy=True)
    z = add_rms_norm_(stream, y.to(device), w.to(device), EPS)
    assert torch.equal(stream.cpu(), total)
    assert relative_error(z, norm.rms_norm(total.double(), w.double(), EPS)) < TOLERANCE[dtype]
    assert torch.equal(add_(x.to(device, copy=True), y.to(device)).cpu(), total)
    assert torch.equal(begin_(torch.full_like(stream, float("nan")), y.to(device)).cpu(), y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_mix(device: torch.device, dtype: torch.dtype, count: int) -> None:
    """Candidates past ``count`` hold NaN and are not read; large projections let one candidate win."""
    v = random(5, 19, 96).mul(torch.tensor([1.0, 9, 0.3, 2, 1])[:, None, None]).to(dtype)
    w, p, gain = random(96, seed=1).add(1), random(96, seed=2), random(96, seed=3)
    v[count:] = float("nan")
    y = mix_rms_norm(v.to(device), count, w.to(device), p.to(device), gain.to(device), EPS)
    mixed = attention_residual.mix(list(v[:count].double()), w.double(), p.double()[None], EPS)
    want = norm.rms_norm(mixed.to(dtype).double(), gain.double(), EPS)
    assert y.dtype == dtype and relative_error(y, want) < TOLERANCE[dtype]


def test_rows_do_not_see_each_other(device: torch.device) -> None:
    v, w = random(3, 40, 96).bfloat16().to(device), random(96, seed=1).to(device)
    together = mix_rms_norm(v, 3, w, w, w, EPS), rms_norm(v[0], w, EPS)
    for t in (0, 15, 16, 39):
        alone = mix_rms_norm(v[:, t : t + 1].contiguous(), 3, w, w, w, EPS), rms_norm(v[0, t : t + 1], w, EPS)
        assert all(torch.equal(a[t], b[0]) for a, b in zip(together, alone, strict=True))


def test_refusals(device: torch.device) -> None:
    x, w = random(2, 8).to(device), random(9).to(device)
    with pytest.raises(ShapeError, match=r"w_d is torch.float32\[9\].*want \[8\]"):
        rms_norm(x, w, EPS)
    with pytest.raises(ShapeError, match="count is 3, want 1 to 2"):
        mix_rms_norm(random(2, 4, 8).to(device), 3, w[:8], w[:8], w[:8], EPS)
    with pytest.raises(ShapeError, match="heads side by side"):
        gated_rms_norm(
            random(2, 4, 8).to(device).transpose(1, 2), random(2, 8, 4).to(device), w[:4], EPS, torch.float32
        )
    with pytest.raises(ShapeError, match="contiguous"):
        add_(x.T, random(8, 2).to(device))
