"""Transposed convolutions against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tvm
from onnx import TensorProto, helper
from tvm import relax

from hybridc.passes.canonicalize.canonicalize import canonicalize
from hybridc.passes.program.program import Program, is_op
from tests.support.programs import drawn, program_of, run_llvm

Ints = tuple[int, ...]


def program(
    x: Ints,
    w: Ints,
    after: Callable[[relax.BlockBuilder, relax.Var], relax.Var] | None = None,
    **options: Ints | int,
) -> Program:
    """A transposed convolution of one or two axes, and what `after` emits for its result."""
    builder = relax.BlockBuilder()
    data, weight = (relax.Var(n, relax.TensorType(s, "float32")) for n, s in (("x", x), ("w", w)))
    transposed = relax.op.nn.conv1d_transpose if len(x) == 3 else relax.op.nn.conv2d_transpose
    with builder.function("main", [data, weight]):
        with builder.dataflow():
            result = builder.emit(transposed(data, weight, **options))
            result = builder.emit_output(relax.Tuple([after(builder, result) if after else result]))
        builder.emit_func_output(result)
    return program_of(builder.get(), {"w": drawn(1, *w)})


def operators(program: Program) -> list[str]:
    return [b.value.op.name.removeprefix("relax.nn.").removeprefix("relax.") for b in program.bindings]


def expected(x: np.ndarray, w: np.ndarray, **options: Ints) -> np.ndarray:
    """What ONNX Runtime computes."""
    names = {"strides": "strides", "padding": "pads", "output_padding": "output_padding"}
    names["dilation"] = "dilations"
    attributes: dict[str, Any] = {names[k]: list(v) for k, v in options.items()}
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], **attributes)
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, a.shape) for n, a in (("x", x), ("w", w))]
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "g", values, [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x, "w": w})[0]


CASES = [
    # kernel, strides, padding (begins, ends), output padding
    ((2, 2), (2, 2), (0, 0, 0, 0), (0, 0)),
    ((3, 3), (2, 2), (1, 1, 1, 1), (1, 1)),
    ((3, 3), (2, 2), (1, 1, 1, 1), (0, 0)),
    ((4, 4), (2, 2), (1, 1, 1, 1), (0, 0)),
    ((5, 5), (2, 2), (2, 2, 2, 2), (1, 1)),
    ((3, 3), (1, 1), (1, 1, 1, 1), (0, 0)),
    ((3, 2), (1, 1), (0, 1, 2, 0), (0, 0)),
    ((1, 1), (2, 2), (0, 0, 0, 0), (1, 0)),
    ((4, 3), (3, 2), (0, 2, 1, 1), (2, 0)),
    ((5, 7), (2, 4), (4, 0, 3, 5), (0, 3)),
    ((2, 3), (3, 5), (1, 0, 0, 2), (0, 1)),
    ((8, 8), (4, 4), (2, 2, 2, 2), (0, 0)),
    ((2, 2), (2, 2), (3, 1, 0, 4), (0, 1)),
]


@pytest.mark.parametrize(("kernel", "strides", "padding", "output_padding"), CASES)
def test_a_transposed_convolution_is_an_ordinary_one_and_a_permutation(
    kernel, strides, padding, output_padding
):
    options = {"strides": strides, "padding": padding, "output_padding": output_padding}
    x = drawn(2, 2, 3, 5, 6)
    before = program(x.shape, (3, 4, *kernel), **options)
    after = canonicalize(before)
    assert set(operators(after)) <= {"conv2d", "reshape", "permute_dims", "strided_slice"}
    (got,) = run_llvm(after.module, x, *after.weights.values())
    want = expected(x, before.weights["w"], **options)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize(("kernel", "strides", "padding", "output_padding"), CASES[1::2])
def test_weights_that_are_not_known_are_arranged_at_run_time(kernel, strides, padding, output_padding):
    options = {"strides": strides, "padding": padding, "output_padding": output_padding}
    x = drawn(2, 2, 3, 5, 6)
    known = program(x.shape, (3, 4, *kernel), **options)
    after = canonicalize(replace(known, weights={}))
    assert "conv2d_transpose" not in operators(after)
    (got,) = run_llvm(after.module, x, known.weights["w"])
    want = expected(x, known.weights["w"], **options)
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("is_known", [True, False])
def test_a_dilated_one_without_stride_is_a_convolution_with_the_kernel_reversed(is_known):
    x = drawn(2, 2, 3, 40)
    before = program(x.shape, (3, 4, 5), padding=(4, 6), dilation=(3,))
    after = canonicalize(before if is_known else replace(before, weights={}))
    assert "conv1d_transpose" not in operators(after)
    (got,) = run_llvm(after.module, x, *(after.weights.values() or [before.weights["w"]]))
    want = expected(x, before.weights["w"], padding=(4, 6), dilation=(3,))
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(4, 2, (1, 1)), (5, 3, (0, 2)), (2, 2, (0, 0))])
def test_a_signal_has_one_axis_of_phases(kernel, stride, padding):
    options = {"strides": (stride,), "padding": padding, "output_padding": (stride - 1,)}
    x = drawn(2, 1, 3, 9)
    before = program(x.shape, (3, 2, kernel), **options)
    after = canonicalize(before)
    (got,) = run_llvm(after.module, x, *after.weights.values())
    want = expected(x, before.weights["w"], **options)
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())


def test_the_kernel_is_divided_among_the_phases():
    after = canonicalize(program((1, 3, 8, 8), (3, 4, 4, 4), strides=(2, 2), padding=(1, 1, 1, 1)))
    (kernel,) = after.weights.values()
    assert kernel.shape == (2 * 2 * 4, 3, 2, 2)


def test_what_follows_for_each_channel_is_done_before_the_permutation():
    bias, factor = drawn(3, 4, 1, 1), drawn(4, 1, 4, 1, 1)

    def after(builder: relax.BlockBuilder, y: relax.Var) -> relax.Var:
        y = builder.emit(relax.op.add(y, relax.const(bias)))
        y = builder.emit(relax.op.clip(y, -1.0, 1.5))
        y = builder.emit(relax.op.multiply(relax.const(factor), y))
        return builder.emit(relax.op.nn.leakyrelu(y, 0.2))

    x = drawn(2, 2, 3, 5, 6)
    options = {"strides": (2, 2), "padding": (1, 1, 1, 1)}
    before = program(x.shape, (3, 4, 3, 3), after, **options)
    changed = canonicalize(before)
    order = operators(changed)
    assert order[:5] == ["conv2d", "add", "clip", "multiply", "leakyrelu"]
    (got,) = run_llvm(changed.module, x, *changed.weights.values())
    want = np.clip(expected(x, before.weights["w"], **options) + bias, -1.0, 1.5) * factor
    np.testing.assert_allclose(got, np.where(want > 0, want, 0.2 * want), atol=2e-5)


def test_batch_norm_is_done_before_the_permutation():
    parameters = [drawn(i, 4) for i in (3, 4, 5)] + [np.abs(drawn(6, 4)) + 0.5]

    def after(builder: relax.BlockBuilder, y: relax.Var) -> relax.Var:
        constants = [relax.const(p) for p in parameters]
        norm = relax.op.nn.batch_norm(y, *constants, axis=1, epsilon=1e-3, training=False)
        return builder.emit(relax.TupleGetItem(builder.emit(norm), 0))

    x = drawn(2, 1, 3, 5, 6)
    before = program(x.shape, (3, 4, 2, 2), after, strides=(2, 2))
    changed = canonicalize(before)
    assert operators(changed)[:3] == ["conv2d", "multiply", "add"]
    (got,) = run_llvm(changed.module, x, *changed.weights.values())
    gamma, beta, mean, variance = (p.reshape(1, 4, 1, 1) for p in parameters)
    want = (expected(x, before.weights["w"], strides=(2, 2)) - mean) / np.sqrt(variance + 1e-3) * gamma + beta
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_an_interleaving_that_others_read_stays_where_it_is():
    def after(builder: relax.BlockBuilder, y: relax.Var) -> relax.Var:
        return builder.emit(relax.op.add(builder.emit(relax.op.nn.relu(y)), y))

    changed = canonicalize(program((1, 3, 5, 5), (3, 4, 2, 2), after, strides=(2, 2)))
    assert operators(changed) == ["conv2d", "reshape", "permute_dims", "reshape", "relu", "add"]


def test_a_dilated_one_with_a_stride_stays():
    before = program((1, 3, 5, 5), (3, 1, 2, 2), strides=(2, 2), dilation=(2, 2))
    after = canonicalize(before)
    assert [b.value.op for b in after.bindings if is_op(b.value, "nn.conv2d_transpose")]
    tvm.ir.assert_structural_equal(after.bindings[0].value.attrs, before.bindings[0].value.attrs)


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(
    "options", [{"padding": (1, 1, 1, 1)}, {"strides": (2, 3)}, {"dilation": (2, 1)}], ids=str
)
def test_one_in_groups_is_a_convolution_in_groups(options, is_known):
    x = drawn(2, 2, 6, 5, 4)
    before = program(x.shape, (6, 4, 3, 3), groups=3, **options)
    after = canonicalize(before if is_known else replace(before, weights={}))
    assert "conv2d_transpose" not in operators(after)
    assert [int(b.value.attrs.groups) for b in after.bindings if is_op(b.value, "nn.conv2d")] == [3]
    (got,) = run_llvm(after.module, x, *(after.weights.values() or [before.weights["w"]]))
    want = np.concatenate(
        [
            expected(*parts, **options)
            for parts in zip(np.split(x, 3, 1), np.split(before.weights["w"], 3), strict=True)
        ],
        axis=1,
    )
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())
