"""Ctrl-C and SIGTERM: end the command soon and leave nothing half done, whatever runs at that moment."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from hybridc.scratch import remove_scratch_folders

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_SECONDS = 1.0
"""What an orderly end may take. A compiler in native code lets no exception through before it is done."""


def exit_code(interrupts: list[int]) -> int:
    """What a shell shows of a process that was ended by the first of these signals, or else by Ctrl-C."""
    return 128 + (interrupts or [signal.SIGINT])[0]


@contextlib.contextmanager
def noted_interrupts() -> Iterator[list[int]]:
    """The signals that come, which end in a KeyboardInterrupt whatever else it was turned into on its way.

    One that is raised in a callback of TVM comes back as a RuntimeError, or is taken for a schedule
    that does not apply. If the block has not ended a second later, the process does.
    """
    interrupts: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        yield interrupts
        return
    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        with _deadline():
            yield interrupts
    except Exception as error:
        if interrupts:
            raise KeyboardInterrupt from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[list[int]]:
    """The signals that come, for a block that looks at them and ends by itself, however long that takes.

    The second one ends it as without this block.
    """
    interrupts: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        if len(interrupts) > 1:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    watched = signal.set_wakeup_fd(-1)
    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(watched)


@contextlib.contextmanager
def _deadline() -> Iterator[None]:
    """Ends the process if the block goes on after a signal.

    Python hands a signal to the main thread, which may be deep in native code; the wakeup descriptor
    hears of it at once.
    """
    heard, told = os.pipe()
    os.set_blocking(told, False)
    ended = threading.Event()

    def watch() -> None:
        signals = os.read(heard, 1)  # empty once the block has ended without a signal
        if signals and not ended.wait(GRACE_SECONDS):
            remove_scratch_folders()
            os._exit(exit_code(list(signals)))

    before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(before)
        os.close(told)
        watcher.join()
        os.close(heard)
