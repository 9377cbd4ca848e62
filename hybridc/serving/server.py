"""Start both servers, and stop them so that no request that was taken is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kserve.model_repository import ModelRepository

from hybridc.errors import UsageError
from hybridc.scratch import remove_scratch_folders
from hybridc.serving.grpc_server import GrpcServer
from hybridc.serving.http_server import HttpServer, application
from hybridc.serving.metrics import MEMORY
from hybridc.serving.model import Runner, ServedModel
from hybridc.serving.protocol import ServedPlane
from hybridc.serving.settings import Limits, Settings

DRAIN_S = 1.0
"""From the signal to stop until no more requests are taken: for those that are on their way, and for clients
to hear that their connections end."""
REFUSE_S = 0.2
"""Until both servers end: requests that come are refused with an error, not with a closed connection."""
REQUEST_BYTES = 64 << 20
_HEADER_BYTES = 64 << 10
"""Beside the tensors of a request, for its JSON or its gRPC message."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where requests are answered."""

    http: str
    grpc: str


def serve(runners: Mapping[str, Runner], settings: Settings, on_start: Callable[[Addresses], None]) -> None:
    """Answer requests until SIGTERM or Ctrl-C. `on_start` is called when they are answered.

    Both end the server when requests that were taken are answered, or `grace_s` is over; the second of these
    signals ends it at once. Raises UsageError HC598 or HC599.
    """
    models = [ServedModel(name, runner, settings) for name, runner in runners.items()]
    if settings.batch is not None and all(each.sizes is None for each in models):
        what = f"no model has an open dimension {settings.batch!r}, along which to join requests"
        raise UsageError("HC598", what, remedy=f"compile one with --dim {settings.batch}=1..8")
    for name, runner in runners.items():
        for device, used in runner.memory().items():
            MEMORY.labels(name, device.value).set(used.allocated_bytes)
    with bound_socket(settings) as bound:
        asyncio.run(_serve(models, settings, bound, on_start))


async def _serve(
    models: list[ServedModel], settings: Settings, bound: socket.socket, on_start: Callable[[Addresses], None]
) -> None:
    repository = ModelRepository()
    for model in models:
        repository.update(model)
    plane = ServedPlane(repository)
    limits = _limits(models, settings)
    http = HttpServer(application(plane, limits), bound, settings.grace_s)
    grpc = GrpcServer(plane, limits, settings)
    stopped = stop_signal()
    await asyncio.gather(http.start(), grpc.start())
    on_start(
        Addresses(
            shown_address(settings.host, bound.getsockname()[1]), shown_address(settings.host, grpc.port)
        )
    )
    await stopped.wait()
    plane.is_stopping = True
    await asyncio.sleep(DRAIN_S)
    await asyncio.gather(*(model.close(settings.grace_s) for model in models))
    await asyncio.sleep(REFUSE_S)
    await asyncio.gather(http.stop(), grpc.stop())


def _limits(models: list[ServedModel], settings: Settings) -> Limits:
    largest = max(model.largest_bytes for model in models) + _HEADER_BYTES
    runs = sum(1 if model.sizes is None else model.sizes.largest for model in models)
    requests = settings.queue * len(models) + runs
    return Limits(settings.request_bytes or max(REQUEST_BYTES, largest), requests, settings.timeout_s)


def stop_signal() -> asyncio.Event:
    """Set by the first signal to stop. The second ends the process, whatever is under way."""
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()

    def stop(number: int) -> None:
        if stopped.is_set():
            remove_scratch_folders()
            os._exit(128 + number)  # as shells show it
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    return stopped


def bound_socket(settings: Settings) -> socket.socket:
    """The socket of the HTTP server. Raises UsageError HC599."""
    try:
        family = socket.getaddrinfo(settings.host, None, type=socket.SOCK_STREAM)[0][0]
        bound = socket.create_server((settings.host, settings.http_port), family=family, backlog=2048)
    except OSError as error:
        address = shown_address(settings.host, settings.http_port)
        what = f"the HTTP server cannot listen at {address}: {error.strerror}"
        raise UsageError("HC599", what, remedy="choose another --host or --http-port") from None
    # its connections inherit it: a result is several writes, the second of which would wait for an answer
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound


def shown_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
