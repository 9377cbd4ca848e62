"""Lowering: which bytes operands are, which waits become events, what lanes call."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tvm import relax, tirx

from hybridc.errors import InternalError
from hybridc.ir import Buffer, BufferKind, Copy, Graph, Kernel, Lane, Plan, Role, Run, Step
from hybridc.ir.plan import ALIGNMENT_BYTES
from hybridc.passes.lower.bind import View, bind
from hybridc.passes.lower.lower import Lowered, cuda_target, llvm_target, required_events
from hybridc.schedules.rule import Scheduled
from hybridc.targets import ISAS, parse_target
from tests.support.artifacts import (
    CPU,
    CPU_TARGET,
    GPU,
    Model,
    PlanBuilder,
    cpu_model,
    hybrid_model,
    model_for_two_budgets,
    relu,
    scheduled,
    streaming_model,
    tensor,
)


def calls(lowered: Lowered, lane: Lane, number: int = 0) -> list[tuple[str, tuple[int, ...]]]:
    """Names of what a lane's function calls behind its views, with the integers among the arguments."""
    found = []
    for binding in lowered.module[lane.function(number)].body.blocks[0].bindings:
        call = binding.value
        if isinstance(call, relax.Call):
            callee = call.op
            name = callee.global_symbol if isinstance(callee, relax.ExternFunc) else callee.name_hint
            integers = tuple(int(a.value) for a in call.args if isinstance(a, tirx.IntImm))
            found.append((name, integers))
    return [c for c in found if c[0] != "hybridc_arena_view"]


def steps_plan(*steps: Step) -> Plan:
    return Plan(steps, (), (), None, (1.0,) * len(steps), 1.0)


def test_each_lane_issues_its_steps_in_order_with_events_only_where_needed() -> None:
    lowered = hybrid_model().lower()
    gpu, cpu, h2d, d2h = (lane.number for lane in (Lane.GPU, Lane.CPU, Lane.H2D, Lane.D2H))
    assert lowered.plans[0].event_count == 6
    assert calls(lowered, Lane.GPU) == [
        ("hybridc_wait", (gpu, 0)),
        ("matmul_gpu", ()),
        ("hybridc_record", (gpu, 1)),
        ("hybridc_wait", (gpu, 4)),
        ("add_gpu", ()),
        ("negate_gpu", ()),
        ("hybridc_record", (gpu, 5)),
    ]
    assert calls(lowered, Lane.CPU) == [
        ("hybridc_wait", (cpu, 2)),
        ("relu_cpu", ()),
        ("hybridc_record", (cpu, 3)),
    ]
    assert calls(lowered, Lane.H2D) == [
        ("hybridc_copy", (h2d,)),
        ("hybridc_record", (h2d, 0)),
        ("hybridc_wait", (h2d, 3)),
        ("hybridc_copy", (h2d,)),
        ("hybridc_record", (h2d, 4)),
    ]
    assert calls(lowered, Lane.D2H) == [
        ("hybridc_wait", (d2h, 1)),
        ("hybridc_copy", (d2h,)),
        ("hybridc_record", (d2h, 2)),
        ("hybridc_wait", (d2h, 5)),
        ("hybridc_copy", (d2h,)),
    ]


def test_cpu_plan_has_one_function_without_events() -> None:
    lowered = cpu_model().lower()
    assert [name for name, _ in calls(lowered, Lane.CPU)] == ["matmul_cpu", "relu_cpu"]
    assert lowered.plans[0].event_count == 0
    assert not {v.name_hint for v in lowered.module.functions} & {"main_gpu_0", "main_h2d_0", "main_d2h_0"}


def test_streamed_weight_is_copied_as_the_kernel_reads_it() -> None:
    lowered = streaming_model().lower()
    assert lowered.plans[0].resident_weights == ()
    assert [(w.tensor, w.packing is not None, w.shape) for w in lowered.plans[0].streamed_weights] == [
        ("w", True, (8, 8))
    ]
    assert ("hybridc_stream_weight", ()) in calls(lowered, Lane.H2D)
    text = lowered.module.script()
    assert "def main_h2d_0(lanes: R.Any, gpu_arena: R.Any, host_arena: R.Any, weight_0" in text


def test_each_plan_has_functions_of_its_own_that_share_the_kernels() -> None:
    lowered = model_for_two_budgets().lower()
    small, large = lowered.plans
    assert [name for name, _ in calls(lowered, Lane.CPU, 0) if name.endswith("_cpu")] == [
        "relu_cpu",
        "matmul_cpu",
    ]
    assert [name for name, _ in calls(lowered, Lane.GPU, 1) if name.endswith("_gpu")] == 2 * ["matmul_gpu"]
    assert ([w.packing is None for w in small.host_weights], large.host_weights) == ([True], ())
    assert small.streamed_weights == large.streamed_weights
    assert (small.event_count, large.event_count) == (3, 4)
    kernels = [v.name_hint for v in lowered.module.functions if not v.name_hint.startswith("main_")]
    assert sorted(kernels) == ["matmul_cpu", "matmul_gpu", "relu_cpu"]


