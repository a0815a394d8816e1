"""Conversations as tokens, and tokens as channels of text.

Kimi K3 writes messages as elements (O open, C close, S separator, E end of message, four special tokens):

    element = O tag attributes S body C tag S
    message = element(message role="...") E        assistant body = element(think), element(response)

Kimi-Linear writes ``<|im_ROLE|>name<|im_middle|>text<|im_end|>``. In both only markup becomes special tokens; every
piece of text is encoded by itself, so what a user types can never open an element.

Source: kimi-k3.md, sections 7 and 9.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from engine.errors import RequestError
from engine.tokenizer import StreamDecoder, Tokenizer

Segment = tuple[str, bool]  # text, and whether it is a special token
Message = Mapping[str, Any]  # role, content and what the role allows besides

OPEN, CLOSE, SEPARATOR, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
EFFORTS = ("low", "high", "max")
EFFORT_TEXT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort={}`."
)
LONGEST_TAG = 32  # tokens after which an open marker is taken for noise


def prompt_ids(
    tokenizer: Tokenizer, model_type: str, messages: Sequence[Message], *, thinking: bool, effort: str = "max"
) -> tuple[int, ...]:
    """Encode a conversation up to the point where the model is to go on.

    Args:
        tokenizer: the model's.
        model_type: "kimi_k3" or "kimi_linear".
        messages: role "system", "user" or "assistant" and a ``content`` of text or text parts.
        thinking: let Kimi K3 reason first; Kimi-Linear has no such switch.
        effort: "low", "high" or "max"; how long it may reason.

    Raises:
        RequestError: a message is malformed.
    """
    if model_type == "kimi_k3":
        segments = k3_segments(messages, thinking=thinking, effort=effort)
    else:
        segments = linear_segments(messages)
    ids: list[int] = []
    for text, markup in segments:
        ids += [tokenizer.encode_markup(text)] if markup else tokenizer.encode_text(text)
    return tuple(ids)


def k3_segments(
    messages: Sequence[Message], *, thinking: bool = True, effort: str | None = None, generation_prompt: bool = True
) -> list[Segment]:
    """Render a conversation for Kimi K3; empty segments are left out."""
    out: list[Segment] = []
    if thinking and effort is not None:
        if effort not in EFFORTS:
            raise RequestError(f"effort is {effort!r}, want one of {', '.join(EFFORTS)}")
        out += _message({"role": "system", "type": "thinking-effort"}, [(EFFORT_TEXT.format(effort), False)])
    for at, message in enumerate(messages):
        role, content = _checked(at, message)
        attributes = {"role": role} | ({"name": str(message["name"])} if message.get("name") else {})
        body = content
        if role == "assistant":
            reasoning = str(message.get("reasoning_content") or message.get("reasoning") or "")
            body = _element("think", {}, [(reasoning, False)]) if thinking else []
            body += _element("response", {}, content)
        out += _message(attributes, body)
    if generation_prompt:
        out += _open("message", {"role": "assistant"}) + _open("think" if thinking else "response", {})
    return [segment for segment in out if segment[0]]


def linear_segments(messages: Sequence[Message], *, generation_prompt: bool = True) -> list[Segment]:
    """Render a conversation for Kimi-Linear."""
    out: list[Segment] = []
    for at, message in enumerate(messages):
        role, content = _checked(at, message)
        out += [(f"<|im_{role}|>", True), (str(message.get("name") or role), False), ("<|im_middle|>", True)]
        out += [*content, ("<|im_end|>", True)]
    if generation_prompt:
        out += [("<|im_assistant|>", True), ("assistant", False), ("<|im_middle|>", True)]
    return [segment for segment in out if segment[0]]


def _checked(at: int, message: Message) -> tuple[str, list[Segment]]:
    """Role and text of a message, or a :class:`RequestError` that names what is wrong."""
    if not isinstance(message, Mapping):
        raise RequestError(f"messages[{at}] is a {type(message).__name__}, want an object with role and content")
    role = message.get("role")
    if role not in ("system", "user", "assistant"):
        raise RequestError(f"messages[{at}].role is {role!r}, want system, user or assistant")
    if message.get("tool_calls") or message.get("tools"):
        raise RequestError(f"messages[{at}] holds tools, want text alone: this version has no tools yet")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return role, [(content or "", False)]
    if not isinstance(content, list):
        raise RequestError(f"messages[{at}].content is a {type(content).__name__}, want text or a list of parts")
    for part in content:
        if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(f"messages[{at}].content has a part of type {kind!r}, want 'text'")
    return role, [(part["text"], False) for part in content]


def _open(tag: str, attributes: Mapping[str, str]) -> list[Segment]:
    out = [(OPEN, True), (tag, False)]
    for key, value in attributes.items():
        escaped = value.replace("&", "&amp;").replace('"', "&quot;")
        out += [(f" {key}", False), ('="', False), (escaped, False), ('"', False)]
    return [*out, (SEPARATOR, True)]


def _element(tag: str, attributes: Mapping[str, str], body: Iterable[Segment]) -> list[Segment]:
    return [*_open(tag, attributes), *body, (CLOSE, True), (tag, False), (SEPARATOR, True)]


def _message(attributes: Mapping[str, str], body: Iterable[Segment]) -> list[Segment]:
    return [*_element("message", attributes, body), (END, True)]


class PlainParser:
    """All text is content; special tokens say nothing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._special = frozenset(tokenizer.special.values())
        self._decoder = StreamDecoder(tokenizer)

    def feed(self, token: int) -> list[tuple[str, str]]:
        """Text that has become certain by ``token``: (channel, text)."""
        return [] if token in self._special else [("content", self._decoder.feed(token))]

    def finish(self) -> list[tuple[str, str]]:
        """The rest, when no token follows."""
        return [("content", self._decoder.finish())]


