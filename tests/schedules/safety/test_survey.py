"""Checks whose values loops around repeat: they are made once, in front of those loops."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import te, tirx
from tvm.script import tirx as T

from hybridc.checks import checked_index, markers, numbered
from hybridc.ir import Device
from hybridc.schedules.rule import Request, Scheduled
from hybridc.schedules.safety.guard import made_safe
from hybridc.schedules.safety.scopes import SURVEYED_POSITIONS
from hybridc.schedules.select import schedule
from hybridc.schedules.shapes import index_shape
from hybridc.targets import parse_target

TARGET = parse_target("cuda:sm_80+avx2")
LLVM = tvm.target.Target({"kind": "llvm", "mcpu": "haswell"})
pytestmark = pytest.mark.isa("avx2")


@T.prim_func(private=True, s_tir=True)
def before(
    table: T.Buffer((T.int64(8), T.int64(16)), "float32"),
    fed: T.Buffer((T.int64(5),), "int64"),
    out: T.Buffer((T.int64(8), T.int64(5)), "float32"),
):
    T.func_attr({"checks": [[0, "Gather", "index", 0, 15]]})
    for i, j in T.grid(T.int64(8), T.int64(5)):
        out[i, j] = table[
            i,
            T.call_pure_extern(
                "int64", "hybridc_index", fed[j], T.int64(0), T.int64(0), T.int64(15), "Gather"
            ),
        ]


@T.prim_func(private=True, s_tir=True)
def expected(
    table: T.Buffer((T.int64(8), T.int64(16)), "float32"),
    fed: T.Buffer((T.int64(5),), "int64"),
    out: T.Buffer((T.int64(8), T.int64(5)), "float32"),
    faults: T.Buffer((T.int64(1), T.int64(2)), "int64"),
):
    T.func_attr({"checks": [[0, "Gather", "index", 0, 15]]})
    worst = T.alloc_buffer((T.int64(1),), "uint64")
    for at in T.vectorized(T.int64(1)):
        worst[at] = T.uint64(0)
    positions = T.alloc_buffer((T.int64(5),), "int64")
    for at in range(T.int64(5)):
        value: T.let[T.int64] = fed[at]
        position: T.let[T.int64] = value
        positions[at] = T.Cast("int64", T.min(T.Cast("uint64", position), T.uint64(15)))
        worst[T.int64(0)] = T.max(worst[T.int64(0)], T.Cast("uint64", position))
    for i, j in T.grid(T.int64(8), T.int64(5)):
        out[i, j] = table[i, positions[j]]
    for at in range(T.int64(1)):
        found: T.let[T.int64] = T.Cast("int64", worst[at])
        if found < T.int64(0) or found > T.int64(15):
            faults[T.int64(0), T.int64(0)] = T.int64(1)
            faults[T.int64(0), T.int64(1)] = T.Cast("int64", T.Select(found < T.int64(0), found, found))


def test_check_is_made_in_front_of_loops_that_its_value_does_not_depend_on():
    tvm.ir.assert_structural_equal(made_safe(Scheduled(before, "none")).function, expected)


def columns(rows: int, width: int, indices: int, device: Device = Device.CPU) -> Scheduled:
    """out[i, j] = table[i, fed[j]], as ONNX's Gather of an inner axis."""
    table = te.placeholder(index_shape((rows, width)), "float32", "table")
    fed = te.placeholder(index_shape((indices,)), "int64", "fed")
    out = te.compute(
        index_shape((rows, indices)),
        lambda i, j: table(i, checked_index(fed(j), width, "Gather")),
        name="out",
    )
    made = te.create_prim_func([table, fed, out])
    result = schedule(Request(numbered(made, [0] * len(markers(made.body))), frozenset(), TARGET), device)
    assert result is not None
    return result


def walled(array: np.ndarray) -> np.ndarray:
    """A copy between NaNs, as far apart as it is large."""
    memory = np.full(3 * array.nbytes + 64, 0xFF, np.uint8)  # all ones are a NaN
    start = array.nbytes - (memory.ctypes.data + array.nbytes) % -64
    copy = memory[start : start + array.nbytes].view(np.float32).reshape(array.shape)
    copy[:] = array
    return copy


def surveys(made: Scheduled) -> list[str]:
    """Names of the buffers in which surveys keep positions."""
    found: list[str] = []
    tvm_ffi.structural_walk(made.function.body, (tirx.AllocBuffer, lambda a: found.append(a.buffer.name)))
    return [name for name in found if name.startswith("positions")]


@pytest.mark.parametrize("seed", range(4))
def test_one_bad_index_anywhere_is_reported_and_reads_nothing_outside(seed):
    random = np.random.default_rng(seed)
    rows, width, indices = (int(random.integers(2, limit)) for limit in (40, 90, 300))
    made = columns(rows, width, indices)
    assert surveys(made)
    called = tvm.compile(
        tvm.IRModule({"main": made.function.with_attr("global_symbol", "main")}), target=LLVM
    )["main"]
    table = walled(random.standard_normal((rows, width), np.float32))
    legal = random.integers(-width, width, indices)

    def run(fed):
        tensors = [
            tvm.runtime.from_dlpack(table),
            *(
                tvm.runtime.tensor(array)
                for array in (fed, np.zeros((rows, indices), np.float32), np.zeros((1, 2), np.int64))
            ),
        ]
        called(*tensors)
        return tensors[2].numpy(), tensors[3].numpy().tolist()

    result, faults = run(legal)
    np.testing.assert_array_equal(result, table[:, legal])
    assert faults == [[0, 0]]
    for place in {0, indices - 1, *random.integers(indices, size=3)}:
        for value in (width, -width - 1, 10**6, 2**63 - 1, -(2**63)):
            fed = legal.copy()
            fed[place] = value
            result, faults = run(fed)
            assert faults == [[1, value]]
            others = np.arange(indices) != place
            np.testing.assert_array_equal(result[:, others], table[:, legal[others]])
            assert np.isfinite(result).all()


def test_indices_that_a_cache_does_not_hold_are_checked_where_they_are_used():
    assert surveys(columns(512, 64, SURVEYED_POSITIONS // 2))
    assert not surveys(columns(512, 64, SURVEYED_POSITIONS + 1))


def test_threads_of_a_gpu_check_their_own_indices():
    assert not surveys(columns(64, 64, 64, Device.GPU))


def test_check_under_a_condition_is_not_made_in_front_of_it():
    """Of rows of padding no index is looked at, and none lies behind the condition."""

    @T.prim_func(private=True, s_tir=True)
    def padded(
        table: T.Buffer((T.int64(8), T.int64(16)), "float32"),
        fed: T.Buffer((T.int64(5),), "int64"),
        out: T.Buffer((T.int64(8), T.int64(5)), "float32"),
    ):
        T.func_attr({"checks": [[0, "Gather", "index", 0, 15]]})
        for i in range(T.int64(8)):
            if i >= T.int64(7):
                for j in range(T.int64(5)):
                    out[i, j] = table[
                        i,
                        T.call_pure_extern(
                            "int64", "hybridc_index", fed[j], T.int64(0), T.int64(0), T.int64(15), "Gather"
                        ),
                    ]

    assert not surveys(made_safe(Scheduled(padded, "none")))
