"""What the programs of a training step take and return."""

from __future__ import annotations

from dataclasses import replace

import onnx
import pytest
from onnx import TensorProto, helper
from tvm import relax

from hybridc.errors import UsageError
from hybridc.frontend import ImportedModel, read_model
from hybridc.models.builder import GraphBuilder
from hybridc.passes.program.program import Program, operator_name
from hybridc.passes.training.spec import TrainingSpec, parse_loss, parse_optimizer
from hybridc.passes.training.step import (
    MOMENT,
    PARAMETER,
    STATISTIC,
    SUM,
    TrainingPrograms,
    training_programs,
)

SPEC = TrainingSpec(parse_loss("softmax_cross_entropy"), parse_optimizer("sgd:lr=0.1,momentum=0.9"))


def network() -> onnx.ModelProto:
    g = GraphBuilder("network", 0)
    x = g.input("x", (4, 3, 6, 6))
    x = g.relu(g.batch_norm(g.conv(x, 4, 3)))
    return g.model(logits=g.gemm(g.flatten(x), 5))


def two_outputs() -> onnx.ModelProto:
    g = GraphBuilder("two", 0)
    x = g.gemm(g.input("x", (4, 3)), 6)
    return g.model(a=g.gemm(x, 5), b=g.gemm(x, 2))


def programs(proto: onnx.ModelProto, spec: TrainingSpec = SPEC) -> TrainingPrograms:
    return training_programs(read_model(proto, parameters=spec.trains), spec)


def names(values: tuple) -> list[str]:
    return [value.name for value in values]


def operators(model: ImportedModel) -> list[str]:
    bindings = Program(model.module, model.weights, model.origins).bindings
    return [operator_name(b.value) for b in bindings if isinstance(b.value, relax.Call)]


def test_every_state_that_goes_in_comes_out_anew() -> None:
    made = programs(network())
    outputs = names(made.step.outputs)
    states = {state.name: state.kind for state in made.states}
    assert outputs[0] == made.loss == "loss"
    assert sorted(outputs[1:]) == sorted(f"{name}#new" for name in states)
    inputs = {value.name for value in made.step.inputs}
    assert inputs == set(states) | {"x", "target", *made.scalars.values()}
    shapes = {value.name: value.shape for value in made.step.inputs}
    for output in made.step.outputs[1:]:
        assert shapes[output.name.removesuffix("#new")] == output.shape
    trained = [name for name, kind in states.items() if kind == PARAMETER]
    assert {name for name, kind in states.items() if kind == MOMENT} == {f"{n}#momentum" for n in trained}
    assert sum(kind == STATISTIC for kind in states.values()) == 2


def test_evaluation_goes_by_running_statistics_and_returns_the_outputs() -> None:
    made = programs(network())
    assert names(made.evaluation.outputs) == ["loss", "logits"]
    inputs = set(names(made.evaluation.inputs))
    assert not any("#" in name for name in inputs)
    assert {s.name for s in made.states if s.kind in (PARAMETER, STATISTIC)} < inputs
    assert not any("batch_norm" in name for name in operators(made.evaluation))
    assert "batch_norm_statistics" in operators(made.step)


def test_accumulation_adds_to_sums_that_the_step_takes() -> None:
    made = programs(network(), replace(SPEC, batch=8, accumulate=2))
    assert made.accumulation is not None
    sums = {f"{s.name}#new" for s in made.states if s.kind == SUM}
    statistics = {f"{s.name}#new" for s in made.states if s.kind == STATISTIC}
    assert set(names(made.accumulation.outputs)) == {"loss"} | sums | statistics
    assert {s.name for s in made.states if s.kind == SUM} < set(names(made.step.inputs))
    assert not sums & set(names(made.step.outputs)), "the host sets them to zero"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_clipping_changes_no_input_or_output(accumulate: int) -> None:
    spec = replace(SPEC, batch=8, accumulate=accumulate)
    plain, clipping = (programs(network(), replace(spec, clip_norm=norm)) for norm in (None, 1.0))
    assert names(clipping.step.inputs) == names(plain.step.inputs)
    assert set(names(clipping.step.outputs)) == set(names(plain.step.outputs))
    assert len(clipping.step.loop_carried) == len(plain.step.loop_carried)
    assert clipping.states == plain.states
    if plain.update is not None and clipping.update is not None:
        assert names(clipping.update.inputs) == names(plain.update.inputs)
        assert names(clipping.update.outputs) == names(plain.update.outputs)


