"""Imported functions compute what ONNX Runtime computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.helper import make_node
from tvm import relax

from hybridc.frontend.reader import read_model


def test_convolution_with_bias_and_batch_normalization(make_model, assert_matches, rng):
    weights = {
        "w": rng.standard_normal((4, 3, 3, 3), dtype=np.float32),
        "b": rng.standard_normal(4, dtype=np.float32),
        **{name: rng.random(4, dtype=np.float32) + 0.5 for name in ("scale", "shift", "mean", "variance")},
    }
    nodes = [
        make_node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1], strides=[2, 2]),
        make_node("BatchNormalization", ["c", "scale", "shift", "mean", "variance"], ["n"], momentum=0.8),
        make_node("Relu", ["n"], ["y"]),
    ]
    model = make_model(nodes, {"x": [1, 3, 8, 8]}, ["y"], weights)
    assert_matches(model, {"x": rng.standard_normal((1, 3, 8, 8), dtype=np.float32)}, rtol=1e-4)


def test_gemm_softmax_and_layer_normalization(make_model, assert_matches, rng):
    weights = {
        "w": rng.standard_normal((5, 6), dtype=np.float32),
        "b": rng.standard_normal(5, dtype=np.float32),
        "scale": rng.random(5, dtype=np.float32),
    }
    nodes = [
        make_node("Gemm", ["x", "w", "b"], ["g"], transB=1, alpha=0.5, beta=2.0),
        make_node("LayerNormalization", ["g", "scale"], ["l"]),
        make_node("Softmax", ["l"], ["y"]),
    ]
    model = make_model(nodes, {"x": [3, 6]}, ["y"], weights)
    assert_matches(model, {"x": rng.standard_normal((3, 6), dtype=np.float32)}, rtol=1e-4)


@pytest.mark.parametrize("opset", [18, 19])
def test_circular_padding_is_taken_at_the_opset_before_it_as_torch_writes_it(
    make_model, assert_matches, rng, opset
):
    pads = {"pads": np.array([1, 2, 0, 3]), "none": np.array(0, np.float32), "axes": np.array([1, 2])}
    nodes = [make_node("Pad", ["x", "pads", "none", "axes"], ["y"], mode="wrap")]
    model = make_model(nodes, {"x": [2, 4, 5]}, ["y"], pads, opset=opset)
    assert_matches(model, {"x": rng.standard_normal((2, 4, 5), dtype=np.float32)})


def test_gather_counts_negative_indices_from_the_end(make_model, assert_matches, rng):
    table = rng.standard_normal((7, 3), dtype=np.float32)
    nodes = [
        make_node("Cast", ["x"], ["i"], to=onnx.TensorProto.INT64),
        make_node("Gather", ["table", "i"], ["a"]),
        make_node("Gather", ["a", "last"], ["y"], axis=0),
    ]
    model = make_model(nodes, {"x": [4]}, ["y"], {"table": table, "last": np.array([-1, 0])})
    assert_matches(model, {"x": np.array([0, -1, -7, 6], np.float32)})


@pytest.mark.parametrize("index", [np.array(-2), np.array([1]), np.array([[-4]], np.int32), np.array(3)])
@pytest.mark.parametrize("shape", [[4], [4, 3], [2, 4, 3]])
def test_gather_by_one_index_of_the_model_is_a_slice(make_model, assert_matches, rng, index, shape):
    """It needs no check, and no kernel that reads the index."""
    axis = shape.index(4)
    model = make_model([make_node("Gather", ["x", "i"], ["y"], axis=axis)], {"x": shape}, ["y"], {"i": index})
    imported = assert_matches(model, {"x": rng.standard_normal(shape, dtype=np.float32)})
    assert "take(" not in imported.module.script()


def test_clip_takes_constant_or_missing_bounds(make_model, assert_matches, rng):
    weights = {"low": np.array(-0.5, np.float32), "high": np.array(0.25, np.float32)}
    nodes = [make_node("Clip", ["x", "low", "high"], ["y"]), make_node("Clip", ["x", "", "high"], ["z"])]
    imported = assert_matches(
        make_model(nodes, {"x": [9]}, ["y", "z"], weights), {"x": np.linspace(-1, 1, 9, dtype=np.float32)}
    )
    assert not imported.weights


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_clip_takes_bounds_that_are_fed(make_model, assert_matches, dtype):
    nodes = [make_node("Clip", ["x", "low", "high"], ["y"]), make_node("Clip", ["x", "", "high"], ["z"])]
    feeds = {"x": np.arange(-5, 7, dtype=dtype).reshape(3, 4), "low": dtype(-2), "high": dtype(4)}
    model = make_model(nodes, {name: list(np.shape(feed)) for name, feed in feeds.items()}, ["y", "z"])
    for port in (*model.graph.input, *model.graph.output):
        port.type.tensor_type.elem_type = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    assert_matches(model, {name: np.asarray(feed) for name, feed in feeds.items()})


@pytest.mark.parametrize("auto_pad", ["NOTSET", "SAME_UPPER", "SAME_LOWER"])
def test_transposed_convolution_keeps_its_output_shape(make_model, assert_matches, rng, auto_pad):
    weights = {"w": rng.standard_normal((2, 3, 3, 3), dtype=np.float32)}
    node = make_node(
        "ConvTranspose", ["x", "w"], ["y"], strides=[2, 2], output_shape=[10, 9], auto_pad=auto_pad
    )
    model = make_model([node], {"x": [1, 2, 5, 5]}, ["y"], weights)
    assert_matches(model, {"x": rng.standard_normal((1, 2, 5, 5), dtype=np.float32)}, rtol=1e-4)


def test_expand_keeps_dimensions_where_the_target_is_smaller(make_model, assert_matches, rng):
    nodes = [make_node("Expand", ["x", "shape"], ["y"])]
    model = make_model(nodes, {"x": [3, 1, 4]}, ["y"], {"shape": np.array([2, 1, 5, 1])})
    assert_matches(model, {"x": rng.standard_normal((3, 1, 4), dtype=np.float32)})


def test_attention_with_shapes_computed_at_run_time(make_model, assert_matches, rng):
    """The Shape-Gather-Concat-Reshape chains that exporters write, erf and depth-to-space."""
    weights = {
        "zero": np.array(0),
        "four": np.array([4]),
        "minus": np.array([-1]),
        "axes": np.array([0]),
        "half": np.array([0.5], np.float32),
    }
    nodes = [
        make_node("Shape", ["x"], ["s"]),
        make_node("Gather", ["s", "zero"], ["n"]),
        make_node("Unsqueeze", ["n", "axes"], ["n1"]),
        make_node("Concat", ["n1", "four", "minus"], ["target"], axis=0),
        make_node("Reshape", ["x", "target"], ["r"]),
        make_node("Transpose", ["r"], ["t"], perm=[0, 2, 1]),
        make_node("MatMul", ["r", "t"], ["m"]),
        make_node("Mul", ["m", "half"], ["h"]),
        make_node("Erf", ["h"], ["y"]),
        make_node("DepthToSpace", ["x"], ["z"], blocksize=2),
    ]
    model = make_model(nodes, {"x": ["N", 4, 2, 3]}, ["y", "z"], weights)
    imported = assert_matches(
        model, {"x": rng.standard_normal((2, 4, 2, 3), dtype=np.float32)}, dims={"N": 2}
    )
    assert not imported.weights, "shapes and scalars are constants"


@pytest.mark.parametrize(("mode", "opset"), [("nearest", 9), ("linear", 9), ("nearest", 10), ("linear", 13)])
def test_resize_by_whole_factors(make_model, assert_matches, rng, mode, opset):
    scales = {"scales": np.array([1, 1, 2, 3], np.float32)}
    inputs = ["x", "scales"] if opset < 11 else ["x", "", "scales"]
    node = make_node("Upsample" if opset == 9 else "Resize", inputs, ["y"], mode=mode)
    model = make_model([node], {"x": [1, 2, 3, 4]}, ["y"], scales, opset=opset)
    assert_matches(model, {"x": rng.standard_normal((1, 2, 3, 4), dtype=np.float32)})


def test_indices_are_wrapped_by_extents_known_at_compile_time(make_model, assert_matches, rng):
    nodes = [
        make_node("Cast", ["i"], ["indices"], to=onnx.TensorProto.INT64),
        make_node("GatherElements", ["x", "indices"], ["y"], axis=1),
    ]
    model = make_model(nodes, {"x": [2, 5], "i": [2, 3]}, ["y"])
    feeds = {
        "x": rng.standard_normal((2, 5), dtype=np.float32),
        "i": np.array([[0, -1, 4], [-5, 2, 1]], np.float32),
    }
    imported = assert_matches(model, feeds)
    assert not imported.weights


def test_operators_of_many_operands_are_chains(make_model, assert_matches, rng):
    nodes = [
        make_node("Sum", ["a", "b", "c"], ["s"]),
        make_node("Max", ["s", "a", "b"], ["m"]),
        make_node("Min", ["m", "c"], ["y"]),
        make_node("Sum", ["a"], ["z"]),
    ]
    model = make_model(nodes, {"a": [2, 3], "b": [3], "c": [2, 1]}, ["y", "z"])
    feeds = {
        n: rng.standard_normal(s, dtype=np.float32) for n, s in {"a": (2, 3), "b": 3, "c": (2, 1)}.items()
    }
    imported = assert_matches(model, feeds)
    operators = [binding.value.op.name for binding in imported.module["main"].body.blocks[0].bindings]
    assert operators == ["relax.add", "relax.add", "relax.maximum", "relax.maximum", "relax.minimum"]


def test_mean_of_operands_that_broadcast(make_model, assert_matches, rng):
    feeds = {"a": rng.standard_normal((2, 3)).astype(np.float32), "b": np.array([[1], [5]], np.float32)}
    feeds["c"] = np.array([2, -4, 8], np.float32)
    shapes = {name: list(value.shape) for name, value in feeds.items()}
    assert_matches(make_model([make_node("Mean", ["a", "b", "c"], ["y"])], shapes, ["y"]), feeds)


@pytest.mark.parametrize("operator", ["Concat", "Sum", "Mean"])
def test_two_thousand_operands_do_not_exhaust_the_stack(make_model, operator):
    attributes: dict[str, Any] = {"axis": 0} if operator == "Concat" else {}
    node = make_node(operator, ["x", "z"] * 1000, ["y"], **attributes)
    imported = read_model(make_model([node], {"x": [3], "z": [3]}, ["y"]))
    bindings = imported.module["main"].body.blocks[0].bindings
    widths = [len(b.value.args[0].fields) for b in bindings if isinstance(b.value.args[0], relax.Tuple)]
    assert max(widths, default=2) <= 128
    assert imported.outputs[0].shape == ((6000,) if operator == "Concat" else (3,))
    assert set(imported.origins.values()) == {imported.origins[bindings[0].var.name]}


def test_power_of_mixed_types(make_model, assert_matches):
    nodes = [
        make_node("Cast", ["x"], ["i"], to=onnx.TensorProto.INT32),
        make_node("Pow", ["i", "x"], ["p"]),
        make_node("Cast", ["p"], ["y"], to=onnx.TensorProto.FLOAT),
    ]
    assert_matches(make_model(nodes, {"x": [4]}, ["y"]), {"x": np.array([0, 1, 2, 5], np.float32)})


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("exponent", [2, 3, -1, 0.5, -0.5])
def test_simple_powers_are_products_quotients_and_roots(make_model, assert_matches, exponent, shape):
    n = np.full(shape, exponent, np.float32)
    model = make_model([make_node("Pow", ["x", "n"], ["y"])], {"x": [2, 2]}, ["y"], {"n": n})
    x = np.array([[-2, -0.5], [0, 3]], np.float32)
    assert_matches(model, {"x": x if exponent in (2, 3) else np.abs(x)})
    assert "power" not in read_model(model).module.script()


def test_an_exponent_of_higher_rank_gives_the_result_its_rank(make_model, assert_matches):
    model = make_model(
        [make_node("Pow", ["x", "n"], ["y"])], {"x": [3]}, ["y"], {"n": np.full((1, 1), 2, np.float32)}
    )
    assert_matches(model, {"x": np.array([-2, 0, 3], np.float32)})


def test_split_and_elementwise_chain(make_model, assert_matches, rng):
    nodes = [
        make_node("Split", ["x"], ["a", "b"], axis=1),
        make_node("Sigmoid", ["a"], ["s"]),
        make_node("Mul", ["s", "b"], ["m"]),
        make_node("Pow", ["m", "two"], ["p"]),
        make_node("ReduceMean", ["p"], ["y"], axes=[1], keepdims=0),
    ]
    model = make_model(nodes, {"x": [2, 6]}, ["y"], {"two": np.array(2, np.float32)})
    assert_matches(model, {"x": rng.standard_normal((2, 6), dtype=np.float32)})


def test_functions_are_inlined(make_model, assert_matches, rng):
    body = [make_node("Mul", ["a", "a"], ["t"], name="square"), make_node("Add", ["t", "a"], ["r"])]
    function = helper.make_function("local", "F", ["a"], ["r"], body, [helper.make_opsetid("", 17)])
    nodes = [
        make_node("F", ["x"], ["h"], domain="local", name="first"),
        make_node("F", ["h"], ["y"], domain="local", name="second"),
    ]
    model = make_model(nodes, {"x": [4]}, ["y"], functions=[function])
    model.graph.output[0].type.tensor_type.shape.dim.add().dim_value = 4
    imported = assert_matches(model, {"x": rng.standard_normal(4, dtype=np.float32)})
    assert len(imported.origins) == 4


def test_outputs_may_repeat_and_may_be_inputs_or_weights(make_model, assert_matches, rng):
    nodes = [make_node("Relu", ["x"], ["r"]), make_node("Identity", ["r"], ["same"])]
    weights = {"w": rng.standard_normal(3, dtype=np.float32), "scalar": np.array(2.5, np.float32)}
    model = make_model(nodes, {"x": [4]}, ["r", "x", "w", "same", "scalar"], weights)
    for output, shape in zip(model.graph.output, [[4], [4], [3], [4], []], strict=True):
        output.type.CopyFrom(helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, shape))
    imported = assert_matches(model, {"x": rng.standard_normal(4, dtype=np.float32)})
    variables = [value.variable for value in imported.outputs]
    assert variables[0] == variables[3]
    assert variables[1] == imported.inputs[0].variable


def test_a_model_without_nodes(make_model, assert_matches, rng):
    model = make_model([], {"x": [4]}, ["x"])
    model.graph.output[0].CopyFrom(model.graph.input[0])
    imported = assert_matches(model, {"x": rng.standard_normal(4, dtype=np.float32)})
    assert not imported.origins
