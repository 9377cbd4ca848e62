"""Gradients of normalisation, and what BatchNorm does in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm import relax

from hybridc.passes.program.program import tensor_shape, variables
from hybridc.passes.training.differentiate import differentiate
from hybridc.passes.training.gradients import Emitter
from tests.support.gradients import (
    assert_gradients,
    compiled,
    gradients_of,
    normal,
    program_of,
    side_by_side,
)

nn = relax.op.nn
EPSILON = 1e-3
PARAMETERS = ("x", "scale", "shift")


def _values(shape: tuple[int, ...], parameters: tuple[int, ...]) -> dict[str, np.ndarray]:
    data = 3 + 2 * normal(0, *shape)
    return dict(zip(PARAMETERS, [data, normal(1, *parameters), normal(2, *parameters)], strict=True))


Within = tuple[tuple[int, ...], tuple[int, ...], Callable[..., relax.Expr], Callable[..., Any]]

WITHIN_EXAMPLES: dict[str, Within] = {
    "layer": (
        (3, 4, 5),
        (5,),
        lambda x, scale, shift: nn.layer_norm(x, scale, shift, [-1], EPSILON),
        lambda F, x, scale, shift: F.layer_norm(x, (5,), scale, shift, EPSILON),
    ),
    "layers": (
        (3, 4, 5),
        (4, 5),
        lambda x, scale, shift: nn.layer_norm(x, scale, shift, [1, 2], EPSILON),
        lambda F, x, scale, shift: F.layer_norm(x, (4, 5), scale, shift, EPSILON),
    ),
    "group": (
        (2, 6, 3, 2),
        (6,),
        lambda x, scale, shift: nn.group_norm(x, scale, shift, 2, 1, [2, 3], EPSILON),
        lambda F, x, scale, shift: F.group_norm(x, 2, scale, shift, EPSILON),
    ),
    "instance": (
        (2, 3, 7),
        (3,),
        lambda x, scale, shift: nn.instance_norm(x, scale, shift, 1, [2], EPSILON),
        lambda F, x, scale, shift: F.instance_norm(x, None, None, scale, shift, eps=EPSILON),
    ),
    "rms": (
        (3, 4, 5),
        (5,),
        lambda x, scale, shift: nn.rms_norm(x, scale, [-1], EPSILON),
        lambda F, x, scale, shift: F.rms_norm(x, (5,), scale, EPSILON),
    ),
}


def test_normalisation_within_examples() -> None:
    """TVM has some of them in float32 only."""
    torch = pytest.importorskip("torch")
    cases = WITHIN_EXAMPLES.items()

    def build(emitter: Emitter, **v: relax.Var) -> relax.Expr:
        single = {name: emitter.emit(relax.op.astype(value, "float32")) for name, value in v.items()}
        results = [make(*(single[f"{p}_{n}"] for p in PARAMETERS)) for n, (_, _, make, _) in cases]
        return relax.op.astype(side_by_side(results, emitter), "float64")

    values = {f"{p}_{n}": v for n, (data, own, *_) in cases for p, v in _values(data, own).items()}
    leaves = {name: torch.tensor(value, requires_grad=True) for name, value in values.items()}
    results = [
        oracle(torch.nn.functional, *(leaves[f"{p}_{n}"] for p in PARAMETERS)) for n, (*_, oracle) in cases
    ]
    weights = program_of(build, values).weights["weights"]
    (torch.cat([r.flatten() for r in results]) * torch.tensor(weights)).sum().backward()
    found = gradients_of(build, values)
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            np.testing.assert_allclose(found[name], leaf.grad.numpy(), rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("shape", [(4, 3, 2, 5), (6, 3)])
def test_batch_norm_goes_through_the_batchs_statistics(shape: tuple[int, ...]) -> None:
    def build(
        emitter: Emitter,
        x: relax.Var,
        scale: relax.Var,
        shift: relax.Var,
        mean: relax.Var,
        variance: relax.Var,
    ) -> relax.Expr:
        return emitter.item(emitter.emit(nn.batch_norm(x, scale, shift, mean, variance, 1, 1e-3)), 0)

    values = {**_values(shape, (3,)), "mean": np.zeros(3), "variance": np.ones(3)}
    program = program_of(build, values)
    made = differentiate(program, ["x", "scale", "shift"])
    run = compiled(made.program)
    outputs = run(values)
    torch = pytest.importorskip("torch")
    leaves = {name: torch.tensor(values[name], requires_grad=True) for name in ("x", "scale", "shift")}
    result = torch.nn.functional.batch_norm(
        leaves["x"], None, None, leaves["scale"], leaves["shift"], training=True, eps=1e-3
    )
    (result * torch.tensor(program.weights["weights"])).sum().backward()
    np.testing.assert_allclose(outputs[1], result.detach().numpy(), rtol=1e-10, atol=1e-12)
    for name, (position,) in made.results.items():
        np.testing.assert_allclose(outputs[position], leaves[name].grad.numpy(), rtol=1e-7, atol=1e-9)


def test_running_statistics_follow_as_in_pytorch() -> None:
    torch = pytest.importorskip("torch")
    values = {**_values((4, 3, 2, 5), (3,)), "mean": normal(3, 3), "variance": np.abs(normal(4, 3))}

    def build(emitter: Emitter, **v: relax.Var) -> relax.Expr:
        norm = nn.batch_norm(*v.values(), 1, 1e-3, momentum=0.3)
        made = emitter.emit(norm)
        return side_by_side([emitter.item(made, i) for i in range(3)], emitter)

    program = program_of(build, values)
    statistics = compiled(differentiate(program, ["scale"]).program)(values)[1][-6:]
    mean, variance = torch.tensor(values["mean"]), torch.tensor(values["variance"])
    torch.nn.functional.batch_norm(torch.tensor(values["x"]), mean, variance, training=True, momentum=0.3)
    np.testing.assert_allclose(statistics, np.concatenate([mean.numpy(), variance.numpy()]), rtol=1e-12)


def test_frozen_batch_norm_scales_and_shifts() -> None:
    def build(emitter: Emitter, x: relax.Var, scale: relax.Var, shift: relax.Var) -> relax.Expr:
        mean = emitter.builder.weight(normal(3, 3), "mean")
        variance = emitter.builder.weight(np.abs(normal(4, 3)) + 0.5, "variance")
        norm = nn.batch_norm(x, scale, shift, mean, variance, 1, 1e-3, training=False)
        return emitter.item(emitter.emit(norm), 0)

    assert_gradients(build, _values((4, 3, 2, 5), (3,)))


def test_computed_statistics_of_batch_norm_have_gradients() -> None:
    """As a layer has them that keeps no running ones, as exporters write it."""

    def build(emitter: Emitter, **values: relax.Var) -> relax.Expr:
        return emitter.item(emitter.emit(nn.batch_norm(*values.values(), 1, 1e-3, training=False)), 0)

    statistics = {"mean": normal(3, 3), "variance": np.abs(normal(4, 3)) + 0.5}
    assert_gradients(build, {**_values((4, 3, 2, 5), (3,)), **statistics})


def test_batch_norm_keeps_its_data_and_two_numbers_a_channel() -> None:
    def build(emitter: Emitter, x: relax.Var, w: relax.Var, scale: relax.Var, shift: relax.Var) -> relax.Expr:
        data = emitter.emit(nn.conv2d(x, w), "data")
        mean, variance = (emitter.builder.weight(np.ones(4), name) for name in ("mean", "variance"))
        return emitter.item(emitter.emit(nn.batch_norm(data, scale, shift, mean, variance, 1)), 0)

    values = {
        "x": normal(0, 2, 3, 5, 5),
        "w": normal(1, 4, 3, 3, 3),
        "scale": normal(2, 4),
        "shift": normal(3, 4),
    }
    program = differentiate(program_of(build, values), ["w", "scale", "shift"]).program
    names = [b.var.name for b in program.bindings]
    forward = {b.var for b in program.bindings[: names.index("loss")]}
    backward = program.bindings[names.index("loss") + 1 :]
    kept = {v for b in backward for v in variables(b.value) if v in forward}
    assert sorted(tensor_shape(v) for v in kept) == [(2, 4, 3, 3), (4,), (4,)]
