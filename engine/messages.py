"""Anthropic's Messages API: their bodies to this engine's conversations, its deltas to their events.

A stream opens with ``message_start``; each run of one kind of text is a content block with its start, deltas and stop;
``message_delta`` says why it ended.
"""

import json
import uuid
from typing import Annotated, Any

from msgspec import Meta, Struct

from engine.answer import Transcript
from engine.api import ApiError, Count, Probability, Usage, event
from engine.chat import Frame
from engine.parser import Delta

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
ERRORS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
ERRORS |= {405: "invalid_request_error", 429: "rate_limit_error", 503: "overloaded_error"}
Blocks = str | list[dict[str, Any]]


class CountRequest(Struct, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    model: str | None = None
    system: Blocks | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as ``engine.chat`` takes them."""
        out = [] if self.system is None else [{"role": "system", "content": _text("system", self.system)}]
        for at, message in enumerate(self.messages):
            out += _converted(f"messages[{at}]", message)
        return out

    def frame(self) -> Frame:
        """What surrounds the messages in the prompt."""
        choice = (self.tool_choice or {}).get("type", "auto")
        if choice not in ("auto", "none"):
            raise ApiError(
                400, f"tool_choice.type is {choice!r}, this version cannot force a call", param="tool_choice"
            )
        thinking = (self.thinking or {}).get("type", "enabled") != "disabled"
        return Frame(
            thinking=thinking, tools=[_tool(k, tool) for k, tool in enumerate(self.tools or ())], tool_choice=choice
        )


class MessagesRequest(CountRequest, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Probability | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None

    def sampling(self) -> dict[str, Any]:
        """What was chosen of the sampling."""
        return {name: getattr(self, name) for name in ("temperature", "top_k", "top_p")}

    def stops(self) -> list[str]:
        """Strings that end the answer."""
        return self.stop_sequences or []


def _tool(k: int, tool: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(tool.get("name"), str):
        raise ApiError(400, f"tools[{k}].name is missing, want the tool's name", param=f"tools[{k}].name")
    schema = tool.get("input_schema") or {}
    function = {"name": tool["name"], "parameters": {"type": "object"} | schema}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _text(where: str, content: Any) -> str:
    """Text of a string or of text blocks."""
    if isinstance(content, str):
        return content
    parts = []
    for k, block in enumerate(content if isinstance(content, list) else [content]):
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            kind = block.get("type") if isinstance(block, dict) else type(block).__name__
            raise ApiError(400, f"{where}[{k}] is a block of type {kind!r}, want text", param=where)
        parts.append(block["text"])
    return "".join(parts)


def _converted(where: str, message: dict[str, Any]) -> list[dict[str, Any]]:
    """One message as one or, where it brings tool results, several."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise ApiError(400, f"{where}.role is {role!r}, want user or assistant", param=f"{where}.role")
    if not isinstance(content, list):
        return [{"role": role, "content": _text(f"{where}.content", content if content is not None else "")}]
    results, texts, thoughts, calls = [], [], [], []
    for k, block in enumerate(content):
        at = f"{where}.content[{k}]"
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "thinking", "thinking": str(text)} if role == "assistant":
                thoughts.append(text)
            case {"type": "redacted_thinking"} if role == "assistant":
                pass
            case {"type": "tool_use", "id": str(call), "name": str(name), "input": dict(given)} if role == "assistant":
                calls.append({"id": call, "function": {"name": name, "arguments": given}})
            case {"type": "tool_result", "tool_use_id": str(call), **rest} if role == "user":
                text = _text(f"{at}.content", rest.get("content") or "")
                text = f"Error: {text}" if rest.get("is_error") else text
                results.append({"role": "tool", "tool_call_id": call, "content": text})
            case _:
                kind = block.get("type") if isinstance(block, dict) else type(block).__name__
                raise ApiError(400, f"{at} is a {kind!r} block that {role} messages cannot hold here", param=at)
    said: dict[str, Any] = {"role": role, "content": "".join(texts)}
    if thoughts:
        said["reasoning_content"] = "".join(thoughts)
    if calls:
        said["tool_calls"] = calls
    return [*results, said] if texts or not results else results


