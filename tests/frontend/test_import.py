"""The imported function has the promised form, and knows the origin of every binding."""

from __future__ import annotations

import cProfile
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from onnx import helper
from onnx.helper import make_node
from tvm import relax

from hybridc.frontend import ImportedModel, read_model

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def assert_normal_form(imported: ImportedModel) -> None:
    """One dataflow block of operations on variables and scalars; parameters and outputs as promised."""
    main = imported.module["main"]
    (block,) = main.body.blocks
    assert isinstance(block, relax.DataflowBlock)
    relax.analysis.well_formed(imported.module)
    assert [p.name for p in main.params] == [*(v.variable for v in imported.inputs), *imported.weights]
    assert [v.name for v in main.body.body.fields] == [v.variable for v in imported.outputs]
    names = [binding.var.name for binding in block.bindings]
    assert names == list(imported.origins)
    for parameter in main.params[len(imported.inputs) :]:
        array = imported.weights[parameter.name]
        assert tuple(int(d) for d in parameter.ty.shape) == array.shape
        assert str(parameter.ty.dtype) == str(array.dtype)
    for binding in block.bindings:
        assert isinstance(binding.value, (tvm.ir.Call, relax.TupleGetItem))
        for argument in getattr(binding.value, "args", ()):
            if isinstance(argument, tvm.ir.GenericConst):
                assert argument.value.ndim == 0


@pytest.mark.parametrize("name", ["squeezenet", "resnet50", "shufflenet", "bvlc_alexnet"])
def test_every_binding_of_a_real_network_has_an_origin_and_every_node_a_binding(name):
    path = LIGHT / f"light_{name}.onnx"
    imported = read_model(path)
    assert_normal_form(imported)
    nodes = [n for n in onnx.load(path).graph.node if n.op_type not in ("ConstantOfShape", "Dropout")]
    named = {origin for origins in imported.origins.values() for origin in origins}
    assert named == {node.name for node in nodes}


def test_functions_of_one_name_are_numbered_behind_an_underscore():
    """Which tells the number from digits of the name: passes ask for names without it."""
    nodes = [make_node("Tile", ["x", f"repeats{i}"], [f"y{i}"]) for i in range(3)]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [3])],
        [helper.make_tensor_value_info(f"y{i}", onnx.TensorProto.FLOAT, [3 * (i + 2)]) for i in range(3)],
        [onnx.numpy_helper.from_array(np.array([i + 2]), f"repeats{i}") for i in range(3)],
    )
    imported = read_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    assert_normal_form(imported)
    names = {v.name_hint for v in imported.module.get_global_vars()}
    assert names == {"main", "tile", "tile_1", "tile_2"}


def test_source_and_interface_carry_the_users_names():
    imported = read_model(LIGHT / "light_resnet50.onnx")
    assert imported.source.name == "light_resnet50.onnx"
    assert imported.source.opset == 9
    assert imported.source.ir_version == 3
    assert len(imported.source.sha256) == 64
    assert [(v.name, v.shape, v.dtype) for v in imported.inputs] == [
        ("gpu_0/data_0", (1, 3, 224, 224), "float32")
    ]
    assert [(v.name, v.shape) for v in imported.outputs] == [("gpu_0/softmax_1", (1, 1000))]


def test_weights_made_by_constant_of_shape_need_no_memory():
    imported = read_model(LIGHT / "light_vgg19.onnx")
    assert sum(array.nbytes for array in imported.weights.values()) > 500 << 20
    assert all(not any(array.strides) for array in imported.weights.values() if array.nbytes > 1 << 20)


def test_tied_weights_appear_once_and_are_not_folded(make_model, assert_matches, rng):
    """The embedding table that a language model also uses, transposed, as its last matrix."""
    table = rng.standard_normal((50, 400), dtype=np.float32)
    nodes = [
        make_node("Cast", ["x"], ["i"], to=onnx.TensorProto.INT64),
        make_node("Gather", ["table", "i"], ["h"]),
        make_node("Transpose", ["table"], ["t"], perm=[1, 0]),
        make_node("MatMul", ["h", "t"], ["y"]),
    ]
    model = make_model(nodes, {"x": [4]}, ["y"], {"table": table})
    imported = assert_matches(model, {"x": np.array([0, 3, 49, 7], np.float32)}, rtol=1e-4)
    assert list(imported.weights) == ["table"]


