"""Gradients of pooling."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tvm import relax

from hybridc.passes.program.program import is_op
from hybridc.passes.training.differentiate import differentiate
from hybridc.passes.training.gradients import Emitter
from tests.support.gradients import (
    assert_gradients,
    compiled,
    distinct,
    gradients_of,
    program_of,
    side_by_side,
)

nn = relax.op.nn
Case = tuple[tuple[int, ...], Callable[[relax.Var], relax.Expr]]

CASES: dict[str, Case] = {
    "max": ((2, 3, 6, 8), lambda x: nn.max_pool2d(x, 2, 2)),
    "max_overlapping": ((2, 2, 7, 8), lambda x: nn.max_pool2d(x, (3, 3), 2, (1, 1, 1, 0))),
    "max_ceil": ((1, 2, 7, 8), lambda x: nn.max_pool2d(x, 3, 2, ceil_mode=True)),
    "max_dilated": ((1, 2, 9, 8), lambda x: nn.max_pool2d(x, (2, 3), (1, 2), 1, (3, 2))),
    "max_gaps": ((1, 2, 9, 9), lambda x: nn.max_pool2d(x, 2, 3)),
    "max_1d": ((2, 3, 9), lambda x: nn.max_pool1d(x, 3, 2, 1)),
    "max_3d": ((1, 2, 4, 5, 4), lambda x: nn.max_pool3d(x, 2, (2, 1, 2), (0, 1, 0, 0, 0, 0))),
    "mean": ((2, 3, 6, 8), lambda x: nn.avg_pool2d(x, 2, 2)),
    "mean_overlapping": ((2, 2, 7, 8), lambda x: nn.avg_pool2d(x, (3, 3), 2, (1, 1, 1, 0))),
    "mean_padded": ((2, 2, 7, 8), lambda x: nn.avg_pool2d(x, 3, 2, 1, count_include_pad=True)),
    "mean_ceil": ((1, 2, 7, 8), lambda x: nn.avg_pool2d(x, 3, 2, 1, ceil_mode=True)),
    "mean_ceil_padded": (
        (1, 2, 7, 8),
        lambda x: nn.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=True),
    ),
    "mean_dilated": ((1, 2, 9, 8), lambda x: nn.avg_pool2d(x, (2, 3), (1, 2), (1, 2), (3, 2))),
    "mean_1d": ((2, 3, 9), lambda x: nn.avg_pool1d(x, 3, 2, 1)),
    "mean_3d": ((1, 2, 4, 5, 4), lambda x: nn.avg_pool3d(x, 2, (2, 1, 2), (0, 1, 0, 0, 0, 0))),
}


@pytest.mark.parametrize("kind", ["max", "mean"])
def test_windows_hand_their_gradients_to_what_they_read(kind: str) -> None:
    cases = {name: case for name, case in CASES.items() if name.startswith(kind)}

    def build(emitter: Emitter, **inputs: relax.Var) -> relax.Expr:
        return side_by_side([cases[name][1](x) for name, x in inputs.items()], emitter)

    values = {name: distinct(i, *shape) for i, (name, (shape, _)) in enumerate(cases.items())}
    assert_gradients(build, values)


def test_the_first_of_equal_maxima_takes_it_all() -> None:
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).integers(0, 3, (2, 3, 8, 9)).astype(np.float64)

    def build(emitter: Emitter, x: relax.Var) -> relax.Expr:
        return nn.max_pool2d(x, 3, 2, 1)

    leaf = torch.tensor(x, requires_grad=True)
    result = torch.nn.functional.max_pool2d(leaf, 3, 2, 1)
    weights = np.random.default_rng(99).uniform(0.5, 1.5, tuple(result.shape))  # those of `program_of`
    (result * torch.tensor(weights)).sum().backward()
    np.testing.assert_allclose(gradients_of(build, {"x": x})["x"], leaf.grad.numpy(), rtol=1e-12)


def test_only_bytes_are_kept_of_the_maxima() -> None:
    values = {"x": distinct(0, 1, 2, 6, 6), "w": distinct(1, 1, 2, 6, 6)}

    def build(emitter: Emitter, x: relax.Var, w: relax.Var) -> relax.Expr:
        return nn.max_pool2d(relax.op.multiply(x, w), 2, 2)

    program = differentiate(program_of(build, values), ["w"]).program
    [backward] = [
        b.value
        for b in program.bindings
        if is_op(b.value, "call_tir") and "gradient" in b.value.args[0].name_hint
    ]
    assert [str(a.ty.dtype) for a in backward.args[1].fields] == ["uint8", "float64"]


def test_data_without_a_parameter_before_it_is_pooled_as_ever() -> None:
    values = {"x": distinct(0, 1, 2, 6, 6), "w": distinct(1, 3, 3)}

    def build(emitter: Emitter, x: relax.Var, w: relax.Var) -> relax.Expr:
        return relax.op.multiply(nn.max_pool2d(x, 2, 2), w)

    program = differentiate(program_of(build, values), ["w"]).program
    assert any(is_op(b.value, "nn.max_pool2d") for b in program.bindings)


def test_nan_is_a_maximum_and_padding_is_none() -> None:
    x = np.full((1, 1, 4, 4), -np.inf)
    x[0, 0, 3, 3] = np.nan

    def build(emitter: Emitter, x: relax.Var) -> relax.Expr:
        return nn.max_pool2d(x, 2, 2, 1)

    result = compiled(differentiate(program_of(build, {"x": x}), ["x"]).program)({"x": x})[1]
    expected = np.full((1, 1, 3, 3), -np.inf)
    expected[0, 0, 2, 2] = np.nan
    np.testing.assert_array_equal(result, expected)
