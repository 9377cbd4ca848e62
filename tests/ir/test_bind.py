"""Binding: which bytes operands are, which waits become events, what each lane does step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridc.ir import Buffer, BufferKind, Copy, Graph, Kernel, Lane, Plan, Role, Run, Step
from hybridc.ir.bind import Binding, BindingError, Parameter, View, Weight, bind, required_events
from hybridc.ir.plan import ALIGNMENT_BYTES
from tests.support.artifacts import (
    CPU,
    GPU,
    Model,
    PlanBuilder,
    cpu_model,
    hybrid_model,
    model_for_two_budgets,
    streaming_model,
    tensor,
)

FLOATS = Parameter((4, 8), "float32")


def issued(model: Model, lane: Lane, number: int = 0) -> list[tuple[tuple[int, ...], str | None, int | None]]:
    """What a lane waits for, calls (None: it copies), and records, in order."""
    steps = model.lower().plans[number].steps
    return [(step.waits, step.function, step.event) for step in steps if step.lane is lane]


def steps_plan(*steps: Step) -> Plan:
    return Plan(steps, (), (), None, (1.0,) * len(steps), 1.0)


def test_each_lane_issues_its_steps_in_order_with_events_only_where_needed() -> None:
    model = hybrid_model()
    assert issued(model, Lane.GPU) == [
        ((0,), "matmul_gpu", 1),
        ((4,), "add_gpu", None),
        ((), "negate_gpu", 5),
    ]
    assert issued(model, Lane.CPU) == [((2,), "relu_cpu", 3)]
    assert issued(model, Lane.H2D) == [((), None, 0), ((3,), None, 4)]
    assert issued(model, Lane.D2H) == [((1,), None, 2), ((5,), None, None)]


def test_cpu_plan_has_one_lane_without_events() -> None:
    model = cpu_model()
    assert issued(model, Lane.CPU) == [((), "matmul_cpu", None), ((), "relu_cpu", None)]
    assert {step.lane for step in model.lower().plans[0].steps} == {Lane.CPU}


def test_copy_has_a_source_and_a_target_of_the_tensors_bytes() -> None:
    first, *_, last = hybrid_model().lower().plans[0].steps
    x, y = (View(CPU, offset, (128,), "uint8") for offset in (0, 3 * ALIGNMENT_BYTES))
    assert first.operands[0] == x and last.operands[1] == y
    for step in (first, last):
        views = [o for o in step.operands if isinstance(o, View)]
        assert [(o.shape, o.dtype) for o in views] == 2 * [((128,), "uint8")]


def test_streamed_weight_is_copied_as_the_kernel_reads_it() -> None:
    binding = streaming_model().lower().plans[0]
    packed = Weight("w", 1, (8, 8), "float32")
    assert binding.resident_weights == ()
    assert binding.streamed_weights == (packed,)
    copies = [step.operands for step in binding.steps if step.lane is Lane.H2D]
    assert [source for source, _ in copies] == [packed, View(CPU, ALIGNMENT_BYTES, (128,), "uint8"), packed]


def test_each_plan_has_steps_of_its_own_that_call_the_same_functions() -> None:
    model = model_for_two_budgets()
    small, large = model.lower().plans
    assert [name for _, name, _ in issued(model, Lane.CPU, 0)] == ["relu_cpu", "matmul_cpu"]
    assert [name for _, name, _ in issued(model, Lane.GPU, 1)] == 2 * ["matmul_gpu"]
    assert ([w.layout for w in small.host_weights], large.host_weights) == ([0], ())
    assert small.streamed_weights == large.streamed_weights
    assert (event_count(small), event_count(large)) == (3, 4)


def event_count(binding: Binding) -> int:
    return sum(step.event is not None for step in binding.steps)


def test_events_are_numbered_in_the_order_of_the_steps_that_record_them() -> None:
    for model in (hybrid_model(), streaming_model(), model_for_two_budgets()):
        for binding in model.lower().plans:
            events = [step.event for step in binding.steps if step.event is not None]
            assert events == list(range(len(events)))
            for position, step in enumerate(binding.steps):
                assert set(step.waits) <= {s.event for s in binding.steps[:position]}


def test_wait_is_dropped_if_the_lane_already_waited_for_a_later_step() -> None:
    plan = steps_plan(
        Copy("a", CPU, GPU),
        Copy("b", CPU, GPU),
        Run("k0", GPU, (1,)),
        Run("k1", GPU, (0,)),
    )
    events, waits = required_events(plan)
    assert events == {1: 0}
    assert waits == ((), (), (1,), ())


def test_each_lane_needs_its_own_wait() -> None:
    plan = steps_plan(Copy("a", CPU, GPU), Run("k0", GPU, (0,)), Run("k1", CPU, (0,)))
    events, waits = required_events(plan)
    assert events == {0: 0}
    assert waits[1:] == ((0,), (0,))


def test_waits_for_cpu_steps_need_events_too() -> None:
    events, waits = required_events(
        steps_plan(Run("k0", CPU), Copy("a", CPU, GPU, (0,)), Run("k1", GPU, (0,)))
    )
    assert events == {0: 0}
    assert waits == ((), (0,), (0,))


def test_weights_are_bound_as_their_device_reads_them() -> None:
    cpu, hybrid = (model.lower().plans[0] for model in (cpu_model(), hybrid_model()))
    assert cpu.host_weights == (Weight("w", 1, (6, 8), "float32"), Weight("w", 0, (8, 6), "float32"))
    assert hybrid.host_weights == ()
    assert [(r.weight.tensor, r.weight.shape, r.offset_bytes) for r in hybrid.resident_weights] == [
        ("w", (8, 8), 0)
    ]


def test_kernel_sees_a_reshaped_tensor_with_its_own_shape() -> None:
    graph, plan = one_relu()
    flat = Parameter((32,), "float32")
    operands = bind(graph, plan, {("relu", CPU): (flat, flat)}).steps[0].operands
    assert operands == (View(CPU, 0, (32,), "float32"), View(CPU, ALIGNMENT_BYTES, (32,), "float32"))


def test_workspaces_lie_behind_one_another_in_the_kernels_buffer() -> None:
    graph, plan = one_relu()
    scratch = Buffer("k0", BufferKind.WORKSPACE, CPU, 2 * ALIGNMENT_BYTES, ALIGNMENT_BYTES + 12, 0, 0)
    plan = replace(plan, buffers=(*plan.buffers, scratch))
    extra = Parameter((3,), "float32")
    operands = bind(graph, plan, {("relu", CPU): (FLOATS, FLOATS, extra, extra)}).steps[0].operands
    offsets = [o.offset_bytes for o in operands if isinstance(o, View)]
    assert offsets == [i * ALIGNMENT_BYTES for i in range(4)]


HUGE = Parameter((1 << 62, 1 << 62), "float32")


@pytest.mark.parametrize(
    ("parameters", "what"),
    [
        ((FLOATS, Parameter((33,), "float32")), "does not fit"),
        ((FLOATS, Parameter((4, 8), "float64")), "does not fit"),
        ((HUGE, FLOATS), "does not fit"),
        ((FLOATS,), "2 tensors"),
        ((FLOATS, FLOATS, FLOATS), "no workspace"),
    ],
)
def test_function_that_needs_more_than_is_planned_is_refused(
    parameters: tuple[Parameter, ...], what: str
) -> None:
    with pytest.raises(BindingError, match=what):
        bind(*one_relu(), {("relu", CPU): parameters})


def test_function_that_is_missing_is_named() -> None:
    with pytest.raises(BindingError, match="relu_cpu") as caught:
        bind(*one_relu(), {("relu", GPU): (FLOATS, FLOATS)})
    assert caught.value.where == "k0"


def test_gpu_weight_of_another_size_than_planned_is_refused() -> None:
    for model in (hybrid_model(), streaming_model()):
        signatures = dict(model.lower().signatures)
        x, _, y = signatures["matmul", GPU]
        for size in (4, 16):
            signatures["matmul", GPU] = (x, Parameter((size, size), "float32"), y)
            with pytest.raises(BindingError):
                bind(model.graph, model.plan, signatures)


def one_relu() -> tuple[Graph, Plan]:
    x, y = tensor("x", Role.INPUT), tensor("y", Role.OUTPUT)
    builder = PlanBuilder()
    builder.run("k0", CPU)
    builder.hold(x, CPU, -1, 0)
    builder.hold(y, CPU, 0, 1)
    return Graph((Kernel("k0", "relu", ("x",), ("y",)),), (x, y), ("x",), ("y",)), builder.plan()