def test_transpose_of_a_weight_with_no_other_use_is_folded(make_model, rng):
    nodes = [make_node("Transpose", ["w"], ["t"], perm=[1, 0]), make_node("MatMul", ["x", "t"], ["y"])]
    model = make_model(
        nodes, {"x": [4, 200]}, ["y"], {"w": rng.standard_normal((300, 200), dtype=np.float32)}
    )
    imported = read_model(model)
    assert [array.shape for array in imported.weights.values()] == [(200, 300)]
    assert list(imported.origins.values()) == [("MatMul_1",)]


def gates(*order):
    """Slices of a weight of four gates, put together in this order, as exporters of LSTM write it."""
    bounds = {f"b{i}": np.array([100 * i]) for i in range(5)}
    slices = [make_node("Slice", ["w", f"b{i}", f"b{i + 1}"], [f"s{i}"]) for i in order]
    return [*slices, make_node("Concat", [f"s{i}" for i in order], ["t"], axis=0)], bounds


def test_a_weight_whose_parts_change_places_is_folded(make_model, assert_matches, rng):
    nodes, bounds = gates(0, 3, 1, 2)
    weights = {"w": rng.standard_normal((400, 200), dtype=np.float32), **bounds}
    model = make_model([*nodes, make_node("MatMul", ["t", "x"], ["y"])], {"x": [200, 4]}, ["y"], weights)
    imported = assert_matches(model, {"x": rng.standard_normal((200, 4), dtype=np.float32)}, rtol=1e-4)
    assert [array.shape for array in imported.weights.values()] == [(400, 200)]
    assert list(imported.origins.values()) == [("MatMul_5",)]


def test_weights_meet_weights_when_reading(make_model, assert_matches, rng):
    """Tables of relative positions, which each layer projects anew."""
    weights = {"table": (300, 64), "scale": (64,), "bias": (64,), "w0": (64, 64), "w1": (64, 64)}
    arrays = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in weights.items()}
    bounds = {"zero": np.array([0]), "end": np.array([256])}
    nodes = [make_node("LayerNormalization", ["table", "scale", "bias"], ["normal"])]
    for layer in range(2):
        nodes += [
            make_node("Slice", ["normal", "zero", "end"], [f"near{layer}"]),
            make_node("Unsqueeze", [f"near{layer}", "zero"], [f"batch{layer}"]),
            make_node("MatMul", [f"batch{layer}", f"w{layer}"], [f"keys{layer}"]),
            make_node("MatMul", ["x", f"keys{layer}"], [f"y{layer}"]),
        ]
    model = make_model(nodes, {"x": [4, 256]}, ["y0", "y1"], {**arrays, **bounds})
    imported = assert_matches(model, {"x": rng.standard_normal((4, 256), dtype=np.float32)}, rtol=1e-3)
    assert [array.shape for array in imported.weights.values()] == [(1, 256, 64)] * 2
    trained = read_model(model, parameters=lambda name: name == "w0")
    assert {array.shape for array in trained.weights.values()} == {(1, 256, 64)}


@pytest.mark.parametrize("reader", ["MatMul", "Slice"])
def test_parts_of_a_weight_that_is_read_elsewhere_take_no_memory(reader, make_model, rng):
    """Another reader of the whole, or parts that are more than the whole."""
    nodes, bounds = gates(0, 1, 2, 3)
    weights = {"w": rng.standard_normal((400, 200), dtype=np.float32), **bounds}
    nodes.append(make_node("MatMul", ["t", "x"], ["u"]))
    if reader == "Slice":
        nodes.append(make_node("Slice", ["w", "b0", "b3"], ["more"]))
    nodes.append(make_node("MatMul", ["w" if reader == "MatMul" else "more", "x"], ["y"]))
    imported = read_model(make_model(nodes, {"x": [200, 4]}, ["u", "y"], weights))
    assert sum(array.nbytes for array in imported.weights.values()) == weights["w"].nbytes


def test_valid_nodes_in_any_order_are_accepted(make_model, assert_matches, rng):
    nodes = [
        make_node("Add", ["a", "b"], ["y"]),
        make_node("Relu", ["x"], ["a"]),
        make_node("Abs", ["a"], ["b"]),
    ]
    model = make_model([nodes[1], nodes[2], nodes[0]], {"x": [4]}, ["y"])
    feeds = {"x": rng.standard_normal(4, dtype=np.float32)}
    assert_matches(model, feeds)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    imported = read_model(model)
    assert_normal_form(imported)
    assert [origins for origins in imported.origins.values()] == [("Relu_1",), ("Abs_2",), ("Add_0",)]


