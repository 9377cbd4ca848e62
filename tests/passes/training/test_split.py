"""Splitting fully connected layers that have most of the parameters."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from hybridc.frontend import read_model
from hybridc.models.builder import GraphBuilder
from hybridc.passes.program.program import tensor_shape
from hybridc.passes.training.differentiate import differentiate
from hybridc.passes.training.gradients import Emitter
from hybridc.passes.training.split import split_dominating, split_model
from hybridc.passes.training.splits import joined
from tests.support.gradients import compiled, normal, program_of

op = relax.op
VALUES = {"x": normal(0, 3, 40), "w": normal(1, 100, 40), "v": normal(2, 100, 5)}


def _mlp(emitter: Emitter, x: relax.Var, w: relax.Var, v: relax.Var) -> relax.Expr:
    return op.matmul(op.nn.relu(op.matmul(x, op.permute_dims(w))), v)


def _mlp_untransposed(emitter: Emitter, x: relax.Var, w: relax.Var, v: relax.Var) -> relax.Expr:
    return op.matmul(op.nn.relu(op.matmul(x, w)), v)


@pytest.mark.parametrize("is_transposed", [True, False])
def test_parts_compute_what_the_whole_does(is_transposed: bool) -> None:
    build = _mlp if is_transposed else _mlp_untransposed
    values = VALUES if is_transposed else {**VALUES, "w": np.ascontiguousarray(VALUES["w"].T)}
    whole = program_of(build, values)
    program, splits = split_dominating(whole, ["w", "v"], least_elements=0)
    split = splits["w"]
    assert list(splits) == ["w"] and split.axis == (0 if is_transposed else 1) and split.ends[-1] == 100
    names = [v.name for v in program.main.params]
    assert names == ["x", *split.parts, "v", "weights"]

    arrays = dict(zip(split.parts, np.split(values["w"], split.ends[:-1], split.axis), strict=True))
    made = differentiate(program, [*split.parts, "v"])
    found = compiled(made.program)({**values, **arrays})
    expected = compiled(differentiate(whole, ["w", "v"]).program)(values)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-12)
    joined = np.concatenate([found[made.results[name][0]] for name in split.parts], split.axis)
    np.testing.assert_allclose(joined, expected[2], rtol=1e-12)
    np.testing.assert_allclose(found[made.results["v"][0]], expected[3], rtol=1e-12)


def test_no_part_exceeds_its_share() -> None:
    program, splits = split_dominating(program_of(_mlp, VALUES), ["w", "v"], least_elements=0)
    parts = [v for v in program.main.params if v.name in splits["w"].parts]
    assert all(tensor_shape(part)[0] in (16, 100 % 16) for part in parts) and len(parts) == 7


def test_parameters_that_others_read_too_stay_whole() -> None:
    def build(emitter: Emitter, x: relax.Var, w: relax.Var) -> relax.Expr:
        return op.matmul(op.matmul(x, op.permute_dims(w)), w)

    program = program_of(build, {"x": normal(0, 3, 40), "w": normal(1, 100, 40)})
    assert split_dominating(program, ["w"], least_elements=0) == (program, {})


def test_small_layers_stay_whole() -> None:
    def build(emitter: Emitter, x: relax.Var, **weights: relax.Var) -> relax.Expr:
        result: relax.Expr = x
        for w in weights.values():
            result = op.matmul(result, w)
        return result

    values = {"x": normal(0, 3, 32)} | {f"w{i}": normal(i, 32, 32) for i in range(16)}
    program = program_of(build, values)
    assert split_dominating(program, list(values)[1:], least_elements=0) == (program, {})


def test_gradients_that_are_small_anyway_stay_whole() -> None:
    program = program_of(_mlp, VALUES)
    assert split_dominating(program, ["w", "v"]) == (program, {})


def test_parts_of_a_models_parameter_have_its_name_and_values() -> None:
    g = GraphBuilder("wide", 0)
    x = g.gemm(g.input("x", (4, 32)), 1 << 14)
    model = read_model(g.model(y=x), parameters=lambda name: True)
    changed, splits = split_model(model)
    assert list(splits) == ["Gemm_0.weight"]
    parts = splits["Gemm_0.weight"].parts
    assert parts == ("Gemm_0.weight#part0", "Gemm_0.weight#part1")
    assert [v.name for v in changed.inputs] == ["x", *parts, "Gemm_0.bias"]
    assert {v.name: v.shape for v in changed.inputs if v.name != "x"} == {
        name: value.shape for name, value in changed.parameters.items()
    }
    whole = joined(changed.parameters, splits)
    assert whole.keys() == model.parameters.keys()
    for name, value in model.parameters.items():
        np.testing.assert_array_equal(whole[name], value)


def test_model_without_a_dominating_layer_is_left_alone() -> None:
    g = GraphBuilder("narrow", 0)
    model = read_model(g.model(y=g.gemm(g.input("x", (4, 32)), 8)), parameters=lambda name: True)
    assert split_model(model) == (model, {})
