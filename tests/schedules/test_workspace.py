"""Shared global intermediates become parameters; everything else stays where it is."""

# mypy: disable-error-code="valid-type"
from __future__ import annotations

import numpy as np
import tvm
from tvm import tirx
from tvm.ir import assert_structural_equal
from tvm.script import tirx as T

from hybridc.schedules.workspace import lift_workspace


@T.prim_func(s_tir=True)
def two_nests(x: T.Buffer((4, 6), "float32"), y: T.Buffer((4, 6), "float32")) -> None:
    T.func_attr({"tirx.noalias": True})
    doubled = T.sblock_alloc_buffer((4, 6), "float32")
    for i, j in T.grid(4, 6):
        with T.sblock("double"):
            vi, vj = T.axis.remap("SS", [i, j])
            doubled[vi, vj] = x[vi, vj] * T.float32(2)
    for i, j in T.grid(4, 6):
        with T.sblock("flip"):
            vi, vj = T.axis.remap("SS", [i, j])
            y[vi, vj] = doubled[3 - vi, 5 - vj]


@T.prim_func(s_tir=True)
def two_nests_lifted(
    x: T.Buffer((4, 6), "float32"), y: T.Buffer((4, 6), "float32"), doubled: T.Buffer((4, 6), "float32")
) -> None:
    T.func_attr({"tirx.noalias": True})
    for i, j in T.grid(4, 6):
        with T.sblock("double"):
            vi, vj = T.axis.remap("SS", [i, j])
            doubled[vi, vj] = x[vi, vj] * T.float32(2)
    for i, j in T.grid(4, 6):
        with T.sblock("flip"):
            vi, vj = T.axis.remap("SS", [i, j])
            y[vi, vj] = doubled[3 - vi, 5 - vj]


@T.prim_func(s_tir=True)
def row_tile(x: T.Buffer((4, 6), "float32"), y: T.Buffer((4, 6), "float32")) -> None:
    doubled = T.sblock_alloc_buffer((4, 6), "float32")
    for i in range(4):
        for j in range(6):
            with T.sblock("double"):
                vi, vj = T.axis.remap("SS", [i, j])
                doubled[vi, vj] = x[vi, vj] * T.float32(2)
        for j in range(6):
            with T.sblock("flip"):
                vi, vj = T.axis.remap("SS", [i, j])
                y[vi, vj] = doubled[vi, 5 - vj]


@T.prim_func(s_tir=True)
def grid_with_mask(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")) -> None:
    positive = T.sblock_alloc_buffer((64,), "bool")
    staged = T.sblock_alloc_buffer((64,), "float32", scope="shared")
    for bx in T.thread_binding(2, thread="blockIdx.x"):
        for tx in T.thread_binding(32, thread="threadIdx.x"):
            with T.sblock("mask"):
                v = T.axis.spatial(64, bx * 32 + tx)
                positive[v] = x[v] > T.float32(0)
    for bx in T.thread_binding(2, thread="blockIdx.x"):
        for tx in T.thread_binding(32, thread="threadIdx.x"):
            with T.sblock("stage"):
                v = T.axis.spatial(64, bx * 32 + tx)
                staged[v] = x[v]
        for tx in T.thread_binding(32, thread="threadIdx.x"):
            with T.sblock("select"):
                v = T.axis.spatial(64, bx * 32 + tx)
                y[v] = T.Select(positive[63 - v], staged[v], T.float32(0))


def test_buffer_of_two_nests_becomes_the_last_parameter() -> None:
    lifted, sizes = lift_workspace(two_nests)
    assert sizes == (4 * 6 * 4,)
    assert_structural_equal(lifted, two_nests_lifted.with_attr("global_symbol", "two_nests"))


def test_lifting_twice_changes_nothing_more() -> None:
    lifted, _ = lift_workspace(two_nests)
    again, sizes = lift_workspace(lifted)
    assert sizes == ()
    assert_structural_equal(again, lifted)


def test_buffer_of_one_nest_stays() -> None:
    lifted, sizes = lift_workspace(row_tile)
    assert sizes == ()
    assert_structural_equal(lifted, row_tile)


def test_shared_memory_stays_and_a_mask_takes_a_byte_an_element() -> None:
    lifted, sizes = lift_workspace(grid_with_mask)
    assert sizes == (64,)
    assert [p.name for p in lifted.params] == ["x", "y", "positive"]
    assert [b.name for b in lifted.body.block.alloc_buffers] == ["staged"]


def test_function_without_a_root_block_is_returned_as_it_is() -> None:
    empty = tirx.PrimFunc([], tirx.Evaluate(0))
    assert lift_workspace(empty) == (empty, ())


def test_lifted_function_computes_the_same() -> None:
    lifted, sizes = lift_workspace(two_nests)
    library = tvm.compile(tvm.IRModule({"main": lifted.with_attr("global_symbol", "main")}), target="llvm")
    x = np.random.default_rng(0).standard_normal((4, 6)).astype("float32")
    y = tvm.runtime.empty((4, 6), "float32")
    workspace = tvm.runtime.empty((4, 6), "float32")
    assert sizes == (workspace.numpy().nbytes,)
    library["main"](tvm.runtime.tensor(x), y, workspace)
    np.testing.assert_array_equal(y.numpy(), 2 * x[::-1, ::-1])
