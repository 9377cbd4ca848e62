from __future__ import annotations

import numpy as np
import pytest
from tvm import relax, tirx

from hybridc.passes.fuse.fuse import fuse
from hybridc.passes.fuse.separable import fuse_separable
from hybridc.passes.layout.layout import choose_layout
from hybridc.passes.program.program import Program, ProgramBuilder, is_op, tensor_shape
from hybridc.targets import parse_target
from tests.support.programs import drawn, run_llvm

SIZE = 48
"""Of images whose depthwise result does not stay in a cache: [1, 32, 48, 48]."""


class Network:
    """Writes a program of convolutions behind one that asks for blocks of its 32 channels."""

    def __init__(self, size: int = SIZE) -> None:
        self.x = relax.Var("x", relax.TensorType((1, 3, size, size), "float32"))
        self.builder = ProgramBuilder([self.x])

    def emit(self, expr: relax.Expr, name: str) -> relax.Var:
        return self.builder.emit(expr, (f"node_{name}",), name)

    def conv(self, x: relax.Var, outputs: int, taps: int, groups: int, name: str) -> relax.Var:
        shape = (outputs, tensor_shape(x)[1] // groups, taps, taps)
        weight, bias = (
            self.builder.weight(drawn(len(self.builder.weights), *s) / 4, "w")
            for s in (shape, (1, outputs, 1, 1))
        )
        value = relax.op.nn.conv2d(x, weight, padding=taps // 2, groups=groups)
        return self.emit(relax.op.add(self.emit(value, name), bias), f"{name}_bias")

    def stem(self) -> relax.Var:
        return self.conv(self.x, 32, 3, 1, "stem")

    def depthwise(self, x: relax.Var, name: str = "depthwise") -> relax.Var:
        return self.emit(relax.op.clip(self.conv(x, 32, 3, 32, name), 0, 6), f"{name}_clip")

    def pointwise(self, x: relax.Var, outputs: int = 16, name: str = "pointwise") -> relax.Var:
        return self.conv(x, outputs, 1, 1, name)

    def program(self, *outputs: relax.Var) -> Program:
        """As the pass gets it."""
        program = self.builder.finish(list(outputs))
        return fuse(choose_layout(program, parse_target("avx2").isa))


def calls(program: Program) -> list[str]:
    return [b.value.args[0].name_hint for b in program.bindings if is_op(b.value, "call_tir")]


def check(before: Program) -> Program:
    """The program behind the pass, after a check that it computes the same and has no function to spare."""
    after = fuse_separable(before, parse_target("avx2"), threads=2)
    functions = {g.name_hint for g, f in after.module.functions.items() if isinstance(f, tirx.PrimFunc)}
    assert functions == set(calls(after))
    assert all(after.origins[b.var.name] for b in after.bindings)
    x = drawn(99, *tensor_shape(before.main.params[0]))
    for got, want in zip(
        run_llvm(after.module, x, *after.weights.values()),
        run_llvm(before.module, x, *before.weights.values()),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    return after


def test_depthwise_and_1x1_convolution_become_one_kernel_with_their_epilogues():
    net = Network()
    x = net.stem()
    residual = net.emit(relax.op.add(net.pointwise(net.depthwise(x), 32), x), "residual")
    before = net.program(residual)
    after = check(before)
    assert calls(before) == ["conv2d_add", "depthwise_add_clip", "conv2d_add_1", "to_plain"]
    assert calls(after) == ["conv2d_add", "depthwise_add_clip_conv2d_add", "to_plain"]
    assert after.origins[after.bindings[1].var.name] == (
        *("node_depthwise", "node_depthwise_bias", "node_depthwise_clip"),
        *("node_pointwise", "node_pointwise_bias", "node_residual"),
    )


def test_equal_pairs_share_a_function():
    net = Network()
    x = net.stem()
    for i in range(2):
        x = net.pointwise(net.depthwise(x, f"depthwise_{i}"), 32, f"pointwise_{i}")
    found = calls(check(net.program(x)))
    assert found[1:3] == ["depthwise_add_clip_conv2d_add"] * 2


def test_a_result_that_others_read_stays_a_tensor():
    net = Network()
    y = net.depthwise(net.stem())
    before = net.program(net.pointwise(y), net.pointwise(y, 8, "other"))
    assert calls(check(before)) == calls(before)


def test_a_1x1_convolution_that_adds_its_own_input_stays_a_kernel():
    net = Network()
    y = net.depthwise(net.stem())
    before = net.program(net.emit(relax.op.add(net.pointwise(y, 32), y), "residual"))
    assert calls(check(before)) == calls(before)


@pytest.mark.parametrize("taps", [1, 3])
def test_only_a_depthwise_and_a_1x1_convolution_are_joined(taps):
    net = Network()
    x = net.stem()
    y = net.depthwise(x) if taps == 3 else net.pointwise(x, 32, "dense")
    before = net.program(net.conv(y, 32, taps, 1, "last"))
    assert calls(check(before)) == calls(before)


def test_kernels_that_are_not_predicted_to_gain_stay_apart():
    net = Network(8)
    before = net.program(net.pointwise(net.depthwise(net.stem())))
    assert calls(check(before)) == calls(before)
