"""Start the server of a decoder, and stop it so that what was asked for is still answered."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridc.generation import GenerationSession
from hybridc.serving.chat.routes import Decoder, refused, routes
from hybridc.serving.chat.scheduler import Scheduler
from hybridc.serving.chat.words import read_words
from hybridc.serving.http_server import HttpServer, LimitedApp
from hybridc.serving.metrics import MEMORY
from hybridc.serving.server import (
    DRAIN_S,
    REFUSE_S,
    REQUEST_BYTES,
    bound_socket,
    shown_address,
    stop_signal,
)
from hybridc.serving.settings import Limits, Settings


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """What a decoder needs beside its artifact."""

    tokenizer: Path
    template: Path | None
    """Of chats. None: the one beside the tokenizer, if there is one."""
    stop_ids: Sequence[int]
    """Tokens that end an answer, beside those that the files beside the tokenizer name."""
    sequences: int
    """Requests that are answered at a time."""


def serve_chat(
    name: str,
    session: GenerationSession,
    settings: Settings,
    chat: ChatSettings,
    on_start: Callable[[str], None],
) -> None:
    """Answer requests until SIGTERM or Ctrl-C. `on_start` is called with the address when they are answered.

    Both end the server when requests that were taken are answered, or `grace_s` is over; the second of these
    signals ends it at once. Raises UsageError HC594, HC595 or HC599.
    """
    words = read_words(chat.tokenizer, chat.template, chat.stop_ids)
    scheduler = Scheduler(name, session, chat.sequences, settings.queue, settings.timeout_s)
    for device, used in session.memory().items():
        MEMORY.labels(name, device.value).set(used.allocated_bytes)
    with bound_socket(settings) as bound:
        asyncio.run(_serve(Decoder(name, session, scheduler, words), settings, bound, on_start))


async def _serve(
    decoder: Decoder, settings: Settings, bound: socket.socket, on_start: Callable[[str], None]
) -> None:
    requests = settings.queue + decoder.scheduler.sequences
    limits = Limits(settings.request_bytes or REQUEST_BYTES, requests, settings.timeout_s)
    http = HttpServer(LimitedApp(routes(decoder), decoder, limits, refused), bound, settings.grace_s)
    stopped = stop_signal()
    await http.start()
    on_start(shown_address(settings.host, bound.getsockname()[1]))
    await stopped.wait()
    decoder.is_stopping = True
    await asyncio.sleep(DRAIN_S)
    await decoder.scheduler.close(settings.grace_s)
    await asyncio.sleep(REFUSE_S)
    await http.stop()
