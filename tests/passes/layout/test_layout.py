from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tvm import relax

from hybridc.passes.layout.layout import choose_layout
from hybridc.passes.layout.state import lanes_of
from hybridc.passes.program.program import Program, ProgramBuilder, is_op, operator_name, tensor_shape
from hybridc.targets import ISAS
from tests.support.programs import drawn, run_llvm

Emit = Callable[[relax.Expr], relax.Var]


class Network:
    """Writes a program with weights drawn as they are asked for."""

    def __init__(self, *shape: int) -> None:
        self.x = relax.Var("x", relax.TensorType(shape, "float32"))
        self.builder = ProgramBuilder([self.x])

    def emit(self, expr: relax.Expr, name: str = "v") -> relax.Var:
        return self.builder.emit(expr, (f"node_{name}",), name)

    def weight(self, *shape: int) -> relax.Var:
        return self.builder.weight(drawn(len(self.builder.weights), *shape) / 8, "w")

    def conv(self, x: relax.Var, outputs: int, taps: int = 3, groups: int = 1, stride: int = 1) -> relax.Var:
        weight = self.weight(outputs, tensor_shape(x)[1] // groups, taps, taps)
        pad = taps // 2
        value = relax.op.nn.conv2d(x, weight, strides=stride, padding=(pad, pad), groups=groups)
        return self.emit(relax.op.add(self.emit(value, "conv"), self.weight(1, outputs, 1, 1)), "bias")

    def relu(self, x: relax.Var) -> relax.Var:
        return self.emit(relax.op.nn.relu(x), "relu")

    def program(self, *outputs: relax.Var) -> Program:
        return self.builder.finish(list(outputs))


def operators(program: Program) -> list[str]:
    return [operator_name(b.value) for b in program.bindings]


def check(before: Program, isa: str = "avx512") -> Program:
    """The program with its layout chosen, after a check that it computes the same."""
    after = choose_layout(before, ISAS[isa])
    assert all(after.origins[b.var.name] for b in after.bindings)
    x = drawn(99, *tensor_shape(before.main.params[0]))
    for got, want in zip(
        run_llvm(after.module, x, *after.weights.values()),
        run_llvm(before.module, x, *before.weights.values()),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    return after


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_a_chain_of_convolutions_is_blocked_from_end_to_end(isa):
    net = Network(1, 3, 12, 12)
    x = net.relu(net.conv(net.x, 32))
    y = net.relu(net.conv(x, 32))
    z = net.emit(relax.op.add(net.conv(y, 32), x))
    pooled = net.emit(relax.op.nn.max_pool2d(z, (2, 2), (2, 2)))
    after = check(net.program(pooled), isa)
    assert operators(after) == [
        *("conv2d", "add", "relu", "conv2d", "add", "relu", "conv2d", "add", "add", "max_pool2d", "to_plain")
    ]
    lanes = ISAS[isa].lanes()
    shapes = [tensor_shape(b.var) for b in after.bindings]
    assert shapes[:-1] == [(1, 32 // lanes, 12, 12, lanes)] * 9 + [(1, 32 // lanes, 6, 6, lanes)]


def test_wide_plain_input_is_converted_once_for_all_its_readers():
    net = Network(1, 32, 8, 8)
    both = net.emit(relax.op.add(net.conv(net.x, 32), net.conv(net.x, 32)))
    assert operators(check(net.program(both))).count("to_blocked") == 1


def test_a_convolution_of_little_work_is_left_plain():
    net = Network(1, 32, 8, 8)
    after = check(net.program(net.conv(net.x, 4, taps=1)))
    assert operators(after) == ["conv2d", "add"] and is_op(after.bindings[0].value, "nn.conv2d")


def test_channels_that_do_not_fill_blocks_are_filled_up():
    net = Network(2, 3, 9, 7)
    x = net.conv(net.x, 20, stride=2)
    y = net.conv(net.emit(relax.op.sigmoid(x)), 3)
    after = check(net.program(y))
    assert tensor_shape(after.bindings[0].var) == (2, 3, 5, 4, 8)
    assert tensor_shape(after.bindings[-2].var) == (2, 1, 5, 4, 8)


def test_an_operator_that_may_make_the_filling_infinite_reads_plain_data():
    net = Network(1, 3, 8, 8)
    inner = net.emit(relax.op.nn.relu(net.conv(net.x, 20)))
    log = net.emit(relax.op.log(net.emit(relax.op.add(inner, relax.const(1.0, "float32")))), "log")
    after = check(net.program(log))
    assert operators(after)[-2:] == ["to_plain", "log"]


def test_depthwise_convolution_follows_its_input():
    net = Network(1, 3, 10, 10)
    x = net.conv(net.conv(net.x, 24), 24, groups=24, stride=2)
    after = check(net.program(net.conv(x, 16, taps=1)))
    assert operators(after) == ["conv2d", "add", "depthwise", "add", "conv2d", "add", "to_plain"]


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
@pytest.mark.parametrize(
    ("channels", "groups", "outputs"),
    [(32, 8, 32), (32, 2, 64), (48, 2, 48), (40, 10, 40), (16, 16, 32)],
    ids=["narrow", "wide", "half vectors", "filled blocks", "two outputs a channel"],
)
def test_grouped_convolution_stays_blocked(isa, channels, groups, outputs):
    net = Network(1, 3, 6, 6)
    y = net.conv(net.conv(net.x, channels), outputs, groups=groups)
    after = check(net.program(net.conv(y, 16)), isa)
    expected = ["conv2d", "add", "grouped_conv2d", "add", "conv2d", "add", "to_plain"]
    assert operators(after) == expected


def test_groups_that_do_not_fit_vectors_are_joined():
    net = Network(1, 3, 6, 6)
    y = net.conv(net.conv(net.x, 48), 48, taps=1, groups=8)
    after = check(net.program(net.conv(y, 16)))
    assert operators(after).count("grouped_conv2d") == 1
    (weight,) = [w for w in after.weights.values() if w.shape == (48, 12, 1, 1)]
    assert (weight[:6, 6:] == 0).all() and (weight[6:12, :6] == 0).all()


def test_groups_of_which_all_are_joined_are_an_ordinary_convolution():
    net = Network(1, 3, 6, 6)
    y = net.conv(net.conv(net.x, 48), 12, groups=3, taps=1)
    assert operators(check(net.program(net.conv(y, 16)))).count("conv2d") == 3


def test_groups_are_left_plain_where_joining_them_would_cost_more_than_conversions():
    net = Network(1, 3, 6, 6)
    after = check(net.program(net.conv(net.conv(net.x, 72), 72, groups=24)))
    assert operators(after) == ["conv2d", "add", "to_plain", "conv2d", "add"]


def test_concatenation_of_blocked_parts_stays_blocked():
    net = Network(1, 3, 6, 6)
    x = net.conv(net.x, 16)
    joined = net.emit(relax.op.concat([net.conv(x, 32), net.emit(relax.op.nn.relu(x))], axis=1), "concat")
    after = check(net.program(net.conv(joined, 16)))
    assert "to_blocked" not in operators(after) and operators(after).count("to_plain") == 1


@pytest.mark.parametrize("axes", [(2, 3), (-1, -2)])
def test_global_pooling_becomes_plain_without_a_copy(axes):
    net = Network(1, 3, 6, 6)
    mean = net.emit(relax.op.mean(net.conv(net.x, 32), axes, keepdims=True))
    flat = net.emit(relax.op.reshape(mean, (1, 32)))
    after = check(net.program(flat))
    assert operators(after) == ["conv2d", "add", "mean", "reshape", "reshape"]


def test_a_scale_per_channel_follows_what_it_scales():
    net = Network(1, 3, 6, 6)
    x = net.conv(net.x, 32)
    gate = net.emit(relax.op.sigmoid(net.emit(relax.op.mean(x, [2, 3], keepdims=True))))
    scaled = net.emit(relax.op.multiply(x, gate))
    after = check(net.program(net.conv(scaled, 16)))
    assert operators(after).count("to_plain") == 1 and "to_blocked" not in operators(after)


def test_pooling_and_resizing_are_done_on_blocks():
    net = Network(1, 3, 8, 8)
    x = net.conv(net.x, 16)
    y = net.emit(relax.op.nn.avg_pool2d(x, (3, 3), (2, 2), (1, 1, 1, 1)))
    z = net.emit(relax.op.image.resize2d(y, (8, 8), method="nearest_neighbor"))
    after = check(net.program(net.emit(relax.op.add(x, z))))
    assert operators(after) == ["conv2d", "add", "avg_pool2d", "resize2d", "add", "to_plain"]


@pytest.mark.parametrize(("inputs", "outputs", "groups"), [(16, 32, 1), (12, 20, 1), (3, 16, 1)])
def test_weights_that_are_inputs_are_packed_at_run_time(inputs, outputs, groups):
    x = relax.Var("x", relax.TensorType((2, inputs, 6, 6), "float32"))
    w = relax.Var("w", relax.TensorType((outputs, inputs // groups, 3, 3), "float32"))
    builder = ProgramBuilder([x, w])
    y = builder.emit(relax.op.nn.conv2d(x, w, padding=(1, 1), groups=groups), ("node",), "y")
    before = builder.finish([y])
    after = choose_layout(before, ISAS["avx2"])
    assert [name for name in operators(after) if name != "to_blocked"] == [
        "pack_weight",
        "conv2d",
        "to_plain",
    ]
    values = drawn(1, 2, inputs, 6, 6), drawn(2, outputs, inputs // groups, 3, 3)
    (got,), (want,) = run_llvm(after.module, *values), run_llvm(before.module, *values)
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_depthwise_weights_that_are_inputs_are_packed_at_run_time():
    shapes = {"x": (1, 16, 8, 8), "w": (20, 16, 3, 3), "d": (20, 1, 3, 3)}
    x, w, d = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items())
    builder = ProgramBuilder([x, w, d])
    y = builder.emit(relax.op.nn.conv2d(x, w), ("node",), "y")
    z = builder.emit(relax.op.nn.conv2d(y, d, padding=(1, 1), groups=20), ("node",), "z")
    before = builder.finish([z])
    after = choose_layout(before, ISAS["avx2"])
    assert "depthwise" in operators(after)
    values = [drawn(i, *shape) for i, shape in enumerate(shapes.values())]
    (got,), (want,) = run_llvm(after.module, *values), run_llvm(before.module, *values)
    np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize(
    ("channels", "lanes"), [(64, 16), (16, 16), (24, 8), (72, 16), (3, 8), (1000, 16), (8, 8), (40, 16)]
)
def test_blocks_are_narrower_where_a_whole_vector_would_be_mostly_filling(channels, lanes):
    assert lanes_of(channels, ISAS["avx512"]) == lanes
    assert lanes_of(channels, ISAS["avx2"]) == 8


@pytest.mark.parametrize(
    ("split", "axes"),
    [((1, 16, 2, 2, 6, 6), (0, 1, 4, 2, 5, 3)), ((1, 2, 2, 16, 6, 6), (0, 3, 4, 1, 5, 2))],
)
def test_depth_to_space_is_done_on_blocks(split, axes):
    net = Network(1, 3, 6, 6)
    squares = net.emit(relax.op.permute_dims(net.emit(relax.op.reshape(net.conv(net.x, 64), split)), axes))
    image = net.emit(relax.op.reshape(squares, (1, 16, 12, 12)))
    after = check(net.program(net.conv(image, 16)))
    assert operators(after) == ["conv2d", "add", "depth_to_space", "conv2d", "add", "to_plain"]


@pytest.mark.parametrize("channels", [32, 24, 40])
def test_padding_and_rectangles_of_images_stay_blocked(channels):
    n = Network(2, 32, 12, 12)
    y = n.conv(n.x, channels)
    y = n.emit(relax.op.nn.pad(y, [0, 0, 0, 0, 1, 0, 2, 3]))
    y = n.emit(relax.op.strided_slice(y, [1, -1, 2], [0, 2, 1], [2147483647, 2147483647, -1]))
    after = check(n.program(n.relu(n.conv(y, 32))))
    assert operators(after).count("to_blocked") == operators(after).count("to_plain") == 1


def test_padding_that_fills_a_block_with_infinities_or_changes_channels_is_plain():
    for widths, number in (([0, 0, 0, 0, 1, 0, 0, 0], -np.inf), ([0, 0, 0, 1, 0, 0, 0, 0], 0.0)):
        n = Network(1, 32, 12, 12)
        y = n.emit(relax.op.nn.pad(n.conv(n.x, 20), widths, "constant", number))
        after = check(n.program(y))
        assert operators(after)[-2:] == ["to_plain", "pad"]


@pytest.mark.parametrize(("channels", "squeezed"), [(128, 32), (96, 24), (144, 6)])
def test_a_channels_number_is_read_in_the_form_that_it_has(channels, squeezed):
    """Squeeze and excitation: no view stands between a convolution of one pixel and its bias."""
    n = Network(1, 32, 14, 14)
    y = n.relu(n.conv(n.x, channels, 1))
    s = n.emit(relax.op.mean(y, [2, 3], keepdims=True))
    s = n.emit(relax.op.sigmoid(n.conv(n.relu(n.conv(s, squeezed, 1)), channels, 1)))
    after = check(n.program(n.conv(n.emit(relax.op.multiply(y, s)), 32, 1)))
    assert "reshape" not in operators(after)


@pytest.mark.parametrize(("divisor", "forms"), [(6.0, 1), (0.0, 2)])
def test_quotients_by_a_number_stay_blocked_where_that_leaves_the_last_block_finite(divisor, forms):
    """Hard swish, which exporters write as `x * relu6(x + 3) / 6`, of 120 channels."""
    n = Network(1, 32, 12, 12)
    y = n.conv(n.x, 120, 1)
    quotient = n.emit(relax.op.divide(n.relu(y), relax.const(divisor, "float32")))
    after = choose_layout(n.program(n.conv(n.emit(relax.op.multiply(y, quotient)), 32, 1)), ISAS["avx512"])
    assert operators(after).count("to_blocked") == forms
