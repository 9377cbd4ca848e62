"""Errors a user can meet: a stable code, what happened, where, and what to do about it.

Codes group by cause, and each group has the exit code the CLI ends with:

    HC1xx  the model was refused                 exit 3
    HC2xx  no plan fits the budget               exit 4
    HC3xx  the artifact was refused              exit 3
    HC4xx  a device, driver or ISA is missing    exit 5
    HC5xx  wrong use: options, feeds, files      exit 2
    HC9xx  a fault of hybridc itself             exit 1
"""

from __future__ import annotations

import errno
import mmap
import resource
import traceback
from contextlib import ContextDecorator, suppress
from types import TracebackType
from typing import Any


class HybridcError(Exception):
    """Base of every error that hybridc raises on purpose."""

    exit_code = 1
    is_shared = False
    """Whether all ranks of a training job raise it, and none waits for another."""

    def __init__(self, code: str, what: str, *, where: str = "", remedy: str = "") -> None:
        super().__init__(what)
        self.code = code
        self.what = what
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        lines = [f"error[{self.code}]: {self.what}"]
        if self.where:
            lines.append(f"  --> {self.where}")
        if self.remedy:
            lines.append(f"  = help: {self.remedy}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        """Exceptions are copied and pickled by calling their class with `args`, which is one text here.

        So a pool of processes tells what happened in one of them.
        """
        return _restored, (type(self), self.args), self.__dict__


def _restored(kind: type[HybridcError], args: tuple[object, ...]) -> HybridcError:
    return kind.__new__(kind, *args)


class ModelError(HybridcError):
    """HC1xx: the ONNX model is malformed, unsafe or not supported."""

    exit_code = 3


class ModelWarning(UserWarning):
    """The model contradicts itself in a way that the user's own words settle."""


class PlanError(HybridcError):
    """HC2xx: no plan keeps the promise asked for.

    `smallest_budget_bytes` is the smallest GPU budget that the planner can meet, if there is one.
    """

    exit_code = 4

    def __init__(
        self,
        code: str,
        what: str,
        *,
        where: str = "",
        remedy: str = "",
        smallest_budget_bytes: int | None = None,
    ) -> None:
        super().__init__(code, what, where=where, remedy=remedy)
        self.smallest_budget_bytes = smallest_budget_bytes


class ArtifactError(HybridcError):
    """HC3xx: the compiled artifact is damaged, incomplete or of another version."""

    exit_code = 3


class DeviceError(HybridcError):
    """HC4xx: a GPU, driver, compiler or instruction set is missing."""

    exit_code = 5


class UsageError(HybridcError):
    """HC5xx: an option, file or feed is not what was expected."""

    exit_code = 2


class InternalError(HybridcError):
    """HC9xx: hybridc broke its own promise; please report it."""

    exit_code = 1


_NO_MEMORY = (
    "bad_alloc",
    "cannot allocate memory",
    "can't start new thread",
    "failed to map segment",
    "no memory for",
    "out of memory",
    "resource temporarily unavailable",
    "virtual memory exhausted",
)
"""What C++, the dynamic linker, the C library and compilers call it, in small letters."""


class _Reserve:
    """Address space that nobody uses, until there is no other and an error has to be made of that."""

    SIZE_BYTES = 4 << 20  # some of the arenas, of 1 MiB, in which Python keeps its objects

    def __init__(self) -> None:
        self._held: mmap.mmap | None = None

    def take(self) -> None:
        if self._held is None:
            with suppress(OSError, MemoryError):  # what is used up is told by what is wanted next
                self._held = mmap.mmap(-1, self.SIZE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)

    def give_back(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


_reserve = _Reserve()


def out_of_memory(error: BaseException) -> DeviceError | None:
    """The error to tell a user if the host's memory or threads are used up, also as a cause of `error`."""
    _reserve.give_back()
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, DeviceError):  # which tells already, and may mean a GPU
        if _is_exhaustion(seen):
            reason = (str(seen).strip().splitlines() or [type(seen).__name__])[-1]
            remedy = "close other programs, or raise the limit (ulimit -v, ulimit -u, that of a container)"
            return DeviceError("HC412", f"the host's memory or threads are used up: {reason}", remedy=remedy)
        seen = seen.__cause__ or seen.__context__
    return None


class exhaustion_told(ContextDecorator):
    """Around a block or a function: lets the host's memory used up be DeviceError HC412, however numpy, TVM
    or the system put it."""

    def __enter__(self) -> None:
        _reserve.take()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        told = out_of_memory(error) if isinstance(error, Exception) else None
        if told is not None:
            raise told from error


def drop_locals(error: BaseException) -> None:
    """Forget what the functions that `error` and its causes ended held: whoever keeps an exception would keep
    their memory and files open, too. Lines and names of the traceback stay."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__


def _is_exhaustion(error: BaseException) -> bool:
    if isinstance(error, HybridcError):  # its text is about a user's file
        return False
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    # TVM goes on without its compiler; Python finds no memory for an exception
    goes_on = isinstance(error, AttributeError) and "_ffi_api" in str(error)
    if goes_on or (isinstance(error, SystemError) and "without" in str(error)):
        return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    return any(text in str(error).lower() for text in _NO_MEMORY)
