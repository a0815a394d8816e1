"""``GET /openapi.json``, made from the types that check the bodies."""

from typing import Any

import msgspec

from engine.api import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from engine.messages import CountRequest, MessagesRequest

BODIES: dict[str, type] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
GETS = ("/health", "/v1/models", "/stats", "/metrics")
ERRORS = {
    "400": "The body is wrong; the error names the field.",
    "401": "The API key is missing or wrong.",
    "429": "The queue is full.",
    "503": "The model is not ready.",
}


def document(version: str) -> dict[str, Any]:
    """The whole description; ``version`` is the program's."""
    schemas, components = msgspec.json.schema_components(
        list(BODIES.values()), ref_template="#/components/schemas/{name}"
    )
    refused = {status: {"description": text} for status, text in ERRORS.items()}
    answered = {"200": {"description": "The answer."}} | refused
    paths: dict[str, Any] = {path: {"get": {"responses": answered}} for path in GETS}
    for path, schema in zip(BODIES, schemas, strict=True):
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": {"requestBody": body, "responses": answered}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "rowstream", "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }
