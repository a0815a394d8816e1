"""``step`` against the float64 reference, and its promises: frame, replay, split, batch."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.generate import Model, open_model
from engine.model import step
from engine.plan import Chunk, make_plan
from engine.state import State, new_state
from tests.reference.ftw_weights import load_ftw
from tests.reference.model import logits as reference_logits
from tests.reference.models import made_up_ids, open_small, run_chunks
from tests.reference.numbers import relative_error
from tests.reference.same_experts import SameExperts


def test_fp32_logits_equal_the_reference(folder: Path, device: torch.device) -> None:
    model = open_small(folder, device, torch.float32)
    ids = made_up_ids(21, model.cfg.vocab)
    want = reference_logits(json.loads((folder / "config.json").read_text()), load_ftw(folder), ids)
    assert relative_error(run_chunks(model, ids, 21), want) <= 1e-4


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
def test_bf16_logits_equal_the_reference(folder: Path, device: torch.device, exact: bool) -> None:
    """Given the same experts: see ``SameExperts``."""
    experts = SameExperts(open_model(folder, device, dtype=torch.bfloat16, exact=exact))
    ids = made_up_ids(21, experts.model.cfg.vocab)
    logits = run_chunks(experts.model, ids, 21)
    config = json.loads((folder / "config.json").read_text())
    error = relative_error(logits, reference_logits(config, load_ftw(folder), ids, experts))
    assert error <= 2e-2, f"relative error {error:.2e}"


def test_chunks_do_not_change_a_bit(folder: Path, device: torch.device) -> None:
    model = open_small(folder, device)
    ids = made_up_ids(67, model.cfg.vocab)
    whole = run_chunks(model, ids, 67)
    assert torch.isfinite(whole).all()
    for chunk in (64, 7):
        assert torch.equal(whole, run_chunks(model, ids, chunk)), f"chunks of {chunk}"
    assert torch.equal(whole[:19], run_chunks(model, ids[:19], 1)), "token by token"
    assert torch.equal(whole, run_chunks(model, ids, 62, then=1)), "token by token over the end of a page"


class Batch:
    """Several sequences in one state, every row and page poisoned before use."""

    def __init__(self, model: Model, slots: int, pages: int) -> None:
        self.model = model
        self.state = new_state(model.cfg, slots, pages, model.dtype, model.device)
        for tensor in self.state:
            tensor.fill_(float("nan"))

    def run(self, chunks: list[Chunk]) -> list[Tensor]:
        plan = make_plan(chunks, self.model.device)
        logits, self.state = step(self.model.cfg, self.model.params, self.state, plan, self.model.store.fetch)
        return list(logits.split([len(chunk.wanted) for chunk in chunks]))


def chunk(ids: list[int], past: int, slot: int, pages: list[int]) -> Chunk:
    return Chunk(ids, past, slot, pages, range(len(ids)))


def same(a: State, b: State, slots: list[int], pages: list[int]) -> bool:
    """Compare bits of some slots and pages; NaN equals NaN."""

    def bits(x: Tensor) -> Tensor:
        return x.contiguous().view(torch.uint8)

    pairs = [(x[:, slots], y[:, slots]) for x, y in zip(a[:2], b[:2], strict=True)] + [(a[2][:, pages], b[2][:, pages])]
    return all(torch.equal(bits(x), bits(y)) for x, y in pairs)


def test_neighbours_do_not_change_a_bit(folder: Path, device: torch.device) -> None:
    model = open_small(folder, device)
    a, b, c = (made_up_ids(n, model.cfg.vocab, seed=n) for n in (9, 5, 18))
    alone = [run_chunks(model, ids, len(ids)) for ids in (a, b, c)]
    batch = Batch(model, slots=4, pages=5)
    first = batch.run([chunk(c[:11], 0, 3, [4]), chunk(a[:8], 0, 0, [1])])
    second = batch.run([chunk(a[8:], 8, 0, [1]), chunk(b, 0, 1, [0]), chunk(c[11:], 11, 3, [4])])
    assert torch.equal(torch.cat([first[1], second[0]]), alone[0])
    assert torch.equal(second[1], alone[1])
    assert torch.equal(torch.cat([first[0], second[2]]), alone[2])


def test_frame_and_replay(folder: Path, device: torch.device) -> None:
    model = open_small(folder, device)
    ids = made_up_ids(12, model.cfg.vocab)
    batch = Batch(model, slots=3, pages=4)
    batch.run([chunk(ids[:6], 0, 0, [0]), chunk(ids, 0, 1, [2])])
    before = State(*map(torch.clone, batch.state))
    first = batch.run([chunk(ids[6:], 6, 0, [0])])
    assert same(before, batch.state, slots=[1, 2], pages=[1, 2, 3]), "a step wrote another sequence's state"
    after, batch.state = State(*map(torch.clone, batch.state)), before
    assert torch.equal(first[0], batch.run([chunk(ids[6:], 6, 0, [0])])[0])
    assert same(after, batch.state, slots=[0, 1, 2], pages=[0, 1, 2, 3])


def test_empty_step(folder: Path, device: torch.device) -> None:
    model = open_small(folder, device)
    assert [len(part) for part in Batch(model, 1, 1).run([])] == []
