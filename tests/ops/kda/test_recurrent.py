"""Both forms of Kimi delta attention against float64 at real decay magnitudes; split, frame, batch for the exact one."""

import pytest
import torch
from torch import Tensor

from ops.kda.chunk import kda_chunk_
from ops.kda.recurrent import kda_recurrent_
from tests.reference.kda import log_decay, recurrence
from tests.reference.numbers import relative_error

FORMS = [kda_recurrent_, kda_chunk_]


def tolerance(form, device: torch.device) -> float:
    """The chunked form multiplies in tf32 on a card."""
    return 2e-3 if form is kda_chunk_ and device.type == "cuda" else 1e-5


class Case:
    """Random inputs for sequences of given lengths; keys and values of different size (B07)."""

    def __init__(self, device: torch.device, tokens: int, heads: int = 3, keys: int = 32, values: int = 48) -> None:
        random = torch.Generator().manual_seed(tokens)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random)

        self.q, self.k = (normal(tokens, heads, keys).bfloat16().to(device) for _ in range(2))
        self.v = normal(tokens, heads, values).bfloat16().to(device)
        self.decay = normal(tokens, heads, keys).mul(3).bfloat16().to(device)
        self.beta = normal(tokens, heads).bfloat16().to(device)
        # A from 1 to 16 as in trained models, padded past the heads as Kimi K3 stores it
        rates = torch.rand(heads, generator=random) * 15 + 1
        self.a_log = torch.cat([rates.log(), torch.full((5,), float("nan"))]).to(device)
        self.dt_bias = (normal(heads, keys) * 2 - 3).to(device)
        self.shape = (heads, keys, values)

    def state(self, slots: int) -> Tensor:
        return torch.full((slots, *self.shape), float("nan"), device=self.q.device)

    def run(self, form, mem: Tensor, tokens: slice, lower: float | None, lengths: list[int], slots: list[int], past: list[int]):
        def index(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=mem.device)

        start = [sum(lengths[:b]) for b in range(len(lengths) + 1)]
        parts = (x[tokens] for x in (self.q, self.k, self.v, self.decay, self.beta))
        return form(mem, *parts, self.a_log, self.dt_bias, lower, index(start), index(slots), index(past))

    def reference(self, tokens: slice, lower: float | None, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v, decay, beta = (x[tokens].double().cpu() for x in (self.q, self.k, self.v, self.decay, self.beta))
        a_log, dt_bias = self.a_log[: self.shape[0]].double().cpu(), self.dt_bias.double().cpu()
        return recurrence(q, k, v, log_decay(decay, a_log, dt_bias, lower), torch.sigmoid(beta), state)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lower", [-5.0, None])
@pytest.mark.parametrize("n", [0, 1, 16, 33, 63])
def test_equals_reference(device: torch.device, form, lower: float | None, n: int) -> None:
    case = Case(device, n)
    mem = case.state(2)
    o = case.run(form, mem, slice(n), lower, [n], [1], [0])
    want, state = case.reference(slice(n), lower)
    assert relative_error(o, want) < tolerance(form, device)
    if n:
        assert relative_error(mem[1], state) < tolerance(form, device)
    assert mem[0].isnan().all()


@pytest.mark.parametrize("form", FORMS)
def test_continues_from_a_state(device: torch.device, form) -> None:
    case = Case(device, 40)
    mem = case.state(1)
    case.run(form, mem, slice(21), -5.0, [21], [0], [0])
    o = case.run(form, mem, slice(21, 40), -5.0, [19], [0], [21])
    want, state = case.reference(slice(40), -5.0)
    assert relative_error(o, want[21:]) < tolerance(form, device)
    assert relative_error(mem[0], state) < tolerance(form, device)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_do_not_change_a_bit(device: torch.device, chunk: int) -> None:
    case = Case(device, 70)
    whole, parts = case.state(1), case.state(1)
    want = case.run(kda_recurrent_, whole, slice(70), -5.0, [70], [0], [0])
    got = []
    for t in range(0, 70, chunk):
        n = min(chunk, 70 - t)
        got.append(case.run(kda_recurrent_, parts, slice(t, t + n), -5.0, [n], [0], [t]))
    assert torch.equal(want, torch.cat(got)) and torch.equal(whole, parts)


@pytest.mark.parametrize("form", FORMS)
def test_sequences_side_by_side(device: torch.device, form) -> None:
    case = Case(device, 20)
    mem = torch.randn(4, *case.shape, device=device)
    before = mem.clone()
    o = case.run(form, mem, slice(20), -5.0, [9, 0, 11], [2, 3, 0], [0, 5, 4])
    alone = before.clone()
    assert torch.equal(o[:9], case.run(form, alone, slice(9), -5.0, [9], [2], [0]))
    assert torch.equal(o[9:], case.run(form, alone, slice(9, 20), -5.0, [11], [0], [4]))
    assert torch.equal(mem, alone) and torch.equal(mem[[1, 3]], before[[1, 3]])
