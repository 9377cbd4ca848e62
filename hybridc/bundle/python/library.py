"""hybridc.h as ctypes sees it: libhybridc_runtime.so stands in this package's folder `lib`."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path
from typing import Any

from .errors import ArtifactError, DeviceError, HybridcError, InternalError, PlanError, UsageError

FOLDER = Path(__file__).parent / "lib"
_NAME = "libhybridc_runtime.so"
_TVM = "libtvm_runtime.so"
_KINDS: dict[int, type[HybridcError]] = {2: PlanError, 3: ArtifactError, 4: DeviceError, 5: UsageError}
"""By the hundreds of the error's number."""


class Options(ctypes.Structure):
    _fields_ = (
        ("struct_bytes", ctypes.c_size_t),
        ("threads", ctypes.c_int32),
        ("trust_weights", ctypes.c_int32),
        ("gpu_memory_bytes", ctypes.c_uint64),
        ("host_memory_bytes", ctypes.c_uint64),
    )


class Port(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("rank", ctypes.c_size_t),
        ("size_bytes", ctypes.c_size_t),
        ("varies", ctypes.c_int32),
    )


class Model(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("sha256", ctypes.c_char_p),
        ("opset", ctypes.c_int64),
        ("target", ctypes.c_char_p),
        ("hybridc_version", ctypes.c_char_p),
        ("tvm_version", ctypes.c_char_p),
        ("tvm_ffi_version", ctypes.c_char_p),
    )


class InputArray(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("rank", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
    )


class OutputArray(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("capacity_bytes", ctypes.c_size_t),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("size_bytes", ctypes.c_size_t),
    )


class Memory(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            *("gpu_planned_bytes", "gpu_allocated_bytes", "host_planned_bytes", "host_allocated_bytes"),
            *("staging_bytes", "mapped_weight_bytes"),
        )
    )


class Step(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("lane", ctypes.c_int32),
        ("planned_us", ctypes.c_double),
        ("begin_us", ctypes.c_double),
        ("end_us", ctypes.c_double),
    )


_SESSION, _COUNT = ctypes.c_void_p, ctypes.c_size_t
_VALUES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "last_error": (ctypes.c_char_p, ()),
    "close": (None, (_SESSION,)),
    "input_count": (_COUNT, (_SESSION,)),
    "output_count": (_COUNT, (_SESSION,)),
    "step_count": (_COUNT, (_SESSION,)),
    "thread_count": (ctypes.c_int32, (_SESSION,)),
    "predicted_us": (ctypes.c_double, (_SESSION,)),
}
"""What functions return and take, without the prefix hybridc_."""
_FALLIBLE: dict[str, tuple[Any, ...]] = {
    "open": (ctypes.c_char_p, ctypes.POINTER(Options), ctypes.POINTER(ctypes.c_void_p)),
    "input": (_SESSION, _COUNT, ctypes.POINTER(Port)),
    "output": (_SESSION, _COUNT, ctypes.POINTER(Port)),
    "get_model": (_SESSION, ctypes.POINTER(Model)),
    "get_memory": (_SESSION, ctypes.POINTER(Memory)),
    "run": (_SESSION, ctypes.POINTER(InputArray), _COUNT, ctypes.POINTER(OutputArray), _COUNT),
    "measure": (_SESSION, ctypes.POINTER(InputArray), _COUNT, ctypes.POINTER(Step)),
}
"""What those take that return 0, or the number of an error."""


def call(name: str, *arguments: Any) -> Any:
    """Call a function of hybridc.h; other threads of Python run meanwhile.

    Raises the HybridcError that the library tells.
    """
    result = getattr(_library(), f"hybridc_{name}")(*arguments)
    if name in _VALUES:
        return result
    if result != 0:
        raise _error(result, _library().hybridc_last_error().decode(errors="replace"))
    return None


@functools.cache
def _library() -> ctypes.CDLL:
    _check_alone()
    path = FOLDER / _NAME
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        what, remedy = f"the library cannot be loaded: {error}", "install hybridc-runtime again"
        raise ArtifactError("HC307", what, where=str(path), remedy=remedy) from None
    fallible = {name: (ctypes.c_int, arguments) for name, arguments in _FALLIBLE.items()}
    for name, (result, arguments) in (_VALUES | fallible).items():
        function = getattr(library, f"hybridc_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def _check_alone() -> None:
    """TVM ends a process that loads a second copy of it: both would register the same functions."""
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    loaded = {line[line.find("/") :] for line in lines if line.endswith(f"/{_TVM}")}
    if others := loaded - {str(FOLDER.resolve() / _TVM)}:
        what = f"this process has loaded TVM from elsewhere: {min(others)}"
        remedy = "use hybridc.load in it, or load the bundle in another process"
        raise ArtifactError("HC307", what, where=str(FOLDER / _TVM), remedy=remedy)


def _error(number: int, text: str) -> HybridcError:
    """The error of a number, from the text that the library has put it in."""
    code = f"HC{number:03d}"
    found = re.fullmatch(rf"error\[{code}\]: (.*?)(?:\n  --> (.*?))?(?:\n  = help: (.*))?", text, re.DOTALL)
    what, where, remedy = ("the host's memory is used up", None, None) if found is None else found.groups()
    kind = _KINDS.get(number // 100, InternalError)
    return kind(code, what, where=where or "", remedy=remedy or "")
