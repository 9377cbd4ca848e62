"""Gradients of activations that are operators of their own."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax

from hybridc.passes.program.program import variables
from hybridc.passes.training.differentiate import differentiate
from hybridc.passes.training.gradients import Emitter
from tests.support.gradients import assert_gradients, distinct, normal, program_of, side_by_side

op = relax.op
nn = op.nn

ACTIVATIONS: dict[str, Callable[[relax.Var], relax.Expr]] = {
    "leakyrelu": lambda x: nn.leakyrelu(x, 0.1),
    "leakyrelu_downwards": lambda x: nn.leakyrelu(x, -0.2),
    "gelu": nn.gelu,
    "gelu_tanh": nn.gelu_tanh,
    "silu": nn.silu,
    "clip": lambda x: op.clip(x, -0.31, 0.42),
    "softmax": nn.softmax,
    "softmax_inside": lambda x: nn.softmax(x, 1),
    "log_softmax": nn.log_softmax,
    "log_softmax_first": lambda x: nn.log_softmax(x, 0),
}


def test_activations_have_their_slopes() -> None:
    def build(emitter: Emitter, **inputs: relax.Var) -> relax.Expr:
        return side_by_side([ACTIVATIONS[name](x) for name, x in inputs.items()], emitter)

    assert_gradients(build, {name: distinct(i, 3, 4, 5) * 2 for i, name in enumerate(ACTIVATIONS)})


def test_prelu_trains_its_slopes() -> None:
    def build(emitter: Emitter, x: relax.Var, slope: relax.Var) -> relax.Expr:
        return nn.prelu(x, slope, 1)

    assert_gradients(build, {"x": distinct(0, 2, 3, 4), "slope": normal(1, 3)})


def test_results_are_read_instead_of_arguments() -> None:
    """So a network keeps one tensor of a layer and its activation."""
    from_result = {
        "relu": nn.relu,
        "tanh": op.tanh,
        "sigmoid": op.sigmoid,
        "softmax": nn.softmax,
        "leakyrelu": nn.leakyrelu,
        "exp": op.exp,
    }
    for activation in from_result.values():

        def build(
            emitter: Emitter, x: relax.Var, w: relax.Var, activation: Callable[..., relax.Expr] = activation
        ) -> relax.Expr:
            return activation(emitter.emit(op.matmul(x, w), "argument"))

        values = {"x": normal(0, 2, 3), "w": normal(1, 3, 4)}
        program = differentiate(program_of(build, values), ["w"]).program
        readers = [b for b in program.bindings if "argument" in {v.name for v in variables(b.value)}]
        assert len(readers) == 1
