"""The engine's thread: answers as the generator gives them, and failures that stay with their request."""

import queue
import threading
import time
from pathlib import Path

import pytest
import torch

from engine.errors import CapacityError, EngineError
from engine.generate import Model, generate, open_model
from engine.loop import End, Engine, Event, Failure, QueueFull, Token, Unready
from engine.requests import Request, Sampling
from formats.errors import FormatError

TINY = Path(__file__).parents[2] / "examples" / "tiny_k3"


def request(prompt: tuple[int, ...], tokens: int = 3) -> Request:
    return Request(prompt, Sampling(temperature=0), tokens)


def answer(events: "queue.Queue[Event]") -> tuple[list[int], Event]:
    tokens = []
    while isinstance(event := events.get(timeout=60), Token):
        tokens.append(event.id)
    return tokens, event


@pytest.fixture
def model(device: torch.device) -> Model:
    return open_model(TINY, device)


def started(model: Model, slots: int = 2, waiting: int = 8) -> Engine:
    ready = threading.Event()

    def load() -> Model:
        ready.set()
        return model

    engine = Engine(load, slots=slots, pages=8, step_tokens=4, queue=waiting)
    with pytest.raises(Unready, match="starting"):
        engine.submit(request((1,)), print)
    engine.start()
    ready.wait(30)
    while engine.phase == "loading":
        time.sleep(0.01)
    return engine


def test_answers_in_one_batch_are_those_alone(model: Model) -> None:
    prompts = [(5, 6, 7, 8, 9, 10), (11,), (12, 13)]
    alone = [list(generate(model, request(prompt))) for prompt in prompts]
    engine = started(model)  # from here on the device is its own
    waiting: list[queue.Queue[Event]] = [queue.Queue() for _ in prompts]
    for prompt, events in zip(prompts, waiting, strict=True):
        engine.submit(request(prompt), events.put)
    for tokens, events in zip(alone, waiting, strict=True):
        assert answer(events) == (tokens, End(length=True))
    engine.drain(30)
    assert engine.phase == "stopped" and engine.counters.requests == 3
    assert engine.counters.prompt_tokens == 9 and engine.counters.completion_tokens == 9


def test_a_row_that_cannot_be_read_fails_its_request_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, fetch, broken = started(model), model.store.fetch, threading.Event()

    def lose(layer: int, ids_ta: torch.Tensor) -> torch.Tensor:
        if broken.is_set():
            raise FormatError("row 3 of layer 1 is not what its digest says")
        return fetch(layer, ids_ta)

    monkeypatch.setattr(model.store, "fetch", lose)
    broken.set()
    events: queue.Queue[Event] = queue.Queue()
    engine.submit(request((5,)), events.put)
    assert answer(events) == ([], Failure("row 3 of layer 1 is not what its digest says"))
    broken.clear()
    engine.submit(request((5,)), events.put)
    assert answer(events)[1] == End(length=True) and engine.phase == "ready"
    engine.drain(30)


def test_limits_and_cancelling(model: Model) -> None:
    engine = started(model, slots=1, waiting=1)
    with pytest.raises(CapacityError, match="room for 512"):
        engine.submit(request((1,), 600), print)
    first: queue.Queue[Event] = queue.Queue()
    kept = [engine.submit(request((1,), 400), first.put), engine.submit(request((2,), 400), print)]
    with pytest.raises(QueueFull, match="the queue takes 1"):
        engine.submit(request((3,)), print)
    assert isinstance(first.get(timeout=60), Token)
    for sequence in kept:
        engine.cancel(sequence)
    last: queue.Queue[Event] = queue.Queue()
    while engine.running() or engine.waiting():
        time.sleep(0.01)
    engine.submit(request((4,)), last.put)
    assert answer(last)[1] == End(length=True) and engine.counters.cancelled == 2
    engine.cancel(kept[0])
    engine.drain(30)
    assert engine.phase == "stopped"


def test_a_model_that_does_not_load() -> None:
    def load() -> Model:
        raise EngineError("no room\nfor it")

    engine = Engine(load, slots=1, pages=1, step_tokens=1, queue=1)
    engine.start()
    engine.drain(30)
    assert (engine.phase, engine.problem) == ("failed", "no room for it")
    with pytest.raises(Unready, match="failed"):
        engine.submit(request((1,)), print)
