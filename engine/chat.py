"""Conversations as tokens.

Kimi K3 writes messages as elements (``engine.markup``); an assistant's body is element(think), element(response) and,
where it called tools, element(tools). Kimi-Linear writes ``<|im_ROLE|>name<|im_middle|>text<|im_end|>``. In both only
markup becomes special tokens; every piece of text is encoded by itself, so what a user types can never open an element.

Source: kimi-k3.md, sections 7 and 9.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from engine import tools
from engine.errors import RequestError
from engine.markup import Segment, element, message, opening
from engine.tokenizer import Tokenizer

Message = Mapping[str, Any]  # role, content and what the role allows besides

EFFORTS = ("low", "high", "max")
EFFORT_TEXT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort={}`."
)
FIELDS: dict[str, type] = {"name": str, "tool": str, "tool_call_id": str, "reasoning_content": str, "reasoning": str}
FIELDS |= {"tool_calls": list, "tools": list}
TEXT_PARTS = ("text", "input_text", "output_text")
ROLES = ("system", "user", "assistant", "tool")


class Frame(NamedTuple):
    """What surrounds the messages of a prompt.

    Attributes:
        thinking: let Kimi K3 reason first; Kimi-Linear has no such switch.
        effort: "low", "high" or "max": how long it may reason. None: do not say.
        tools: declarations as in OpenAI's API.
        tool_choice: "auto", "none" or "required".
        response_format: as in OpenAI's API.
        generation_prompt: end with the opening of an answer.
    """

    thinking: bool = True
    effort: str | None = "max"
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"
    response_format: Mapping[str, Any] | None = None
    generation_prompt: bool = True


def prompt_ids(tokenizer: Tokenizer, model_type: str, messages: Sequence[Message], frame: Frame) -> tuple[int, ...]:
    """Encode a conversation up to the point where the model is to go on.

    Args:
        tokenizer: the model's.
        model_type: "kimi_k3" or "kimi_linear".
        messages: role "system", "user", "assistant" or "tool", and a ``content`` of text or text parts.
        frame: tools, effort and what else the prompt says.

    Raises:
        RequestError: a message is malformed, or the model cannot do what is asked.
    """
    segments = (k3_segments if model_type == "kimi_k3" else linear_segments)(messages, frame)
    ids: list[int] = []
    for text, markup in segments:
        ids += [tokenizer.encode_markup(text)] if markup else tokenizer.encode_text(text)
    return tuple(ids)


def k3_segments(messages: Sequence[Message], frame: Frame) -> list[Segment]:
    """Render a conversation for Kimi K3; empty segments are left out."""
    out: list[Segment] = tools.declaration(frame.tools) if frame.tools else []
    if frame.thinking and frame.effort is not None:
        if frame.effort not in EFFORTS:
            raise RequestError(f"effort is {frame.effort!r}, want one of {', '.join(EFFORTS)}")
        text = EFFORT_TEXT.format(frame.effort)
        out += message({"role": "system", "type": "thinking-effort"}, [(text, False)])
    calls: list[tools.Call] = []
    results = 0  # since the last assistant message
    roles = [_role(at, said) for at, said in enumerate(messages)]
    for role, places in groupby(range(len(messages)), roles.__getitem__):
        run = list(places)
        if role == "tool":
            said = [messages[at] for at in run]
            for result, name, index in tools.ordered_results(run[0], said, calls, results):
                out += message({"role": "tool", "tool": name, "index": str(index)}, _content(run[0], result))
            results += len(run)
            continue
        for at in run:
            if role == "assistant":
                calls, results = tools.calls_of(at, messages[at]), 0
            out += _said(at, role, messages[at], calls, frame.thinking)
    out += tools.choice(frame.tool_choice)
    out += tools.response_format(frame.response_format or {})
    if frame.generation_prompt:
        out += opening("message", {"role": "assistant"}) + opening("think" if frame.thinking else "response", {})
    return [segment for segment in out if segment[0]]


def _said(at: int, role: str, said: Message, calls: Sequence[tools.Call], thinking: bool) -> list[Segment]:
    """A message of the system, the user or the assistant."""
    if role == "system" and said.get("tools"):
        return tools.declaration(said["tools"], tools.EXTENSION)
    attributes = {"role": role} | ({"name": str(said["name"])} if said.get("name") else {})
    body = _content(at, said)
    if role == "assistant":
        reasoning = str(said.get("reasoning_content") or said.get("reasoning") or "")
        thought = element("think", {}, [(reasoning, False)]) if thinking else []
        body = [*thought, *element("response", {}, body), *tools.render_calls(calls)]
    return message(attributes, body)


def linear_segments(messages: Sequence[Message], frame: Frame) -> list[Segment]:
    """Render a conversation for Kimi-Linear, which knows no tools."""
    if frame.tools or frame.response_format:
        raise RequestError("tools or a response_format are given, this model knows neither")
    out: list[Segment] = []
    for at, said in enumerate(messages):
        role = _role(at, said)
        if role == "tool" or said.get("tool_calls"):
            raise RequestError(f"messages[{at}] is about tools, this model knows none")
        out += [(f"<|im_{role}|>", True), (str(said.get("name") or role), False), ("<|im_middle|>", True)]
        out += [*_content(at, said), ("<|im_end|>", True)]
    if frame.generation_prompt:
        out += [("<|im_assistant|>", True), ("assistant", False), ("<|im_middle|>", True)]
    return [segment for segment in out if segment[0]]


def _role(at: int, said: Message) -> str:
    """Role of a message, or a :class:`RequestError` that names what is wrong."""
    if not isinstance(said, Mapping):
        raise RequestError(f"messages[{at}] is a {type(said).__name__}, want an object with role and content")
    for field, kind in FIELDS.items():
        if said.get(field) is not None and not isinstance(said[field], kind):
            found = type(said[field]).__name__
            raise RequestError(f"messages[{at}].{field} is a {found}, want a {kind.__name__}")
    role = said.get("role")
    role = {"developer": "system", "function": "tool"}.get(str(role), role)
    if role not in ROLES:
        raise RequestError(f"messages[{at}].role is {role!r}, want {', '.join(ROLES)}")
    return role


def _content(at: int, said: Message) -> list[Segment]:
    """Text of a message, or a :class:`RequestError` that names what is wrong."""
    content = said.get("content")
    if content is None or isinstance(content, str):
        return [(content or "", False)]
    if not isinstance(content, list):
        raise RequestError(f"messages[{at}].content is a {type(content).__name__}, want text or a list of parts")
    for part in content:
        if not (
            isinstance(part, Mapping) and str(part.get("type")) in TEXT_PARTS and isinstance(part.get("text"), str)
        ):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(f"messages[{at}].content has a part of type {kind!r}, want 'text'")
    return [(part["text"], False) for part in content]
