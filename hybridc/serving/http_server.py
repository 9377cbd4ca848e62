"""The protocol over HTTP: KServe's routes on uvicorn, behind limits on what is read."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from kserve.protocol.rest.server import metrics_handler
from kserve.protocol.rest.v2_endpoints import register_v2_endpoints
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybridc.serving.metrics import REFUSED
from hybridc.serving.protocol import FixedModels, ServedPlane
from hybridc.serving.refusals import (
    STATUSES,
    BodyTimedOut,
    QueueFull,
    TooLarge,
    UnknownEncoding,
    malformed,
    refusal,
)
from hybridc.serving.settings import Limits


def application(plane: ServedPlane, limits: Limits) -> ASGIApp:
    """KServe's routes of the protocol's version 2, and `/metrics`."""
    app = FastAPI(title="hybridc", docs_url=None, redoc_url=None, openapi_url=None)
    register_v2_endpoints(app, plane, FixedModels(plane.model_registry))
    app.add_api_route("/metrics", metrics_handler, methods=["GET"])
    for kind in (*STATUSES, Exception):
        app.add_exception_handler(kind, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse_malformed)
    app.add_exception_handler(HTTPException, _refuse_route)
    return LimitedApp(app, plane, limits, _answer)


async def _refuse(_: Any, error: Exception) -> JSONResponse:
    found = refusal(error)
    return _answer(found.http_status, found.text)


async def _refuse_malformed(_: Any, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return _answer(400, malformed(error.errors()))


async def _refuse_route(_: Any, error: Exception) -> JSONResponse:
    """FastAPI's own refusals, such as of a path that there is not."""
    assert isinstance(error, HTTPException)
    return _answer(error.status_code, str(error.detail))


def _answer(status: int, text: str) -> JSONResponse:
    REFUSED.labels("http", status).inc()
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return JSONResponse({"error": text}, status, headers)


class Stopping(Protocol):
    """What tells that a server is about to end."""

    is_stopping: bool


class LimitedApp:
    """Refuses bodies that are too large, too slow or too many before they are read."""

    def __init__(
        self, app: ASGIApp, plane: Stopping, limits: Limits, answer: Callable[[int, str], JSONResponse]
    ) -> None:
        """`answer` writes a refusal, by its status and text."""
        self._app, self._plane, self._limits, self._answer = app, plane, limits, answer
        self._taken = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = self._closing(send)
        if scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        try:
            self._check(dict(scope["headers"]))
        except Exception as error:
            found = refusal(error)
            await self._answer(found.http_status, found.text)(scope, receive, send)
            return
        self._taken += 1
        try:
            await self._app(scope, _Body(receive, self._limits).receive, send)
        finally:
            self._taken -= 1

    def _check(self, headers: dict[bytes, bytes]) -> None:
        encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
        if encoding != "identity":
            raise UnknownEncoding(encoding[:20])
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._limits.request_bytes:
            raise TooLarge(self._limits.request_bytes)
        if self._taken >= self._limits.requests:
            raise QueueFull

    def _closing(self, send: Send) -> Send:
        """Ends connections with their next answer once the server is stopping: none is lost on them."""

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self._plane.is_stopping:
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        return closing


class _Body:
    """The body of a request, whose length need not be told before, as it comes."""

    def __init__(self, receive: Receive, limits: Limits) -> None:
        self._receive, self._limits, self._size = receive, limits, 0
        self._deadline: float | None = None

    async def receive(self) -> Message:
        loop = asyncio.get_running_loop()
        if self._deadline is None:
            self._deadline = loop.time() + self._limits.timeout_s
        if self._deadline == float("inf"):
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise _passed_on(BodyTimedOut(self._limits.timeout_s)) from None
        self._size += len(message.get("body", b""))
        if self._size > self._limits.request_bytes:
            raise _passed_on(TooLarge(self._limits.request_bytes))
        if not message.get("more_body"):
            self._deadline = float("inf")  # what comes now is that the client has gone
        return message


def _passed_on(error: Exception) -> HTTPException:
    """As FastAPI lets it through: of other exceptions in reading a body it makes one of its own."""
    found = refusal(error)
    return HTTPException(found.http_status, found.text)


class HttpServer(uvicorn.Server):
    """Answers requests until it is stopped."""

    def __init__(self, app: ASGIApp, bound: socket.socket, grace_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=max(1, round(grace_s)),
                lifespan="off",
            )
        )
        self._bound = bound
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are those of both servers."""
        yield

    async def start(self) -> None:
        self._task = asyncio.create_task(self.serve([self._bound]))
        while not self.started and not self._task.done():
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Take no more connections, and answer what was asked for on those that there are."""
        self.should_exit = True
        if self._task is not None:
            await self._task
