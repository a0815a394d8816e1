"""The chunk form of Kimi delta attention: float64 at real and at extreme decay, against the recurrence, batch."""

import pytest
import torch

from ops.kda.chunk import kda_chunk_
from ops.kda.recurrent import kda_recurrent_
from tests.reference.kda_case import Case
from tests.reference.numbers import relative_error


@pytest.fixture
def tolerance(device: torch.device) -> float:
    """On a card the products of a chunk run in tf32."""
    return 2e-3 if device.type == "cuda" else 2e-6


@pytest.mark.parametrize("lower", [-5.0, None])
@pytest.mark.parametrize("n", [0, 1, 16, 33, 63])
def test_equals_reference(device: torch.device, tolerance: float, lower: float | None, n: int) -> None:
    case = Case(device, n)
    mem = case.state(2)
    o = case.run(kda_chunk_, mem, slice(n), lower, [n], [1], [0])
    want, state = case.reference(lower)
    assert relative_error(o, want) < tolerance
    if n:
        assert relative_error(mem[1], state) < tolerance
    assert mem[0].isnan().all() and mem[1].isnan().all() == (n == 0)


@pytest.mark.parametrize(("strength", "loss"), [(0.01, 1), (100, 30)])
def test_weak_and_extreme_decay(device: torch.device, tolerance: float, strength: float, loss: float) -> None:
    """Sums of the log decay from nearly 0 to thousands, whose differences keep fewer digits."""
    case = Case(device, 40, strength=strength)
    mem = case.state(1)
    o = case.run(kda_chunk_, mem, slice(40), None, [40], [0], [0])
    want, state = case.reference(None)
    assert relative_error(o, want) < loss * tolerance and relative_error(mem[0], state) < loss * tolerance


def test_equal_keys_that_never_fade(device: torch.device, tolerance: float) -> None:
    """All ones below the diagonal of L: the inverse by doubling would cancel here."""
    case = Case(device, 32)
    case.k.copy_(case.k[:1].clone().expand_as(case.k))
    case.decay.fill_(-30)
    case.beta.fill_(20)
    mem = case.state(1)
    o = case.run(kda_chunk_, mem, slice(32), -5.0, [32], [0], [0])
    want, state = case.reference(-5.0)
    assert relative_error(o, want) < 5 * tolerance and relative_error(mem[0], state) < 5 * tolerance


def test_real_head_agrees_with_the_recurrence(device: torch.device, tolerance: float) -> None:
    case = Case(device, 19, heads=1, keys=128, values=128)
    chunked, recurrent = case.state(1), case.state(1)
    o = case.run(kda_chunk_, chunked, slice(19), -5.0, [19], [0], [0])
    want = case.run(kda_recurrent_, recurrent, slice(19), -5.0, [19], [0], [0])
    assert relative_error(o, want) < tolerance and relative_error(chunked, recurrent) < tolerance


def test_continues_from_a_state(device: torch.device, tolerance: float) -> None:
    case = Case(device, 40)
    mem = case.state(1)
    case.run(kda_chunk_, mem, slice(21), -5.0, [21], [0], [0])
    o = case.run(kda_chunk_, mem, slice(21, 40), -5.0, [19], [0], [21])
    want, state = case.reference(-5.0)
    assert relative_error(o, want[21:]) < tolerance and relative_error(mem[0], state) < tolerance


def test_neighbours_and_other_slots(device: torch.device) -> None:
    case = Case(device, 37)
    mem = torch.randn(4, *case.shape, generator=torch.Generator().manual_seed(0)).to(device)
    before = mem.clone()
    o = case.run(kda_chunk_, mem, slice(37), -5.0, [18, 0, 19], [2, 3, 0], [0, 5, 4])
    alone = before.clone()
    assert torch.equal(o[:18], case.run(kda_chunk_, alone, slice(18), -5.0, [18], [2], [0]))
    assert torch.equal(o[18:], case.run(kda_chunk_, alone, slice(18, 37), -5.0, [19], [0], [4]))
    assert torch.equal(mem, alone) and torch.equal(mem[[1, 3]], before[[1, 3]])
