"""Which tensors have channels last, and what becomes of the program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain, combinations

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax
from tvm_ffi import structural_equal

from hybridc.errors import InternalError
from hybridc.passes.fuse.fuse import fuse
from hybridc.passes.layout.channels_last import LEAST_GAIN, choose_channels_last, in_layout, lay_out
from hybridc.passes.program.prim_funcs import FunctionTable
from hybridc.passes.program.program import Program, called_function, tensor_shape
from hybridc.passes.read_graph import read_graph
from hybridc.schedules.channels_last import channels_last, with_planes
from tests.passes.layout.test_layout import Network
from tests.support.programs import drawn, run_llvm

Us = Callable[[str, frozenset[int]], float]


def network() -> Program:
    """Two convolutions of one shape with ReLUs, a pool between, a residual, and a mean at the end."""
    n = Network(1, 3, 8, 10)
    x = n.relu(n.conv(n.x, 16))
    pooled = n.emit(relax.op.nn.max_pool2d(x, (3, 3), padding=(1, 1)), "pool")
    y = n.relu(n.conv(pooled, 16))
    z = n.relu(n.emit(relax.op.add(n.conv(y, 16), pooled), "sum"))
    return fuse(n.program(n.emit(relax.op.mean(z, (2, 3)), "mean")), FunctionTable())


PROGRAM = network()
CONVOLUTIONS = {called_function(b): frozenset({0}) for b in PROGRAM.bindings if "conv" in called_function(b)}
TENSORS = [b.var.name for b in PROGRAM.bindings]
GROUPS = (frozenset({"conv2d", "max_pool2d", "conv2d_2"}), frozenset({"conv2d_1"}))
"""What the pool and the residual connect, and what lies between the convolutions."""


def in_order(*, last: float, crossing: float) -> Us:
    """Convolutions take `last` if their result has channels last, else 1, and `crossing` more where what a
    function reads and writes lies in two ways."""

    def us(name: str, positions: frozenset[int]) -> float:
        [binding] = [b for b in PROGRAM.bindings if called_function(b) == name][:1]
        operands = [*binding.value.args[1].fields, binding.var]
        images = [
            i for i, v in enumerate(operands) if v.name in ("x", *TENSORS) and len(tensor_shape(v)) == 4
        ]
        is_last = len(operands) - 1 in positions
        mixed = crossing if 0 < len(positions) < len(images) else 0.0
        return (last if is_last and name in CONVOLUTIONS else 1.0) + mixed

    return us


def test_nothing_changes_where_nothing_is_gained() -> None:
    assert not choose_channels_last(PROGRAM, CONVOLUTIONS, in_order(last=1.0, crossing=0.0))
    assert not choose_channels_last(PROGRAM, CONVOLUTIONS, in_order(last=1.0 - LEAST_GAIN, crossing=0.0))
    assert not choose_channels_last(PROGRAM, CONVOLUTIONS, in_order(last=0.5, crossing=10.0))
    assert not choose_channels_last(PROGRAM, {}, in_order(last=0.1, crossing=0.0))


def test_all_images_between_convolutions_change_where_all_gain() -> None:
    last = choose_channels_last(PROGRAM, CONVOLUTIONS, in_order(last=0.5, crossing=0.1))
    # not the result of the mean, which is no image
    assert last == frozenset(TENSORS[:-1])


def test_functions_that_cannot_have_channels_last_keep_planes() -> None:
    cheap = in_order(last=0.5, crossing=0.0)
    [pool] = [name for name in map(called_function, PROGRAM.bindings) if "pool" in name]

    def us(name: str, positions: frozenset[int]) -> float:
        return float("inf") if name == pool and positions else cheap(name, positions)

    last = choose_channels_last(PROGRAM, CONVOLUTIONS, us)
    [pooled] = [b for b in PROGRAM.bindings if called_function(b) == pool]
    assert last and not last & {pooled.var.name, pooled.value.args[1].fields[0].name}


def test_what_a_function_of_two_results_reads_or_writes_keeps_planes() -> None:
    n = Network(1, 16, 8, 8)
    both = n.emit(relax.op.split(n.relu(n.conv(n.x, 16)), 2, 1), "split")
    parts = [n.emit(relax.TupleGetItem(both, i), "part") for i in range(2)]
    program = fuse(n.program(*(n.relu(n.conv(part, 16)) for part in parts)), FunctionTable())
    names = {called_function(b) for b in program.bindings if "conv" in called_function(b)}
    last = choose_channels_last(
        program, dict.fromkeys(names, frozenset({0})), lambda _, positions: 1.0 - 0.1 * len(positions)
    )
    tuples = [b for b in program.bindings if isinstance(b.var.ty, relax.TupleType)]
    assert len(tuples) == 1 and not last


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.tuples(st.sampled_from(TENSORS[:-1]), st.booleans()), st.floats(0, 4)))
def test_the_cheapest_layouts_are_found(prices: dict[tuple[str, bool], float]) -> None:
    """Where each result has a price in each layout."""

    def us(name: str, positions: frozenset[int]) -> float:
        found = 1.0
        for b in PROGRAM.bindings:
            if called_function(b) == name:
                operands = [*b.value.args[1].fields, b.var]
                found += prices.get((b.var.name, len(operands) - 1 in positions), 0.0)
        return found

    def total(last: frozenset[str]) -> float:
        found = 0.0
        for b in PROGRAM.bindings:
            operands = [*b.value.args[1].fields, b.var]
            found += us(called_function(b), frozenset(i for i, v in enumerate(operands) if v.name in last))
        return found

    last = choose_channels_last(PROGRAM, CONVOLUTIONS, us)
    assert total(last) <= total(frozenset())
    if last:
        some = chain.from_iterable(combinations(GROUPS, n) for n in range(len(GROUPS) + 1))
        subsets = [frozenset().union(*groups) for groups in some]
        assert last in subsets and total(last) <= min(map(total, subsets)) + 1e-9


@pytest.mark.parametrize("count", range(1, len(TENSORS)))
def test_programs_compute_the_same_in_any_layout(count: int) -> None:
    rng = np.random.default_rng(count)
    last = frozenset(rng.choice(TENSORS[:-1], min(count, len(TENSORS) - 1), replace=False))
    after, origins = lay_out(PROGRAM, last)
    assert {b.var.name for b in after.bindings if _is_last(after, b)} == last
    assert after.origins == PROGRAM.origins and origins
    x = drawn(5, *tensor_shape(PROGRAM.inputs[0]))
    wanted = run_llvm(PROGRAM.module, x, *PROGRAM.weights.values())
    found = run_llvm(after.module, x, *after.weights.values())
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5, atol=1e-6)
    graph = read_graph(after, {})
    assert {t.name for t in graph.tensors if t.channels_last} == last
    for before, tensor in zip(read_graph(PROGRAM, {}).tensors, graph.tensors, strict=True):
        n, *rest = before.shape
        moved = (n, *rest[1:], rest[0]) if tensor.channels_last else before.shape
        assert tensor.shape == moved and tensor.size_bytes == before.size_bytes


def _is_last(program: Program, binding: relax.VarBinding) -> bool:
    function = program.module[called_function(binding)]
    return len(function.params) - 1 in channels_last(function)


def test_a_kernel_that_reads_another_layout_is_found() -> None:
    after, _ = lay_out(PROGRAM, frozenset({"conv2d_1"}))
    planes = {g.name_hint: f for g, f in PROGRAM.functions.items()}
    mixed = [called_function(b).partition("_last_") for b in after.bindings if b.var.name == "conv2d_2"]
    [(name, _, _)] = mixed
    module = tvm.IRModule(
        {
            g: planes[name] if g.name_hint.startswith(f"{name}_last_") else f
            for g, f in after.module.functions.items()
        }
    )
    with pytest.raises(InternalError, match="conv2d_2 does not read conv2d_1 as it lies"):
        read_graph(replace(after, module=module), {})


def test_planes_are_found_again() -> None:
    for name, function in PROGRAM.functions.items():
        images = [i for i, p in enumerate(function.params) if len(p.shape) == 4 and int(p.shape[2]) > 1]
        made = in_layout(function, frozenset(images))
        assert made is not None and made.attrs["global_symbol"] != name.name_hint
        again = with_planes(made).with_attr("global_symbol", name.name_hint)
        assert structural_equal(again, function)


def test_a_convolution_goes_through_memory_in_its_order() -> None:
    name = next(iter(CONVOLUTIONS))
    [function] = [f for g, f in PROGRAM.functions.items() if g.name_hint == name]
    made = in_layout(function, frozenset({len(function.params) - 1}))
    assert made is not None
    schedule = tvm.s_tir.Schedule(made)
    for block in schedule.get_child_blocks(schedule.get_sblock("root")):
        realized = schedule.get(block)
        extents = [int(schedule.get(loop).extent) for loop in schedule.get_loops(block)][:4]
        if "pad" not in realized.name_hint:
            assert extents == [int(e) for e in realized.writes[0].source.shape] == [1, 8, 10, 16]
