"""Cheap results are computed again in the backward pass."""

from __future__ import annotations

import functools
import math

import numpy as np
from tvm import relax

from hybridc.passes.fuse.fuse import fuse
from hybridc.passes.program.program import Program, operator_name, tensor_shape, variables
from hybridc.passes.training.differentiate import differentiate
from hybridc.passes.training.gradients import Emitter
from tests.support.gradients import assert_gradients, normal, program_of

op = relax.op
number = functools.partial(relax.const, dtype="float64")


def _gelu(x: relax.Var) -> relax.Expr:
    """As exporters write it."""
    inner = op.add(op.erf(op.divide(x, number(math.sqrt(2)))), number(1.0))
    return op.multiply(op.multiply(x, inner), number(0.5))


def _layer(emitter: Emitter, x: relax.Var, v: relax.Var, w: relax.Var) -> relax.Expr:
    return op.matmul(_gelu(emitter.emit(op.matmul(x, v))), w)


VALUES = {"x": normal(0, 6, 3), "v": normal(1, 3, 8), "w": normal(2, 8, 5)}


def _kept(program: Program) -> list[tuple[int, ...]]:
    """Shapes of what is written before the loss and read behind it."""
    names = [b.var.name for b in program.bindings]
    at = names.index("loss")
    forward = {b.var for b in program.bindings[: at + 1]}
    return sorted(
        tensor_shape(v)
        for v in {v for b in program.bindings[at + 1 :] for v in variables(b.value)}
        if v in forward
    )


def test_an_activation_in_five_operators_keeps_one_tensor() -> None:
    assert_gradients(_layer, VALUES)
    program = differentiate(program_of(_layer, VALUES), ["v", "w"]).program
    assert _kept(program) == [(6, 8)]


def test_its_forward_pass_is_one_kernel() -> None:
    values = {name: value.astype(np.float32) for name, value in VALUES.items()}

    def build(emitter: Emitter, **inputs: relax.Var) -> relax.Expr:
        wide = {name: emitter.emit(op.astype(v, "float64")) for name, v in inputs.items()}
        return _layer(emitter, **wide)

    program = fuse(differentiate(program_of(build, values), ["v", "w"]).program)
    names = [operator_name(b.value) for b in program.bindings if isinstance(b.value, relax.Call)]
    assert "divide_erf_add_multiply" in names


def test_results_and_what_costs_more_are_kept() -> None:
    def build(emitter: Emitter, x: relax.Var, v: relax.Var) -> relax.Expr:
        y = emitter.emit(op.matmul(x, v))
        return op.exp(op.nn.softmax(op.tanh(y)))

    values = {"x": normal(0, 6, 3), "v": normal(1, 3, 8)}
    assert_gradients(build, values)
    program = differentiate(program_of(build, values), ["v"]).program
    # tanh and softmax from their results, exp computed again or kept as the output
    assert _kept(program) == [(6, 8)] * 3


def test_long_chains_are_cut() -> None:
    """Else a network of additions would compute its beginning again for each layer."""

    def build(emitter: Emitter, x: relax.Var, **weights: relax.Var) -> relax.Expr:
        result: relax.Expr = x
        for w in weights.values():
            result = emitter.emit(op.multiply(op.add(result, w), result))
        return result

    values = {"x": normal(0, 4)} | {f"w{i}": 0.1 * normal(i, 4) for i in range(12)}
    program = differentiate(program_of(build, values), [f"w{i}" for i in range(12)]).program
    assert len(program.bindings) < 12 * 40
