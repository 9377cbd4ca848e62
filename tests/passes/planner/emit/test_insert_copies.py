"""Simulated runs as steps: which copies a placement needs, and what waits for what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from hybridc.ir import Copy, Device, Graph, Run, Step
from hybridc.passes.planner.emit.insert_copies import insert_copies
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import problem_of
from hybridc.passes.planner.model.simulate import simulate
from tests.support.graphs import GraphBuilder, chain, machine
from tests.support.placements import names, steps_of

GPU, CPU = Device.GPU, Device.CPU


def listed(graph: Graph, *placement: Device) -> list[str]:
    return names(steps_of(graph, placement))


def waits(steps: Sequence[Step]) -> dict[str, list[str]]:
    named = names(steps)
    return {named[i]: [named[w] for w in s.waits] for i, s in enumerate(steps) if s.waits}


def test_all_gpu_copies_inputs_in_and_outputs_out_but_no_weights() -> None:
    steps = steps_of(chain(2), (GPU, GPU))
    assert names(steps) == ["x>gpu", "k0@gpu", "k1@gpu", "t1>cpu"]
    assert waits(steps) == {"k0@gpu": ["x>gpu"], "t1>cpu": ["k1@gpu"]}


def test_all_cpu_needs_no_copy_and_no_wait() -> None:
    assert steps_of(chain(2), (CPU, CPU)) == (Run("k0", CPU), Run("k1", CPU))


def test_step_i_is_event_i() -> None:
    problem = problem_of(chain(3), machine(), 1 << 40)
    outcome = simulate(problem, Decisions((False, True, False), (True,) * len(problem.gaps)))
    steps = insert_copies(chain(3), problem, outcome)
    assert [s.kernel for s in steps if isinstance(s, Run)] == [
        problem.kernel_names[e.index] for e in outcome.events if e.kind.startswith("run")
    ]
    assert [s.tensor for s in steps if isinstance(s, Copy)] == [
        problem.tensor_names[e.index] for e in outcome.events if not e.kind.startswith("run")
    ]
    assert len(steps) == len(outcome.events)


def test_copy_is_shared_by_consumers_on_one_device() -> None:
    build = GraphBuilder()
    x = build.input("x", 1)
    a = build.kernel((x,), {"a": 1})
    for i in range(3):
        build.kernel((x, a), {f"b{i}": 1})
    graph = build.graph("b0", "b1", "b2")
    assert listed(graph, GPU, CPU, CPU, CPU).count("a>cpu") == 1
    steps = listed(graph, CPU, GPU, GPU, GPU)
    assert steps.count("a>gpu") == steps.count("x>gpu") == 1


def test_result_is_copied_to_the_host_right_behind_its_producer() -> None:
    build = GraphBuilder()
    x = build.input("x", 1)
    a = build.kernel((x,), {"a": 1})
    b = build.kernel((a,), {"b": 1})
    c = build.kernel((b, a), {"c": 1})
    steps = steps_of(build.graph(c), (GPU, GPU, CPU))
    assert names(steps) == ["x>gpu", "k0@gpu", "a>cpu", "k1@gpu", "b>cpu", "k2@cpu"]
    assert waits(steps)["a>cpu"] == ["k0@gpu"] and "k1@gpu" not in waits(steps)  # side by side


def test_cpu_kernel_runs_beside_the_gpu_until_its_result_is_needed() -> None:
    build = GraphBuilder()
    x = build.input("x", 1)
    a = build.kernel((x,), {"a": 1})
    b = build.kernel((x,), {"b": 1})
    c = build.kernel((b,), {"c": 1})
    d = build.kernel((a, c), {"d": 1})
    steps = steps_of(build.graph(d), (CPU, GPU, GPU, GPU))
    assert "k0@cpu" not in waits(steps)
    assert waits(steps) == {
        "k1@gpu": ["x>gpu"],
        "a>gpu": ["k0@cpu"],
        "k3@gpu": ["a>gpu"],
        "d>cpu": ["k3@gpu"],
    }


def test_input_that_is_ready_is_fetched_while_the_cpu_makes_the_other() -> None:
    build = GraphBuilder()
    x, y = build.input("x", 1), build.input("y", 1)
    a = build.kernel((x,), {"a": 1})
    b = build.kernel((a, y), {"b": 1})
    steps = steps_of(build.graph(b), (CPU, GPU))
    assert sorted(names(steps)[:2]) == ["k0@cpu", "y>gpu"]
    assert names(steps)[2:] == ["a>gpu", "k1@gpu", "b>cpu"]


def test_only_waits_between_lanes_that_nothing_else_implies_are_kept() -> None:
    steps = steps_of(chain(3), (GPU, CPU, GPU))
    assert names(steps) == ["x>gpu", "k0@gpu", "t0>cpu", "k1@cpu", "t1>gpu", "k2@gpu", "t2>cpu"]
    assert [s.waits for s in steps] == [(), (0,), (1,), (2,), (3,), (4,), (5,)]
    residual = GraphBuilder()
    x = residual.input("x", 1)
    a = residual.kernel((x,), {"a": 1})
    b = residual.kernel((a,), {"b": 1})
    steps = steps_of(residual.graph(residual.kernel((x, b), {"c": 1})), (GPU, GPU, GPU))
    assert [s.waits for s in steps] == [(), (0,), (), (), (3,)]


def test_output_that_is_an_input_or_a_weight_needs_no_copy() -> None:
    build = GraphBuilder()
    x, w = build.input("x", 1), build.weight("w", 1)
    a = build.kernel((x, w), {"a": 1})
    assert listed(build.graph(a, x, w, a), GPU) == ["x>gpu", "k0@gpu", "a>cpu"]


def test_streamed_weight_is_waited_for_by_its_kernel() -> None:
    steps = steps_of(chain(2), (GPU, GPU), given_up={("w1", "k1")})
    assert "w1>gpu" in names(steps) and "w0>gpu" not in names(steps)
    assert waits(steps)["k1@gpu"] == ["w1>gpu"]


def test_tensor_that_leaves_the_gpu_is_offloaded_and_fetched_again() -> None:
    build = GraphBuilder()
    a = build.kernel((build.input("x", 4),), {"a": 4})
    b = build.kernel((a,), {"b": 4})
    graph = build.graph(build.kernel((a, b), {"c": 4}))
    steps = steps_of(graph, (GPU,) * 3, given_up={("a", "k2")})
    assert sorted(names(steps)) == sorted(["x>gpu", "k0@gpu", "a>cpu", "k1@gpu", "a>gpu", "k2@gpu", "c>cpu"])
    assert waits(steps)["a>gpu"] == ["a>cpu"]
    assert waits(steps)["k2@gpu"] == ["a>gpu"]


@pytest.mark.parametrize("given_up", [(), {("w1", "k1")}])
def test_cpu_kernel_reads_its_weight_where_it_lies(given_up: set[tuple[str, str]]) -> None:
    steps = steps_of(chain(3), (GPU, CPU, GPU), given_up)
    assert not {"w1>gpu", "w1>cpu"} & set(names(steps))
    assert waits(steps)["k1@cpu"] == ["t0>cpu"]
    assert waits(steps)["k2@gpu"] == ["t1>gpu"]


def test_kernel_that_runs_twice_is_read_from_its_last_run() -> None:
    graph = chain(2)
    problem = problem_of(graph, machine(), 1 << 40)
    run_again = replace(
        problem,
        kernel_names=("k0", *problem.kernel_names),
        tensor_names=(*problem.tensor_names, "t0"),
        gpu_us=(1.0, *problem.gpu_us),
        cpu_us=(1.0, *problem.cpu_us),
        inputs=(problem.inputs[0], *problem.inputs),
        outputs=((len(problem.tensor_names),), *problem.outputs),
        workspace_bytes=(0, *problem.workspace_bytes),
        may_overwrite=((), *problem.may_overwrite),
        size_bytes=(*problem.size_bytes, 2048),
        h2d_us=(*problem.h2d_us, 1.0),
        d2h_us=(*problem.d2h_us, 1.0),
        is_weight=(*problem.is_weight, False),
        wanted_on_host=(*problem.wanted_on_host, False),
    )
    decisions = Decisions((False,) * 3, (True,) * len(run_again.gaps))
    steps = insert_copies(graph, run_again, simulate(run_again, decisions))
    assert [n for n in names(steps) if "@" in n] == ["k0@gpu", "k0@gpu", "k1@gpu"]
