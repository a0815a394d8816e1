"""Tools in a Kimi K3 conversation: declarations, calls and results as segments.

    declaration   system message type="tool-declare": the tools as one line of sorted, compact JSON
    call          element(call tool="NAME" index="k"), one element(argument key="K" type="T") an argument
    result        message role="tool" tool="NAME" index="k"

Source: kimi-k3.md, section 7.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from engine.errors import RequestError
from engine.markup import Segment, element, message

Message = Mapping[str, Any]

DECLARATION = "# Tools\nHere are the available tools, described in JSONSchema."
EXTENSION = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools."
)
CHOICES = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
RESPONSE_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
TYPES = {
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    type(None): "null",
    dict: "object",
    list: "array",
}
_SPACE = " \t\n\r"


class Call(NamedTuple):
    """A tool call as a message states it."""

    id: str | None
    name: str
    arguments: Any  # a JSON object as text or parsed; None: no arguments


def compact(value: Any) -> str:
    """JSON with sorted keys and no spaces."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def declaration(tools: Sequence[Any], head: str = DECLARATION) -> list[Segment]:
    """System message that declares tools."""
    return message(
        {"role": "system", "type": "tool-declare"}, [(f"{head}\n\n```json\n{compact(list(tools))}\n```", False)]
    )


def choice(name: str) -> list[Segment]:
    """System message about ``tool_choice``; "auto" needs none."""
    if name == "auto":
        return []
    if name not in CHOICES:
        raise RequestError(f"tool_choice is {name!r}, want auto, none or required")
    return message({"role": "system", "type": "tool-choice"}, [(CHOICES[name], False)])


def response_format(wanted: Mapping[str, Any]) -> list[Segment]:
    """System message about ``response_format``; "text" needs none."""
    kind = wanted.get("type")
    if kind in (None, "text"):
        return []
    if kind not in ("json_object", "json_schema"):
        raise RequestError(f"response_format.type is {kind!r}, want text, json_object or json_schema")
    text = RESPONSE_FORMAT.format(kind)
    if kind == "json_schema":
        text += f"\nThe JSON data must match the following schema:\n```json\n{compact(schema_of(wanted))}\n```"
    return message({"role": "system", "type": "response-format"}, [(text, False)])


def schema_of(wanted: Mapping[str, Any]) -> Any:
    """The schema inside a ``response_format`` of type json_schema, named or inline.

    Raises:
        RequestError: there is none.
    """
    outer = wanted.get("json_schema")
    found = (outer.get("schema") if isinstance(outer, Mapping) else None) or wanted.get("schema")
    if not isinstance(found, Mapping):
        raise RequestError("response_format.json_schema.schema is missing, want a JSON schema")
    return found


def calls_of(at: int, said: Message) -> list[Call]:
    """Tool calls of the assistant message at place ``at``.

    Raises:
        RequestError: one is malformed.
    """
    calls = []
    for k, call in enumerate(said.get("tool_calls") or ()):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"messages[{at}].tool_calls[{k}] has no function.name, want the called tool's name")
        if not isinstance(call.get("id"), str | None):
            raise RequestError(f"messages[{at}].tool_calls[{k}].id is no text, want the call's id")
        calls.append(Call(call.get("id"), function["name"], function.get("arguments")))
    return calls


def render_calls(calls: Sequence[Call]) -> list[Segment]:
    """The ``tools`` element of an assistant message; nothing without calls."""
    if not calls:
        return []
    body: list[Segment] = []
    for k, call in enumerate(calls, 1):
        body += element("call", {"tool": call.name, "index": str(k)}, _arguments(call.arguments))
    return element("tools", {}, body)


def _arguments(arguments: Any) -> list[Segment]:
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return []
    if isinstance(arguments, Mapping):
        members = [(key, value, json.dumps(value, ensure_ascii=False)) for key, value in arguments.items()]
    else:
        try:
            members = list(_members(str(arguments)))
        except ValueError:
            return element("json", {"type": "object"}, [(str(arguments), False)])
    body: list[Segment] = []
    for key, value, literal in members:
        text = value if isinstance(value, str) else literal
        body += element("argument", {"key": str(key), "type": TYPES[type(value)]}, [(text, False)])
    return body


def _members(text: str) -> Iterator[tuple[str, Any, str]]:
    """Key, value and the value's own spelling of each member of a JSON object; what follows it is ignored.

    Raises:
        ValueError: the text does not begin with a JSON object.
    """
    decode = json.JSONDecoder().raw_decode

    def skip(at: int) -> int:
        while text[at : at + 1] and text[at] in _SPACE:
            at += 1
        return at

    at, wanted = skip(0), "{"
    while True:
        if text[at : at + 1] != wanted and not (wanted == "," and text[at : at + 1] == "}"):
            raise ValueError(f"no {wanted!r} at character {at}")
        if text[at] == "}":
            return
        at = skip(at + 1)
        if wanted == "{" and text[at : at + 1] == "}":
            return
        if text[at : at + 1] != '"':
            raise ValueError(f"no key at character {at}")
        key, at = decode(text, at)
        at = skip(at)
        if text[at : at + 1] != ":":
            raise ValueError(f"no ':' at character {at}")
        begin = skip(at + 1)
        value, at = decode(text, begin)
        yield key, value, text[begin:at]
        at, wanted = skip(at), ","


def ordered_results(
    at: int, run: Sequence[Message], calls: Sequence[Call], before: int
) -> list[tuple[Message, str, int]]:
    """Neighbouring results in the order of their calls, each with its tool's name and index.

    Args:
        at: place of the first in the conversation.
        run: messages of role "tool".
        calls: of the last assistant message.
        before: results since that message that are not in ``run``.

    Raises:
        RequestError: a result names no tool and none can be found for it.
    """
    place = {call.id: k for k, call in enumerate(calls) if call.id is not None}
    ids = [result.get("tool_call_id") for result in run]
    matched = all(i in place for i in ids) and len(set(ids)) == len(ids)
    if matched:
        run = sorted(run, key=lambda result: place[result["tool_call_id"]])
    out = []
    for k, result in enumerate(run, before):
        name = result.get("tool") or result.get("name")
        if matched:
            name = calls[place[result["tool_call_id"]]].name
        elif not name and k < len(calls):
            name = calls[k].name
        if not isinstance(name, str) or not name:
            raise RequestError(
                f"messages[{at + k - before}] is a tool result of no known tool, want tool_call_id or name"
            )
        out.append((result, name, k + 1))
    return out
