"""OpenAI's routes, as their client libraries ask for them."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from kserve.protocol.rest.server import metrics_handler
from kserve.utils.utils import generate_uuid
from starlette.exceptions import HTTPException
from starlette.responses import Response

from hybridc.generation import GenerationSession
from hybridc.generation.text import TextStream
from hybridc.serving.chat.requests import (
    ChatRequest,
    CompletionRequest,
    RefusedRequest,
    asked_chat,
    asked_completion,
)
from hybridc.serving.chat.scheduler import Generation, Scheduler
from hybridc.serving.chat.words import Words
from hybridc.serving.metrics import REFUSED
from hybridc.serving.refusals import STATUSES, malformed, refusal


@dataclass(slots=True)
class Decoder:
    """A decoder that is served."""

    name: str
    session: GenerationSession
    """Its sequences are the scheduler's."""
    scheduler: Scheduler
    words: Words
    created: int = field(default_factory=lambda: int(time.time()))
    is_stopping: bool = False
    """Requests are still answered, but no more should be sent."""


@dataclass(frozen=True, slots=True)
class _Form:
    """How answers of a route are written."""

    kind: str
    chunk_kind: str
    prefix: str

    def choice(self, text: str, reason: str | None, *, is_chunk: bool, is_first: bool) -> dict[str, Any]:
        found = {"index": 0, "finish_reason": reason, "logprobs": None}
        if self.prefix == "cmpl":
            return {**found, "text": text}
        role = {"role": "assistant"} if is_first or not is_chunk else {}
        return {**found, "delta" if is_chunk else "message": {**role, "content": text}}


_COMPLETION = _Form("text_completion", "text_completion", "cmpl")
_CHAT = _Form("chat.completion", "chat.completion.chunk", "chatcmpl")


def routes(decoder: Decoder) -> FastAPI:
    """The application: completions, chats, the model, its health and metrics."""
    app = FastAPI(title="hybridc", docs_url=None, redoc_url=None, openapi_url=None)

    async def completions(request: CompletionRequest, raw: Request) -> Response:
        _check_model(request.model, decoder)
        asked = asked_completion(request, decoder.words, decoder.session)
        return await _answered(decoder, request, await decoder.scheduler.submit(asked), _COMPLETION, raw)

    async def chats(request: ChatRequest, raw: Request) -> Response:
        _check_model(request.model, decoder)
        asked = asked_chat(request, decoder.words, decoder.session)
        return await _answered(decoder, request, await decoder.scheduler.submit(asked), _CHAT, raw)

    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(decoder)]}

    async def model(name: str) -> dict[str, Any]:
        _check_model(name, decoder)
        return _model(decoder)

    async def health() -> JSONResponse:
        status = "stopping" if decoder.is_stopping else "ok"
        return JSONResponse({"status": status}, 503 if decoder.is_stopping else 200)

    app.add_api_route("/v1/completions", completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/chat/completions", chats, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", model, methods=["GET"])
    app.add_api_route("/health", health, methods=["GET"], response_model=None)
    app.add_api_route("/metrics", metrics_handler, methods=["GET"])
    for kind in (*STATUSES, RefusedRequest, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _refuse)
    return app


def refused(status: int, text: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    """An error as OpenAI's clients read it."""
    REFUSED.labels("http", status).inc()
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return JSONResponse(_error(status, text, param, code), status, headers)


def _error(status: int, text: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": text, "type": kind, "param": param, "code": code}}


async def _refuse(_: Any, error: Exception) -> JSONResponse:
    if isinstance(error, RefusedRequest):
        status = 404 if error.code == "model_not_found" else 400
        return refused(status, str(error), error.param, error.code)
    if isinstance(error, RequestValidationError):
        return refused(400, malformed(error.errors()))
    if isinstance(error, HTTPException):
        return refused(error.status_code, str(error.detail))
    found = refusal(error)
    return refused(found.http_status, found.text)


def _check_model(name: str, decoder: Decoder) -> None:
    if name != decoder.name:
        text = f"there is no model {name!r}: it is called {decoder.name!r}"
        raise RefusedRequest(text, "model", "model_not_found")


def _model(decoder: Decoder) -> dict[str, Any]:
    return {"id": decoder.name, "object": "model", "created": decoder.created, "owned_by": "hybridc"}


async def _answered(
    decoder: Decoder,
    request: CompletionRequest | ChatRequest,
    generation: Generation,
    form: _Form,
    raw: Request,
) -> Response:
    common = {"id": f"{form.prefix}-{generate_uuid()}", "created": int(time.time()), "model": decoder.name}
    pieces = _pieces(decoder.words, generation, request.stops)
    if request.stream:
        head = {**common, "object": form.chunk_kind}
        chunks = _chunks(pieces, generation, form, head, has_usage=request.has_usage)
        return StreamingResponse(chunks, media_type="text/event-stream")
    text, reason = "", None
    async for piece, last in pieces:
        text, reason = text + piece, last
        if await raw.is_disconnected():
            generation.give_up()
    choice = form.choice(text, reason, is_chunk=False, is_first=True)
    head = {**common, "object": form.kind}
    return JSONResponse({**head, "choices": [choice], "usage": _usage(generation)})


async def _pieces(
    words: Words, generation: Generation, stops: tuple[str, ...]
) -> AsyncIterator[tuple[str, str | None]]:
    """Text as it comes, and with the last of it why it ends."""
    stream, reason = TextStream(words.decode, stops), "length"
    try:
        async for token in generation.tokens():
            if token in generation.asked.stop_ids:
                reason = "stop"
                break
            text = stream.push(token)
            if stream.is_stopped:
                reason = "stop"
                yield text, None
                break
            yield text, None
        yield stream.finish(), reason
    finally:
        generation.give_up()


async def _chunks(
    pieces: AsyncIterator[tuple[str, str | None]],
    generation: Generation,
    form: _Form,
    head: dict[str, Any],
    *,
    has_usage: bool,
) -> AsyncIterator[str]:
    """Server-sent events. The client's end of the connection ends the pieces."""
    is_first = True
    try:
        async for text, reason in pieces:
            if text or reason or is_first:
                choice = form.choice(text, reason, is_chunk=True, is_first=is_first)
                yield _event({**head, "choices": [choice]})
                is_first = False
    except Exception as error:
        found = refusal(error)
        yield _event(_error(found.http_status, found.text))
        return
    finally:
        generation.give_up()
    if has_usage:
        yield _event({**head, "choices": [], "usage": _usage(generation)})
    yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def _usage(generation: Generation) -> dict[str, Any]:
    prompt, new = len(generation.asked.prompt), generation.count
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": generation.cached},
    }
