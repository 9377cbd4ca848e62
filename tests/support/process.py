"""What this process holds, one by one: a mere count falls when garbage of earlier tests goes."""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections.abc import Callable

PATIENCE_SECONDS = 600.0
"""What hangs is given up after this time, many times what it takes on a loaded machine."""

_SYS_SCHED_GETATTR, _ATTRIBUTES = 315, struct.Struct("IIQiIQQQ")
"""Of x86-64; size, policy, flags, nice, priority, runtime, deadline, period."""


def open_handles() -> set[tuple[int, str]]:
    """Number and file of each open handle."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add((int(number), os.readlink(f"/proc/self/fd/{number}")))
        except FileNotFoundError:  # it was that of the list itself
            continue
    return found


def running_threads() -> set[int]:
    """The system's number of each thread, native ones included."""
    return {int(number) for number in os.listdir("/proc/self/task")}


def slice_nanoseconds(thread: int) -> int:
    """How long the system lets a thread run before others; 0 where it has no such time of each thread."""
    attributes = ctypes.create_string_buffer(_ATTRIBUTES.size)
    failed = ctypes.CDLL(None).syscall(_SYS_SCHED_GETATTR, thread, attributes, len(attributes), 0)
    runtime: int = 0 if failed else _ATTRIBUTES.unpack(attributes.raw)[5]
    return runtime


def becomes_true(condition: Callable[[], bool]) -> bool:
    """Whether it holds soon: the system lists a thread for a moment after it was joined."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()
