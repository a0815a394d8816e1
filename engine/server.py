"""The HTTP server: one process, one event loop; each handler hands its request to the engine's thread and waits.

Routes in OpenAI's shapes (``engine.api``). A client that leaves ends its handler, which frees the sequence within a
step. While the engine is silent a stream carries comments, so that nothing between here and the client gives up.
"""

import asyncio
import hmac
import json
import socket
import time
import traceback
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sanic import HTTPResponse, Request, Sanic
from sanic.exceptions import SanicException
from sanic.response import json as json_response
from sanic.response import text as text_response

from engine import api
from engine.answer import Transcript, finish_reason
from engine.api import ApiError, Reply, Usage
from engine.chat import Frame, prompt_ids
from engine.config import ModelConfig
from engine.errors import CapacityError, EngineError, RequestError
from engine.loop import Busy, End, Engine, Event, Failure, Token
from engine.parser import PlainParser, parser_for
from engine.requests import Request as Job
from engine.requests import check_ids, sampling_for
from engine.tokenizer import Tokenizer

SILENCE_S = 10.0  # of a stream, before a comment
Events = AsyncGenerator[Event | None, None]
DEFAULT_TOKENS = 4096  # of an answer whose request does not say


@dataclass(frozen=True)
class Service:
    """What the handlers work with."""

    engine: Engine
    folder: Path
    cfg: ModelConfig
    tokenizer: Tokenizer
    positions: int  # tokens that one prompt and its answer may take
    api_key: str | None = None
    cors: str | None = None
    drain_s: float = 30.0
    body_limit: int = 32 * 2**20

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.folder.resolve().name


def serve(service: Service, sock: socket.socket) -> None:
    """Run the server on a bound socket until a signal ends it; the engine starts to load at once."""
    app = make_app(service)
    app.run(sock=sock, single_process=True, motd=False, access_log=False)


def make_app(service: Service) -> Sanic:
    """Routes, errors, and the engine's life around them."""
    app = Sanic("rowstream", configure_logging=False)
    app.config.REQUEST_MAX_SIZE = service.body_limit
    app.config.RESPONSE_TIMEOUT = app.config.REQUEST_TIMEOUT = 10**6  # a first token may take minutes
    app.config.GRACEFUL_SHUTDOWN_TIMEOUT = service.drain_s
    app.config.FALLBACK_ERROR_FORMAT = "json"
    app.ctx.service = service
    app.ctx.began = time.time()

    @app.before_server_start
    async def start(app: Sanic) -> None:
        service.engine.start()

    @app.before_server_stop
    async def stop(app: Sanic) -> None:
        await asyncio.to_thread(service.engine.drain, service.drain_s)

    app.on_request(_admit)
    app.on_response(_allow_origin)
    app.exception(Exception)(_failed)
    app.add_route(_health, "/health")
    app.add_route(_models, "/v1/models", name="models")
    app.add_route(_models, "/v1/models/<name:path>", name="model")
    app.add_route(_stats, "/stats")
    app.add_route(_metrics, "/metrics")
    app.add_route(_chat, "/v1/chat/completions", methods=["POST"])
    app.add_route(_completions, "/v1/completions", methods=["POST"])
    app.add_route(_tokenize, "/tokenize", methods=["POST"])
    app.add_route(_detokenize, "/detokenize", methods=["POST"])
    return app


def _service(request: Request) -> Service:
    return request.app.ctx.service


async def _admit(request: Request) -> HTTPResponse | None:
    """Answer a browser's preflight; ask for the API key, in constant time, everywhere but at /health."""
    if request.method == "OPTIONS":
        return HTTPResponse(status=204)
    key = _service(request).api_key
    if key is None or request.path == "/health":
        return None
    given = request.headers.get("authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key", "")
    if hmac.compare_digest(given.encode(), key.encode()):
        return None
    raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")


async def _allow_origin(request: Request, response: HTTPResponse) -> None:
    cors = _service(request).cors
    if cors is not None:
        response.headers["access-control-allow-origin"] = cors
        response.headers["access-control-allow-headers"] = "*"
        response.headers["access-control-allow-methods"] = "GET, POST, OPTIONS"


