"""From a request to text: tokens to characters, channels apart, stop strings withheld, times taken.

Text comes out as soon as it is certain: no half characters, no beginning of a marker, no beginning of a stop string.
"""

import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from engine.generate import Model, generate
from engine.parser import Delta, Parser
from engine.requests import Request


class ToolCall(NamedTuple):
    """A call of a tool; ``arguments`` is JSON as the model wrote it, cut short where the answer was."""

    name: str
    arguments: str


class Finish(NamedTuple):
    """The end of an answer and what it took. ``bytes_read`` counts weights, from opening the model on."""

    text: str
    reasoning: str
    tool_calls: list[ToolCall]
    token_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str  # "stop": a stop token or string; "length": max_tokens reached; "tool_calls"
    ttft_s: float  # from the request to its first token
    tokens_per_s: float  # of the tokens after the first; 0 for a single one
    bytes_read: int

    def summary(self) -> str:
        """How fast it came, in a line."""
        return (
            f"{self.prompt_tokens} + {self.completion_tokens} tokens, first after {self.ttft_s:.2f} s, "
            f"then {self.tokens_per_s:.2f} tok/s, {self.bytes_read / 2**20:.1f} MiB read"
        )


class StopFilter:
    """Cuts a text stream at the first of several strings, holding back what might begin one."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has appeared."""
        return self.stop_string is not None

    def feed(self, text: str) -> str:
        """Take more text, give what is certain not to belong to a stop string."""
        if self.stopped:
            return ""
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.stop_string = min(found)
            return self._give(at)
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


class Transcript:
    """Collects an answer's deltas, with the stop strings applied to its content."""

    def __init__(self, parser: Parser, stops: Iterable[str]) -> None:
        self._parser = parser
        self._cut = StopFilter(stops)
        self._said: dict[tuple[str, int | None], list[str]] = {}

    @property
    def stopped(self) -> bool:
        """Whether a stop string has appeared."""
        return self._cut.stopped

    @property
    def stop_string(self) -> str | None:
        """The stop string that has appeared."""
        return self._cut.stop_string

    def feed(self, token: int) -> list[Delta]:
        """Deltas that have become certain by ``token``."""
        return self._take(self._parser.feed(token))

    def finish(self) -> list[Delta]:
        """The rest, when no token follows."""
        return self._take(self._parser.finish()) + self._keep(Delta("content", self._cut.flush()))

    def text(self, channel: str, call: int | None = None) -> str:
        """All that a channel has said."""
        return "".join(self._said.get((channel, call), ()))

    def tool_calls(self) -> list[ToolCall]:
        """The calls so far."""
        calls = [call for channel, call in self._said if channel == "tool_name"]
        return [ToolCall(self.text("tool_name", call), self.text("tool_arguments", call)) for call in calls]

    def _take(self, deltas: Iterable[Delta]) -> list[Delta]:
        kept = []
        for delta in deltas:
            if delta.channel == "content":
                delta = delta._replace(text=self._cut.feed(delta.text))
            kept += self._keep(delta)
        return kept

    def _keep(self, delta: Delta) -> list[Delta]:
        if not delta.text:
            return []
        self._said.setdefault((delta.channel, delta.call), []).append(delta.text)
        return [delta]


def finish_reason(transcript: Transcript, *, length: bool) -> str:
    """Why an answer ended; ``length``: because of the most tokens allowed."""
    if length and not transcript.stopped:
        return "length"
    return "tool_calls" if transcript.tool_calls() else "stop"


def complete(model: Model, parser: Parser, request: Request, stops: Iterable[str]) -> Iterator[Delta | Finish]:
    """Answer one request: text as it becomes certain, then one :class:`Finish`.

    Args:
        model: see ``engine.generate``.
        parser: turns this model's tokens into text.
        request: what to do.
        stops: strings that end the answer when they appear in its content; they are not part of it.
    """
    transcript = Transcript(parser, stops)
    tokens: list[int] = []
    begin = first = time.perf_counter()
    for token in generate(model, request):
        if not tokens:
            first = time.perf_counter()
        tokens.append(token)
        yield from transcript.feed(token)
        if transcript.stopped:
            break
    end = time.perf_counter()
    yield from transcript.finish()
    yield Finish(
        text=transcript.text("content"),
        reasoning=transcript.text("reasoning"),
        tool_calls=transcript.tool_calls(),
        token_ids=tokens,
        prompt_tokens=len(request.prompt_ids),
        completion_tokens=len(tokens),
        finish_reason=finish_reason(transcript, length=len(tokens) == request.max_tokens),
        ttft_s=first - begin,
        tokens_per_s=(len(tokens) - 1) / (end - first) if len(tokens) > 1 else 0.0,
        bytes_read=model.bytes_read(),
    )
