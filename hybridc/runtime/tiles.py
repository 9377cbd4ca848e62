"""Permission to use AMX: Linux gives a process its 8 KiB of tile registers a thread only if it asks for
them."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Collection
from functools import cache

from hybridc.errors import DeviceError

TILE_FLAG = "amx_tile"
_SYSCALL_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


@cache
def _ask() -> int:
    """The error of the system call, 0 if there is none. What is granted holds for all threads, for good."""
    libc = ctypes.CDLL(None, use_errno=True)
    refused = libc.syscall(_SYSCALL_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    return ctypes.get_errno() or errno.EPERM if refused else 0


def enable_amx(cpu_flags: Collection[str], ask: Callable[[], int] = _ask) -> None:
    """Ask for tile registers if code that needs these flags uses them. Raises DeviceError HC410 if
    refused."""
    if TILE_FLAG not in cpu_flags:
        return
    error = ask()
    if error:
        what = f"the system does not allow this process to use AMX: {os.strerror(error)}"
        raise DeviceError(
            "HC410", what, remedy="use Linux 5.16 or newer, or compile for --target avx512_bf16"
        )