def test_main_can_be_printed() -> None:
    text = hybrid_model().lower().module.script()
    assert "def main_gpu_0(lanes: R.Any, gpu_arena: R.Any, host_arena: R.Any)" in text
    assert 'R.call_packed("hybridc_copy", lanes, 2' in text


def test_views_are_made_once_for_each_distinct_use() -> None:
    model = hybrid_model()
    lowered = model.lower()
    binding = bind(model.graph, model.plan, model.functions)
    steps = zip(model.plan.steps, binding.operands, strict=True)
    views = {(step.lane, o) for step, used in steps for o in used if isinstance(o, View)}
    assert lowered.module.script().count("hybridc_arena_view") == len(views)


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


def test_functions_carry_their_targets_and_are_in_the_module_once() -> None:
    module = hybrid_model().lower().module
    targets = {
        v.name_hint: f.attrs["target"] for v, f in module.functions.items() if isinstance(f, tirx.PrimFunc)
    }
    assert {name: t.kind.name for name, t in targets.items()} == {
        "matmul_gpu": "cuda",
        "relu_cpu": "llvm",
        "add_gpu": "cuda",
        "negate_gpu": "cuda",
    }
    assert targets["matmul_gpu"].host.attrs["mcpu"] == "core-avx2"


def test_cuda_code_is_for_the_oldest_architecture() -> None:
    assert cuda_target(parse_target("cuda:sm_90,sm_75,sm_100+avx2")).attrs["arch"] == "sm_75"


@pytest.mark.parametrize("isa", ISAS)
def test_llvm_target_names_the_processor_of_the_isa(isa: str) -> None:
    attributes = llvm_target(ISAS[isa]).attrs
    assert attributes["mcpu"] == ISAS[isa].mcpu
    assert tuple(attributes.get("mattr", ())) == ISAS[isa].mattr


def test_weights_are_bound_as_their_device_reads_them() -> None:
    cpu = bind(*_parts(cpu_model()))
    assert [(w.tensor, w.shape, w.packing is not None) for w in cpu.host_weights] == [
        ("w", (6, 8), True),
        ("w", (8, 6), False),
    ]
    hybrid = bind(*_parts(hybrid_model()))
    assert hybrid.host_weights == ()
    assert [(r.layout.tensor, r.layout.shape, r.offset_bytes) for r in hybrid.resident_weights] == [
        ("w", (8, 8), 0)
    ]


def test_kernel_sees_a_reshaped_tensor_with_its_own_shape() -> None:
    model = one_relu()
    flat = {("relu", CPU): scheduled(relu((32,)), CPU)}
    operands = bind(model.graph, model.plan, flat).operands[0]
    assert operands == (View(CPU, 0, (32,), "float32"), View(CPU, ALIGNMENT_BYTES, (32,), "float32"))


def test_workspaces_lie_behind_one_another_in_the_kernels_buffer() -> None:
    model = one_relu()
    function = relu()
    extra = [tirx.decl_buffer((3,), "float32", name=f"s{i}") for i in range(2)]
    widened = tirx.PrimFunc([*function.params, *extra], function.body, function.ret_type, function.attrs)
    functions = {("relu", CPU): Scheduled(widened, "t", workspace_bytes=(12, 12))}
    scratch = Buffer("k0", BufferKind.WORKSPACE, CPU, 2 * ALIGNMENT_BYTES, ALIGNMENT_BYTES + 12, 0, 0)
    plan = replace(model.plan, buffers=(*model.plan.buffers, scratch))
    operands = bind(model.graph, plan, functions).operands[0]
    offsets = [o.offset_bytes for o in operands if isinstance(o, View)]
    assert offsets == [i * ALIGNMENT_BYTES for i in range(4)]


def test_buffer_too_small_for_the_kernel_is_an_internal_error() -> None:
    model = one_relu()
    with pytest.raises(InternalError, match="does not fit") as caught:
        bind(model.graph, model.plan, {("relu", CPU): scheduled(relu((33,)), CPU)})
    assert caught.value.code == "HC911"


def test_kernel_with_another_number_of_parameters_is_an_internal_error() -> None:
    model = one_relu()
    graph = replace(model.graph, kernels=(replace(model.graph.kernels[0], inputs=("x", "x")),))
    with pytest.raises(InternalError, match="3 tensors"):
        bind(graph, model.plan, model.functions)


def one_relu() -> Model:
    x, y = tensor("x", Role.INPUT), tensor("y", Role.OUTPUT)
    builder = PlanBuilder()
    builder.run("k0", CPU)
    builder.hold(x, CPU, -1, 0)
    builder.hold(y, CPU, 0, 1)
    graph = Graph((Kernel("k0", "relu", ("x",), ("y",)),), (x, y), ("x",), ("y",))
    return Model(graph, builder.plan(), {("relu", CPU): scheduled(relu(), CPU)}, CPU_TARGET)


def _parts(model: Model) -> tuple[Graph, Plan, dict]:
    return model.graph, model.plan, model.functions
