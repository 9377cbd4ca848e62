"""Random operators and graphs compute the same tiled as whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import assume, given, reject
from hypothesis import strategies as st
from tvm import relax

from hybridc.frontend import read_model
from hybridc.passes.canonicalize.canonicalize import canonicalize
from hybridc.passes.program.program import Program, tensor_shape
from hybridc.passes.tiling.slice_rules import Slice, operation_of, slice_of
from hybridc.passes.tiling.tile import tile
from hybridc.passes.tiling.working_set import largest_working_set_bytes
from tests.support.light_models import random_feeds
from tests.support.programs import drawn, run_llvm
from tests.support.random_examples import random_examples
from tests.support.random_graphs import graphs
from tests.support.tiled import Network

TOLERANCE = 1e-4
Draw = Callable[[st.SearchStrategy[Any]], Any]


def pick(draw: Draw, low: int, high: int) -> int:
    return int(draw(st.integers(low, high)))


def convolution(draw: Draw, net: Network) -> relax.Expr:
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    taps = pick(draw, 1, 4), pick(draw, 1, 3)
    pad, strides = [pick(draw, 0, 2) for _ in range(4)], (pick(draw, 1, 3), pick(draw, 1, 2))
    weight = net.weight(4, 4 // groups, *taps)
    dilation = pick(draw, 1, 2), 1
    return relax.op.nn.conv2d(net.x, weight, strides, pad, dilation, groups=groups)


def pool(draw: Draw, net: Network) -> relax.Expr:
    make = draw(st.sampled_from([relax.op.nn.max_pool2d, relax.op.nn.avg_pool2d]))
    window = pick(draw, 2, 3), pick(draw, 2, 3)
    pad, strides = [pick(draw, 0, 1) for _ in range(4)], (pick(draw, 1, 3), pick(draw, 1, 2))
    modes = {"ceil_mode": draw(st.booleans()), "count_include_pad": draw(st.booleans())}
    return make(net.x, window, strides, pad, **modes)


def resize(draw: Draw, net: Network) -> relax.Expr:
    _, _, h, w = tensor_shape(net.x)
    method = draw(st.sampled_from(["nearest_neighbor", "linear", "cubic"]))
    rounding = draw(st.sampled_from(["round", "floor"])) if method == "nearest_neighbor" else "round"
    mode = draw(st.sampled_from(["half_pixel", "asymmetric"]))
    size = h * pick(draw, 1, 3), w * 2
    how = {"method": method, "coordinate_transformation_mode": mode, "rounding_method": rounding}
    return relax.op.image.resize2d(net.x, size, **how)


def movement(draw: Draw, net: Network) -> relax.Expr:
    n, c, h, w = tensor_shape(net.x)
    begin = pick(draw, 0, 2)
    return draw(
        st.sampled_from(
            [
                relax.op.reshape(net.x, (n * c, h, w)),
                relax.op.reshape(net.x, (n, c, h * w)),
                relax.op.reshape(net.x, (n, 2, c // 2, h, w)),
                relax.op.permute_dims(net.x, [2, 0, 3, 1]),
                relax.op.strided_slice(net.x, [1, 2], [1, begin], [3, h], [1, pick(draw, 1, 2)]),
                relax.op.nn.pad(net.x, [0, 0, 0, 0, begin, 1, 1, 0]),
                relax.op.concat([net.x, net.x], axis=1),
            ]
        )
    )


def arithmetic(draw: Draw, net: Network) -> relax.Expr:
    _, c, h, w = tensor_shape(net.x)
    return draw(
        st.sampled_from(
            [
                relax.op.add(net.x, net.weight(c, 1, 1)),
                relax.op.multiply(net.x, net.weight(h, w)),
                relax.op.matmul(net.x, net.weight(w, 5)),
                relax.op.matmul(net.weight(c, 3, h), net.x),
                relax.op.nn.softmax(net.x, axis=-1),
                relax.op.mean(net.x, [1, 3], keepdims=draw(st.booleans())),
            ]
        )
    )


def any_slice(draw: Draw, net: Network) -> relax.Expr:
    """Of two axes, forwards or backwards, from and to any index, which may be outside."""
    _, _, h, w = tensor_shape(net.x)
    strides = [draw(st.sampled_from([-3, -2, -1, 1, 2, 3])) for _ in range(2)]
    limits = [(pick(draw, -e - 1, e + 1), pick(draw, -e - 1, e + 1)) for e in (h, w)]
    taken = [slice(*to, by).indices(e) for to, by, e in zip(limits, strides, (h, w), strict=True)]
    assume(all(len(range(*each)) > 0 for each in taken))
    return relax.op.strided_slice(net.x, [2, 3], *zip(*limits, strict=True), strides)


def part_of(value: np.ndarray, sliced: Slice | None) -> np.ndarray:
    """With zeros where the slice exceeds the value."""
    if sliced is None:
        return value
    extent = value.shape[sliced.axis]
    widths = [(0, 0)] * value.ndim
    widths[sliced.axis] = max(-sliced.begin, 0), max(sliced.end - extent, 0)
    inner = np.take(value, range(max(sliced.begin, 0), min(sliced.end, extent)), sliced.axis)
    return np.pad(inner, widths)


@random_examples(60)
@given(st.data())
def test_a_share_is_that_part_of_the_result(data: st.DataObject) -> None:
    net = Network(pick(data.draw, 1, 2), 4, pick(data.draw, 5, 9), pick(data.draw, 5, 6))
    expr = data.draw(st.sampled_from([convolution, pool, resize, movement, arithmetic]))(data.draw, net)
    check_a_share(data, net, expr)


@random_examples(40)
@given(st.data())
def test_a_share_of_a_slice_is_that_part_of_it(data: st.DataObject) -> None:
    net = Network(1, 2, pick(data.draw, 5, 9), pick(data.draw, 5, 6))
    check_a_share(data, net, any_slice(data.draw, net))


@pytest.mark.parametrize("begin", range(9))
def test_ties_of_a_resize_are_those_of_the_whole_image(begin: int) -> None:
    net = Network(1, 4, 5, 5)
    how = {"coordinate_transformation_mode": "asymmetric", "rounding_method": "round"}
    expr = relax.op.image.resize2d(net.x, (5, 10), method="nearest_neighbor", **how)
    assert check_part(net, expr, 3, begin, min(begin + 2, 10))


def check_a_share(data: st.DataObject, net: Network, expr: relax.Expr) -> None:
    """Some indices of the result are what the rule makes of its slices of the operands."""
    shape = tensor_shape(relax.BlockBuilder().normalize(expr))
    axis = pick(data.draw, 0, len(shape) - 1)
    begin = pick(data.draw, 0, shape[axis] - 1)
    if not check_part(net, expr, axis, begin, pick(data.draw, begin + 1, shape[axis])):
        reject()


def check_part(net: Network, expr: relax.Expr, axis: int, begin: int, end: int) -> bool:
    """Whether there is a rule for indices of the result; what it makes must be right."""
    whole = net.emit(expr)
    operation = operation_of(relax.BlockBuilder().normalize(expr))
    assert operation is not None
    rule = slice_of(operation, axis, begin, end)
    if rule is None:
        return False
    x = drawn(99, *tensor_shape(net.x))
    operands, parts = [], []
    for operand, sliced in zip(operation.operands, rule.slices, strict=True):
        if sliced is not None:
            known = x if operand.same_as(net.x) else net.builder.weights[operand.name]
            parts.append(part_of(known, sliced))
            operand = relax.Var(f"part{len(parts)}", relax.TensorType(parts[-1].shape, "float32"))
            net.builder.inputs.append(operand)
        operands.append(operand)
    program = net.program(whole, net.emit(rule.make(operands, net.emit)))
    expected, got = run_llvm(program.module, x, *parts, *program.weights.values())
    np.testing.assert_allclose(got, np.take(expected, range(begin, end), axis), rtol=1e-4, atol=1e-5)
    return True


@random_examples(12)
@given(graphs(), st.sampled_from([2, 3, 5]))
def test_random_graphs_in_bands_agree_with_onnxruntime(model: onnx.ModelProto, fraction: int) -> None:
    feeds = random_feeds(model)
    imported = read_model(model)
    before = canonicalize(Program(imported.module, imported.weights, imported.origins))
    after = tile(before, largest_working_set_bytes(before) // fraction)
    assume(after is not before)
    inputs = [feeds[port.name] for port in imported.inputs]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    results = run_llvm(after.module, *inputs, *after.weights.values())
    for got, wanted in zip(results, session.run(None, feeds), strict=True):
        scale = max(np.abs(wanted).max(initial=0.0), 1e-3)
        assert np.abs(got - wanted).max(initial=0.0) <= TOLERANCE * scale
