"""Progress of a long compilation: two listeners, silent and a bar on a terminal, and a stopwatch."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm


class Progress(Protocol):
    """Listens to the compiler."""

    def stage(self, name: str) -> None:
        """A stage of the compiler begins."""

    def kernels(self, done: int, total: int) -> None:
        """`done` of `total` distinct functions of the present stage are finished."""


class NullProgress:
    """Says nothing."""

    def stage(self, name: str) -> None:
        pass

    def kernels(self, done: int, total: int) -> None:
        pass


class Stopwatch:
    """Measures the parts of a compilation, and announces each to `progress`."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}
        """Wall time of each part that is finished."""

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        self.progress.stage(part)
        start = time.perf_counter()
        yield
        self.seconds[part] = time.perf_counter() - start


class Bar:
    """One line on a terminal: the present stage, and a bar over its kernels."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: tqdm | None = None

    def stage(self, name: str) -> None:
        self._begin(name, 0, "{desc} {elapsed}")

    def kernels(self, done: int, total: int) -> None:
        if self._bar is None or self._bar.total != total:
            name = self._bar.desc if self._bar is not None else "kernels"
            self._begin(name, total, "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}")
        assert self._bar is not None
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Wipe the line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _begin(self, name: str, total: int, bar_format: str) -> None:
        from tqdm import tqdm

        self.close()
        self._bar = tqdm(
            desc=name, total=total, file=self._stream, leave=False, bar_format=bar_format, dynamic_ncols=True
        )


@contextmanager
def terminal_progress(stream: TextIO | None = None) -> Iterator[Progress]:
    """A bar where `stream` (standard error by default) is a terminal, else silence.

    The line is wiped at the end, also when an error is on its way to the user.
    """
    stream = sys.stderr if stream is None else stream
    if not stream.isatty():
        yield NullProgress()
        return
    bar = Bar(stream)
    try:
        yield bar
    finally:
        bar.close()