class ChannelParser:
    """Kimi K3's output, read on token ids: what is inside ``think`` is reasoning, inside ``response`` content.

    Markers never become text. A missing close of ``think`` is forgiven; what lies outside both elements, or inside
    an element unknown here, is dropped.
    """

    CHANNELS: ClassVar = {"think": "reasoning", "response": "content"}

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool) -> None:
        self._tokenizer = tokenizer
        self._special = {slot: name for name, slot in tokenizer.special.items()}
        self._channel: str | None = "reasoning" if thinking else "content"
        self._decoder = StreamDecoder(tokenizer)
        self._marker = ""  # OPEN or CLOSE while a tag is being read
        self._tag: list[int] = []

    def feed(self, token: int) -> list[tuple[str, str]]:
        """Text that has become certain by ``token``: (channel, text)."""
        name = self._special.get(token)
        if name in (OPEN, CLOSE):
            self._marker, self._tag = name, []
            return self._rest()
        if name == SEPARATOR and self._marker:
            tag = self._tokenizer.decode_bytes(self._tag).decode("utf-8", "replace").split(" ")[0]
            self._channel = self.CHANNELS.get(tag) if self._marker == OPEN else None
            self._marker = ""
            return []
        if name is not None:
            return []
        if self._marker:
            self._tag.append(token)
            if len(self._tag) > LONGEST_TAG:
                self._marker = ""
            return []
        return [] if self._channel is None else [(self._channel, self._decoder.feed(token))]

    def finish(self) -> list[tuple[str, str]]:
        """The rest, when no token follows; an unfinished marker is dropped."""
        return self._rest()

    def _rest(self) -> list[tuple[str, str]]:
        text = self._decoder.finish()
        return [] if self._channel is None else [(self._channel, text)]


def parser_for(tokenizer: Tokenizer, model_type: str, *, thinking: bool) -> ChannelParser | PlainParser:
    """Parser of what the model says after :func:`prompt_ids`."""
    return ChannelParser(tokenizer, thinking=thinking) if model_type == "kimi_k3" else PlainParser(tokenizer)
