"""Which tokens go into the next step: continuous batching over a fixed number of slots and pages.

First come, first served. A sequence is admitted when a slot and pages for its prompt and its longest answer are free,
so that none is ever thrown out half-way. Each step carries one token of every sequence that is answering, and as much
of the oldest unfinished prompts as still fits. No torch, no clock, no input or output.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from engine.config import PAGE
from engine.errors import CapacityError
from engine.requests import Request


class Sequence:
    """A request on its way.

    Attributes:
        request: what to do.
        ids: the prompt and the answer so far.
        past: tokens that have been through the model.
        slot: place of its recurrent state, -1 while it waits.
        pages: places of its latent rows.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.ids = list(request.prompt_ids)
        self.past = 0
        self.slot = -1
        self.pages: list[int] = []

    @property
    def answer(self) -> list[int]:
        """Tokens made so far."""
        return self.ids[len(self.request.prompt_ids) :]


class Work(NamedTuple):
    """The next tokens of one sequence; ``last``: its newest token is among them, so an answer token follows."""

    sequence: Sequence
    ids: list[int]
    last: bool


class Scheduler:
    """Owns slots and pages."""

    def __init__(self, slots: int, pages: int, step_tokens: int) -> None:
        """Manage ``slots`` sequences on ``pages`` pages; a step takes about ``step_tokens`` tokens of prompts."""
        self._free_slots = list(range(slots))[::-1]
        self._free_pages = list(range(pages))[::-1]
        self._pages, self._step_tokens = pages, step_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def expect_room(self, request: Request) -> None:
        """Raise :class:`CapacityError` if a request could never run."""
        wanted = len(request.prompt_ids) + request.max_tokens
        if pages_of(request) > self._pages:
            raise CapacityError(f"prompt and answer take {wanted} tokens, the server has room for {self._pages * PAGE}")

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, waiting or running; its slot and pages are free at once."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
            self._free_slots.append(sequence.slot)
            self._free_pages += sequence.pages
            sequence.slot, sequence.pages = -1, []

    def next_step(self) -> list[Work]:
        """Admit what fits, then choose the tokens of the next step; nothing when there is nothing to do."""
        while self.waiting and self._free_slots and pages_of(self.waiting[0].request) <= len(self._free_pages):
            sequence = self.waiting.popleft()
            sequence.slot = self._free_slots.pop()
            sequence.pages = [self._free_pages.pop() for _ in range(pages_of(sequence.request))]
            self.running.append(sequence)
        budget = self._step_tokens
        works = []
        for sequence in self.running:
            left = len(sequence.ids) - sequence.past
            count = 1 if left == 1 else min(left, sequence.request.prefill_chunk, budget)
            if count > 0:
                budget -= count if left > 1 else 0
                ids = sequence.ids[sequence.past : sequence.past + count]
                works.append(Work(sequence, ids, count == left))
        return works

    def done(self, works: Iterable[Work]) -> None:
        """Note that a step's tokens went through the model."""
        for work in works:
            work.sequence.past += len(work.ids)


def pages_of(request: Request) -> int:
    """Pages that a request takes."""
    return -(-(len(request.prompt_ids) + request.max_tokens) // PAGE)
