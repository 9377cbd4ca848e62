"""Progress of a long compilation: who listens to the compiler, and a stopwatch.

A terminal gets one line with a bar, which is wiped at the end; anything else plain lines.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm

Callback = Callable[[str, int, int | None], None]
"""Called as `callback(stage, done, total)`: the name of the present stage, and how many of its parts are
done, of how many. A stage that begins has done none of an unknown number, None. Calls come one at a time,
from the thread that compiles. What the callback raises ends the compilation, which leaves nothing behind."""

_TICK_SECONDS = 1.0
_LINE_SECONDS = 10.0
"""A stage that takes longer says so this often."""
_WORTH_A_LINE_SECONDS = 0.5
"""Stages that take less are not listed: most take milliseconds."""


class Progress(Protocol):
    """Listens to the compiler."""

    def stage(self, name: str) -> None:
        """A stage of the compiler begins."""

    def kernels(self, done: int, total: int) -> None:
        """`done` of `total` distinct functions of the present stage are finished."""

    def note(self, text: str) -> None:
        """What there is to say about the present stage; replaces what was said before."""


class NullProgress:
    """Says nothing."""

    def stage(self, name: str) -> None:
        pass

    def kernels(self, done: int, total: int) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class CallbackProgress:
    """Tells a function."""

    def __init__(self, callback: Callback) -> None:
        self._callback = callback
        self._stage = ""

    def stage(self, name: str) -> None:
        self._stage = name
        self._callback(name, 0, None)

    def kernels(self, done: int, total: int) -> None:
        self._callback(self._stage, done, total)

    def note(self, text: str) -> None:
        pass


def listener(callback: Callback | None) -> Progress:
    """What tells `callback`, if there is one."""
    return NullProgress() if callback is None else CallbackProgress(callback)


class Stopwatch:
    """Measures the parts of a compilation, and announces each to `progress`, once if it goes on."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._last = ""
        self.seconds: dict[str, float] = {}
        """Wall time of each part that is finished; of one that is repeated, together."""

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        if part != self._last:
            self.progress.stage(part)
        self._last = part
        start = time.perf_counter()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start


class Bar:
    """One line on a terminal: the present stage, a bar over its kernels, and what it says of itself."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: tqdm | None = None
        self._note = ""
        self._lock = threading.RLock()

    def stage(self, name: str) -> None:
        self._note = ""
        self._begin(name, 0, "{desc} {elapsed}{postfix}")

    def kernels(self, done: int, total: int) -> None:
        with self._lock:
            if self._bar is None or self._bar.total != total:
                name = self._bar.desc if self._bar is not None else "kernels"
                self._begin(name, total, "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}")
            assert self._bar is not None
            self._bar.update(done - self._bar.n)

    def note(self, text: str) -> None:
        with self._lock:
            self._note = text
            if self._bar is not None:
                self._bar.set_postfix_str(text)

    def tick(self) -> None:
        """Let the seconds go on while nothing else is told."""
        with self._lock:
            if self._bar is not None:
                self._bar.refresh()

    def close(self) -> None:
        """Wipe the line."""
        with self._lock:
            if self._bar is not None:
                self._bar.close()
                self._bar = None

    def _begin(self, name: str, total: int, bar_format: str) -> None:
        from tqdm import tqdm

        with self._lock:
            self.close()
            self._bar = tqdm(
                desc=name,
                total=total,
                file=self._stream,
                leave=False,
                bar_format=bar_format,
                dynamic_ncols=True,
            )
            self._bar.set_postfix_str(self._note)


class Lines:
    """A line for each stage that took long, and one now and then during those that take very long."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._lock = threading.Lock()
        self._stage: str | None = None
        self._done = self._note = ""
        self._start = self._last_line = clock()

    def stage(self, name: str) -> None:
        with self._lock:
            self._finish()
            self._stage, self._done, self._note = name, "", ""
            self._start = self._last_line = self._clock()

    def kernels(self, done: int, total: int) -> None:
        with self._lock:
            self._done = f" {done} of {total}"

    def note(self, text: str) -> None:
        with self._lock:
            self._note = f", {text}"

    def tick(self) -> None:
        """Say where the present stage is, if it has been silent for long."""
        with self._lock:
            now = self._clock()
            if self._stage is not None and now - self._last_line >= _LINE_SECONDS:
                self._write(f"{self._stage}{self._done} after {now - self._start:.0f} s{self._note}")
                self._last_line = now

    def close(self) -> None:
        """Write down the last stage."""
        with self._lock:
            self._finish()
            self._stage = None

    def _finish(self) -> None:
        seconds = self._clock() - self._start
        if self._stage is not None and seconds >= _WORTH_A_LINE_SECONDS:
            self._write(f"{self._stage} {seconds:.1f} s{self._note}")

    def _write(self, line: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads it any more; the compilation goes on
            print(line, file=self._stream, flush=True)


@contextmanager
def terminal_progress(stream: TextIO | None = None, *, quiet: bool = False) -> Iterator[Progress]:
    """A bar where `stream` (standard error by default) is a terminal, else lines; nothing if `quiet`.

    The bar is wiped at the end, also when an error is on its way to the user.
    """
    stream = sys.stderr if stream is None else stream
    if quiet or stream is None:  # a process may have no standard error
        yield NullProgress()
        return
    shown = Bar(stream) if stream.isatty() else Lines(stream)
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(_TICK_SECONDS):
            with suppress(OSError, ValueError):  # the terminal has gone
                shown.tick()

    ticking = threading.Thread(target=tick, name="hybridc-progress", daemon=True)
    ticking.start()
    try:
        yield shown
    finally:
        ended.set()
        ticking.join()
        shown.close()