def error_body(refusal: ApiError) -> dict[str, Any]:
    """Anthropic's error object."""
    return {"type": "error", "error": {"type": ERRORS.get(refusal.status, "api_error"), "message": str(refusal)}}


class MessagesReply:
    """Shapes one answer; the same methods as ``engine.api.Reply``."""

    silence = event({"type": "ping"}, "ping")

    def __init__(self, model: str) -> None:
        self._id, self._model = f"msg_{uuid.uuid4().hex}", model
        self._block = -1
        self._open: tuple[str, int | None] | None = None

    def whole(self, transcript: Transcript, reason: str, usage: Usage) -> dict[str, Any]:
        """The answer in one object."""
        content: list[dict[str, Any]] = []
        if thought := transcript.text("reasoning"):
            content.append({"type": "thinking", "thinking": thought, "signature": ""})
        calls = transcript.tool_calls()
        if (text := transcript.text("content")) or not calls:
            content.append({"type": "text", "text": text})
        for call in calls:
            try:
                given = json.loads(call.arguments)
            except ValueError:
                given = {"raw": call.arguments}
            content.append({"type": "tool_use", "id": _call_id(), "name": call.name, "input": given})
        return self._message(usage) | {"content": content} | self._stop(reason, transcript)

    def begin(self, usage: Usage) -> str:
        """First frames of a stream."""
        return event({"type": "message_start", "message": self._message(Usage(usage.prompt_tokens))}, "message_start")

    def delta(self, delta: Delta) -> str:
        """Frames with new text."""
        kind = "tool" if delta.call is not None else delta.channel
        out = ""
        if self._open != (kind, delta.call):
            out = self._close()
            self._block, self._open = self._block + 1, (kind, delta.call)
            starts = {
                "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
                "content": {"type": "text", "text": ""},
                "tool": {"type": "tool_use", "id": _call_id(), "name": delta.text, "input": {}},
            }
            out += self._event("content_block_start", content_block=starts[kind])
            if delta.channel == "tool_name":
                return out
        pieces = {
            "reasoning": {"type": "thinking_delta", "thinking": delta.text},
            "content": {"type": "text_delta", "text": delta.text},
            "tool": {"type": "input_json_delta", "partial_json": delta.text},
        }
        return out + self._event("content_block_delta", delta=pieces[kind])

    def end(self, reason: str, transcript: Transcript, usage: Usage) -> str:
        """Last frames."""
        last = {"type": "message_delta", "delta": self._stop(reason, transcript)}
        return (
            self._close()
            + event(last | {"usage": _counts(usage)}, "message_delta")
            + event({"type": "message_stop"}, "message_stop")
        )

    def failed(self, refusal: ApiError) -> str:
        """Frames of a failure after the stream began."""
        return event(error_body(refusal), "error")

    def _message(self, usage: Usage) -> dict[str, Any]:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": [],
            "stop_reason": None, "stop_sequence": None, "usage": _counts(usage),
        }  # fmt: skip

    def _stop(self, reason: str, transcript: Transcript) -> dict[str, Any]:
        found = transcript.stop_string
        return {"stop_reason": STOP_REASONS[reason] if found is None else "stop_sequence", "stop_sequence": found}

    def _close(self) -> str:
        if self._open is None:
            return ""
        kind, self._open = self._open[0], None
        signature = {"type": "signature_delta", "signature": ""}
        before = self._event("content_block_delta", delta=signature) if kind == "reasoning" else ""
        return before + self._event("content_block_stop")

    def _event(self, name: str, **rest: Any) -> str:
        return event({"type": name, "index": self._block} | rest, name)


def _counts(usage: Usage) -> dict[str, int]:
    return {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}


def _call_id() -> str:
    return f"toolu_{uuid.uuid4().hex[:24]}"
