"""The micro-kernel's sums stay off the heap, and a stream prefetches every line that it is asked for."""

from __future__ import annotations

import itertools

import pytest
import tvm
from tvm import sym, tirx

from hybridc.schedules.cpu.core.micro_kernel import function_of, integer, prefetch
from hybridc.schedules.cpu.core.register_tile import PREFETCHES_AT_ONCE, Stream, reduction, register_tile


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("lines", [1, 6, 40, 300])
def test_every_line_of_a_stream_is_prefetched_in_each_outer_iteration(axis, lines):
    trips, asked = (3, 5, 4), []
    data = tirx.decl_buffer((1,), "float32")

    def line(outer, n):
        asked.append((tuple(int(i) for i in outer), int(sym.Analyzer().simplify(n))))
        return tirx.BufferLoad(data, [integer(0)])

    stream = Stream(axis, lines, line)
    at_once = []
    for level in range(axis, len(trips)):
        for point in itertools.product(*(range(extent) for extent in trips[: level + 1])):
            at_once.append(len(stream.at(level, trips, [integer(i) for i in point])))
    for outer in itertools.product(*(range(extent) for extent in trips[:axis])):
        numbers = [n for where, n in asked if where == outer]
        assert set(numbers) == set(range(lines))
    if lines <= PREFETCHES_AT_ONCE * 20:
        assert max(at_once) <= PREFETCHES_AT_ONCE


def test_sums_are_no_heap_allocations_even_with_prefetches(harness):
    """On the heap, sums would go back to memory in every iteration that prefetches."""
    data, out = (tirx.decl_buffer((64, 16), "float32", name) for name in ("data", "out"))
    tile = register_tile(8, 2, 8)

    def step(k):
        product = tirx.BufferLoad(data, [k[0], integer(0)])
        return tile.set(lambda m, v, lane: tile.sum_at(m, v, lane) + product)

    stream = Stream(0, 64, lambda outer, n: tirx.BufferLoad(data, [n, integer(0)]))
    write = tile.each(lambda m, v, lane: tirx.BufferStore(out, tile.sum_at(m, v, lane), [m * 2 + v, lane]))
    body = tile.within([tile.clear(), reduction((64,), tile, step, [stream]), write])
    original = tirx.PrimFunc([data, out], tirx.Evaluate(0)).with_attr("tirx.noalias", True)
    function = function_of(original, [data, out], [body], []).with_attr("global_symbol", "main")
    target = tvm.target.Target({"kind": "llvm", "mcpu": harness.isa.mcpu, "mattr": list(harness.isa.mattr)})
    source = tvm.compile(tvm.IRModule({"main": function}), target=target).mod.inspect_source("ll")
    assert "llvm.prefetch" in source
    assert "load ptr, ptr @__TVMBackendAllocWorkspace" not in source


def test_prefetch_for_writing_is_told_apart():
    element = tirx.BufferLoad(tirx.decl_buffer((4,), "float32"), [integer(0)])
    assert int(prefetch(element, write=True).value.args[2]) == 1
    assert int(prefetch(element).value.args[2]) == 0
