"""What a memory reaches for a kernel and copies that use it at once: `shared_gb_s` of a profile."""

from __future__ import annotations

import ctypes
import math
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from hybridc.calibrate.link import Direction

Clock = Callable[[], float]
"""Seconds."""

_RUNS = 5
# Copies that the kernel slows down last longer anyway, and they still outlast a kernel that they slow down to
# half of its speed.
_OUTLASTS = 2
"""How many times as long as the kernel the copies beside it would take by themselves."""


class Copies(Protocol):
    """Copies, one after the other, beside which something else can run."""

    @property
    def moved_bytes(self) -> int:
        """What one of them reads and writes in the memory that is looked at."""

    def begin(self, count: int) -> None:
        """Start so many copies, without waiting for them."""

    def end(self) -> None:
        """Wait for them."""


@dataclass(frozen=True, slots=True)
class LinkCopies:
    """Over the link, one way: each memory is read or written once."""

    direction: Direction
    moved_bytes: int

    def begin(self, count: int) -> None:
        for _ in range(count):
            self.direction.begin(self.moved_bytes)

    def end(self) -> None:
        self.direction.end()


@dataclass(slots=True)
class ThreadCopies:
    """By a thread of the CPU, within the host's memory: a stand-in for the link where there is no GPU."""

    size_bytes: int
    moved_bytes: int = field(init=False)
    _source: np.ndarray = field(init=False)
    _target: np.ndarray = field(init=False)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self.moved_bytes = 2 * self.size_bytes
        self._source, self._target = (np.ones(self.size_bytes, "uint8") for _ in range(2))

    def begin(self, count: int) -> None:
        self._thread = threading.Thread(target=self._copy, args=(count,))
        self._thread.start()

    def end(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _copy(self, count: int) -> None:
        for _ in range(count):
            # without the interpreter's lock
            ctypes.memmove(self._target.ctypes.data, self._source.ctypes.data, self.size_bytes)


def shared_gb_s(
    kernel: Callable[[], int], copies: Copies, clock: Clock = time.perf_counter, runs: int = _RUNS
) -> float:
    """Bytes a second, in 1e9, that a kernel and copies beside it get of a memory together.

    `kernel` runs to its end and returns the bytes that it has moved; it should do nothing but read and
    write. Of the copies those bytes count that were moved until the kernel ended: what is left then goes on
    at the speed that copies have by themselves. The median of some runs.
    """
    kernel()  # what is mapped or compiled at the first call is not measured
    kernel_s = statistics.median(_seconds(kernel, clock) for _ in range(runs))
    copy_s = statistics.median(_seconds(lambda: _copied(copies, 1), clock) for _ in range(runs))
    count = max(1, math.ceil(_OUTLASTS * kernel_s / copy_s))
    reached = []
    for _ in range(runs):
        start = clock()
        copies.begin(count)
        kernel_bytes = kernel()
        together_s = clock() - start
        copies.end()
        left_bytes = (clock() - start - together_s) / copy_s * copies.moved_bytes
        copied_bytes = max(0.0, count * copies.moved_bytes - left_bytes)
        reached.append((kernel_bytes + copied_bytes) / together_s / 1e9)
    return statistics.median(reached)


def _copied(copies: Copies, count: int) -> None:
    copies.begin(count)
    copies.end()


def _seconds(work: Callable[[], object], clock: Clock) -> float:
    start = clock()
    work()
    return clock() - start
