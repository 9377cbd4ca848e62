"""One damaged plan for each promise that the verifier keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from hybridc.errors import PlanError
from hybridc.ir import (
    Arena,
    Buffer,
    BufferKind,
    Copy,
    Device,
    Graph,
    Kernel,
    Plan,
    Role,
    Run,
    Step,
    Tensor,
)
from hybridc.ir.plan import ALIGNMENT_BYTES
from hybridc.ir.verify import verify
from hybridc.passes.planner.emit.reuse_buffers import reuse_buffers
from hybridc.passes.planner.make_plans import assemble
from tests.support.graphs import GraphBuilder, chain, machine
from tests.support.placements import steps_of
from tests.support.verdicts import is_refused

GPU, CPU = Device.GPU, Device.CPU


def plan_of(graph: Graph, steps: Sequence[Step]) -> Plan:
    return assemble(graph, machine(), None, *reuse_buffers(graph, steps, (GPU, CPU)))


def planned(graph: Graph, *placement: Device) -> Plan:
    return plan_of(graph, steps_of(graph, placement))


GRAPH = chain(3)
PLAN = planned(GRAPH, GPU, CPU, GPU)
"""x>gpu k0@gpu t0>cpu k1@cpu t1>gpu k2@gpu t2>cpu"""


def refused(plan: Plan, code: str, what: str, graph: Graph = GRAPH) -> None:
    with pytest.raises(PlanError, match=what) as error:
        verify(graph, plan)
    assert error.value.code == code
    assert error.value.where


def with_step(position: int, step: Step) -> Plan:
    return replace(PLAN, steps=(*PLAN.steps[:position], step, *PLAN.steps[position + 1 :]))


def with_buffer(tensor: str, device: Device, /, **changes: Any) -> Plan:
    assert any(b.tensor == tensor and b.device is device for b in PLAN.buffers)
    buffers = (
        replace(b, **changes) if b.tensor == tensor and b.device is device else b for b in PLAN.buffers
    )
    return replace(PLAN, buffers=tuple(buffers))


def without_buffer(tensor: str, device: Device) -> Plan:
    kept = tuple(b for b in PLAN.buffers if not (b.tensor == tensor and b.device is device))
    return replace(PLAN, buffers=kept)


def test_plan_of_the_planner_is_accepted() -> None:
    assert not is_refused(GRAPH, PLAN)


@pytest.mark.parametrize("wait", [-1, 3, 4, 99])
def test_wait_for_a_step_that_is_not_earlier_is_refused(wait: int) -> None:
    refused(with_step(3, replace(PLAN.steps[3], waits=(wait,))), "HC212", "earlier")


def test_kernel_that_never_runs_is_refused() -> None:
    cut = replace(PLAN, steps=PLAN.steps[:5], step_us=PLAN.step_us[:5])
    refused(cut, "HC211", "never runs")


def test_kernel_on_a_device_it_has_no_code_for_is_refused() -> None:
    kernels = (replace(GRAPH.kernels[0], devices=(CPU,)), *GRAPH.kernels[1:])
    refused(PLAN, "HC211", "no code", replace(GRAPH, kernels=kernels))


@pytest.mark.parametrize(
    "step",
    [Run("nobody", GPU), Copy("nothing", CPU, GPU), Copy("x", GPU, GPU), Run(3, GPU), Copy([], CPU, GPU)],  # type: ignore[arg-type]
)
def test_step_of_something_unknown_is_refused(step: Step) -> None:
    refused(with_step(0, step), "HC210", "unknown|itself")


def test_read_that_is_not_ordered_behind_its_write_is_refused() -> None:
    refused(with_step(1, replace(PLAN.steps[1], waits=())), "HC213", "without being behind step 0")


def test_read_on_the_device_where_the_value_is_not_is_refused() -> None:
    refused(with_step(2, Copy("x", GPU, CPU, (1,))), "HC214", "no buffers hold 'x'")


def test_copy_of_a_resident_weight_or_of_one_to_the_host_is_refused() -> None:
    refused(with_step(0, Copy("w0", CPU, GPU)), "HC213", "already there")
    refused(with_step(2, Copy("w0", GPU, CPU)), "HC219", "copies a weight to the host")


def test_missing_or_doubled_buffer_is_refused() -> None:
    refused(without_buffer("t1", GPU), "HC214", "no buffers hold 't1'")
    doubled = next(b for b in PLAN.buffers if b.tensor == "t1" and b.device is GPU)
    refused(replace(PLAN, buffers=(*PLAN.buffers, doubled)), "HC214", "2 buffers hold 't1'")


@pytest.mark.parametrize(
    ("changes", "code", "what"),
    [
        ({"size_bytes": 1}, "HC215", f"needs {4 * ALIGNMENT_BYTES}"),
        ({"offset_bytes": 3}, "HC215", "not aligned"),
        ({"offset_bytes": -ALIGNMENT_BYTES}, "HC215", "not aligned"),
        ({"offset_bytes": 1 << 40}, "HC215", "outside the arena"),
        ({"first_step": 5}, "HC214", "no buffers hold"),
        ({"last_step": 4}, "HC214", "no buffers hold"),
        ({"last_step": 99}, "HC210", "to 99"),
        ({"first_step": -2}, "HC210", "from step -2"),
        ({"first_step": 3}, "HC213", "already there"),
        ({"kind": BufferKind.WEIGHT}, "HC219", "only they"),
        ({"kind": BufferKind.WORKSPACE}, "HC215", "no such kernel"),
    ],
)
def test_wrong_buffer_is_refused(changes: dict[str, Any], code: str, what: str) -> None:
    refused(with_buffer("t1", GPU, **changes), code, what)


@pytest.mark.parametrize("name", [None, 7, [], "nothing"])
@pytest.mark.parametrize("kind", list(BufferKind))
def test_buffer_of_something_unknown_is_refused(name: Any, kind: BufferKind) -> None:
    with pytest.raises(PlanError):
        verify(GRAPH, with_buffer("t1", GPU, tensor=name, kind=kind))


def test_weight_that_is_not_resident_all_the_time_is_refused() -> None:
    refused(with_buffer("w2", GPU, last_step=6), "HC219", "not resident")
    refused(with_buffer("w2", GPU, first_step=0), "HC213", "nothing writes it at step 0")
    refused(without_buffer("w2", GPU), "HC214", "no buffers hold 'w2'")


def test_weight_of_a_cpu_kernel_with_a_buffer_is_refused() -> None:
    for device in Device:
        extra = Buffer("w1", BufferKind.WEIGHT, device, 0, 2 * ALIGNMENT_BYTES, -1, len(PLAN.steps))
        refused(replace(PLAN, buffers=(*PLAN.buffers, extra)), "HC219", "only weights of GPU kernels")


def test_live_buffers_that_share_bytes_are_refused() -> None:
    offset_bytes = next(b.offset_bytes for b in PLAN.buffers if b.tensor == "t1" and b.device is GPU)
    refused(with_buffer("t2", GPU, offset_bytes=offset_bytes), "HC216", "'t1'.*'t2'")
    refused(with_buffer("w0", GPU, offset_bytes=offset_bytes), "HC216", "'w0'")


def test_output_overwrites_only_what_the_kernel_permits() -> None:
    build = GraphBuilder()
    a = build.kernel((build.input("x", 4),), {"a": 4})
    graph = build.graph(build.kernel((a,), {"b": 4}, overwrite=(("b", "a"),)))
    plan = planned(graph, GPU, GPU)
    verify(graph, plan)
    forbidden = (graph.kernels[0], replace(graph.kernels[1], may_overwrite=()))
    refused(plan, "HC216", "'a'.*'b'", replace(graph, kernels=forbidden))


def test_arena_over_the_budget_is_refused() -> None:
    size_bytes = PLAN.arena_bytes(GPU)
    verify(GRAPH, replace(PLAN, budget_bytes=size_bytes))
    refused(replace(PLAN, budget_bytes=size_bytes - 1), "HC217", "exceed the budget")


def test_arena_that_is_too_small_doubled_or_impossible_is_refused() -> None:
    gpu, cpu = PLAN.arenas
    small = replace(gpu, size_bytes=gpu.size_bytes - ALIGNMENT_BYTES)
    refused(replace(PLAN, arenas=(small, cpu)), "HC215", "outside the arena")
    refused(replace(PLAN, arenas=(gpu, cpu, gpu)), "HC210", "two arenas")
    refused(replace(PLAN, arenas=(Arena(GPU, 1 << 80, 0), cpu)), "HC210", "impossible")
    refused(replace(PLAN, arenas=(Arena(GPU, -1, 0), cpu)), "HC210", "impossible")


def test_input_and_output_must_be_on_the_host() -> None:
    refused(with_buffer("t2", CPU, last_step=6), "HC218", "output")
    build = GraphBuilder()
    build.input("unused", 2)
    graph = build.graph(build.kernel((build.input("x", 2),), {"y": 2}))
    plan = planned(graph, CPU)
    dropped = replace(plan, buffers=tuple(b for b in plan.buffers if b.tensor != "unused"))
    refused(dropped, "HC218", "input", graph)


def test_graph_that_cannot_be_is_refused() -> None:
    kernels = (replace(GRAPH.kernels[0], inputs=("nothing",)), *GRAPH.kernels[1:])
    refused(PLAN, "HC210", "unknown tensor", replace(GRAPH, kernels=kernels))
    tensors = (replace(GRAPH.tensors[0], shape=(-4,)), *GRAPH.tensors[1:])
    refused(PLAN, "HC210", "impossible tensor", replace(GRAPH, tensors=tensors))
    refused(PLAN, "HC210", "two things", replace(GRAPH, tensors=GRAPH.tensors * 2))


STAYS = plan_of(
    GRAPH,
    [
        Copy("x", CPU, GPU),
        Copy("w0", CPU, GPU),
        Run("k0", GPU, (0, 1)),
        Copy("w1", CPU, GPU),
        Run("k1", GPU, (2, 3)),
        Copy("w0", CPU, GPU),  # again, and k0 again
        Run("k0", GPU, (0, 5)),
        Copy("t1", GPU, CPU, (4,)),
        Copy("t1", CPU, GPU, (7,)),
        Copy("w2", CPU, GPU),
        Run("k2", GPU, (8, 9)),
        Copy("t2", GPU, CPU, (10,)),
    ],
)
"""w0, t0 and t1 are on the GPU twice, k0 runs twice, and all weights are streamed."""


def stay(plan: Plan, tensor: str, device: Device, number: int, /, **changes: Any) -> Plan:
    """The plan with one of the stays of a tensor changed."""
    index = [i for i, b in enumerate(plan.buffers) if (b.tensor, b.device) == (tensor, device)][number]
    buffer = replace(plan.buffers[index], **changes)
    return replace(plan, buffers=(*plan.buffers[:index], buffer, *plan.buffers[index + 1 :]))


def test_tensor_may_come_to_a_device_again_and_a_weight_be_streamed() -> None:
    verify(GRAPH, STAYS)
    first = [(b.tensor, b.first_step) for b in STAYS.buffers if b.device is GPU and b.tensor in ("w0", "t1")]
    assert first == [("w0", 1), ("w0", 5), ("t1", 4), ("t1", 8)]


@pytest.mark.parametrize(
    ("tensor", "number", "changes", "code", "what"),
    [
        ("w0", 0, {"last_step": 5}, "HC214", "2 buffers hold 'w0'"),
        ("w0", 1, {"first_step": 6}, "HC214", "no buffers hold 'w0'"),
        ("t0", 1, {"first_step": 5}, "HC213", "already there"),
        ("t1", 0, {"last_step": 6}, "HC214", "no buffers hold 't1'"),
        ("t1", 1, {"first_step": 7}, "HC214", "2 buffers hold"),
    ],
)
def test_wrong_stay_is_refused(
    tensor: str, number: int, changes: dict[str, int], code: str, what: str
) -> None:
    refused(stay(STAYS, tensor, GPU, number, **changes), code, what)


def test_streamed_weight_must_have_arrived_when_it_is_read() -> None:
    waits = replace(STAYS.steps[6], waits=())
    unordered = replace(STAYS, steps=(*STAYS.steps[:6], waits, *STAYS.steps[7:]))
    refused(unordered, "HC213", "reads 'w0' on the gpu without being behind step 5")


def test_bytes_of_a_stay_are_not_taken_before_it_ends() -> None:
    offset_bytes = next(b.offset_bytes for b in STAYS.buffers if b.tensor == "t1" and b.first_step == 4)
    refused(stay(STAYS, "w0", GPU, 1, offset_bytes=offset_bytes), "HC216", "'t1'.*'w0'")


def test_deep_chain_is_verified_without_recursion() -> None:
    graph = chain(1500)
    assert not is_refused(graph, planned(graph, *(GPU, CPU, GPU) * 500))


def _with_parts(*parts: tuple[str, str]) -> Graph:
    """One kernel of two inputs and two outputs, of which each two may be parts."""
    tensors = [Tensor(name, (4,), "float32", Role.INPUT) for name in ("a", "b")]
    tensors += [Tensor(name, (4,), "float32", Role.OUTPUT) for name in ("c", "d")]
    kernel = Kernel("k", "k", ("a", "b"), ("c", "d"), devices=(CPU,))
    return Graph((kernel,), tuple(tensors), ("a", "b"), ("c", "d"), parts=parts)


def test_parts_of_inputs_and_outputs_are_known() -> None:
    graph = _with_parts(("a", "b"), ("c", "d"))
    plan = replace(PLAN, steps=(Run("k", CPU),), buffers=(), step_us=(1.0,))
    with pytest.raises(PlanError) as caught:  # its buffers are missing, which is told behind parts
        verify(graph, plan)
    assert "part" not in str(caught.value)
    assert graph.ports(graph.inputs) == (("a", "b"),) and graph.ports(graph.outputs) == (("c", "d"),)
    for parts in (
        [("a", "c")],  # an input and an output
        [("a", "a")],
        [("a", "b"), ("b", "a")],
        [("b", "a")],  # the second part is in front of the first
        [("a", "x")],
    ):
        refused(plan, "HC210", "part|unknown", _with_parts(*parts))
    tensors = tuple(replace(t, dtype="float16") if t.name == "b" else t for t in graph.tensors)
    refused(plan, "HC210", "cannot be parts", replace(graph, tensors=tensors))
