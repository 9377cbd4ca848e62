"""Gradients of element-wise operators."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
from tvm import relax

from hybridc.passes.training.gradients import Emitter
from tests.support.gradients import assert_gradients, distinct, gradients_of, normal

op = relax.op

UNARY: dict[str, tuple[Callable[[relax.Expr], relax.Expr], float, float]] = {
    "exp": (op.exp, -1, 1),
    "sqrt": (op.sqrt, 0.5, 2),
    "rsqrt": (op.rsqrt, 0.5, 2),
    "tanh": (op.tanh, -2, 2),
    "tan": (op.tan, -1, 1),
    "sigmoid": (op.sigmoid, -2, 2),
    "relu": (op.nn.relu, -1, 1),
    "log": (op.log, 0.5, 2),
    "abs": (op.abs, -1, 1),
    "negative": (op.negative, -1, 1),
    "sin": (op.sin, -1, 1),
    "cos": (op.cos, -1, 1),
    "sinh": (op.sinh, -1, 1),
    "cosh": (op.cosh, -1, 1),
    "asin": (op.asin, -0.9, 0.9),
    "acos": (op.acos, -0.9, 0.9),
    "atan": (op.atan, -1, 1),
    "asinh": (op.asinh, -1, 1),
    "acosh": (op.acosh, 1.5, 3),
    "atanh": (op.atanh, -0.9, 0.9),
    "erf": (op.erf, -1, 1),
}


def test_functions_of_one_element() -> None:
    def build(emitter: Emitter, **inputs: relax.Var) -> relax.Expr:
        return functools.reduce(op.add, (UNARY[name][0](x) for name, x in inputs.items()))

    values = {
        name: low + (high - low) * (distinct(i, 3, 4) + 1) / 2
        for i, (name, (_, low, high)) in enumerate(UNARY.items())
    }
    assert_gradients(build, values)


BINARY = {
    "add": op.add,
    "subtract": op.subtract,
    "multiply": op.multiply,
    "divide": op.divide,
    "power": op.power,
    "maximum": op.maximum,
    "minimum": op.minimum,
}


@pytest.mark.parametrize("shapes", [((3, 4), (3, 4)), ((2, 3, 4), (4,)), ((3, 1), (2, 1, 4)), ((2, 3), ())])
def test_broadcast_operands_sum_up(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    def build(emitter: Emitter, **inputs: relax.Var) -> relax.Expr:
        terms = [make(inputs[f"{name}_a"], inputs[f"{name}_b"]) for name, make in BINARY.items()]
        return functools.reduce(op.add, terms)

    values = {
        f"{name}_{side}": 2.1 + 0.9 * np.sin(normal(2 * i + j, *shape))
        for i, name in enumerate(BINARY)
        for j, (side, shape) in enumerate(zip("ab", shapes, strict=True))
    }
    assert_gradients(build, values)


def test_an_operand_may_be_used_twice_and_be_a_number() -> None:
    def build(emitter: Emitter, x: relax.Var) -> relax.Expr:
        number = functools.partial(relax.const, dtype="float64")
        cubed = op.power(x, number(3.0))
        squared = op.multiply(op.multiply(x, x), op.power(x, number(2.0)))
        quotient = op.divide(number(2.0), op.subtract(op.multiply(x, number(0.5)), number(4.0)))
        return op.add(op.add(cubed, squared), quotient)

    assert_gradients(build, {"x": normal(0, 5)})


def test_bounds_pass_the_gradient_inside() -> None:
    def build(emitter: Emitter, x: relax.Var) -> relax.Expr:
        low, high = (relax.const(value, "float64") for value in (-0.31, 0.42))
        return op.minimum(op.maximum(x, low), high)

    assert_gradients(build, {"x": distinct(1, 40)})


def test_where_takes_the_chosen_branch() -> None:
    def build(emitter: Emitter, condition: relax.Var, a: relax.Var, b: relax.Var) -> relax.Expr:
        return op.where(condition, a, b)

    condition = normal(0, 3, 4) > 0
    assert_gradients(build, {"condition": condition, "a": normal(1, 3, 4), "b": normal(2, 4)})
    assert_gradients(build, {"condition": condition[0], "a": normal(1, 3, 1), "b": normal(2, 3, 4)})


def test_a_remainder_has_the_slope_of_its_dividend() -> None:
    def build(emitter: Emitter, x: relax.Var) -> relax.Expr:
        return op.floor_mod(x, relax.const(0.7, "float64"))

    assert_gradients(build, {"x": distinct(3, 9)})


def test_casts_pass_the_gradient() -> None:
    def build(emitter: Emitter, x: relax.Var) -> relax.Expr:
        return op.astype(op.multiply(op.astype(x, "float32"), relax.const(2.0, "float32")), "float64")

    assert_gradients(build, {"x": normal(4, 6)}, step=1.0, tolerance=1e-5)


def test_steps_have_no_slope() -> None:
    def build(emitter: Emitter, x: relax.Var) -> relax.Expr:
        steps = op.add(op.add(op.floor(x), op.ceil(x)), op.add(op.round(x), op.sign(x)))
        return op.add(steps, op.multiply(x, relax.const(3.0, "float64")))

    assert_gradients(build, {"x": distinct(5, 8) * 3})


def test_relu_has_slope_0_at_0() -> None:
    gradient = gradients_of(lambda emitter, x: op.nn.relu(x), {"x": np.zeros(3)})["x"]
    assert (gradient == 0).all()


@pytest.mark.parametrize(
    "root", [op.sqrt, lambda x: op.power(x, relax.const(0.5, "float64"))], ids=["sqrt", "power"]
)
def test_a_distance_of_0_has_gradient_0(root: Callable[[relax.Expr], relax.Expr]) -> None:
    """As norms and distances of PyTorch, which its exporters write as roots."""
    torch = pytest.importorskip("torch")

    def build(emitter: Emitter, x: relax.Var) -> relax.Expr:
        return root(op.sum(op.multiply(x, x), [1]))

    x = normal(0, 3, 4)
    x[1] = 0
    leaf = torch.tensor(x, requires_grad=True)
    weights = np.random.default_rng(99).uniform(0.5, 1.5, 3)  # those of `program_of`
    (leaf.norm(dim=1) * torch.tensor(weights)).sum().backward()
    np.testing.assert_allclose(gradients_of(build, {"x": x})["x"], leaf.grad.numpy(), rtol=1e-12)


def test_an_exponent_of_0_s_power_has_gradient_0() -> None:
    values = {"x": np.array([0.0, 2.0]), "exponent": np.array([1.5, 2.5])}
    found = gradients_of(lambda emitter, x, exponent: op.power(x, exponent), values)["exponent"]
    weights = np.random.default_rng(99).uniform(0.5, 1.5, 2)  # those of `program_of`
    np.testing.assert_allclose(found, weights * [0, 2**2.5 * np.log(2)], rtol=1e-12)
