"""Choice of experts, against float64."""

import pytest
import torch
from torch import Tensor

from ops.checks import ShapeError
from ops.moe.router import route

TOLERANCE = 2e-6  # fp32 sigmoid and one division


def expected(z: Tensor, bias: Tensor, n_active: int, renormalize: bool, scale: float, groups: int, top: int):
    s = z.double().sigmoid()
    c = (z.sigmoid() + bias.float()).double()
    if groups > 1:
        score = c.unflatten(1, (groups, -1)).topk(2, dim=2).values.sum(2)
        keep = torch.zeros_like(score).scatter(1, score.topk(top, dim=1).indices, 1.0)
        c = c.masked_fill(keep.repeat_interleave(z.shape[1] // groups, dim=1) == 0, float("-inf"))
    ids = c.sort(dim=1, descending=True, stable=True).indices[:, :n_active]
    w = s.gather(1, ids)
    if renormalize:
        w = w / (w.sum(1, keepdim=True) + 1e-20)
    return ids, w * scale


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.double(), b, rtol=TOLERANCE, atol=0)


@pytest.mark.parametrize("n_tokens", [0, 1, 33, 63])
@pytest.mark.parametrize(("n_experts", "n_active"), [(12, 3), (33, 1), (896, 16)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_matches_float64(device: torch.device, n_tokens: int, n_experts: int, n_active: int, renormalize: bool) -> None:
    torch.manual_seed(1)
    wide = torch.full((n_tokens, n_experts + 5), float("nan"), device=device)
    z = wide[:, 2 : 2 + n_experts]
    z.normal_()
    bias = torch.randn(n_experts, device=device)
    ids, w = route(z, bias, n_active, renormalize=renormalize, scale=2.446)
    want_ids, want_w = expected(z, bias, n_active, renormalize, 2.446, 1, 1)
    assert ids.dtype == torch.int32
    assert torch.equal(ids.long(), want_ids)
    assert close(w, want_w)


@pytest.mark.parametrize(("groups", "top"), [(4, 2), (8, 1), (3, 3)])
def test_groups(device: torch.device, groups: int, top: int) -> None:
    torch.manual_seed(2)
    z, bias = torch.randn(33, 48, device=device), torch.randn(48, device=device)
    ids, w = route(z, bias, 5, renormalize=True, scale=1.0, n_groups=groups, top_groups=top)
    want_ids, want_w = expected(z, bias, 5, True, 1.0, groups, top)
    assert torch.equal(ids.long(), want_ids)
    assert close(w, want_w)


def test_ties_and_negative_keys(device: torch.device) -> None:
    """All keys are below -1 and equal in pairs: a running maximum from -1 would find none."""
    z = torch.zeros(1, 6, device=device)
    bias = torch.tensor([-9.0, -3.0, -5.0, -3.0, -5.0, -9.0], device=device)
    ids, _ = route(z, bias, 4, renormalize=True, scale=1.0)
    assert ids.tolist() == [[1, 3, 2, 4]]


@pytest.mark.parametrize("renormalize", [True, False])
def test_scale_is_applied_once(device: torch.device, renormalize: bool) -> None:
    """B05: with a factor of 2.5 the weights sum to 2.5, or to 2.5 times the sum of the scores."""
    z = torch.full((3, 8), 0.7, device=device)
    _, w = route(z, torch.zeros(8, device=device), 4, renormalize=renormalize, scale=2.5)
    total = 2.5 if renormalize else 2.5 * 4 * float(torch.tensor(0.7).double().sigmoid())
    assert torch.allclose(w.sum(1), torch.full((3,), total, device=device), rtol=TOLERANCE, atol=0)


def test_bias_selects_and_does_not_weigh(device: torch.device) -> None:
    z = torch.tensor([[0.0, 1.0, 2.0]], device=device)
    ids, w = route(z, torch.tensor([5.0, 0.0, 0.0], device=device), 1, renormalize=False, scale=1.0)
    assert ids.tolist() == [[0]] and w.tolist() == [[0.5]]


def test_not_a_number_selects_last_and_stays_visible(device: torch.device) -> None:
    z = torch.tensor([[float("nan"), 1.0, 2.0], [0.0, 1.0, 2.0]], device=device)
    ids, w = route(z, torch.zeros(3, device=device), 3, renormalize=True, scale=1.0)
    assert ids.tolist() == [[2, 1, 0], [2, 1, 0]]
    assert w[0].isnan().all() and not w[1].isnan().any()


def test_rows_are_alone(device: torch.device) -> None:
    torch.manual_seed(3)
    z, bias = torch.randn(40, 96, device=device), torch.randn(96, device=device)
    ids, w = route(z, bias, 8, renormalize=True, scale=1.0)
    for t in (0, 17, 39):
        one_ids, one_w = route(z[t : t + 1], bias, 8, renormalize=True, scale=1.0)
        assert torch.equal(one_ids[0], ids[t]) and torch.equal(one_w[0], w[t])
    again_ids, again_w = route(z, bias, 8, renormalize=True, scale=1.0)
    assert torch.equal(again_ids, ids) and torch.equal(again_w, w)


def test_refuses_too_few_experts(device: torch.device) -> None:
    with pytest.raises(ShapeError, match="n_active is 5, want 1 to 4"):
        route(torch.zeros(1, 8, device=device), torch.zeros(8, device=device), 5, renormalize=True, scale=1.0,
              n_groups=4, top_groups=2)  # fmt: skip
