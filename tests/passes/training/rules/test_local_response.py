"""Local response normalisation and its gradient."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from hybridc.passes.program.program import Program, operator_name
from hybridc.passes.training.differentiate import differentiate
from hybridc.passes.training.gradients import Emitter
from tests.support.gradients import assert_gradients, compiled, gradients_of, normal, program_of

op = relax.op
SIZE, ALPHA, BETA, BIAS = 3, 0.5, 0.6, 2.0


def spelled_out(
    emitter: Emitter, x: relax.Var, size: int = SIZE, *, counts_padding: bool = True
) -> relax.Expr:
    """As the importer does it."""
    spatial = len(x.ty.shape) - 2
    pool = op.nn.avg_pool2d if spatial == 1 else op.nn.avg_pool3d
    padding = [size // 2, *([0] * spatial), size // 2, *([0] * spatial)]
    squares = emitter.emit(op.expand_dims(op.multiply(x, x), 1))
    taps = [size, *([1] * spatial)]
    means = pool(squares, taps, [1] * (spatial + 1), padding, count_include_pad=counts_padding)
    scale = op.add(op.multiply(op.squeeze(emitter.emit(means), [1]), _number(ALPHA)), _number(BIAS))
    return op.divide(x, emitter.emit(op.power(emitter.emit(scale), _number(BETA))))


def _number(value: float) -> relax.Expr:
    return relax.const(value, "float64")


def functions(program: Program) -> list[str]:
    return [operator_name(b.value) for b in program.bindings if isinstance(b.value, relax.Call)]


@pytest.mark.parametrize("shape", [(2, 7, 3, 4), (2, 2, 3, 3), (1, 6, 5)])
@pytest.mark.parametrize("size", [1, 3, 5])
def test_it_is_what_pytorch_computes(shape: tuple[int, ...], size: int) -> None:
    torch = pytest.importorskip("torch")
    x = 2 * normal(0, *shape)
    leaf = torch.tensor(x, requires_grad=True)
    result = torch.nn.functional.local_response_norm(leaf, size, ALPHA, BETA, BIAS)
    weights = np.random.default_rng(99).uniform(0.5, 1.5, shape)  # those of `program_of`
    (result * torch.tensor(weights)).sum().backward()

    def build(emitter: Emitter, x: relax.Var) -> relax.Expr:
        return spelled_out(emitter, x, size)

    found = compiled(differentiate(program_of(build, {"x": x}), ["x"]).program)({"x": x})
    np.testing.assert_allclose(found[1], result.detach().numpy(), rtol=1e-12)
    np.testing.assert_allclose(found[2], leaf.grad.numpy(), rtol=1e-9, atol=1e-12)


def test_gradient_is_the_change_of_the_result() -> None:
    assert_gradients(spelled_out, {"x": 2 * normal(3, 2, 5, 3, 3)})


def test_one_function_each_way_of_the_data_alone() -> None:
    program = differentiate(program_of(spelled_out, {"x": normal(0, 1, 4, 3, 3)}), ["x"]).program
    calls = {operator_name(b.value): b.value for b in program.bindings if isinstance(b.value, relax.Call)}
    assert not {"power", "divide", "nn.avg_pool3d"} & set(calls)
    [data] = calls["local_response"].args[1].fields
    assert calls["local_response_gradient"].args[1].fields[0].same_as(data)


def test_other_means_stay_as_they_are() -> None:
    """Windows that do not count padding have fewer channels at the ends."""

    def build(emitter: Emitter, x: relax.Var) -> relax.Expr:
        return spelled_out(emitter, x, counts_padding=False)

    values = {"x": 2 * normal(0, 2, 4, 3, 3)}
    assert "local_response" not in functions(differentiate(program_of(build, values), ["x"]).program)
    assert_gradients(build, values)


def test_the_divisor_may_be_of_other_data() -> None:
    def build(emitter: Emitter, x: relax.Var, z: relax.Var) -> relax.Expr:
        divided = emitter.emit(spelled_out(emitter, z))
        return op.divide(x, emitter.values[divided].args[1])

    values = {"x": normal(0, 1, 4, 3, 3), "z": normal(1, 1, 4, 3, 3)}
    assert "local_response" not in functions(differentiate(program_of(build, values), ["x", "z"]).program)
    assert gradients_of(build, values).keys() == {"x", "z"}
