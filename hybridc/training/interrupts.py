"""Signals while a step changes states where they are."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Signals that Python handles, by a KeyboardInterrupt or otherwise, are handled when the block has ended.

    Elsewhere than on the main thread nothing is to be done: handlers run on that one.
    """
    came: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: handler for number in SIGNALS if callable(handler := signal.getsignal(number))}
    try:
        for number in before:
            signal.signal(number, lambda which, _: came.append(which))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for interrupt in came:
            signal.raise_signal(interrupt)
