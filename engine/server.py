"""The HTTP server: one process, one event loop, routes in OpenAI's and Anthropic's shapes, one engine thread."""

import asyncio
import hmac
import socket
import time
import traceback
from importlib.metadata import version

from sanic import HTTPResponse, Request, Sanic
from sanic.exceptions import SanicException
from sanic.response import json as json_response
from sanic.response import text as text_response

from engine import handlers
from engine.api import ApiError
from engine.errors import CapacityError, EngineError, RequestError
from engine.handlers import Service, service_of
from engine.loop import Engine, QueueFull, Unready
from engine.messages import error_body
from engine.openapi import document


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
    app.add_route(_health, "/health", methods=["GET", "HEAD"])
    app.add_route(_models, "/v1/models", methods=["GET", "HEAD"], name="models")
    app.add_route(_models, "/v1/models/<name:path>", methods=["GET", "HEAD"], name="model")
    app.add_route(_openapi, "/openapi.json")
    app.add_route(_stats, "/stats")
    app.add_route(_metrics, "/metrics")
    app.add_route(handlers.chat, "/v1/chat/completions", methods=["POST"])
    app.add_route(handlers.completions, "/v1/completions", methods=["POST"])
    app.add_route(handlers.messages, "/v1/messages", methods=["POST"])
    app.add_route(handlers.count_tokens, "/v1/messages/count_tokens", methods=["POST"])
    app.add_route(handlers.tokenize, "/tokenize", methods=["POST"])
    app.add_route(handlers.detokenize, "/detokenize", methods=["POST"])
    return app


async def _admit(request: Request) -> HTTPResponse | None:
    """Answer a browser's preflight; ask for the API key, in constant time, everywhere but at /health."""
    if request.method == "OPTIONS":
        return HTTPResponse(status=204)
    key = service_of(request).api_key
    if key is None or request.path == "/health":
        return None
    given = request.headers.get("authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key", "")
    if hmac.compare_digest(given.encode(), key.encode()):
        return None
    raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")


async def _allow_origin(request: Request, response: HTTPResponse) -> None:
    cors = service_of(request).cors
    if cors is not None:
        response.headers["access-control-allow-origin"] = cors
        response.headers["access-control-allow-headers"] = "*"
        response.headers["access-control-allow-methods"] = "GET, POST, OPTIONS"


async def _failed(request: Request, error: Exception) -> HTTPResponse:
    """Every failure in one shape."""
    refusal = _refusal(error)
    headers = dict(getattr(error, "headers", {})) | ({"retry-after": "5"} if refusal.status in (429, 503) else {})
    body = error_body(refusal) if request.path.startswith("/v1/messages") else refusal.body()
    return json_response(body, refusal.status, headers)


def _refusal(error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case QueueFull():
            return ApiError(429, str(error), code="queue_full")
        case Unready():
            return ApiError(503, str(error), code="not_ready")
        case CapacityError():
            return ApiError(400, str(error), code="context_length_exceeded")
        case RequestError():
            return ApiError(400, str(error))
        case EngineError():
            return ApiError(500, str(error))
        case SanicException():
            return ApiError(error.status_code or 500, str(error), code={404: "not_found"}.get(error.status_code))
        case _:
            traceback.print_exception(error)
            return ApiError(500, f"{type(error).__name__} in the server")


async def _health(request: Request) -> HTTPResponse:
    engine = service_of(request).engine
    body = {"status": engine.phase, "model": service_of(request).name}
    return json_response(body | ({"problem": engine.problem} if engine.problem else {}), _ready(engine))


def _ready(engine: Engine) -> int:
    return 200 if engine.phase == "ready" else 503


async def _models(request: Request, name: str | None = None) -> HTTPResponse:
    service = service_of(request)
    card = {"id": service.name, "object": "model", "created": int(request.app.ctx.began), "owned_by": "rowstream"}
    card |= {"max_model_len": service.positions}
    if name is None:
        return json_response({"object": "list", "data": [card]})
    if name != service.name:
        raise ApiError(404, f"the model {name!r} is not here, want {service.name!r}", code="model_not_found")
    return json_response(card)


async def _openapi(request: Request) -> HTTPResponse:
    return json_response(document(version("rowstream")))


def _numbers(request: Request) -> dict[str, float]:
    engine = service_of(request).engine
    now = {"running": engine.running(), "waiting": engine.waiting(), "ready": engine.phase == "ready"}
    return engine.counters._asdict() | {name: int(value) for name, value in now.items()}


async def _stats(request: Request) -> HTTPResponse:
    uptime = round(time.time() - request.app.ctx.began, 3)
    return json_response({"model": service_of(request).name, "uptime_s": uptime} | _numbers(request))


async def _metrics(request: Request) -> HTTPResponse:
    lines = []
    for name, value in _numbers(request).items():
        kind = "gauge" if name in ("running", "waiting", "ready") else "counter"
        full = f"rowstream_{name}" + ("_total" if kind == "counter" else "")
        lines += [f"# TYPE {full} {kind}", f"{full} {value}"]
    return text_response("\n".join(lines) + "\n", content_type="text/plain; version=0.0.4")
