"""Weighted sum of experts, against float64."""

import pytest
import torch

from ops.checks import ShapeError
from ops.moe.combine import combine

# relative to the sum of the absolute terms, and the cast
TOLERANCE = {torch.float32: (0.0, 1e-6), torch.bfloat16: (2.0**-8, 1e-6)}


@pytest.mark.parametrize("n_tokens", [0, 1, 33, 63])
@pytest.mark.parametrize(("width", "n_active"), [(1, 1), (96, 3), (3584, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_float64(device: torch.device, n_tokens: int, width: int, n_active: int, dtype: torch.dtype) -> None:
    torch.manual_seed(n_tokens)
    wide = torch.full((n_tokens * n_active, width + 3), float("nan"), dtype=dtype, device=device)
    y_rz = wide[:, 1 : 1 + width]
    y_rz.normal_()
    weight_ta = torch.rand(n_tokens, n_active, device=device)
    r_tz = combine(y_rz, weight_ta)
    terms = weight_ta.double()[..., None] * y_rz.double().unflatten(0, (n_tokens, n_active))
    relative, absolute = TOLERANCE[dtype]
    want = terms.sum(1)
    assert r_tz.dtype == dtype
    assert ((r_tz.double() - want).abs() <= relative * want.abs() + absolute * terms.abs().sum(1)).all()


def test_order_of_the_sum(device: torch.device) -> None:
    """Choices are added from the first to the last: 2^24 + 1 + 1 loses both ones, 1 + 1 + 2^24 none."""
    y_rz = torch.tensor([2.0**24, 1.0, 1.0, 1.0, 1.0, 2.0**24], device=device)[:, None]
    r_tz = combine(y_rz, torch.ones(2, 3, device=device))
    assert r_tz[:, 0].tolist() == [2.0**24, 2.0**24 + 2]


def test_rows_are_alone(device: torch.device) -> None:
    torch.manual_seed(0)
    y, w = torch.randn(40, 8, 96, device=device).bfloat16(), torch.rand(40, 8, device=device)
    whole = combine(y.flatten(0, 1), w)
    assert torch.equal(combine(y.flatten(0, 1), w), whole)
    for t in (0, 17, 39):
        assert torch.equal(combine(y[t], w[t : t + 1])[0], whole[t])


def test_refuses_other_rows(device: torch.device) -> None:
    with pytest.raises(ShapeError, match="want 6 rows"):
        combine(torch.zeros(5, 4, device=device), torch.zeros(2, 3, device=device))
