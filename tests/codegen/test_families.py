"""Functions that differ in numbers alone: one function that computes exactly what each of them does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from hybridc.codegen.families import Family, families
from hybridc.codegen.flat import flattened
from hybridc.codegen.library import build_library
from hybridc.ir import Device
from hybridc.keywords import options_of
from hybridc.models.bert import bert
from hybridc.models.cifar_quick import cifar_quick
from hybridc.passes.import_model import import_model
from hybridc.passes.pipeline import run_stages
from hybridc.progress import NullProgress
from hybridc.schedules.cpu.math.intrinsics import install
from tests.support.artifacts import CPU_TARGET, parallel_scale, scheduled

ROOT = Path(__file__).parents[2]
LLVM = tvm.target.Target({"kind": "llvm", "mcpu": "core-avx2"})


def named(functions: dict[str, tirx.PrimFunc]) -> dict[str, tirx.PrimFunc]:
    attributes = {"target": LLVM, "tirx.noalias": True}
    return {name: f.with_attrs({**attributes, "global_symbol": name}) for name, f in functions.items()}


def built(function: tirx.PrimFunc) -> tvm_ffi.Function:
    install()
    return tirx.build(tvm.IRModule({"main": function.with_attr("global_symbol", "main")}), target=LLVM)[
        "main"
    ]


def arrays(function: tirx.PrimFunc, seed: int) -> list[tvm.runtime.Tensor]:
    """Random ones for parameters; integers may be indices, so they are 0 and 1."""
    rng = np.random.default_rng(seed)
    made = []
    for parameter in function.params:
        shape, dtype = [int(n) for n in parameter.shape], np.dtype(str(parameter.dtype))
        values = rng.standard_normal(shape) if dtype.kind == "f" else rng.integers(0, 2, shape)
        made.append(tvm.runtime.tensor(values.astype(dtype)))
    return made


def assert_same(family: Family, name: str, member: tirx.PrimFunc, seed: int) -> None:
    """All arrays are bit for bit what the member makes of them by itself."""
    wanted, found = arrays(member, seed), arrays(member, seed)
    built(member)(*wanted)
    built(family.function)(*family.members[name], *found)
    for one, other in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(other.numpy(), one.numpy())


def scheduled_for(model: onnx.ModelProto, tag: int) -> dict[str, tirx.PrimFunc]:
    """The functions of a network, with names of their own for each size."""
    options = options_of({"target": "avx2", "threads": 2})
    _, network = import_model(model, options, many_sizes=True)
    module = run_stages(network, NullProgress(), stop_after="lower").lowered.module
    return {
        f"{v.name_hint}_{tag}": f.with_attr("global_symbol", f"{v.name_hint}_{tag}")
        for v, f in module.functions.items()
    }


def few(alike: tuple[Family, ...], rng: np.random.Generator, count: int) -> list[Family]:
    several = [each for each in alike if len(each.members) > 1]
    return [several[i] for i in rng.choice(len(several), min(count, len(several)), replace=False)]


def small_bert(batch: int) -> onnx.ModelProto:
    return bert(batch=batch, tokens=8, layers=1, hidden=32, heads=2, vocabulary=50)


def small_cifar(batch: int) -> onnx.ModelProto:
    return cifar_quick(batch=batch)


@pytest.mark.parametrize("network", [small_bert, small_cifar])
def test_family_computes_what_its_members_do(network: Callable[[int], onnx.ModelProto]) -> None:
    rng = np.random.default_rng(0)
    functions: dict[str, tirx.PrimFunc] = {}
    for size in rng.choice(np.arange(2, 40), 2, replace=False):
        functions |= scheduled_for(network(int(size)), int(size))
    alike = families(functions)
    assert sorted(name for each in alike for name in each.members) == sorted(functions)
    assert len(alike) <= len(functions) * 7 // 8
    for each in few(alike, rng, 2):
        name = str(rng.choice(list(each.members)))
        assert_same(each, name, functions[name], seed=0)


def rows(count: int, width: int = 8, lanes: int = 4) -> tirx.PrimFunc:
    @T.prim_func(s_tir=True)
    def function(x: T.Buffer((count, width), "float32"), y: T.Buffer((count, width), "float32")):  # type: ignore
        for i in T.parallel(count):
            for j in range(width // lanes):
                for k in T.vectorized(lanes):
                    y[i, j * lanes + k] = x[i, j * lanes + k] + T.float32(1)

    return function


def divided(count: int, divisor: int) -> tirx.PrimFunc:
    """Whose tasks are numbered by rows of `divisor`."""

    @T.prim_func(s_tir=True)
    def function(x: T.Buffer((count * divisor,), "float32"), y: T.Buffer((divisor, count), "float32")):  # type: ignore
        for i in T.parallel(count * divisor):
            y[i % divisor, i // divisor] = x[i] * T.float32(2)

    return function


def divided_inside(count: int, divisor: int) -> tirx.PrimFunc:
    """Which divides for each element."""

    @T.prim_func(s_tir=True)
    def function(x: T.Buffer((count * divisor,), "float32"), y: T.Buffer((divisor, count), "float32")):  # type: ignore
        for i in range(count * divisor):
            y[i % divisor, i // divisor] = x[i] * T.float32(2)

    return function


def rows_of(*axes: int) -> tirx.PrimFunc:
    """Which numbers its rows across all axes but the last."""
    first, second, width = axes

    @T.prim_func(s_tir=True)
    def function(x: T.Buffer(axes, "float32"), y: T.Buffer(axes, "float32")):  # type: ignore
        for i in range(first * second):
            for k in T.vectorized(width):
                y[i // second, i % second, k] = x[i // second, i % second, k] + T.float32(1)

    return function


def limited(count: int, most: int) -> tirx.PrimFunc:
    """Which compares with a number without a sign."""

    @T.prim_func(s_tir=True)
    def function(x: T.Buffer((count,), "int64"), y: T.Buffer((count,), "int64")):  # type: ignore
        for i in range(count):
            y[i] = T.Cast("int64", T.min(T.Cast("uint64", x[i] - T.int64(1)), T.uint64(most)))

    return function


def test_equal_numbers_are_one_parameter() -> None:
    functions = named({"a": rows(3), "b": rows(5)})
    [family] = families(functions)
    assert family.members == {"a": (3, 24), "b": (5, 40)}  # rows and elements, each used several times
    for name, member in functions.items():
        assert_same(family, name, member, 0)


def test_numbers_of_tasks_may_be_divided_by_a_parameter() -> None:
    functions = named({"a": divided(3, 5), "b": divided(5, 7)})
    [family] = families(functions)
    for name, member in functions.items():
        assert_same(family, name, member, 1)


@pytest.mark.parametrize(
    "alike",
    [
        (rows_of(2, 3, 4), rows_of(1, 5, 4)),  # rows that lie behind each other
        (limited(3, 0), limited(5, 7)),
    ],
)
def test_what_differs_in_numbers_is_alike(alike: tuple[tirx.PrimFunc, tirx.PrimFunc]) -> None:
    functions = named(dict(zip("ab", alike, strict=True)))
    [family] = families(functions)
    for name, member in functions.items():
        assert_same(family, name, member, 2)


@pytest.mark.parametrize(
    "others",
    [
        (rows(3, 16, 4), rows(3, 16, 8)),  # vectors of other widths
        (divided_inside(3, 5), divided_inside(3, 7)),
        (rows(3), divided(3, 8)),  # other code
    ],
)
def test_what_shapes_code_keeps_functions_apart(others: tuple[tirx.PrimFunc, tirx.PrimFunc]) -> None:
    functions = named(dict(zip("ab", others, strict=True)))
    assert [each.members for each in families(functions)] == [{"a": ()}, {"b": ()}]
    for each, flat in zip(families(functions), flattened(functions).values(), strict=True):
        tvm.ir.assert_structural_equal(each.function, flat)


def test_hundreds_of_functions_are_compiled_by_families(tmp_path: Path) -> None:
    functions = {
        f"f{count}": scheduled(parallel_scale(2, (count, 4)), Device.CPU).function for count in range(1, 131)
    }
    several = {name: functions[name] for name in list(functions)[1:4]}
    for made, is_shared in ((functions, True), (several, False)):
        library = build_library(tvm.IRModule(named(made)), CPU_TARGET, tmp_path)
        assert library.functions == len(made)
        assert (b"_family" in library.path.read_bytes()) is is_shared
        x, y = (tvm.runtime.tensor(np.full((3, 4), value, np.float32)) for value in (5, 0))
        tvm_ffi.load_module(str(library.path))["f3"](x, y)
        assert np.all(y.numpy() == 10)


def test_library_has_the_members_under_their_names(tmp_path: Path) -> None:
    shapes = {"one": (3, 4), "two": (5, 4), "same": (5, 4), "other": (2, 3, 4)}
    functions = {name: scheduled(parallel_scale(2, s), Device.CPU).function for name, s in shapes.items()}
    library = build_library(tvm.IRModule(named(functions)), CPU_TARGET, tmp_path, many_sizes=True)
    assert library.functions == len(shapes)
    assert b"one_family" in library.path.read_bytes()
    module = tvm_ffi.load_module(str(library.path))
    for name, shape in shapes.items():
        x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
        result = tvm.runtime.tensor(np.zeros(shape, np.float32))
        module[name](tvm.runtime.tensor(x), result)
        np.testing.assert_array_equal(result.numpy(), x * 2)
    with pytest.raises(TypeError):
        module["one"](tvm.runtime.tensor(x))
    assert all(
        os.fsencode(f) not in library.path.read_bytes()
        for f in (ROOT, tmp_path, Path(tvm_ffi.__file__).parent)
    )
