"""Fewer bytes at once where that costs no time, and lists of steps that show the peak."""

from __future__ import annotations

import pytest

from hybridc.ir import Copy, Device, Graph, Run, Step
from hybridc.ir.plan import ALIGNMENT_BYTES
from hybridc.passes.planner.emit.reuse_buffers import Spans, live_bytes_bound, reuse_buffers
from hybridc.passes.planner.emit.slack import reduce_peak
from hybridc.passes.planner.emit.timeline import timeline
from tests.support.graphs import GraphBuilder

GPU, CPU = Device.GPU, Device.CPU
UNIT = ALIGNMENT_BYTES


def two_weights() -> tuple[Graph, list[Step]]:
    """x -> k0(w0) -> a -> k1 -> b -> k2(w2) -> c on the GPU; both weights are copied in early."""
    build = GraphBuilder()
    a = build.kernel((build.input("x", 1), build.weight("w0", 8)), {"a": 1})
    b = build.kernel((a,), {"b": 1})
    graph = build.graph(build.kernel((b, build.weight("w2", 8)), {"c": 1}))
    steps: list[Step] = [
        *(Copy("x", CPU, GPU), Copy("w0", CPU, GPU), Run("k0", GPU, (0, 1)), Copy("w2", CPU, GPU)),
        *(Run("k1", GPU), Run("k2", GPU, (3,)), Copy("c", GPU, CPU, (5,))),
    ]
    return graph, steps


def started(steps: tuple[Step, ...], spans: Spans) -> dict[str, float]:
    names = (s.tensor if isinstance(s, Copy) else s.kernel for s in steps)
    return {name: start_us for name, (start_us, _) in zip(names, spans, strict=True)}


def test_copy_waits_for_bytes_where_that_costs_no_time() -> None:
    graph, steps = two_weights()
    step_us = [1, 1, 3, 1, 3, 1, 1]
    makespan_us, spans = timeline(steps, step_us)
    assert live_bytes_bound(graph, steps, GPU, spans) == 18 * UNIT  # both weights during k0
    listed, later = reduce_peak(graph, steps, step_us, steps, (GPU, CPU))
    assert started(listed, later)["w2"] == started(listed, later)["k1"] == 5
    assert max(end_us for _, end_us in later) == makespan_us
    assert live_bytes_bound(graph, listed, GPU, later) == live_bytes_bound(graph, listed, GPU) == 10 * UNIT
    _, _, arenas = reuse_buffers(graph, listed, (GPU, CPU), later)
    assert arenas[0].size_bytes == arenas[0].lower_bound_bytes == 10 * UNIT


def test_peak_shows_in_the_list_where_no_time_can_be_lost() -> None:
    graph, steps = two_weights()
    step_us = [1, 1, 3, 9, 1, 1, 1]
    _, spans = timeline(steps, step_us)
    assert live_bytes_bound(graph, steps, GPU) < 18 * UNIT
    listed, same = reduce_peak(graph, steps, step_us, steps, (GPU, CPU))
    assert started(listed, same) == started(tuple(steps), spans)
    assert listed.index(Copy("w2", CPU, GPU)) < next(
        i for i, s in enumerate(listed) if s == Run("k0", GPU, s.waits)
    )
    assert live_bytes_bound(graph, listed, GPU, same) == live_bytes_bound(graph, listed, GPU) == 18 * UNIT


def test_peak_of_the_host_shows_in_the_list() -> None:
    """The copy of a to the host begins while a kernel of the CPU still reads b."""
    build = GraphBuilder()
    x = build.input("x", 1)
    a = build.kernel((x,), {"a": 8})
    b = build.kernel((x,), {"b": 8})
    c = build.kernel((b,), {"c": 1})
    graph = build.graph(build.kernel((a, c), {"d": 1}))
    steps: list[Step] = [
        *(Copy("x", CPU, GPU), Run("k1", CPU), Run("k2", CPU), Run("k0", GPU, (0,))),
        *(Copy("a", GPU, CPU, (3,)), Run("k3", CPU, (4,))),
    ]
    step_us = [1, 1, 4, 1, 9, 1]
    listed, spans = reduce_peak(graph, steps, step_us, steps, (GPU, CPU))
    assert started(listed, spans)["a"] == 2 and started(listed, spans)["k2"] == 1
    assert live_bytes_bound(graph, steps, CPU) == 10 * UNIT
    # x is an input, which is on the host until its last use
    assert live_bytes_bound(graph, listed, CPU, spans) == live_bytes_bound(graph, listed, CPU) == 17 * UNIT


def test_run_begins_with_the_waits_of_a_plan() -> None:
    graph, steps = two_weights()
    waiting, _, _ = reuse_buffers(graph, steps, (GPU, CPU))  # w2 takes the bytes of w0
    step_us = [1, 1, 3, 9, 1, 1, 1]
    listed, spans = reduce_peak(graph, steps, step_us, waiting, (GPU, CPU))
    assert started(listed, spans)["w2"] == 5
    assert live_bytes_bound(graph, listed, GPU, spans) == 10 * UNIT


def test_second_stay_of_a_tensor_comes_after_the_first() -> None:
    build = GraphBuilder()
    a = build.kernel((build.input("x", 1), build.weight("w", 8)), {"a": 1})
    b = build.kernel((a,), {"b": 1})
    graph = build.graph(build.kernel((b, "w"), {"c": 1}))
    steps: list[Step] = [
        *(Copy("x", CPU, GPU), Copy("w", CPU, GPU), Run("k0", GPU, (0, 1)), Run("k1", GPU)),
        *(Copy("w", CPU, GPU), Run("k2", GPU, (4,)), Copy("c", GPU, CPU, (5,))),
    ]
    listed, spans = reduce_peak(graph, steps, [1, 1, 3, 3, 1, 1, 1], steps, (GPU,))
    copies = [spans[i][0] for i, step in enumerate(listed) if step == Copy("w", CPU, GPU)]
    assert copies == [1, 5]


@pytest.mark.parametrize("devices", [(CPU,), (GPU, CPU)])
def test_nothing_to_run(devices: tuple[Device, ...]) -> None:
    assert reduce_peak(GraphBuilder().graph(), [], [], [], devices) == ((), [])