def test_unused_initializers_and_dead_nodes_are_dropped(make_model):
    nodes = [make_node("Relu", ["x"], ["y"]), make_node("Add", ["x", "w"], ["unused"])]
    imported = read_model(make_model(nodes, {"x": [4]}, ["y"], {"w": np.ones(4, np.float32)}))
    assert not imported.weights
    assert list(imported.origins.values()) == [("Relu_0",)]


def test_no_ops_are_dropped(make_model):
    nodes = [
        make_node("Identity", ["x"], ["a"]),
        make_node("Dropout", ["a"], ["b"]),
        make_node("Cast", ["b"], ["c"], to=onnx.TensorProto.FLOAT),
        make_node("Relu", ["c"], ["y"]),
    ]
    imported = read_model(make_model(nodes, {"x": [4]}, ["y"]))
    assert list(imported.origins.values()) == [("Relu_3",)]


def test_constants_overflow_without_a_warning(make_model):
    zero = np.zeros(3, np.float32)
    nodes = [make_node("Log", ["w"], ["l"]), make_node("Add", ["x", "l"], ["y"])]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        imported = read_model(make_model(nodes, {"x": (3,)}, ["y"], {"w": zero}))
    [folded] = imported.weights.values()
    assert np.isneginf(folded).all()


def test_slices_and_splits_that_take_all_are_dropped(make_model, assert_matches, rng):
    """Other slices of the same shape run backwards; what a rotation leaves over may be empty."""
    nodes = [
        make_node("Split", ["x", "whole"], ["a", "rest"], axis=1),
        make_node("Slice", ["a", "zero", "far"], ["b"]),
        make_node("Concat", ["rest", "b"], ["c"], axis=1),
        make_node("Slice", ["c", "far", "before", "zero", "back"], ["y"]),
    ]
    numbers = {"whole": [3, 0], "zero": [0], "far": [1 << 40], "before": [-(1 << 40)], "back": [-1]}
    arrays = {name: np.asarray(values, np.int64) for name, values in numbers.items()}
    model = make_model(nodes, {"x": [4, 3]}, ["y"], arrays)
    assert list(read_model(model).origins.values()) == [("Slice_3",)]
    assert_matches(model, {"x": rng.standard_normal((4, 3), dtype=np.float32)})


def test_nodes_of_the_same_name_are_told_apart(make_model):
    nodes = [make_node("Relu", ["x"], ["a"], name="n"), make_node("Abs", ["a"], ["y"], name="n")]
    imported = read_model(make_model(nodes, {"x": [4]}, ["y"]))
    assert list(imported.origins.values()) == [("n",), ("n_1",)]


def test_the_users_model_is_left_alone(make_model):
    model = make_model([make_node("Relu", ["x"], ["y"])], {"x": ["N", 3]}, ["y"])
    before = model.SerializeToString(deterministic=True)
    read_model(model, dims={"N": 2})
    assert model.SerializeToString(deterministic=True) == before


def test_nodes_of_functions_have_origins(make_model):
    body = [make_node("Mul", ["a", "a"], ["t"], name="square"), make_node("Relu", ["t"], ["r"])]
    function = helper.make_function("local", "F", ["a"], ["r"], body, [helper.make_opsetid("", 17)])
    nodes = [make_node("F", ["x"], ["y"], domain="local", name="call")]
    model = make_model(nodes, {"x": [4]}, ["y"], functions=[function])
    model.graph.output[0].type.tensor_type.shape.dim.add().dim_value = 4
    imported = read_model(model)
    assert_normal_form(imported)
    assert all(imported.origins.values())


def test_work_of_the_import_is_linear_in_the_number_of_nodes(make_model):
    """Counted in calls of functions, which no other load on the machine changes."""

    def calls(length: int) -> int:
        nodes = [make_node("Relu" if i % 2 else "Sin", [f"v{i}"], [f"v{i + 1}"]) for i in range(length)]
        model = make_model(nodes, {"v0": [4]}, [f"v{length}"])
        profile = cProfile.Profile()
        imported = profile.runcall(read_model, model)
        assert len(imported.origins) == length
        return sum(entry.callcount for entry in profile.getstats())

    calls(10)
    assert calls(1000) < 5 * calls(250)
