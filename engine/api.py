"""Requests and answers of the HTTP API: declared once, checked by msgspec, rendered in OpenAI's shapes.

A field that is known and wrong is refused by name; a field that is not known is ignored, as clients expect.
"""

import json
import re
import time
import uuid
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from engine.answer import Transcript
from engine.chat import Frame
from engine.errors import EngineError
from engine.parser import Delta

Probability = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1)]
EFFORTS = {"minimal": "low", "low": "low", "medium": "high", "high": "high", "xhigh": "max", "max": "max"}
NO_EFFORT = ("none", "off")
T = TypeVar("T")


class ApiError(EngineError):
    """A refusal with its HTTP status and, where there is one, the field at fault."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class StreamOptions(Struct):
    """What a stream holds besides text."""

    include_usage: bool | None = None


class Options(Struct, kw_only=True):
    """What every kind of completion may ask for."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Probability | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: Count | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    def sampling(self) -> dict[str, Any]:
        """What was chosen of the sampling; top_k -1 means 0, all tokens."""
        chosen = {name: getattr(self, name) for name in ("temperature", "top_p", "min_p")}
        top_k = 0 if self.top_k == -1 else self.top_k
        return chosen | {"top_k": top_k, "seed": self.seed}

    def stops(self) -> list[str]:
        """Strings that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else [stop for stop in self.stop or () if stop]

    def wants_usage(self) -> bool:
        """Whether a stream shall end with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def expect_supported(self) -> None:
        """Raise :class:`ApiError` for what this version cannot do."""
        for name, off in (("n", 1), ("presence_penalty", 0), ("frequency_penalty", 0), ("logit_bias", {})):
            value = getattr(self, name)
            if value is not None and value != off:
                raise ApiError(400, f"{name} is {value}, this version knows {off} alone", param=name)


class ChatRequest(Options, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    logprobs: bool | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as ``engine.chat`` takes them."""
        return self.messages

    def frame(self) -> Frame:
        """What surrounds the messages in the prompt."""
        if self.tool_choice not in (None, "auto", "none"):
            raise ApiError(400, "tool_choice is no auto or none, this version cannot force a call", param="tool_choice")
        kind = (self.response_format or {}).get("type")
        if kind not in (None, "text"):
            raise ApiError(400, f"response_format is {kind}, this version knows text alone", param="response_format")
        if self.logprobs:
            raise ApiError(400, "logprobs is true, this version has none", param="logprobs")
        effort, known = self.reasoning_effort, [*NO_EFFORT, *EFFORTS]
        if effort is not None and effort not in known:
            raise ApiError(400, f"reasoning_effort is {effort!r}, want {', '.join(known)}", param="reasoning_effort")
        return Frame(
            thinking=effort not in NO_EFFORT,
            effort=EFFORTS.get(effort or "max"),
            tools=self.tools or (),
            tool_choice=str(self.tool_choice or "auto"),
        )


class CompletionRequest(Options, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[int]
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None

    def expect_supported(self) -> None:
        super().expect_supported()
        for name in ("echo", "suffix", "logprobs"):
            if getattr(self, name):
                raise ApiError(400, f"{name} is set, this version has none", param=name)


class TokenizeRequest(Struct, kw_only=True):
    """Body of POST /tokenize: text, or messages as of a chat."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[Annotated[int, Meta(ge=0)]]


class Usage(Struct):
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int = 0
    reasoning_tokens: int = 0

    def body(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


def decode(body: bytes, kind: type[T]) -> T:
    """Read a request body.

    Raises:
        ApiError: it is no JSON object of that kind; names the field at fault.
    """
    try:
        return msgspec.json.decode(body or b"", type=kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        missing = re.search("required field `([^`]+)`", message)
        param = ".".join(filter(None, [path.rstrip("`").strip("."), missing and missing[1]])) or None
        raise ApiError(400, f"{param or 'the body'}: {message}", param=param) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None


def event(data: dict[str, Any] | str, name: str | None = None) -> str:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return ("" if name is None else f"event: {name}\n") + f"data: {text}\n\n"


class Reply:
    """Shapes one answer, whole or as a stream of server-sent events.

    Attributes:
        silence: what a stream carries while the engine is silent.
    """

    silence = ": waiting\n\n"

    def __init__(self, model: str, *, chat: bool, with_usage: bool = False) -> None:
        self._chat, self._with_usage = chat, with_usage
        self._id = ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex
        self._model, self._created = model, int(time.time())
        self._call_ids: dict[int, str] = {}

    def whole(self, transcript: Transcript, reason: str, usage: Usage) -> dict[str, Any]:
        """The answer in one object."""
        content = transcript.text("content")
        if self._chat:
            message: dict[str, Any] = {"role": "assistant", "content": content}
            if thought := transcript.text("reasoning"):
                message["reasoning_content"] = thought
            if calls := transcript.tool_calls():
                message["content"] = content or None
                message["tool_calls"] = [
                    {"id": self._call_id(k), "type": "function", "function": call._asdict()}
                    for k, call in enumerate(calls)
                ]
            choice: dict[str, Any] = {"message": message}
        else:
            choice = {"text": content}
        choice |= {"index": 0, "finish_reason": reason, "logprobs": None}
        return self._object("") | {"choices": [choice], "usage": usage.body()}

    def begin(self, usage: Usage) -> str:
        """First frames of a stream."""
        return self._chunk({"role": "assistant", "content": ""}) if self._chat else ""

    def delta(self, delta: Delta) -> str:
        """Frame with new text."""
        if not self._chat:
            return self._chunk(delta.text)
        if delta.call is None:
            return self._chunk({"reasoning_content" if delta.channel == "reasoning" else "content": delta.text})
        call: dict[str, Any] = {"index": delta.call}
        if delta.channel == "tool_name":
            call |= {"id": self._call_id(delta.call), "type": "function"}
            call["function"] = {"name": delta.text, "arguments": ""}
        else:
            call["function"] = {"arguments": delta.text}
        return self._chunk({"tool_calls": [call]})

    def end(self, reason: str, transcript: Transcript, usage: Usage) -> str:
        """Last frames; if usage is wanted, one without choices holds it."""
        out = self._chunk({} if self._chat else "", reason)
        if self._with_usage:
            out += event(self._object(".chunk") | {"choices": [], "usage": usage.body()})
        return out + event("[DONE]")

    def failed(self, refusal: ApiError) -> str:
        """Frames of a failure after the stream began."""
        return event(refusal.body()) + event("[DONE]")

    def _chunk(self, delta: Any, reason: str | None = None) -> str:
        choice = {"index": 0, "delta" if self._chat else "text": delta, "finish_reason": reason, "logprobs": None}
        return event(self._object(".chunk") | {"choices": [choice]})

    def _object(self, suffix: str) -> dict[str, Any]:
        kind = f"chat.completion{suffix}" if self._chat else "text_completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _call_id(self, call: int) -> str:
        return self._call_ids.setdefault(call, f"call_{uuid.uuid4().hex[:24]}")