async def _failed(request: Request, error: Exception) -> HTTPResponse:
    """Every failure in one shape."""
    refusal = _refusal(error)
    headers = {"retry-after": "5"} if refusal.status in (429, 503) else {}
    return json_response(refusal.body(), refusal.status, headers)


def _refusal(error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case Busy():
            return ApiError(429 if "waiting" in str(error) else 503, str(error), code="busy")
        case CapacityError():
            return ApiError(400, str(error), code="context_length_exceeded")
        case RequestError():
            return ApiError(400, str(error))
        case SanicException():
            return ApiError(error.status_code or 500, str(error), code={404: "not_found"}.get(error.status_code))
        case _:
            traceback.print_exception(error)
            return ApiError(500, f"{type(error).__name__} in the server")


async def _health(request: Request) -> HTTPResponse:
    engine = _service(request).engine
    body = {"status": engine.phase, "model": _service(request).name}
    return json_response(body | ({"problem": engine.problem} if engine.problem else {}), _ready(engine))


def _ready(engine: Engine) -> int:
    return 200 if engine.phase == "ready" else 503


async def _models(request: Request, name: str | None = None) -> HTTPResponse:
    service = _service(request)
    card = {"id": service.name, "object": "model", "created": int(request.app.ctx.began), "owned_by": "rowstream"}
    card |= {"max_model_len": service.positions}
    if name is None:
        return json_response({"object": "list", "data": [card]})
    if name != service.name:
        raise ApiError(404, f"the model {name!r} is not here, want {service.name!r}", code="model_not_found")
    return json_response(card)


def _numbers(request: Request) -> dict[str, float]:
    engine = _service(request).engine
    now = {"running": engine.running(), "waiting": engine.waiting(), "ready": engine.phase == "ready"}
    return engine.counters._asdict() | {name: int(value) for name, value in now.items()}


async def _stats(request: Request) -> HTTPResponse:
    uptime = round(time.time() - request.app.ctx.began, 3)
    return json_response({"model": _service(request).name, "uptime_s": uptime} | _numbers(request))


async def _metrics(request: Request) -> HTTPResponse:
    lines = []
    for name, value in _numbers(request).items():
        kind = "gauge" if name in ("running", "waiting", "ready") else "counter"
        full = f"rowstream_{name}" + ("_total" if kind == "counter" else "")
        lines += [f"# TYPE {full} {kind}", f"{full} {value}"]
    return text_response("\n".join(lines) + "\n", content_type="text/plain; version=0.0.4")


async def _tokenize(request: Request) -> HTTPResponse:
    service, body = _service(request), api.decode(request.body, api.TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "the body has both or neither of prompt and messages, want one", param="prompt")
    if body.prompt is not None:
        ids = service.tokenizer.encode_text(body.prompt)
    else:
        ids = list(prompt_ids(service.tokenizer, service.cfg.model_type, body.messages or [], Frame()))
    return json_response({"tokens": ids, "count": len(ids), "max_model_len": service.positions})


async def _detokenize(request: Request) -> HTTPResponse:
    service, body = _service(request), api.decode(request.body, api.DetokenizeRequest)
    check_ids(tuple(body.tokens), service.cfg.vocab)
    return json_response({"prompt": service.tokenizer.decode_bytes(body.tokens).decode("utf-8", "replace")})


async def _chat(request: Request) -> HTTPResponse | None:
    service, body = _service(request), api.decode(request.body, api.ChatRequest)
    body.expect_supported()
    frame = body.frame()
    ids = await asyncio.to_thread(prompt_ids, service.tokenizer, service.cfg.model_type, body.messages, frame)
    parser = parser_for(service.tokenizer, service.cfg.model_type, thinking=frame.thinking)
    job = _job(service, ids, body, body.max_completion_tokens or body.max_tokens)
    return await _answer(request, job, Transcript(parser, body.stops()), body, Reply(service.name, chat=True))


async def _completions(request: Request) -> HTTPResponse | None:
    service, body = _service(request), api.decode(request.body, api.CompletionRequest)
    body.expect_supported()
    ids = body.prompt if isinstance(body.prompt, list) else service.tokenizer.encode_text(body.prompt)
    job = _job(service, tuple(ids), body, body.max_tokens or 16)
    transcript = Transcript(PlainParser(service.tokenizer), body.stops())
    return await _answer(request, job, transcript, body, Reply(service.name, chat=False))


def _job(service: Service, ids: tuple[int, ...], options: api.Options, max_tokens: int | None) -> Job:
    """What the engine is to do; too long a prompt is refused here."""
    check_ids(ids, service.cfg.vocab)
    room = service.positions - len(ids)
    if room < (max_tokens or 1):
        raise CapacityError(
            f"prompt is too long: {len(ids)} tokens and {max_tokens or 1} of an answer > {service.positions} maximum"
        )
    sampling = sampling_for(service.folder, options.sampling())
    stop_ids = service.tokenizer.end_ids | set(service.cfg.eos_ids)
    return Job(ids, sampling, max_tokens or min(room, DEFAULT_TOKENS), stop_ids)


async def _answer(
    request: Request, job: Job, transcript: Transcript, options: api.Options, reply: Reply
) -> HTTPResponse | None:
    """Run a job, as one object or as a stream of server-sent events."""
    usage = Usage(len(job.prompt_ids))
    events = _events(_service(request).engine, job)
    if options.stream:
        with_usage = options.stream_options is not None and options.stream_options.include_usage
        await _stream(request, events, transcript, reply, usage, with_usage)
        return None
    length = False
    try:
        async for event in events:
            length = _take(event, transcript, usage)[1]
            if transcript.stopped:
                break
    finally:
        await events.aclose()
    transcript.finish()
    texts = {channel: transcript.text(channel) for channel in ("content", "reasoning")}
    reason = finish_reason(transcript, length=length)
    return json_response(reply.whole(texts, transcript.tool_calls(), reason, usage))


def _take(event: Event | None, transcript: Transcript, usage: Usage) -> tuple[list, bool]:
    """Deltas of one event, and whether the answer was cut for its length."""
    match event:
        case None:
            return [], False
        case Failure(message):
            raise EngineError(message)
        case End(length):
            return [], length
    usage.completion_tokens += 1
    deltas = transcript.feed(event.id)
    usage.reasoning_tokens += any(delta.channel == "reasoning" for delta in deltas)
    return deltas, False


async def _stream(
    request: Request, events: Events, transcript: Transcript, reply: Reply, usage: Usage, with_usage: bool
) -> None:
    first = await anext(events)  # a queue that is full refuses before there are headers
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    response = await request.respond(content_type="text/event-stream", headers=headers)
    length = False

    async def send(*chunks: dict[str, Any]) -> None:
        for chunk in chunks:
            await response.send(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n")

    try:
        await send(*reply.begin())
        event = first
        while True:
            if event is None:
                await response.send(": waiting\n\n")
            deltas, length = _take(event, transcript, usage)
            await send(*map(reply.delta, deltas))
            if transcript.stopped or isinstance(event, End):
                break
            event = await anext(events)
        await send(*map(reply.delta, transcript.finish()))
        await send(*reply.end(finish_reason(transcript, length=length), usage if with_usage else None))
    except EngineError as error:
        await send(ApiError(500, str(error)).body())
    finally:
        await events.aclose()
    await response.send("data: [DONE]\n\n")
    await response.eof()


async def _events(engine: Engine, job: Job) -> Events:
    """Events of a job as the engine makes them; None at once when it is queued, and after each silence.

    Closing the iterator before its end cancels the job.
    """
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Event]()

    def listen(event: Event) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(queue.put_nowait, event)

    sequence = engine.submit(job, listen)
    try:
        yield None
        while True:
            try:
                event = await asyncio.wait_for(queue.get(), SILENCE_S)
            except TimeoutError:
                yield None
                continue
            yield event
            if not isinstance(event, Token):
                return
    finally:
        engine.cancel(sequence)
