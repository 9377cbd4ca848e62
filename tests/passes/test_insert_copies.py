"""Which copies a placement needs, where they are issued and what waits for what."""

from __future__ import annotations

from hybridc.ir import Copy, Device, Graph, Run, Step
from hybridc.passes.insert_copies import insert_copies
from tests.support.graphs import GraphBuilder, chain

GPU, CPU = Device.GPU, Device.CPU


def issued(graph: Graph, *placement: Device) -> list[str]:
    return [name(step) for step in insert_copies(graph, placement)]


def name(step: Step) -> str:
    return f"{step.tensor}>{step.target}" if isinstance(step, Copy) else f"{step.kernel}@{step.device}"


def test_all_gpu_copies_inputs_in_and_outputs_out_but_no_weights() -> None:
    assert issued(chain(2), GPU, GPU) == ["x>gpu", "k0@gpu", "k1@gpu", "t1>cpu"]


def test_all_cpu_needs_no_copy_and_no_wait() -> None:
    steps = insert_copies(chain(2), (CPU, CPU))
    assert steps == (Run("k0", CPU), Run("k1", CPU))


def test_copy_is_shared_by_consumers_on_one_device() -> None:
    build = GraphBuilder()
    x = build.input("x", 1)
    a = build.kernel((x,), {"a": 1})
    for i in range(3):
        build.kernel((x, a), {f"b{i}": 1})
    graph = build.graph("b0", "b1", "b2")
    assert issued(graph, GPU, CPU, CPU, CPU).count("a>cpu") == 1
    steps = issued(graph, CPU, GPU, GPU, GPU)
    assert steps.count("a>gpu") == steps.count("x>gpu") == 1


def test_result_is_copied_to_the_host_right_behind_its_producer() -> None:
    build = GraphBuilder()
    x = build.input("x", 1)
    a = build.kernel((x,), {"a": 1})
    b = build.kernel((a,), {"b": 1})
    c = build.kernel((b, a), {"c": 1})
    assert issued(build.graph(c), GPU, GPU, CPU) == ["x>gpu", "k0@gpu", "a>cpu", "k1@gpu", "b>cpu", "k2@cpu"]


def test_cpu_kernels_are_held_back_until_a_gpu_kernel_needs_them() -> None:
    build = GraphBuilder()
    x = build.input("x", 1)
    a = build.kernel((x,), {"a": 1})
    b = build.kernel((x,), {"b": 1})
    c = build.kernel((b,), {"c": 1})
    d = build.kernel((a, c), {"d": 1})
    assert issued(build.graph(d), CPU, GPU, GPU, GPU) == [
        *("x>gpu", "k1@gpu", "k2@gpu"),
        *("k0@cpu", "a>gpu", "k3@gpu", "d>cpu"),
    ]


def test_input_that_is_ready_is_fetched_ahead_of_the_cpu_work_waited_for() -> None:
    build = GraphBuilder()
    x, y = build.input("x", 1), build.input("y", 1)
    a = build.kernel((x,), {"a": 1})
    b = build.kernel((a, y), {"b": 1})
    assert issued(build.graph(b), CPU, GPU) == ["y>gpu", "k0@cpu", "a>gpu", "k1@gpu", "b>cpu"]


def test_only_waits_between_lanes_that_nothing_else_implies_are_kept() -> None:
    steps = insert_copies(chain(3), (GPU, CPU, GPU))
    assert [name(s) for s in steps] == [
        *("x>gpu", "k0@gpu", "t0>cpu", "k1@cpu", "t1>gpu", "k2@gpu", "t2>cpu"),
    ]
    assert [s.waits for s in steps] == [(), (0,), (1,), (2,), (3,), (4,), (5,)]
    residual = GraphBuilder()
    x = residual.input("x", 1)
    a = residual.kernel((x,), {"a": 1})
    b = residual.kernel((a,), {"b": 1})
    steps = insert_copies(residual.graph(residual.kernel((x, b), {"c": 1})), (GPU, GPU, GPU))
    assert [s.waits for s in steps] == [(), (0,), (), (), (3,)]


def test_output_that_is_an_input_or_a_weight_needs_no_copy() -> None:
    build = GraphBuilder()
    x, w = build.input("x", 1), build.weight("w", 1)
    a = build.kernel((x, w), {"a": 1})
    assert issued(build.graph(a, x, w, a), GPU) == ["x>gpu", "k0@gpu", "a>cpu"]
