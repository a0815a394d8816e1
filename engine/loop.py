"""The thread that owns the device: it loads the model, then turns queued requests into tokens, many in one step.

Callers are other threads. They submit a request with a function that is called, in the engine's thread, with each
event; it must not block. A request that fails takes nothing with it.
"""

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from engine.errors import EngineError
from engine.generate import Model, draw
from engine.model import step
from engine.plan import Chunk, make_plan
from engine.requests import Request
from engine.scheduler import Scheduler, Sequence, Work
from engine.state import State, new_state
from formats.errors import FormatError


class Token(NamedTuple):
    """One more token of the answer."""

    id: int


class End(NamedTuple):
    """The answer is complete; ``length``: it was cut at the request's most tokens."""

    length: bool


class Failure(NamedTuple):
    """The request failed; the message says why."""

    message: str


Event = Token | End | Failure
Listener = Callable[[Event], None]


class Unready(EngineError):
    """The engine takes no requests now."""


class QueueFull(EngineError):
    """As many requests wait as may."""


class Counters(NamedTuple):
    """What has happened since the start."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    requests: int = 0
    failures: int = 0
    cancelled: int = 0
    steps: int = 0
    step_seconds: float = 0.0


class Engine:
    """Owns the model, its state and the scheduler.

    Attributes:
        phase: starting, loading, ready, draining, stopped or failed.
        problem: why it failed.
        counters: what has happened so far.
    """

    def __init__(self, load: Callable[[], Model], *, slots: int, pages: int, step_tokens: int, queue: int) -> None:
        """Make an engine that will call ``load`` in its thread.

        Args:
            load: opens the model.
            slots: most sequences in a step.
            pages: pages of latent cache for all of them.
            step_tokens: prompt tokens of a step.
            queue: most requests that wait beside those that run.
        """
        self.phase = "starting"
        self.problem = ""
        self.counters = Counters()
        self._load = load
        self._queue = queue
        self._slots, self._pages = slots, pages
        self._scheduler = Scheduler(slots, pages, step_tokens)
        self._listeners: dict[Sequence, Listener] = {}
        self._arrived: list[Sequence] = []
        self._left: list[Sequence] = []
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    def drain(self, seconds: float) -> None:
        """Take no new request, and return when the running ones have ended or ``seconds`` have passed."""
        with self._wake:
            if self.phase != "failed":
                self.phase = "draining"
            self._wake.notify()
        self._thread.join(seconds)

    def waiting(self) -> int:
        """Requests that no step has taken up yet."""
        return len(self._arrived) + len(self._scheduler.waiting)

    def running(self) -> int:
        """Sequences that are in the steps."""
        return len(self._scheduler.running)

    def submit(self, request: Request, listener: Listener) -> Sequence:
        """Queue a request. The result serves to cancel it.

        Raises:
            Unready: the model is not there, or the engine is to stop.
            QueueFull: too many wait.
            CapacityError: the request could never run.
        """
        self._scheduler.expect_room(request)
        sequence = Sequence(request)
        with self._wake:
            if self.phase != "ready":
                raise Unready(f"the engine is {self.phase}")
            if self.waiting() + self.running() >= self._slots + self._queue:
                raise QueueFull(f"{self.waiting()} requests are waiting, the queue takes {self._queue}")
            self._listeners[sequence] = listener
            self._arrived.append(sequence)
            self._wake.notify()
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Drop a request within a step; one that has ended is left alone."""
        with self._wake:
            if sequence in self._listeners:
                self._left.append(sequence)
                self._wake.notify()

    def _count(self, **more: float) -> None:
        old = self.counters._asdict()
        self.counters = Counters(**{name: value + more.get(name, 0) for name, value in old.items()})

    def _main(self) -> None:
        try:
            self.phase = "loading"
            model = self._load()
            state = new_state(model.cfg, self._slots, self._pages, model.dtype, model.device)
            if self.phase == "loading":
                self.phase = "ready"
            while self._expect_work():
                state = self._step(model, state)
            self.phase = "stopped"
        except Exception as error:
            self.problem, self.phase = " ".join(str(error).split()) or type(error).__name__, "failed"
            if not isinstance(error, EngineError | FormatError | OSError):
                traceback.print_exc()
            print(f"rowstream: {self.problem}", file=sys.stderr, flush=True)
            for sequence in list(self._listeners):
                self._end(sequence, Failure(f"the engine failed: {self.problem}"))

    def _expect_work(self) -> bool:
        """Wait for something to do; False when draining is over."""
        with self._wake:
            while not (self._arrived or self._left or self._scheduler.running or self._scheduler.waiting):
                if self.phase == "draining":
                    return False
                self._wake.wait()
            left, self._left = self._left, []
            arrived, self._arrived = self._arrived, []
        for sequence in arrived:
            self._scheduler.add(sequence)
        for sequence in left:
            if sequence in self._listeners:
                self._count(cancelled=1)
                self._end(sequence, None)
        return True

    def _step(self, model: Model, state: State) -> State:
        works = self._scheduler.next_step()
        if not works:
            return state
        begin = time.perf_counter()
        chunks = [_chunk(work) for work in works]
        try:
            plan = make_plan(chunks, model.device)
            logits_wv, state = step(model.cfg, model.params, state, plan, model.store.fetch)
        except (EngineError, FormatError, OSError) as error:
            for work in works:
                self._end(work.sequence, Failure(str(error)))
            return state
        prompt = sum(len(work.ids) for work in works if not work.sequence.answer)
        self._scheduler.done(works)
        answering = [work.sequence for work in works if work.last]
        for row, sequence in enumerate(answering):
            self._draw(sequence, logits_wv[row : row + 1])
        self._count(steps=1, step_seconds=time.perf_counter() - begin, prompt_tokens=prompt)
        return state

    def _draw(self, sequence: Sequence, logits_1v: Tensor) -> None:
        request = sequence.request
        try:
            token = draw(logits_1v, request.sampling, len(sequence.ids))
        except EngineError as error:
            self._end(sequence, Failure(str(error)))
            return
        if token in request.stop_ids:
            self._end(sequence, End(length=False))
            return
        sequence.ids.append(token)
        self._count(completion_tokens=1)
        self._listeners[sequence](Token(token))
        if len(sequence.answer) == request.max_tokens:
            self._end(sequence, End(length=True))

    def _end(self, sequence: Sequence, event: Event | None) -> None:
        """Forget a sequence and tell its listener why, if there is one to tell."""
        self._scheduler.remove(sequence)
        with self._wake:
            listener = self._listeners.pop(sequence)
        if event is not None:
            self._count(requests=isinstance(event, End), failures=isinstance(event, Failure))
            listener(event)


def _chunk(work: Work) -> Chunk:
    sequence, n = work.sequence, len(work.ids)
    return Chunk(work.ids, sequence.past, sequence.slot, sequence.pages, range(n - 1, n) if work.last else range(0))
