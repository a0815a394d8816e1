"""Tokens of an answer as text of named channels, and tool calls.

Kimi K3 closes its thinking, opens a response, and may open ``tools`` with calls whose arguments are elements:

    call tool="NAME" index="k"      argument key="K" type="T" ... value      or      json type="object" ... object

Markers are read on token ids and never become text. What a parser gives depends on the tokens alone, so any cutting of
the same stream yields the same text.

Source: kimi-k3.md, section 7.
"""

import json
import re
from typing import NamedTuple, Protocol

from engine.markup import CLOSE, OPEN, SEPARATOR
from engine.tokenizer import StreamDecoder, Tokenizer

LONGEST_TAG = 512  # tokens after which an open marker is taken for noise
_ATTRIBUTE = re.compile(r' ([^=\s]+)="([^"]*)"')
_CHANNELS = {"think": "reasoning", "response": "content"}


class Delta(NamedTuple):
    """New text of a channel.

    Channels are "reasoning", "content" and, for tool call number ``call``, "tool_name" once and then "tool_arguments",
    whose pieces make one JSON text.
    """

    channel: str
    text: str
    call: int | None = None


class Parser(Protocol):
    """Turns tokens into deltas."""

    def feed(self, token: int) -> list[Delta]:
        """What has become certain by ``token``; texts may be empty."""
        ...

    def finish(self) -> list[Delta]:
        """The rest, when no token follows; an unfinished marker is dropped."""
        ...


def parser_for(tokenizer: Tokenizer, model_type: str, *, thinking: bool) -> Parser:
    """Parser of what the model says after ``engine.chat.prompt_ids``."""
    return ChannelParser(tokenizer, thinking=thinking) if model_type == "kimi_k3" else PlainParser(tokenizer)


class PlainParser:
    """All text is content; special tokens say nothing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._special = frozenset(tokenizer.special.values())
        self._decoder = StreamDecoder(tokenizer)

    def feed(self, token: int) -> list[Delta]:
        """See :class:`Parser`."""
        return [] if token in self._special else [Delta("content", self._decoder.feed(token))]

    def finish(self) -> list[Delta]:
        """See :class:`Parser`."""
        return [Delta("content", self._decoder.finish())]


class ChannelParser:
    """Kimi K3's output.

    A missing close of ``think`` is forgiven. An answer that closes response or message while it was still thinking
    was all thought to be the response (very long prompts do so): it is given again as content. What lies outside the
    elements known here is dropped.
    """

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool) -> None:
        self._tokenizer = tokenizer
        self._special = {slot: name for name, slot in tokenizer.special.items()}
        self._channel: str | None = "reasoning" if thinking else "content"
        self._decoder = StreamDecoder(tokenizer)
        self._marker = ""  # OPEN or CLOSE while a tag is being read
        self._tag: list[int] = []
        self._thought: list[str] | None = [] if thinking else None  # until anything opens or think closes
        self._calls = _Calls()

    def feed(self, token: int) -> list[Delta]:
        """See :class:`Parser`."""
        name = self._special.get(token)
        if name in (OPEN, CLOSE):
            self._marker, self._tag = str(name), []
            return self._text(self._decoder.finish())
        if name == SEPARATOR and self._marker:
            tag = self._tokenizer.decode_bytes(self._tag).decode("utf-8", "replace")
            opened, self._marker = self._marker == OPEN, ""
            return self._opened(tag) if opened else self._closed(tag)
        if name is not None:
            return []
        if self._marker:
            self._tag.append(token)
            if len(self._tag) > LONGEST_TAG:
                self._marker = ""
            return []
        return self._text(self._decoder.feed(token))

    def finish(self) -> list[Delta]:
        """See :class:`Parser`."""
        return self._text(self._decoder.finish())

    def _text(self, text: str) -> list[Delta]:
        if self._channel is None:
            return []
        if self._channel == "tools":
            return self._calls.text(text)
        if self._thought is not None:
            self._thought.append(text)
        return [Delta(self._channel, text)]

    def _opened(self, tag: str) -> list[Delta]:
        name = tag.split(" ")[0]
        if self._channel == "tools":
            return self._calls.opened(name, {key: _unescape(value) for key, value in _ATTRIBUTE.findall(tag)})
        self._channel, self._thought = "tools" if name == "tools" else _CHANNELS.get(name), None
        return []

    def _closed(self, tag: str) -> list[Delta]:
        if self._channel == "tools" and tag != "tools":
            return self._calls.closed(tag)
        thought, self._thought, self._channel = self._thought, None, None
        if thought is not None and tag in ("response", "message"):
            return [Delta("content", "".join(thought))]
        return []


class _Calls:
    """Writes the elements inside ``tools`` as JSON, piece by piece."""

    def __init__(self) -> None:
        self._call = -1
        self._inside = ""  # "", "call", "json", or the type of the argument being read
        self._members = 0
        self._held: list[str] = []  # an argument that is no string, until it is whole

    def opened(self, tag: str, attributes: dict[str, str]) -> list[Delta]:
        if tag == "call":
            self._call, self._inside, self._members = self._call + 1, "call", 0
            return [Delta("tool_name", attributes.get("tool", ""), self._call)]
        if tag == "json" and self._inside == "call":
            self._inside, self._members = "json", -1
            return []
        if tag == "argument" and self._inside == "call" and self._members >= 0:
            self._inside, self._held = attributes.get("type", "string"), []
            begin = "{" if self._members == 0 else ", "
            self._members += 1
            key = json.dumps(attributes.get("key", ""), ensure_ascii=False)
            return self._say(f"{begin}{key}: " + ('"' if self._inside == "string" else ""))
        return []

    def text(self, text: str) -> list[Delta]:
        if self._inside in ("", "call"):
            return []
        if self._inside == "json":
            return self._say(text)
        if self._inside == "string":
            return self._say(json.dumps(text, ensure_ascii=False)[1:-1])
        self._held.append(text)
        return []

    def closed(self, tag: str) -> list[Delta]:
        if tag == "argument" and self._inside not in ("", "call", "json"):
            was, self._inside = self._inside, "call"
            return self._say('"' if was == "string" else _literal("".join(self._held)))
        if tag == "json" and self._inside == "json":
            self._inside = "call"
        elif tag == "call" and self._inside:
            members, self._inside = self._members, ""
            return [] if members < 0 else self._say("}" if members else "{}")
        return []

    def _say(self, text: str) -> list[Delta]:
        return [Delta("tool_arguments", text, self._call)]


def _literal(text: str) -> str:
    """A value that is no string as it stands, if it is JSON; else as a JSON string."""
    try:
        json.loads(text)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def _unescape(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")
