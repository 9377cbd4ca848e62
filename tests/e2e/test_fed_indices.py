"""Indices and divisors that are fed: legal ones as ONNX Runtime has them, any other is an error and does no
harm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import hybridc
from hybridc import emulator
from hybridc.errors import ModelError, UsageError
from hybridc.frontend import read_model
from hybridc.runtime.session import Session
from tests.support.machines import EAGER_GPU

TARGETS = [pytest.param(name, marks=pytest.mark.isa("avx2")) for name in ("avx2", "cuda:sm_75+avx2")]
SLOW = [pytest.mark.isa("avx2"), pytest.mark.slow]
GPU_BYTES = 64 << 20
X = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)
X_WITH_NAN = np.where(np.abs(X) < 0.3, np.float32(np.nan), X)
MAPS = np.random.default_rng(1).standard_normal((2, 2, 6, 6)).astype(np.float32)


@dataclass(frozen=True)
class Node:
    """A node of the model; its second operand, or the one at `fed`, is what the tests change."""

    operator: str
    operands: tuple[Any, ...]
    lower: int
    upper: int
    fed: int = 1
    attributes: dict[str, Any] = field(default_factory=dict)

    def illegal(self) -> list[int]:
        """Values just outside, far outside, and as far as the type reaches."""
        limits = np.iinfo(self.operands[self.fed].dtype)
        return [self.upper + 1, self.lower - 1, 10**6, int(limits.max), int(limits.min)]

    def proto(self, name: str) -> onnx.NodeProto:
        operands = [f"{name}_{i}" for i in range(len(self.operands))]
        return helper.make_node(self.operator, operands, [f"{name}_y"], name=name, **self.attributes)


def ints(*values: Any, dtype: str = "int64") -> np.ndarray:
    return np.array(values, dtype)


NODES = {
    "rows": Node("Gather", (X, ints([2, -3], [0, 1])), -3, 2),
    "columns": Node("Gather", (X, ints(4, -5, 0, dtype="int32")), -5, 4, attributes={"axis": -1}),
    "column": Node("Gather", (np.tile(X, (8, 1, 1)), np.array(-2)), -5, 4, attributes={"axis": 2}),
    "table": Node("Gather", (np.arange(7), ints(4, -5, 0)), -7, 6),
    "elements": Node("GatherElements", (X, ints([[3, -4, 0, 1, 2]] * 2) % 3), -3, 2),
    "last_elements": Node(
        "GatherElements", (X, ints(*[[[4, -5]] * 4] * 3, dtype="int32")), -5, 4, attributes={"axis": -1}
    ),
    "points": Node("GatherND", (X, ints([-3, 2], [1, -1])), -3, 2),
    "batched": Node("GatherND", (X, ints([-4], [3], [0])), -4, 3, attributes={"batch_dims": 1}),
    "scattered": Node("ScatterND", (X, ints([2], [-3]), X[:2] * 2), -3, 2),
    "added": Node("ScatterND", (X, ints([2], [2]), X[:2]), -3, 2, attributes={"reduction": "add"}),
    **{
        f"{reduction}_of_nan": Node(
            "ScatterND",
            (X_WITH_NAN, ints([2], [0]), X_WITH_NAN[1:]),
            -3,
            2,
            attributes={"reduction": reduction},
        )
        for reduction in ("max", "min")
    },
    "placed": Node("ScatterElements", (X, ints([[2, -3, 0, 1, 2]]), X[:1, :1]), -3, 2),
    "largest": Node(
        "ScatterElements",
        (X, ints([[3, -4, 0, 1, 2]], dtype="int32"), X[:1, :1]),
        -4,
        3,
        attributes={"axis": 1, "reduction": "max"},
    ),
    "unpooled": Node(
        "MaxUnpool",
        (X[:1, :1, :4].reshape(1, 1, 1, 4), ints([[[0, 3, 4, 15]]])),
        0,
        15,
        attributes={"kernel_shape": [2, 2], "strides": [2, 2]},
    ),
    "regions": Node(
        "RoiAlign",
        (MAPS, np.array([[0, 0, 4, 4], [1, 1, 5, 3]], np.float32), ints(1, 0)),
        0,
        1,
        fed=2,
        attributes={"output_height": 2, "output_width": 2, "sampling_ratio": 2},
    ),
}
QUOTIENTS = {
    f"{operator}_{dtype}_{fmod}": Node(
        operator,
        (ints(7, -7, 9, -128, dtype=dtype), ints(2, 2, -4, 3, dtype=dtype)),
        0,
        0,
        attributes={"fmod": 1} if fmod else {},
    )
    for operator, fmod, dtypes in (
        ("Div", 0, ("int32", "int64")),  # ONNX Runtime has none of bytes
        ("Mod", 0, ("int8", "int32", "int64")),
        ("Mod", 1, ("int32", "int64")),
    )
    for dtype in dtypes
}
ALL = NODES | QUOTIENTS


def model(names: Iterable[str] = ALL) -> onnx.ModelProto:
    inputs, outputs, nodes = [], [], []
    for name in names:
        node = ALL[name]
        nodes.append(node.proto(name))
        outputs.append(onnx.ValueInfoProto(name=f"{name}_y"))
        for i, array in enumerate(node.operands):
            dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
            inputs.append(helper.make_tensor_value_info(f"{name}_{i}", dtype, array.shape))
    graph = helper.make_graph(nodes, "fed", inputs, outputs)
    opset = [helper.make_opsetid("", 18)]
    return onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=opset, ir_version=8))


def feeds() -> dict[str, np.ndarray]:
    return {f"{name}_{i}": a for name, node in ALL.items() for i, a in enumerate(node.operands)}


@contextmanager
def loaded(proto: onnx.ModelProto, path: Path, target: str) -> Iterator[Session]:
    """On the GPU every kernel of the plan runs there."""
    if target.startswith("cuda"):
        emulator.start(GPU_BYTES, guard_tensors=True)
    hybridc.compile(proto, path, target=target, machine=EAGER_GPU, plan_seconds=0.05)
    with hybridc.load(path) as session:
        yield session
    if emulator.is_active():
        emulator.reset()


@pytest.fixture(
    scope="module",
    params=[
        TARGETS[0],
        pytest.param("cuda:sm_75+avx2", marks=SLOW),  # the fast suite has a test of a few nodes
    ],
)
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with loaded(model(), tmp_path_factory.mktemp("fed") / "model.hyb", request.param) as session:
        yield session


@pytest.fixture(scope="module")
def expected() -> list[np.ndarray]:
    return onnxruntime.InferenceSession(model().SerializeToString()).run(None, feeds())


def changed(name: str, value: int, place: int = 0) -> dict[str, np.ndarray]:
    fed = f"{name}_{ALL[name].fed}"
    array = feeds()[fed].copy()
    array.flat[place] = value
    return feeds() | {fed: array}


def assert_right(session: Session, expected: list[np.ndarray]) -> None:
    for name, got, wanted in zip(ALL, session.run(None, feeds()), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5, err_msg=name)


def test_legal_values_are_those_of_onnxruntime(session, expected):
    assert_right(session, expected)


@pytest.mark.parametrize("name", NODES)
def test_index_outside_is_an_error_that_names_node_value_and_limits(session, expected, name):
    node = NODES[name]
    for value in node.illegal():
        with pytest.raises(UsageError) as caught:
            session.run(None, changed(name, value))
        assert caught.value.code == "HC560"
        what = f"{name!r}: index {value} is outside of [{node.lower}, {node.upper}]"
        assert what in str(caught.value)
    assert_right(session, expected)


@pytest.mark.isa("avx2")
def test_a_gpu_tells_of_an_index_outside_and_of_a_divisor_of_zero(tmp_path: Path) -> None:
    names = ("rows", "placed", "Mod_int32_0")
    proto, fed = model(names), {k: v for k, v in feeds().items() if k[:-2] in names}
    wanted = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, fed)
    with loaded(proto, tmp_path / "model.hyb", "cuda:sm_75+avx2") as session:
        for name in names:
            for value in NODES[name].illegal() if name in NODES else [0]:
                given = changed(name, value)
                with pytest.raises(UsageError, match=f"'{name}'") as caught:
                    session.run(None, {key: given[key] for key in fed})
                assert caught.value.code == "HC560"
        for got, reference in zip(session.run(None, fed), wanted, strict=True):
            np.testing.assert_allclose(got, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", QUOTIENTS)
def test_divisor_of_zero_is_an_error_that_names_the_node(session, expected, name):
    with pytest.raises(UsageError, match=f"{QUOTIENTS[name].operator} '{name}': the divisor is 0") as caught:
        session.run(None, changed(name, 0))
    assert caught.value.code == "HC560"
    assert_right(session, expected)


@pytest.mark.parametrize("name", QUOTIENTS)
def test_least_integer_by_minus_one_wraps_as_in_numpy(session, name):
    dividends, divisors = (array.copy() for array in QUOTIENTS[name].operands)
    dividends[0], divisors[0] = np.iinfo(dividends.dtype).min, -1
    results = session.run(None, feeds() | {f"{name}_0": dividends, f"{name}_1": divisors})
    least = np.iinfo(dividends.dtype).min if name.startswith("Div") else 0
    assert results[list(ALL).index(name)][0] == least


CONSTANTS = [
    ("Gather", X, ints(3), ()),
    ("Gather", X, ints(-4), ()),
    ("GatherElements", X, ints([[[7]]]), ()),
    ("GatherND", X, ints([[1, 4]]), ()),
    ("ScatterND", X, ints([[-4]]), (X[:1],)),
    ("ScatterElements", X, ints([[[3]]]), (X[:1, :1, :1],)),
    ("MaxUnpool", X[:1, :1, :4].reshape(1, 1, 1, 4), ints([[[0, 1, -1, 2]]]), ()),
    ("Div", ints(5, 6), ints(1, 0), ()),
    ("Mod", ints(5, 6), ints(0), ()),
]


@pytest.mark.parametrize(("operator", "x", "constant", "rest"), CONSTANTS)
def test_constant_that_is_illegal_is_refused_with_the_model(operator, x, constant, rest):
    attributes: dict[str, Any] = (
        {"kernel_shape": [2, 2], "strides": [2, 2]} if operator == "MaxUnpool" else {}
    )
    names = ["x", "constant", *(f"rest_{i}" for i in range(len(rest)))]
    weights = zip(names[1:], (constant, *rest), strict=True)
    x_info = helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
    graph = helper.make_graph(
        [helper.make_node(operator, names, ["y"], name="the_node", **attributes)],
        "constant",
        [x_info],
        [onnx.ValueInfoProto(name="y")],
        [numpy_helper.from_array(array, name) for name, array in weights],
    )
    opset = [helper.make_opsetid("", 18)]
    proto = helper.make_model(graph, opset_imports=opset, ir_version=8)
    with pytest.raises(ModelError, match="the_node") as caught:
        read_model(onnx.shape_inference.infer_shapes(proto))
    assert caught.value.code == "HC114"


@pytest.mark.parametrize("target", [TARGETS[0], pytest.param("cuda:sm_75+avx2", marks=SLOW)])
def test_positions_that_are_no_numbers_read_nothing_outside(target: str, tmp_path: Path) -> None:
    """Samples at NaN and at huge coordinates: the guard pages around the tensors are left alone."""
    grid = np.random.default_rng(2).uniform(-1, 1, (2, 3, 4, 2)).astype(np.float32)
    modes = [("linear", "zeros"), ("nearest", "border"), ("linear", "reflection"), ("cubic", "reflection")]
    infos = [helper.make_tensor_value_info(n, 1, a.shape) for n, a in (("x", MAPS), ("grid", grid))]
    nodes = [
        helper.make_node("GridSample", ["x", "grid"], [f"y{i}"], mode=mode, padding_mode=pad)
        for i, (mode, pad) in enumerate(modes)
    ]
    outputs = [onnx.ValueInfoProto(name=node.output[0]) for node in nodes]
    opset = [helper.make_opsetid("", 20)]
    proto = helper.make_model(
        helper.make_graph(nodes, "grids", infos, outputs), opset_imports=opset, ir_version=9
    )
    if target.startswith("cuda"):
        emulator.start(GPU_BYTES, guard_tensors=True)
    inferred = onnx.shape_inference.infer_shapes(proto)
    hybridc.compile(inferred, tmp_path / "m.hyb", target=target, machine=EAGER_GPU, plan_seconds=0.05)
    wild = grid.copy()
    wild.flat[:8] = np.nan, np.inf, -np.inf, 1e30, -1e30, 2.0**31, -(2.0**31), 3e9
    with hybridc.load(tmp_path / "m.hyb") as session:
        session.run(None, {"x": MAPS, "grid": wild})
        results = session.run(None, {"x": MAPS, "grid": grid})
    wanted = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": MAPS, "grid": grid})
    for got, reference in zip(results, wanted, strict=True):
        np.testing.assert_allclose(got, reference, rtol=1e-4, atol=1e-4)
    if emulator.is_active():
        emulator.reset()


REGION_MODES: list[dict[str, Any]] = [
    {"spatial_scale": 0.5},
    {"coordinate_transformation_mode": "output_half_pixel"},
    {"sampling_ratio": 2},
]
EMPTY = np.array([[1, 1, 1, 1], [3, 3, 1, 1], [1, 1, 1, 4]], np.float32)
LARGE = np.array([[-100, -100, 50, 50], [0, 0, 3e4, 10], [0.3, -2, 5.5, 17]], np.float32)
ABSURD = np.array([[0, 0, 1e9, 1e9], [np.nan, 0, 3, 3], [-np.inf, 0, 3e38, np.inf]], np.float32)


@pytest.mark.parametrize("target", TARGETS)
def test_regions_may_be_empty_or_of_any_size(target: str, tmp_path: Path) -> None:
    """Samples outside of the image are 0, and are not visited one by one."""
    if target.startswith("cuda"):
        emulator.start(GPU_BYTES, guard_tensors=True)
    images = ints(0, 1, 1)
    fed = {"x": MAPS, "r": EMPTY, "i": images}
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in fed.items()
    ]
    nodes = [
        helper.make_node("RoiAlign", ["x", "r", "i"], [f"y{k}"], output_height=2, output_width=3, **mode)
        for k, mode in enumerate(REGION_MODES)
    ]
    outputs = [onnx.ValueInfoProto(name=node.output[0]) for node in nodes]
    graph = helper.make_graph(nodes, "regions", infos, outputs)
    proto = onnx.shape_inference.infer_shapes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    )
    hybridc.compile(proto, tmp_path / "m.hyb", target=target, machine=EAGER_GPU, plan_seconds=0.05)
    reference = onnxruntime.InferenceSession(proto.SerializeToString())
    with hybridc.load(tmp_path / "m.hyb") as session:
        for regions in (EMPTY, LARGE):
            fed["r"] = regions
            for got, wanted in zip(session.run(None, fed), reference.run(None, fed), strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
        for got in session.run(None, {**fed, "r": ABSURD}):  # which onnxruntime refuses
            assert np.isfinite(got).all()