def test_frozen_parameters_are_no_states() -> None:
    made = programs(network(), replace(SPEC, freeze=("*Conv*", "*.mean")))
    assert not any("Conv" in s.name or s.kind == STATISTIC for s in made.states)
    assert made.step.weights
    assert "batch_norm_statistics" not in operators(made.step)


def test_loss_may_be_of_several_outputs_with_a_target_each() -> None:
    made = programs(two_outputs(), replace(SPEC, loss=parse_loss("softmax_cross_entropy(a)+2*mse(b)")))
    targets = {value.name: (value.shape, value.dtype) for value in made.targets}
    assert targets == {"target_a": ((4,), "int64"), "target_b": ((4, 2), "float32")}
    assert names(made.evaluation.outputs) == ["loss", "a", "b"]


def test_parameters_that_the_loss_does_not_depend_on_stay() -> None:
    made = programs(two_outputs(), replace(SPEC, loss=parse_loss("mse(a)")))
    changed = {name.removesuffix("#new") for name in names(made.step.outputs)}
    unused = [s.name for s in made.states if s.kind == PARAMETER and s.name not in changed]
    assert len(unused) == 2 and all(name.startswith("Gemm_2") for name in unused)


def test_models_own_loss_node_is_taken() -> None:
    proto = network()
    labels = helper.make_tensor_value_info("labels", TensorProto.INT64, [4])
    proto.graph.input.append(labels)
    proto.graph.node.append(helper.make_node("SoftmaxCrossEntropyLoss", ["logits", "labels"], ["ce"]))
    proto.graph.output.insert(0, helper.make_tensor_value_info("ce", TensorProto.FLOAT, []))
    made = programs(proto, replace(SPEC, loss=()))
    assert made.targets == () and "labels" in names(made.step.inputs)
    assert names(made.evaluation.outputs) == ["loss", "ce", "logits"]


@pytest.mark.parametrize("loss", ["mse", "mse(c)", "softmax_cross_entropy"])
def test_loss_that_does_not_fit_the_outputs_is_refused(loss: str) -> None:
    with pytest.raises(UsageError) as caught:
        programs(two_outputs(), replace(SPEC, loss=parse_loss(loss)))
    assert caught.value.code == "HC574"
    with pytest.raises(UsageError, match="is no loss"):
        programs(two_outputs(), replace(SPEC, loss=()))


@pytest.mark.parametrize("optimizer", ["sgd", "sgd:momentum=0.9", "adam", "adamw"])
def test_session_gives_every_optimizer_its_scalars(optimizer: str) -> None:
    spec = replace(SPEC, optimizer=parse_optimizer(optimizer))
    made = programs(network(), spec)
    assert set(spec.optimizer.scalar_values(0.1, 1)) == set(made.scalars)
    assert set(made.scalars.values()) < set(names(made.step.inputs))


def test_parts_of_a_split_layer_are_states_each_updated_on_its_own() -> None:
    g = GraphBuilder("wide", 0)
    proto = g.model(logits=g.gemm(g.gemm(g.input("x", (4, 64)), 1 << 13), 5))
    model = read_model(proto, parameters=SPEC.trains)
    made = training_programs(model, replace(SPEC, batch=8, accumulate=2), split_layers=True)
    split = made.splits["Gemm_0.weight"]
    assert set(made.splits) == {"Gemm_0.weight", "Gemm_0.weight#momentum"}
    kinds = {state.name: state.kind for state in made.states}
    assert "Gemm_0.weight" not in kinds and len(split.parts) > 1
    for part in split.parts:
        assert [kinds[part + suffix] for suffix in ("", "#momentum", "#sum")] == [PARAMETER, MOMENT, SUM]
    assert made.splits["Gemm_0.weight#momentum"].parts == tuple(f"{part}#momentum" for part in split.parts)
    assert {f"{part}#new" for part in split.parts} < set(names(made.step.outputs))
    assert set(split.parts) < set(names(made.evaluation.inputs)) & set(made.step.parameters)
    assert not training_programs(model, SPEC).splits
