"""Each kind of bad model is refused with its own code, the place and a remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.helper import make_node
from tvm import relax

from hybridc.errors import ModelError, ModelWarning
from hybridc.frontend import codes, read_model

MakeModel = Callable[..., onnx.ModelProto]


def refusal(source: str | Path | bytes | onnx.ModelProto, **options: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        read_model(source, **options)
    error = caught.value
    assert error.where and error.remedy, "every refusal says where and what to do"
    return error


@pytest.fixture
def relu(make_model: MakeModel) -> onnx.ModelProto:
    return make_model([make_node("Relu", ["x"], ["y"], name="act")], {"x": [2, 3]}, ["y"])


@pytest.fixture
def weighted(make_model: MakeModel) -> onnx.ModelProto:
    weights = {"w": np.arange(3, dtype=np.float32)}
    return make_model([make_node("Add", ["x", "w"], ["y"])], {"x": [2, 3]}, ["y"], weights)


@pytest.mark.parametrize("data", [b"", b"\x00", b"not a model", b"\xff" * 64])
def test_bytes_that_are_no_model(data):
    assert refusal(data).code == codes.NOT_ONNX


def test_truncated_model(weighted, tmp_path):
    path = tmp_path / "cut.onnx"
    path.write_bytes(weighted.SerializeToString()[:-20])
    error = refusal(path)
    assert error.code == codes.NOT_ONNX
    assert "cut.onnx" in error.where


def test_missing_file_and_folder(tmp_path):
    assert refusal(tmp_path / "absent.onnx").code == codes.UNREADABLE
    assert refusal(tmp_path).code == codes.UNREADABLE


def test_sparse_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "huge.onnx"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert refusal(path).code == codes.UNREADABLE


@pytest.mark.parametrize("dims", [[-3], [1 << 62, 1 << 62], [1 << 33, 1 << 33], [4], [2]])
def test_tensor_whose_shape_and_bytes_contradict_each_other(weighted, dims):
    tensor = weighted.graph.initializer[0]
    del tensor.dims[:]
    tensor.dims.extend(dims)
    error = refusal(weighted)
    assert error.code == codes.MALFORMED_TENSOR
    assert "'w'" in error.where


def test_tensor_with_values_in_the_wrong_field(weighted):
    tensor = weighted.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.int64_data.extend([1, 2, 3])
    assert refusal(weighted).code == codes.MALFORMED_TENSOR


@pytest.mark.parametrize("kind", [TensorProto.STRING, TensorProto.COMPLEX64, TensorProto.UNDEFINED, 4711])
def test_tensor_of_a_type_without_support(weighted, kind):
    weighted.graph.initializer[0].data_type = kind
    assert refusal(weighted).code == codes.UNSUPPORTED_TYPE


@pytest.mark.parametrize("kind", [TensorProto.STRING, TensorProto.COMPLEX64])
def test_input_of_a_type_without_support(relu, kind):
    relu.graph.input[0].type.tensor_type.elem_type = kind
    assert refusal(relu).code == codes.UNSUPPORTED_TYPE


def test_value_between_nodes_of_a_type_without_support(relu):
    name = relu.graph.node[0].input[0]
    small = helper.make_node("Cast", [name], ["small"], to=TensorProto.INT4)
    padded = helper.make_node("Pad", ["small", "pads"], ["padded"])
    large = helper.make_node("Cast", ["padded"], ["large"], to=TensorProto.FLOAT)
    relu.graph.node[0].input[0] = "large"
    relu.graph.node.extend([small, padded, large])
    pads = np.zeros(2 * len(relu.graph.input[0].type.tensor_type.shape.dim), np.int64)
    relu.graph.initializer.append(numpy_helper.from_array(pads, "pads"))
    relu.opset_import[0].version = 24
    error = refusal(relu)
    assert error.code == codes.UNSUPPORTED_TYPE
    assert "Pad" in str(error)


def test_sequence_input(relu):
    relu.graph.input[0].type.CopyFrom(
        helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [2]))
    )
    assert refusal(relu).code == codes.UNSUPPORTED_TYPE


def test_operator_of_an_unknown_domain_even_if_its_name_is_known(relu):
    relu.graph.node[0].domain = "com.microsoft"
    relu.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    error = refusal(relu)
    assert error.code == codes.UNKNOWN_DOMAIN
    assert "com.microsoft::Relu" in error.what
    assert "'act'" in error.where


@pytest.mark.parametrize("opset", [0, 29, 99])
def test_opset_out_of_range(relu, opset):
    relu.opset_import[0].version = opset
    error = refusal(relu)
    assert error.code == codes.UNSUPPORTED_OPSET
    assert str(opset) in error.what


def test_value_defined_twice(relu):
    relu.graph.node.append(make_node("Abs", ["x"], ["y"]))
    error = refusal(relu)
    assert error.code == codes.BAD_DEFINITION
    assert "'y'" in error.what


def test_undefined_value_and_output(relu):
    relu.graph.node[0].input[0] = "ghost"
    assert refusal(relu).code == codes.BAD_DEFINITION
    relu.graph.node[0].input[0] = "x"
    relu.graph.output[0].name = "ghost"
    assert refusal(relu).code == codes.BAD_DEFINITION


def test_cycle_names_a_node_of_it(make_model):
    nodes = [make_node("Add", ["x", "b"], ["a"], name="one"), make_node("Relu", ["a"], ["b"], name="two")]
    model = make_model([], {"x": [2]}, ["b"])
    model.graph.node.extend(nodes)
    error = refusal(model)
    assert error.code == codes.CYCLE
    assert "'one'" in error.where


def test_recursive_functions(make_model):
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    one = helper.make_function(
        "local", "F", ["a"], ["r"], [make_node("G", ["a"], ["r"], domain="local")], imports
    )
    two = helper.make_function(
        "local", "G", ["a"], ["r"], [make_node("F", ["a"], ["r"], domain="local")], imports
    )
    model = make_model(
        [make_node("F", ["x"], ["y"], domain="local")], {"x": [2]}, ["y"], functions=[one, two]
    )
    assert refusal(model).code == codes.CYCLE


def test_functions_that_inline_to_exponentially_many_nodes(make_model):
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    functions = [helper.make_function("local", "F0", ["a"], ["r"], [make_node("Abs", ["a"], ["r"])], imports)]
    for level in range(1, 40):
        body = [make_node(f"F{level - 1}", [a], [b], domain="local") for a, b in (("a", "t"), ("t", "r"))]
        functions.append(helper.make_function("local", f"F{level}", ["a"], ["r"], body, imports))
    model = make_model(
        [make_node("F39", ["x"], ["y"], domain="local")], {"x": [2]}, ["y"], functions=functions
    )
    assert refusal(model).code == codes.TOO_LARGE


def test_what_the_onnx_checker_refuses(relu):
    relu.graph.node[0].attribute.append(helper.make_attribute("alpha", 1.0))
    assert refusal(relu).code == codes.CHECKER


def test_type_that_an_operator_takes_from_a_later_opset_on(make_model):
    model = make_model([make_node("Relu", ["x"], ["a"])], {"x": [1, 2, 4, 4], "w": [3, 2, 1, 1]}, ["y"])
    for value in model.graph.input:
        value.type.tensor_type.elem_type = TensorProto.BFLOAT16
    model.graph.node.append(make_node("Conv", ["a", "w"], ["y"]))
    model.graph.output[0].type.CopyFrom(helper.make_tensor_type_proto(TensorProto.BFLOAT16, [1, 3, 4, 4]))
    error = refusal(model)
    assert error.code == codes.CHECKER
    newer = "with opset 22 or newer, where Conv takes tensor(bfloat16)"
    assert error.remedy == f"export the network {newer}, or in float32"
    model.opset_import[0].version = 22
    read_model(model)


def test_shapes_that_do_not_fit_together(make_model):
    model = make_model([], {"x": [2, 3], "z": [4, 5]}, ["y"])
    model.graph.node.append(make_node("MatMul", ["x", "z"], ["y"]))
    assert refusal(model).code == codes.CHECKER


@pytest.mark.parametrize("shape", [["N", 3], [-1, 3], [0, 3], [None, 3]])
def test_unknown_dimension_names_the_input_and_the_remedy(make_model, shape):
    model = make_model([make_node("Relu", ["in/x"], ["y"])], {"in/x": [1, 3]}, ["y"])
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("in/x", TensorProto.FLOAT, shape))
    error = refusal(model)
    assert error.code == codes.UNKNOWN_DIMENSION
    assert "'in/x'" in error.what
    assert "--shape in/x=1x3" in error.remedy
    assert ("--dim N=1" in error.remedy) == (shape[0] == "N")
    assert read_model(model, shapes={"in/x": (5, 3)}).inputs[0].shape == (5, 3)


@pytest.mark.parametrize(
    ("shape", "remedy"),
    [
        (["?", 3, "h", "w"], "--shape in/x=1x3x224x224 or --dim '?=1' --dim h=224 --dim w=224"),
        (["n", "h", "w", 3], "--shape in/x=1x224x224x3 or --dim n=1 --dim h=224 --dim w=224"),
        ([1, 1, 64, "width"], "--shape in/x=1x1x64x224 or --dim width=224"),
        (["batch", "words"], "--shape in/x=1x128 or --dim batch=1 --dim words=128"),
        ([2, "batch", 128], "--shape in/x=2x1x128 or --dim batch=1"),
    ],
)
def test_sizes_that_a_remedy_shows_are_usual_ones(make_model, shape, remedy):
    model = make_model([make_node("Relu", ["in/x"], ["y"])], {"in/x": [1, 3]}, ["y"])
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("in/x", TensorProto.FLOAT, shape))
    error = refusal(model)
    assert error.what == f"input 'in/x' has unknown dimensions: {' x '.join(map(str, shape))}"
    assert error.remedy == f"fix them, for example {remedy}"


def test_an_input_that_counts_trips_is_to_be_a_constant(make_model):
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [make_node("Identity", ["go"], ["on"]), make_node("Relu", ["s"], ["t"])],
        "body",
        [
            info("i", TensorProto.INT64, []),
            info("go", TensorProto.BOOL, []),
            info("s", TensorProto.FLOAT, [3]),
        ],
        [info("on", TensorProto.BOOL, []), info("t", TensorProto.FLOAT, [3])],
    )
    nodes = [make_node("Cast", ["rate"], ["trips"], to=TensorProto.INT64)]
    nodes.append(make_node("Loop", ["trips", "", "x"], ["y"], body=body))
    error = refusal(make_model(nodes, {"x": [3], "rate": []}, ["y"]))
    assert error.code == codes.WRONG_RESULT
    assert error.remedy == "make what decides it a constant: --value rate=NUMBER"


def test_sizes_of_parts_are_to_be_constant(make_model):
    parts = make_node("Split", ["x", "sizes"], ["y", "z"])
    model = make_model([parts], {"x": [3], "sizes": [2]}, ["y", "z"])
    model.graph.input[1].type.tensor_type.elem_type = TensorProto.INT64
    error = refusal(model)
    assert error.code == codes.IMPORT_FAILED
    assert error.remedy == "make what decides it a constant: --value sizes=NUMBER"


@pytest.mark.parametrize("operator", ["ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceSum"])
def test_axes_are_to_be_constant(make_model, operator):
    node = make_node(operator, ["x", "axes"], ["y"])
    model = make_model([node], {"x": [3, 2], "axes": [1]}, ["y"], opset=18)
    model.graph.input[1].type.tensor_type.elem_type = TensorProto.INT64
    error = refusal(model)
    assert error.code == codes.IMPORT_FAILED
    assert error.remedy == "make what decides it a constant: --value axes=NUMBER"


def test_unknown_rank_needs_a_shape(make_model):
    model = make_model([make_node("Relu", ["x"], ["y"])], {"x": [1]}, ["y"])
    model.graph.input[0].type.tensor_type.ClearField("shape")
    assert refusal(model).code == codes.UNKNOWN_DIMENSION


def test_dimensions_that_are_left_out_are_the_models_own(make_model):
    model = make_model([make_node("Relu", ["x"], ["y"])], {"x": ["N", 3, "M", 5]}, ["y"])
    imported = read_model(model, shapes={"x": (2, None, None, None)}, dims={"M": 4})
    assert imported.inputs[0].shape == (2, 3, 4, 5)
    error = refusal(model, shapes={"x": (2, None, None, None)})
    assert error.code == codes.UNKNOWN_DIMENSION and "M" in error.what


def test_an_input_without_a_shape_may_be_a_scalar(make_model):
    model = make_model([make_node("Relu", ["x"], ["y"])], {"x": None}, ["y"])
    assert read_model(model, shapes={"x": ()}).inputs[0].shape == ()


def test_a_named_dimension_is_fixed_for_all_inputs(make_model):
    model = make_model([make_node("Add", ["a", "b"], ["y"])], {"a": ["N", 3], "b": ["N", 3]}, ["y"])
    assert read_model(model, dims={"N": 4}).outputs[0].shape == (4, 3)
    assert read_model(model, shapes={"a": (7, 3)}).inputs[1].shape == (7, 3)


@pytest.mark.parametrize(
    "options",
    [
        {"shapes": {"x": (1, 2, 3)}},
        {"shapes": {"x": (2, 4)}},
        {"shapes": {"other": (2, 3)}},
        {"shapes": {"x": (-1, 3)}},
        {"dims": {"M": 2}},
        {"dims": {"N": -2}},
        {"dims": {"N": 2}, "shapes": {"x": (3, 3)}},
    ],
)
def test_given_shape_that_contradicts_the_model(make_model, options):
    model = make_model([make_node("Relu", ["x"], ["y"])], {"x": ["N", 3]}, ["y"])
    assert refusal(model, **options).code == codes.CONTRADICTED_SHAPE


def test_dimension_of_two_sizes_is_warned_of_where_shapes_say_so(make_model):
    nodes = [make_node("Relu", ["a"], ["y"]), make_node("Relu", ["b"], ["z"])]
    model = make_model(nodes, {"a": ["N", 3], "b": [4, "N"]}, ["y", "z"])
    with pytest.warns(ModelWarning, match="'N' is 2 and 5"):
        shapes = [value.shape for value in read_model(model, shapes={"a": (2, 3), "b": (4, 5)}).inputs]
    assert shapes == [(2, 3), (4, 5)]
    assert refusal(model, dims={"N": 2}, shapes={"b": (4, 5)}).code == codes.CONTRADICTED_SHAPE


NGRAMS: dict[str, Any] = {
    "mode": "TF",
    "min_gram_length": 1,
    "max_gram_length": 1,
    "max_skip_count": 0,
    "ngram_counts": [0],
    "ngram_indexes": [0, 1],
    "pool_int64s": [2, 3],
}
"""Attributes of TfIdfVectorizer, which hybridc has not."""


def test_missing_operators_are_all_listed_with_their_nodes(make_model):
    nodes = [
        make_node("TfIdfVectorizer", ["x"], ["h"], name="counts", **NGRAMS),
        make_node("ImageDecoder", ["m"], ["d"], name="decodes"),
    ]
    model = make_model(nodes, {"x": [4], "m": [2]}, ["h", "d"], opset=20)
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    for value in (model.graph.input[1], model.graph.output[1]):
        value.type.tensor_type.elem_type = TensorProto.UINT8
    error = refusal(model)
    assert error.code == codes.MISSING_OPERATOR
    for part in ("TfIdfVectorizer", "ImageDecoder"):
        assert part in error.what
    assert "'counts'" in error.where
    assert "'decodes'" in error.where


def test_uses_that_would_be_computed_wrong(make_model):
    models = [
        make_model([make_node("Gather", ["x", "i"], ["y"])], {"x": [2, 3]}, ["y"], {"i": np.array([2])}),
        make_model(
            [make_node("Gather", ["x", "i"], ["y"], axis=1)], {"x": [2, 3]}, ["y"], {"i": np.array([-4])}
        ),
        make_model([make_node("GlobalAveragePool", ["x"], ["y"])], {"x": [2, 3]}, ["y"]),
        make_model(
            [make_node("TopK", ["x", "k"], ["y", "i"], largest=64)],
            {"x": [2, 3]},
            ["y"],
            {"k": np.array([1])},
        ),
        make_model([make_node("GlobalMaxPool", ["x"], ["y"])], {"x": [3, 4]}, ["y"]),
    ]
    for model in models:
        error = refusal(model)
        assert error.code == codes.WRONG_RESULT
        assert model.graph.node[0].op_type in error.where


def test_shape_that_depends_on_data(make_model):
    nodes = [
        make_node("NonZero", ["x"], ["i"]),
        make_node("Shape", ["i"], ["extents"]),
        make_node("ConstantOfShape", ["extents"], ["y"]),
    ]
    assert refusal(make_model(nodes, {"x": [2, 3]}, ["y"])).code == codes.DATA_DEPENDENT_SHAPE


@pytest.mark.parametrize("operator", ["ConstantOfShape", "Expand", "Tile", "Range"])
def test_constants_that_ask_for_terabytes_are_never_made(make_model, operator):
    weights = {
        "huge": np.array([1 << 21, 1 << 21]),
        "one": np.ones((1, 1), np.float32),
        "unit": np.array(1, np.float32),
        "limit": np.array(1 << 40, np.float32),
    }
    operands = {"ConstantOfShape": ["huge"], "Range": ["unit", "limit", "unit"]}.get(
        operator, ["one", "huge"]
    )
    nodes = [
        make_node(operator, operands, ["c"]),
        make_node("ReduceMax", ["c"], ["m"]),
        make_node("Add", ["x", "m"], ["y"]),
    ]
    model = make_model(nodes, {"x": [1, 1]}, ["y"], weights)
    assert refusal(model).code == codes.TOO_LARGE


def test_result_whose_dimensions_are_no_int64_is_refused(make_model):
    """ONNX's shape inference gives none here, TVM's importer goes on with numbers beyond its own types."""
    repeats = {"r": np.full(2, np.iinfo(np.int64).max)}
    nodes = [
        make_node("Shape", ["x"], ["s"]),
        make_node("Concat", ["s"], ["c"], axis=0),
        make_node("Reshape", ["x", "c"], ["z"]),  # its shape is known after folding only
        make_node("Tile", ["z", "r"], ["t"], name="tile"),
        make_node("Add", ["t", "t"], ["y"]),
    ]
    error = refusal(make_model(nodes, {"x": [2, 3]}, ["y"], repeats))
    assert error.code == codes.TOO_LARGE and "'tile'" in error.where


def _seed_model() -> bytes:
    weights = [
        numpy_helper.from_array(np.ones((2, 3, 1, 1), np.float32), "w"),
        numpy_helper.from_array(np.array([1, -1]), "shape"),
    ]
    nodes = [
        make_node("Conv", ["x", "w"], ["c"], name="conv"),
        make_node("Relu", ["c"], ["r"]),
        make_node("Reshape", ["r", "shape"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 2, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 8])],
        weights,
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8
    ).SerializeToString()


def test_names_that_are_no_text(relu):
    content = relu.SerializeToString().replace(b"act", b"\xff\xfe\xfd").replace(b"test", b"\xff\xff\xff\xff")
    with pytest.raises(ModelError) as caught:
        read_model(content)
    assert caught.value.code == codes.NOT_ONNX


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_mutated_models_are_read_or_refused_but_never_crash(data):
    content = bytearray(_seed_model())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] = data.draw(st.integers(0, 255))
    try:
        imported = read_model(bytes(content))
    except ModelError as error:
        assert error.where and error.remedy
    else:
        assert relax.analysis.check_well_formed(imported.module)
