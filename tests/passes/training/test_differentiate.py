"""Reverse-mode differentiation of whole programs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from tvm import relax

from hybridc.errors import ModelError
from hybridc.passes.program.program import is_op, variables
from hybridc.passes.training.differentiate import differentiate
from hybridc.passes.training.gradients import Emitter
from hybridc.passes.training.optimizers import Sgd, emit_update
from tests.support.gradients import assert_gradients, compiled, normal, program_of

op = relax.op


def _mlp(emitter: Emitter, x: relax.Var, v: relax.Var, w: relax.Var) -> relax.Expr:
    return op.matmul(op.nn.relu(op.matmul(x, v)), w)


VALUES = {"x": normal(0, 2, 3), "v": normal(1, 3, 4), "w": normal(2, 4, 5)}


def test_what_is_used_in_several_places_adds_up() -> None:
    def build(emitter: Emitter, w: relax.Var) -> relax.Expr:
        once = emitter.emit(op.nn.relu(op.matmul(w, w)))
        return op.add(op.matmul(once, w), op.add(once, op.permute_dims(once)))

    assert_gradients(build, {"w": normal(0, 4, 4)})


def test_the_programs_own_outputs_come_first() -> None:
    made = differentiate(program_of(_mlp, VALUES), ["w", "v"])
    assert made.results == {"w": (2,), "v": (3,)}
    shapes = [tuple(int(n) for n in output.ty.shape) for output in made.program.outputs]
    assert shapes == [(), (2, 5), (4, 5), (3, 4)]


def test_any_scalar_output_may_be_the_loss() -> None:
    values = {"w": normal(0, 3)}
    program = program_of(lambda emitter, w: op.sum(op.multiply(w, w)), values)
    made = differentiate(program, ["w"], loss=1)
    np.testing.assert_allclose(compiled(made.program)(values)[2], 2 * values["w"])


def test_updates_follow_the_last_reader_of_the_old_value() -> None:
    """So that a gradient need not outlive its update, and the new value may take the old one's place."""
    optimizer = Sgd()

    def update(emitter: Emitter, parameter: relax.Var, gradient: relax.Expr) -> Sequence[relax.Expr]:
        return emit_update(
            optimizer, emitter, parameter, gradient, [], {"learning_rate": relax.const(0.1, "float64")}
        )

    made = differentiate(program_of(_mlp, VALUES), ["v", "w"], update=update)
    bindings = made.program.bindings
    names = [b.value.args[0].name_hint if is_op(b.value, "call_tir") else b.value.op.name for b in bindings]
    updates = [i for i, name in enumerate(names) if name.startswith("sgd_update")]
    assert len(updates) == 2
    for i in updates:
        parameter, gradient, *_ = bindings[i].value.args[1].fields
        assert bindings[i - 1].var.same_as(gradient)
        assert not any(parameter in variables(b.value) for b in bindings[i + 1 :])
    rows = compiled(made.program)(VALUES)
    gradients = compiled(differentiate(program_of(_mlp, VALUES), ["v", "w"]).program)(VALUES)
    for name, new, gradient in zip("vw", rows[2:], gradients[2:], strict=True):
        np.testing.assert_allclose(new, VALUES[name] - 0.1 * gradient)


def test_a_parameter_that_the_loss_does_not_depend_on_has_no_results() -> None:
    def build(emitter: Emitter, v: relax.Var, w: relax.Var) -> relax.Expr:
        return op.multiply(v, v)

    made = differentiate(program_of(build, {"v": normal(0, 3), "w": normal(1, 3)}), ["v", "w"])
    assert list(made.results) == ["v"]


def test_operators_without_a_gradient_are_named_with_their_node() -> None:
    def build(emitter: Emitter, w: relax.Var) -> relax.Expr:
        return op.sort(w)

    with pytest.raises(ModelError, match=r"HC160.*sort(.|\n)*node node") as caught:
        differentiate(program_of(build, {"w": normal(0, 3)}), ["w"])
    assert "freeze" in caught.value.remedy


def test_operators_without_a_gradient_may_stand_before_all_parameters() -> None:
    def build(emitter: Emitter, x: relax.Var, w: relax.Var) -> relax.Expr:
        return op.multiply(op.sort(x), w)

    values = {"x": normal(0, 3), "w": normal(1, 3)}
    made = differentiate(program_of(build, values), ["w"])
    weights = made.program.weights["weights"]
    np.testing.assert_allclose(compiled(made.program)(values)[2], np.sort(values["x"]) * weights)


def test_a_loss_without_a_trained_parameter_is_refused() -> None:
    program = program_of(lambda emitter, v, w: op.exp(v), {"v": normal(0, 3), "w": normal(1, 3)})
    with pytest.raises(ModelError, match="HC161"):
        differentiate(program, ["w"])


def test_a_loss_must_be_one_number() -> None:
    with pytest.raises(ModelError, match="HC162"):
        differentiate(program_of(_mlp, VALUES), ["w"], loss=1)


def test_time_and_functions_do_not_grow_faster_than_the_depth() -> None:
    """Bindings grow in proportion, distinct functions not at all."""

    def of_depth(depth: int) -> tuple[int, int]:
        def build(emitter: Emitter, x: relax.Var, **weights: relax.Var) -> relax.Expr:
            result: relax.Expr = x
            for w in weights.values():
                result = emitter.emit(op.add(result, op.nn.relu(op.nn.conv2d(result, w, padding=1))))
            return result

        values = {"x": normal(0, 1, 2, 4, 4)} | {f"w{i}": normal(i, 2, 2, 3, 3) for i in range(depth)}
        program = differentiate(program_of(build, values), [f"w{i}" for i in range(depth)]).program
        return len(program.bindings), len(program.functions)

    (few, functions), (many, same) = of_depth(10), of_depth(40)
    assert many < 4.2 * few and functions == same
