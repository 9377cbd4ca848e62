"""Errors keep every field on their way between processes, and used up memory is one of them."""

from __future__ import annotations

import copy
import errno
import importlib
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from functools import partial

import pytest

import hybridc.cli
from hybridc.errors import (
    ArtifactError,
    DeviceError,
    HybridcError,
    PlanError,
    UsageError,
    exhaustion_told,
    out_of_memory,
)


def kinds() -> list[type[HybridcError]]:
    """Every class of errors, wherever it is defined."""
    for module in pkgutil.walk_packages(hybridc.cli.__path__, "hybridc.cli."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)

    def below(kind: type[HybridcError]) -> Iterator[type[HybridcError]]:
        yield kind
        for child in kind.__subclasses__():
            yield from below(child)

    return list(below(HybridcError))


def pickled(error: HybridcError, protocol: int) -> HybridcError:
    copied: HybridcError = pickle.loads(pickle.dumps(error, protocol))
    return copied


COPIES: list[Callable[[HybridcError], HybridcError]] = [
    copy.copy,
    copy.deepcopy,
    *(partial(pickled, protocol=protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)),
]


@pytest.mark.parametrize("copied_by", COPIES)
def test_every_kind_of_error_is_copied_whole(copied_by: Callable[[HybridcError], HybridcError]) -> None:
    for kind in kinds():
        error = kind.__new__(kind, "what happened")
        HybridcError.__init__(error, "HC999", "what happened", where="a file", remedy="do this")
        error.smallest_budget_bytes = error.text = "a field of some kinds"  # type: ignore[attr-defined]
        copied = copied_by(error)
        assert type(copied) is kind
        assert (vars(copied), copied.args, str(copied)) == (vars(error), error.args, str(error))
        assert copied.exit_code == error.exit_code


def test_fields_of_a_kind_of_its_own_are_copied() -> None:
    error = PlanError("HC201", "too little", remedy="give more", smallest_budget_bytes=4096)
    copied = pickle.loads(pickle.dumps(error))
    assert copied.smallest_budget_bytes == 4096


def test_note_is_copied() -> None:
    error = UsageError("HC500", "wrong")
    error.add_note("seen in the third file")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["seen in the third file"]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("can't start new thread"),
        ImportError("libtvm_ffi.so: failed to map segment from shared object"),
        OSError("libtvm_runtime.so: cannot allocate memory in static TLS block"),
        RuntimeError("Check failed\nResource temporarily unavailable"),
    ],
)
def test_memory_used_up_is_a_device_error_however_it_is_put(error: Exception) -> None:
    with pytest.raises(DeviceError) as caught, exhaustion_told():
        raise error
    assert caught.value.code == "HC412" and caught.value.__cause__ is error
    assert "\n" not in caught.value.what


def test_memory_used_up_is_told_where_it_was_taken_for_another_mistake() -> None:
    with pytest.raises(DeviceError, match="HC412"), exhaustion_told():
        try:
            raise MemoryError
        except MemoryError:
            raise ArtifactError("HC307", "the library cannot be loaded") from None


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no such file"),
        UsageError("HC530", "'out of memory.onnx' does not exist"),
        DeviceError("HC407", "the device failed: out of memory"),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_stay_as_they_are(error: BaseException) -> None:
    assert out_of_memory(error) is None
    with pytest.raises(type(error)) as caught, exhaustion_told():
        raise error
    assert caught.value is error
