"""The scheduler against its promises, over random arrivals, departures and answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import PAGE
from engine.errors import CapacityError
from engine.requests import Request, Sampling
from engine.scheduler import Scheduler, Sequence, pages_of

SLOTS, PAGES, STEP_TOKENS = 3, 7, 50


def request(prompt: int, answer: int, chunk: int = 8192) -> Request:
    return Request(tuple(range(1, prompt + 1)), Sampling(), answer, prefill_chunk=chunk)


def check(scheduler: Scheduler, known: set[Sequence]) -> None:
    """Nobody shares a slot or a page, and none is lost."""
    running = scheduler.running
    assert {*running, *scheduler.waiting} == known and len(known) == len(running) + len(scheduler.waiting)
    slots = [sequence.slot for sequence in running] + scheduler._free_slots
    pages = [page for sequence in running for page in sequence.pages] + scheduler._free_pages
    assert sorted(slots) == list(range(SLOTS)) and sorted(pages) == list(range(PAGES))


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 3 * PAGE), st.integers(1, 2 * PAGE), st.integers(1, 90)),
        st.tuples(st.just("remove"), st.integers(0, 9)),
        st.tuples(st.just("step"), st.integers(0, 3)),
    ),
    max_size=60,
)


@given(ACTIONS)
def test_promises(actions: list[tuple]) -> None:
    scheduler, known = Scheduler(SLOTS, PAGES, STEP_TOKENS), set[Sequence]()
    for name, *values in actions:
        if name == "add":
            sequence = Sequence(request(*values))
            scheduler.add(sequence)
            known.add(sequence)
        elif name == "remove" and known:
            sequence = sorted(known, key=lambda s: (len(s.ids), id(s)))[values[0] % len(known)]
            scheduler.remove(sequence)
            known.discard(sequence)
        elif name == "step":
            step(scheduler)
        check(scheduler, known)
    for _ in range(2000):
        if not known:
            break
        assert step(scheduler), "something waits and nothing runs"
        for sequence in [s for s in scheduler.running if len(s.answer) == s.request.max_tokens]:
            scheduler.remove(sequence)
            known.discard(sequence)
        check(scheduler, known)
    assert not known


def step(scheduler: Scheduler) -> int:
    """Take a step and give each finished prompt one more token; returns how many tokens went through."""
    works = scheduler.next_step()
    prompts = 0
    for work in works:
        sequence = work.sequence
        assert work.ids == sequence.ids[sequence.past : sequence.past + len(work.ids)] and work.ids
        assert len(sequence.ids) <= len(sequence.pages) * PAGE
        assert len(work.ids) <= sequence.request.prefill_chunk
        prompts += len(work.ids) if len(sequence.ids) - sequence.past > 1 else 0
    assert prompts <= STEP_TOKENS
    assert {w.sequence for w in works} >= {s for s in scheduler.running if len(s.ids) - s.past == 1}, "an answer waits"
    scheduler.done(works)
    for work in works:
        if work.last and len(work.sequence.answer) < work.sequence.request.max_tokens:
            work.sequence.ids.append(0)
    return sum(len(work.ids) for work in works)


def test_first_come_first_served() -> None:
    scheduler = Scheduler(SLOTS, PAGES, STEP_TOKENS)
    large, small = Sequence(request(PAGE * 5, 1)), Sequence(request(1, 1))
    for sequence in (Sequence(request(PAGE, PAGE)), large, small):
        scheduler.add(sequence)
    scheduler.next_step()
    assert len(scheduler.running) == 1 and list(scheduler.waiting) == [large, small]


def test_what_can_never_run_is_refused() -> None:
    scheduler = Scheduler(SLOTS, PAGES, STEP_TOKENS)
    scheduler.expect_room(request(PAGES * PAGE - 1, 1))
    assert pages_of(request(PAGES * PAGE, 1)) == PAGES + 1
    with pytest.raises(CapacityError, match=f"take {PAGES * PAGE + 1} tokens, the server has room for {PAGES * PAGE}"):
        scheduler.expect_room(request(PAGES * PAGE, 1))
