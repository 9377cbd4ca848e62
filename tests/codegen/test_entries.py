"""Arguments are compared with a function's entry before its code sees them, as TVM's own checks would."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from hybridc.codegen.library import build_library
from tests.support.artifacts import CPU_TARGET

LLVM = tvm.target.Target({"kind": "llvm", "mcpu": "core-avx2"})


@T.prim_func(s_tir=True)
def chosen(c: T.Buffer((2, 3), "bool"), x: T.Buffer((1, 3), "float32"), y: T.Buffer((2, 3), "float32")):  # type: ignore
    for i, j in T.grid(2, 3):
        y[i, j] = T.Select(c[i, j], x[0, j], T.float32(7))


@T.prim_func(s_tir=True)
def counted(x: T.Buffer((), "int64"), none: T.Buffer((0, 3), "bfloat16"), y: T.Buffer((1,), "int64")):  # type: ignore
    y[0] = x[()] + T.int64(1)


def named(function: tirx.PrimFunc, name: str) -> tirx.PrimFunc:
    return function.with_attrs({"target": LLVM, "tirx.noalias": True, "global_symbol": name})


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    functions = {name: named(f, name) for name, f in (("chosen_cpu", chosen), ("counted_cpu", counted))}
    return build_library(tvm.IRModule(functions), CPU_TARGET, tmp_path_factory.mktemp("entries")).path


@pytest.fixture(scope="module")
def entered(library: Path) -> tvm_ffi.Module:
    return tvm_ffi.load_module(str(library))


@pytest.fixture(scope="module")
def checked_by_tvm() -> Callable[..., Any]:
    return tirx.build(tvm.IRModule({"main": named(chosen, "main")}), target=LLVM)["main"]


def array(shape: tuple[int, ...], dtype: str) -> tvm.runtime.Tensor:
    return tvm.runtime.tensor(np.ones(shape, dtype))


def gaps(shape: tuple[int, ...], dtype: str) -> tvm_ffi.Tensor:
    """Every second element of an array."""
    return tvm_ffi.from_dlpack(np.ones((*shape, 2), dtype)[..., 0])


C, X, Y = array((2, 3), "bool"), array((1, 3), "float32"), array((2, 3), "float32")
NARROW = tvm_ffi.from_dlpack(np.ones((2, 3), np.float32)[:1])
"""Its only row has the stride of an array of two."""


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        (C, X),
        (C, X, Y, Y),
        (X, X, Y),
        (array((2, 3), "uint8"), X, Y),
        (array((2, 3), "int8"), X, Y),
        (C, array((3,), "float32"), Y),
        (C, array((1, 1, 3), "float32"), Y),
        (C, array((2, 3), "float32"), Y),
        (C, array((1, 2), "float32"), Y),
        (C, array((1, 3), "float64"), Y),
        (C, array((1, 3), "int32"), Y),
        (C, array((1, 3), "float16"), Y),
        (C, gaps((1, 3), "float32"), Y),
        (C, X, gaps((2, 3), "float32")),
        (None, X, Y),
        (C, 7, Y),
        (C, 1.5, Y),
    ],
)
def test_what_tvm_refuses_is_refused(
    entered: tvm_ffi.Module, checked_by_tvm: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        checked_by_tvm(*arguments)
    with pytest.raises((TypeError, ValueError), match="chosen_cpu"):
        entered["chosen_cpu"](*arguments)


@pytest.mark.parametrize("x", [X, NARROW])
def test_what_tvm_takes_is_taken(
    entered: tvm_ffi.Module, checked_by_tvm: Callable[..., Any], x: tvm_ffi.Tensor
) -> None:
    for function in (entered["chosen_cpu"], checked_by_tvm):
        y = array((2, 3), "float32")
        function(C, x, y)
        assert np.all(y.numpy() == 1)


def test_arrays_without_dimensions_or_elements_are_arrays(entered: tvm_ffi.Module) -> None:
    y = array((1,), "int64")
    entered["counted_cpu"](array((), "int64"), tvm.runtime.empty((0, 3), "bfloat16"), y)
    assert y.numpy() == 2
    for wrong in ((0, 2), (3, 0), (0,)):
        with pytest.raises(ValueError, match=r"counted_cpu: argument 1 is .* instead of bfloat16\[0, 3\]"):
            entered["counted_cpu"](array((), "int64"), tvm.runtime.empty(wrong, "bfloat16"), y)


def test_objects_that_are_no_arrays_are_refused(entered: tvm_ffi.Module) -> None:
    for wrong in ("text", b"bytes", [1, 2], tvm_ffi.Shape((2, 3)), print):
        with pytest.raises(TypeError, match="chosen_cpu: argument 1 is no array"):
            entered["chosen_cpu"](C, wrong, Y)


def test_nothing_leads_around_an_entry(library: Path, entered: tvm_ffi.Module) -> None:
    exported = ctypes.CDLL(str(library))
    assert exported.__tvm_ffi_chosen_cpu
    for hidden in ("__tvm_ffi_chosen_cpu_code", "__tvm_ffi_main", "hybridc_enter"):
        with pytest.raises(AttributeError):
            getattr(exported, hidden)
    with pytest.raises(AttributeError):
        entered["chosen_cpu_code"]
