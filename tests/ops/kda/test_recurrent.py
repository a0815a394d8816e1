"""The recurrent form of Kimi delta attention: float64 at real decay magnitudes, split, frame, batch, replay."""

import pytest
import torch

from ops.checks import ShapeError
from ops.kda.recurrent import kda_recurrent_
from tests.reference.kda_case import Case
from tests.reference.numbers import relative_error

TOLERANCE = 2e-6  # fp32 throughout


@pytest.mark.parametrize("lower", [-5.0, None])
@pytest.mark.parametrize("n", [0, 1, 33, 63])
def test_equals_reference(device: torch.device, lower: float | None, n: int) -> None:
    case = Case(device, n)
    mem = case.state(2)
    o = case.run(kda_recurrent_, mem, slice(n), lower, [n], [1], [0])
    want, state = case.reference(lower)
    assert relative_error(o, want) < TOLERANCE
    if n:
        assert relative_error(mem[1], state) < TOLERANCE
    assert mem[0].isnan().all() and mem[1].isnan().all() == (n == 0)


def test_real_head(device: torch.device) -> None:
    case = Case(device, 5, heads=1, keys=128, values=128)
    mem = case.state(1)
    o = case.run(kda_recurrent_, mem, slice(5), -5.0, [5], [0], [0])
    want, state = case.reference(-5.0)
    assert relative_error(o, want) < TOLERANCE and relative_error(mem[0], state) < TOLERANCE


def test_chunks_do_not_change_a_bit(device: torch.device) -> None:
    case = Case(device, 67)
    whole = case.state(1)
    want = case.run(kda_recurrent_, whole, slice(67), -5.0, [67], [0], [0])
    for chunk in (1, 7, 64):
        mem, got = case.state(1), []
        for t in range(0, 67, chunk):
            n = min(chunk, 67 - t)
            got.append(case.run(kda_recurrent_, mem, slice(t, t + n), -5.0, [n], [0], [t]))
        assert torch.equal(want, torch.cat(got)) and torch.equal(whole, mem), f"chunks of {chunk}"


def test_neighbours_and_other_slots(device: torch.device) -> None:
    case = Case(device, 20)
    mem = torch.randn(4, *case.shape, generator=torch.Generator().manual_seed(0)).to(device)
    before = mem.clone()
    o = case.run(kda_recurrent_, mem, slice(20), -5.0, [9, 0, 11], [2, 3, 0], [0, 5, 4])
    alone = before.clone()
    assert torch.equal(o[:9], case.run(kda_recurrent_, alone, slice(9), -5.0, [9], [2], [0]))
    assert torch.equal(o[9:], case.run(kda_recurrent_, alone, slice(9, 20), -5.0, [11], [0], [4]))
    assert torch.equal(mem, alone) and torch.equal(mem[[1, 3]], before[[1, 3]])
    again = before.clone()
    assert torch.equal(o, case.run(kda_recurrent_, again, slice(20), -5.0, [9, 0, 11], [2, 3, 0], [0, 5, 4]))
    assert torch.equal(mem, again)


def test_refuses_a_transposed_state(device: torch.device) -> None:
    case = Case(device, 2)
    with pytest.raises(ShapeError, match="want"):
        case.run(kda_recurrent_, case.state(1).transpose(2, 3), slice(2), -5.0, [2], [0], [0])
