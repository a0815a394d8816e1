"""Handlers that make tokens or count them: from a body to a prompt, through the engine, to an answer or a stream.

A client that leaves ends its handler, which frees the sequence within a step. While the engine is silent a stream
carries comments or pings, so that nothing between here and the client gives up.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sanic import HTTPResponse, Request
from sanic.response import json as json_response

from engine import api
from engine.answer import Transcript, finish_reason
from engine.api import ApiError, Reply, Usage
from engine.chat import Frame, prompt_ids
from engine.config import ModelConfig
from engine.errors import CapacityError, EngineError
from engine.loop import End, Engine, Event, Failure, Token
from engine.messages import CountRequest, MessagesReply, MessagesRequest
from engine.parser import Delta, PlainParser, parser_for
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


def service_of(request: Request) -> Service:
    """What the application was made with."""
    return request.app.ctx.service


async def tokenize(request: Request) -> HTTPResponse:
    service, body = service_of(request), api.decode(request.body, api.TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "the body has both or neither of prompt and messages, want one", param="prompt")
    if body.prompt is not None:
        ids = service.tokenizer.encode_text(body.prompt)
    else:
        ids = list(prompt_ids(service.tokenizer, service.cfg.model_type, body.messages or [], Frame()))
    return json_response({"tokens": ids, "count": len(ids), "max_model_len": service.positions})


async def detokenize(request: Request) -> HTTPResponse:
    service, body = service_of(request), api.decode(request.body, api.DetokenizeRequest)
    check_ids(tuple(body.tokens), service.cfg.vocab)
    return json_response({"prompt": service.tokenizer.decode_bytes(body.tokens).decode("utf-8", "replace")})


async def chat(request: Request) -> HTTPResponse | None:
    body = api.decode(request.body, api.ChatRequest)
    body.expect_supported()
    reply = Reply(service_of(request).name, chat=True, with_usage=body.wants_usage())
    return await _converse(request, body, body.max_completion_tokens or body.max_tokens, reply)


async def completions(request: Request) -> HTTPResponse | None:
    service, body = service_of(request), api.decode(request.body, api.CompletionRequest)
    body.expect_supported()
    ids = body.prompt if isinstance(body.prompt, list) else service.tokenizer.encode_text(body.prompt)
    job = _job(service, tuple(ids), body.sampling(), body.max_tokens or 16)
    transcript = Transcript(PlainParser(service.tokenizer), body.stops())
    reply = Reply(service.name, chat=False, with_usage=body.wants_usage())
    return await _answer(request, job, transcript, reply, stream=bool(body.stream))


async def messages(request: Request) -> HTTPResponse | None:
    body = api.decode(request.body, MessagesRequest)
    return await _converse(request, body, body.max_tokens, MessagesReply(service_of(request).name))


async def _converse(
    request: Request, body: api.ChatRequest | MessagesRequest, max_tokens: int | None, reply: Reply | MessagesReply
) -> HTTPResponse | None:
    """Answer a conversation, of whichever API."""
    service, frame = service_of(request), body.frame()
    ids = await _prompt(service, body.conversation(), frame)
    parser = parser_for(service.tokenizer, service.cfg.model_type, thinking=frame.thinking)
    job = _job(service, ids, body.sampling(), max_tokens)
    return await _answer(request, job, Transcript(parser, body.stops()), reply, stream=bool(body.stream))


async def count_tokens(request: Request) -> HTTPResponse:
    body = api.decode(request.body, CountRequest)
    ids = await _prompt(service_of(request), body.conversation(), body.frame())
    return json_response({"input_tokens": len(ids)})


async def _prompt(service: Service, messages: list[dict[str, Any]], frame: Frame) -> tuple[int, ...]:
    """Encode a conversation off the event loop: a long one takes its time."""
    return await asyncio.to_thread(prompt_ids, service.tokenizer, service.cfg.model_type, messages, frame)


def _job(service: Service, ids: tuple[int, ...], chosen: dict[str, Any], max_tokens: int | None) -> Job:
    """What the engine is to do; too long a prompt is refused here."""
    check_ids(ids, service.cfg.vocab)
    room = service.positions - len(ids)
    if room < (max_tokens or 1):
        raise CapacityError(
            f"prompt is too long: {len(ids)} tokens and {max_tokens or 1} of an answer > {service.positions} maximum"
        )
    stop_ids = service.tokenizer.end_ids | set(service.cfg.eos_ids)
    return Job(ids, sampling_for(service.folder, chosen), max_tokens or min(room, DEFAULT_TOKENS), stop_ids)


async def _answer(
    request: Request, job: Job, transcript: Transcript, reply: Reply | MessagesReply, *, stream: bool
) -> HTTPResponse | None:
    """Run a job, as one object or as a stream of server-sent events."""
    usage = Usage(len(job.prompt_ids))
    events = _events(service_of(request).engine, job)
    if stream:
        await _stream(request, events, transcript, reply, usage)
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
    return json_response(reply.whole(transcript, finish_reason(transcript, length=length), usage))


def _take(event: Event | None, transcript: Transcript, usage: Usage) -> tuple[list[Delta], bool]:
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
    request: Request, events: Events, transcript: Transcript, reply: Reply | MessagesReply, usage: Usage
) -> None:
    event = await anext(events)  # a queue that is full refuses before there are headers
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    response = await request.respond(content_type="text/event-stream; charset=utf-8", headers=headers)
    try:
        await response.send(reply.begin(usage))
        while True:
            if event is None:
                await response.send(reply.silence)
            deltas, length = _take(event, transcript, usage)
            await response.send("".join(map(reply.delta, deltas)))
            if transcript.stopped or isinstance(event, End):
                break
            event = await anext(events)
        await response.send("".join(map(reply.delta, transcript.finish())))
        await response.send(reply.end(finish_reason(transcript, length=length), transcript, usage))
    except EngineError as error:
        await response.send(reply.failed(ApiError(500, str(error))))
    finally:
        await events.aclose()
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
