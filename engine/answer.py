"""From a request to text: tokens to characters, channels apart, stop strings withheld, times taken.

Text comes out as soon as it is certain: no half characters, no beginning of a marker, no beginning of a stop string.
"""

import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from engine.generate import Model, generate
from engine.requests import Request


class Parser(Protocol):
    """Turns tokens into text of named channels."""

    def feed(self, token: int) -> list[tuple[str, str]]: ...

    def finish(self) -> list[tuple[str, str]]: ...


class Delta(NamedTuple):
    """New text of one channel, "reasoning" or "content"."""

    channel: str
    text: str


class Finish(NamedTuple):
    """The end of an answer and what it took. ``bytes_read`` counts weights, from opening the model on."""

    text: str
    reasoning: str
    token_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str  # "stop": a stop token or string; "length": max_tokens reached
    ttft_s: float  # from the request to its first token
    tokens_per_s: float  # of the tokens after the first; 0 for a single one
    bytes_read: int


class StopFilter:
    """Cuts a text stream at the first of several strings, holding back what might begin one."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Take more text, give what is certain not to belong to a stop string."""
        if self.stopped:
            return ""
        self._held += text
        found = [at for at in map(self._held.find, self._stops) if at >= 0]
        if found:
            self.stopped = True
            return self._give(min(found))
        return self._give(len(self._held) - self._pending())

    def flush(self) -> str:
        """Give the rest: the stream has ended."""
        return "" if self.stopped else self._give(len(self._held))

    def _give(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text

    def _pending(self) -> int:
        """Length of the longest tail that begins a stop string."""
        sizes = (n for stop in self._stops for n in range(1, len(stop)) if self._held.endswith(stop[:n]))
        return max(sizes, default=0)


def complete(model: Model, parser: Parser, request: Request, stops: Iterable[str]) -> Iterator[Delta | Finish]:
    """Answer one request: text as it becomes certain, then one :class:`Finish`.

    Args:
        model: see ``engine.generate``.
        parser: turns this model's tokens into text.
        request: what to do.
        stops: strings that end the answer when they appear in its content; they are not part of it.
    """
    cut = StopFilter(stops)
    tokens: list[int] = []
    said: dict[str, list[str]] = {"reasoning": [], "content": []}
    begin = first = time.perf_counter()
    for token in generate(model, request):
        if not tokens:
            first = time.perf_counter()
        tokens.append(token)
        for delta in _certain(parser.feed(token), cut):
            said[delta.channel].append(delta.text)
            yield delta
        if cut.stopped:
            break
    end = time.perf_counter()
    for delta in [*_certain(parser.finish(), cut), Delta("content", cut.flush())]:
        said[delta.channel].append(delta.text)
        yield delta
    yield Finish(
        text="".join(said["content"]),
        reasoning="".join(said["reasoning"]),
        token_ids=tokens,
        prompt_tokens=len(request.prompt_ids),
        completion_tokens=len(tokens),
        finish_reason="stop" if cut.stopped or len(tokens) < request.max_tokens else "length",
        ttft_s=first - begin,
        tokens_per_s=(len(tokens) - 1) / (end - first) if len(tokens) > 1 else 0.0,
        bytes_read=model.bytes_read(),
    )


def _certain(texts: Iterable[tuple[str, str]], cut: StopFilter) -> list[Delta]:
    """Apply the stop strings to the content channel and drop what is empty."""
    kept = [Delta(channel, cut.feed(text) if channel == "content" else text) for channel, text in texts]
    return [delta for delta in kept if delta.text]
