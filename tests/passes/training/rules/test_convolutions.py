"""Gradients of convolutions and their transposes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tvm import relax

from hybridc.passes.program.program import is_op, operator_name
from hybridc.passes.training.differentiate import differentiate
from hybridc.passes.training.gradients import Emitter
from tests.support.gradients import assert_gradients, normal, program_of, side_by_side

nn = relax.op.nn
Case = tuple[tuple[int, ...], tuple[int, ...], Callable[[relax.Var, relax.Var], relax.Expr]]

FORWARD: dict[str, Case] = {
    "plain": ((2, 3, 5, 6), (4, 3, 3, 3), lambda x, w: nn.conv2d(x, w, padding=1)),
    "strides": ((2, 3, 7, 6), (4, 3, 3, 2), lambda x, w: nn.conv2d(x, w, (2, 3), (1, 0, 0, 1))),
    "unread_end": ((1, 2, 8, 9), (2, 2, 3, 1), lambda x, w: nn.conv2d(x, w, (3, 4))),
    "dilation": ((1, 2, 8, 9), (3, 2, 3, 3), lambda x, w: nn.conv2d(x, w, 1, (2, 1, 2, 3), (2, 3))),
    "both": ((1, 2, 9, 9), (3, 2, 3, 3), lambda x, w: nn.conv2d(x, w, 2, 2, 2)),
    "groups": ((2, 4, 5, 5), (6, 2, 3, 3), lambda x, w: nn.conv2d(x, w, 2, 1, 1, 2)),
    "depthwise": ((2, 4, 5, 5), (4, 1, 3, 3), lambda x, w: nn.conv2d(x, w, 1, 1, 1, 4)),
    "pointwise": ((2, 4, 4, 4), (3, 4, 1, 1), lambda x, w: nn.conv2d(x, w, 2)),
    "1d": ((2, 3, 11), (4, 3, 3), lambda x, w: nn.conv1d(x, w, 2, (1, 2), 2)),
    "1d_groups": ((2, 4, 9), (4, 2, 3), lambda x, w: nn.conv1d(x, w, 1, 1, 1, 2)),
    "3d": ((1, 2, 4, 5, 4), (3, 2, 2, 3, 2), lambda x, w: nn.conv3d(x, w, (1, 2, 1), 1, 1)),
    "3d_groups": ((1, 2, 4, 4, 4), (2, 1, 2, 2, 2), lambda x, w: nn.conv3d(x, w, 2, 0, 1, 2)),
}

TRANSPOSED: dict[str, Case] = {
    "plain": ((2, 3, 4, 5), (3, 2, 3, 3), lambda x, w: nn.conv2d_transpose(x, w)),
    "strides": ((2, 3, 3, 4), (3, 2, 3, 4), lambda x, w: nn.conv2d_transpose(x, w, (2, 3), (1, 0, 0, 2))),
    "more": ((1, 2, 3, 3), (2, 2, 2, 3), lambda x, w: nn.conv2d_transpose(x, w, 3, 1, (1, 2))),
    "dilation": ((1, 2, 4, 4), (2, 3, 3, 2), lambda x, w: nn.conv2d_transpose(x, w, 2, 1, 1, (2, 1))),
    "groups": ((1, 4, 3, 3), (4, 3, 2, 2), lambda x, w: nn.conv2d_transpose(x, w, 2, 0, 0, 1, 2)),
    "1d": ((2, 3, 5), (3, 2, 4), lambda x, w: nn.conv1d_transpose(x, w, 2, 1)),
    "3d": ((1, 2, 3, 2, 3), (2, 2, 2, 3, 2), lambda x, w: nn.conv3d_transpose(x, w, 2, 1)),
}


@pytest.mark.parametrize("cases", [FORWARD, TRANSPOSED], ids=["forward", "transposed"])
def test_data_and_weight_get_their_gradients(cases: dict[str, Case]) -> None:
    def build(emitter: Emitter, **inputs: relax.Var) -> relax.Expr:
        return side_by_side(
            [make(inputs[f"x_{n}"], inputs[f"w_{n}"]) for n, (*_, make) in cases.items()], emitter
        )

    values = {}
    for i, (name, (data, weight, _)) in enumerate(cases.items()):
        values[f"x_{name}"], values[f"w_{name}"] = normal(2 * i, *data), normal(2 * i + 1, *weight)
    assert_gradients(build, values, step=1.0)


def test_the_first_layers_data_gets_no_gradient() -> None:
    def build(emitter: Emitter, x: relax.Var, w: relax.Var) -> relax.Expr:
        return nn.conv2d(x, w)

    values = {"x": normal(0, 1, 2, 4, 4), "w": normal(1, 3, 2, 3, 3)}
    program = differentiate(program_of(build, values), ["w"]).program
    names = [operator_name(b.value) for b in program.bindings if isinstance(b.value, relax.Call)]
    assert names.count("conv2d_wgrad") == 1 and "conv2d_transpose" not in names


def test_equal_layers_share_one_function() -> None:
    def build(emitter: Emitter, x: relax.Var, v: relax.Var, w: relax.Var) -> relax.Expr:
        return nn.conv2d(nn.conv2d(x, v, padding=1), w, padding=1)

    values = {"x": normal(0, 1, 2, 4, 4), "v": normal(1, 2, 2, 3, 3), "w": normal(2, 2, 2, 3, 3)}
    program = differentiate(program_of(build, values), ["v", "w"]).program
    calls = [b.value.args[0].name_hint for b in program.bindings if is_op(b.value, "call_tir")]
    assert calls == ["conv2d_wgrad"] * 2 and len(program.functions) == 1
