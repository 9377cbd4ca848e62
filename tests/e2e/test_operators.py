"""Each operator, compiled and run, against ONNX Runtime; on demand, onnx's own tests as a user feeds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import hybridc
from hybridc import emulator
from hybridc.emulator import ThreadOrder
from hybridc.errors import HybridcError
from tests.onnx_suite.cases import DISPUTED, INEXACT
from tests.support.machines import EAGER_GPU

TOLERANCE = 1e-4
GPU_BYTES = 64 << 20
CPU_TARGETS = [
    pytest.param("avx2", marks=pytest.mark.isa("avx2")),
    # tests of schedules show in less time what wider vectors do
    pytest.param("avx512", marks=[pytest.mark.isa("avx512"), pytest.mark.slow]),
]
TARGETS = [*CPU_TARGETS, pytest.param("cuda:sm_75+avx2", marks=pytest.mark.isa("avx2"))]


@dataclass
class Model:
    """A model of many independent operators: compiling them together links once."""

    opset: int = 18
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    feeds: dict[str, np.ndarray] = field(default_factory=dict)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def x(self, *shape: int) -> str:
        return self.feed(self.random.standard_normal(shape).astype(np.float32))

    def feed(self, array: Any) -> str:
        self.feeds[f"x{len(self.feeds)}"] = np.asarray(array)
        return f"x{len(self.feeds) - 1}"

    def w(self, *shape: int) -> str:
        return self.constant(self.random.standard_normal(shape).astype(np.float32))

    def constant(self, array: Any) -> str:
        self.weights[f"w{len(self.weights)}"] = np.asarray(array)
        return f"w{len(self.weights) - 1}"

    def value(self, operator: str, *inputs: str, results: int = 1, **attributes: Any) -> str:
        """The (first) result of an operator, for another one to read."""
        names = [f"{operator}_{len(self.nodes)}_{i}" for i in range(results)]
        self.nodes.append(helper.make_node(operator, inputs, names, **attributes))
        return names[0]

    def add(self, operator: str, *inputs: str, results: int = 1, **attributes: Any) -> None:
        """An operator whose results are outputs of the model."""
        self.value(operator, *inputs, results=results, **attributes)
        self.outputs += self.nodes[-1].output

    def proto(self) -> onnx.ModelProto:
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in self.feeds.items()
        ]
        outputs = [onnx.ValueInfoProto(name=name) for name in self.outputs]
        weights = [numpy_helper.from_array(array, name) for name, array in self.weights.items()]
        graph = helper.make_graph(self.nodes, "operators", inputs, outputs, weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)
        return onnx.shape_inference.infer_shapes(model)


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    yield
    if emulator.is_active():
        emulator.reset()


def run(
    model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], target: str, folder: Path
) -> list[np.ndarray]:
    """Compile and run, on a GPU whose threads and copies come in the least expected order."""
    if target.startswith("cuda"):
        emulator.start(GPU_BYTES, thread_order=ThreadOrder.SHUFFLED, lazy_streams=True)
    hybridc.compile(model, folder / "model.hyb", target=target, machine=EAGER_GPU, plan_seconds=0.05)
    with hybridc.load(folder / "model.hyb") as session:
        return session.run(None, {port.name: feeds[port.name] for port in session.get_inputs()})


def fault(got: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE) -> str | None:
    """How a result differs from what is expected, relative to the largest finite magnitude."""
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        return f"{got.dtype}{got.shape} instead of {expected.dtype}{expected.shape}"
    if expected.dtype.kind in "iub":
        return None if np.array_equal(got, expected) else "integers differ"
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(expected)
    if not np.array_equal(got[~finite], expected[~finite], equal_nan=True):
        return f"{got[~finite]} instead of {expected[~finite]}"
    scale = np.abs(expected[finite]).max(initial=1e-30)
    error = np.abs(got[finite] - expected[finite]).max(initial=0.0) / scale
    return None if error <= tolerance else f"error {error:.2g}"


def assert_like_onnxruntime(model: Model, target: str, folder: Path) -> None:
    proto = model.proto()
    expected = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, model.feeds)
    got = run(proto, model.feeds, target, folder)
    faults = {name: f for name, g, e in zip(model.outputs, got, expected, strict=True) if (f := fault(g, e))}
    assert not faults


def convolutions(m: Model) -> None:
    m.add("Conv", m.x(1, 4, 13), m.w(5, 4, 3), m.w(5), pads=[0, 2], dilations=[2])
    m.add("Conv", m.x(2, 3, 7, 9), m.w(4, 3, 3, 2), pads=[1, 0, 2, 1], strides=[2, 1])
    m.add("Conv", m.x(1, 6, 5, 5), m.w(4, 3, 3, 3), group=2, auto_pad="SAME_UPPER", strides=[2, 2])
    m.add("Conv", m.x(1, 5, 6, 7), m.w(5, 1, 3, 3), m.w(5), group=5, pads=[1, 1, 1, 1])
    m.add("Conv", m.x(1, 2, 4, 5, 3), m.w(3, 2, 2, 3, 2), pads=[0, 1, 0, 1, 1, 1])
    m.add("Relu", m.value("Conv", m.x(1, 1, 5, 6), m.w(3, 1, 1, 1), m.w(3)))  # a reduction of one step
    m.add("Conv", m.x(1, 2, 5, 5), m.x(3, 2, 3, 3))  # the weight is an input
    m.add("ConvTranspose", m.x(1, 2, 4, 5), m.w(2, 3, 3, 3), strides=[2, 2], output_padding=[1, 1])
    x = m.x(1, 4, 6, 5)
    m.add("Relu", m.value("Add", m.value("Conv", x, m.w(4, 4, 3, 3), m.w(4), pads=[1, 1, 1, 1]), x))
    rows = m.value("Add", m.value("Conv", m.x(1, 3, 4, 3), m.w(3, 3, 1, 1)), m.w(3))  # along the last axis
    m.add("BatchNormalization", rows, m.w(3), m.w(3), m.w(3), m.constant(np.array([0.5, 1, 2], np.float32)))


def products(m: Model) -> None:
    m.add("MatMul", m.x(7), m.x(7, 5))
    m.add("MatMul", m.x(5, 7), m.w(7))
    m.add("MatMul", m.x(7), m.x(7))
    m.add("MatMul", m.x(2, 1, 3, 5), m.x(4, 5, 6))
    m.add("Relu", m.value("Add", m.value("MatMul", m.x(6, 1), m.w(1, 9)), m.w(9)))  # of one step
    m.add("Gemm", m.x(7, 4), m.w(5, 7), m.w(5), transA=1, transB=1, alpha=0.5, beta=2.0)
    x = m.x(9, 9)
    m.add("Add", x, m.value("Tanh", m.value("Add", m.value("MatMul", x, m.w(9, 9)), x)))
    m.add("Einsum", m.x(2, 3, 4), m.x(2, 4, 5), equation="bij,bjk->bik")


def poolings(m: Model) -> None:
    m.add("MaxPool", m.x(1, 2, 7, 8), kernel_shape=[3, 2], strides=[2, 3], ceil_mode=1)
    m.add("AveragePool", m.x(1, 2, 7), kernel_shape=[3], strides=[2], pads=[1, 1], count_include_pad=1)
    m.add("AveragePool", m.x(1, 2, 6, 7), kernel_shape=[3, 3], pads=[1, 0, 1, 2])
    m.add("GlobalMaxPool", m.x(2, 3, 5, 4))
    # with offsets: of equal elements, along columns, in three dimensions
    steps = m.feed(np.random.default_rng(0).integers(0, 3, (2, 3, 9, 7)).astype(np.float32))
    m.add("MaxPool", steps, results=2, kernel_shape=[3, 2], pads=[1, 0, 2, 1], dilations=[2, 1])
    m.add("MaxPool", steps, results=2, kernel_shape=[2, 3], strides=[2, 3], storage_order=1, ceil_mode=1)
    m.add("MaxPool", m.x(1, 2, 5, 4, 6), results=2, kernel_shape=[2, 2, 3], auto_pad="SAME_LOWER")
    pooled = m.value("MaxPool", m.x(2, 2, 5, 7), results=2, kernel_shape=[2, 2], strides=[2, 2])
    offsets = m.nodes[-1].output[1]
    shape = m.constant([2, 2, 5, 7])  # more than what windows of 2 x 2 give back
    m.add("MaxUnpool", pooled, offsets, shape, kernel_shape=[2, 2], strides=[2, 2])
    m.add("LpPool", m.x(1, 2, 6, 6), kernel_shape=[2, 2], strides=[2, 2], p=2)


def reductions(m: Model) -> None:
    x = m.x(3, 5, 7)
    for i, operator in enumerate(
        ("Mean", "Max", "Min", "Sum", "Prod", "L1", "L2", "SumSquare", "LogSumExp", "Max", "Mean")
    ):
        axes = ([-1], [0], [1, -1], [0, 2], [0, 1, 2])[i % 5]
        m.add(f"Reduce{operator}", x, m.constant(axes), keepdims=i % 2)
    m.add("ArgMax", x, axis=1, keepdims=0)
    m.add("ArgMin", x, axis=-1)
    for axis in (0, 1, 2):
        m.add("Softmax", x, axis=axis)
    m.add("LogSoftmax", m.x(4, 33), axis=-1)
    m.add("LayerNormalization", x, m.w(7), m.w(7), axis=-1)
    m.add("InstanceNormalization", x, m.w(5), m.w(5))
    m.add("LRN", m.x(1, 6, 3, 3), size=3)
    m.add("Sub", m.value("ReduceMax", x, keepdims=0), m.constant(np.float32(1)))  # a scalar's epilogue


def infinities(m: Model) -> None:
    rows = np.zeros((4, 32), np.float32)
    rows[1], rows[2], rows[3, 5] = -np.inf, np.inf, -np.inf
    x = m.feed(rows)
    for operator in ("ReduceMax", "ReduceMin", "ReduceLogSumExp"):
        m.add(operator, x, m.constant([1]))
    m.add("ArgMax", x, axis=1)
    m.add("ArgMin", x, axis=1)
    m.add("Exp", x)
    m.add("Erf", x)
    m.add("Sigmoid", x)


def scans(m: Model) -> None:
    x, numbers = m.x(3, 40, 2), m.feed(np.random.default_rng(1).integers(-4, 4, (2, 31)))
    m.add("CumSum", x, m.constant(1))
    m.add("CumSum", x, m.constant(-1), exclusive=1)
    m.add("CumSum", x, m.constant(0), reverse=1)
    m.add("CumSum", m.value("Relu", m.x(1, 1)), m.constant(0))
    m.add("CumSum", numbers, m.constant(1), exclusive=1, reverse=1)
    m.add("TopK", m.value("Relu", x), m.constant([7]), results=2, axis=1)  # of equal ones the first
    m.add("TopK", x, m.constant([3]), results=2, axis=0, largest=0)
    m.add("TopK", numbers, m.constant([31]), results=2)
    m.add("TopK", m.feed(np.array([[1, np.inf, -np.inf, 0]], np.float32)), m.constant([4]), results=2)


def movements(m: Model) -> None:
    x = m.x(3, 4, 5)
    m.add("Split", x, m.constant([1, 3]), results=2, axis=1)
    m.add("Concat", x, m.x(3, 1, 5), x, axis=1)
    m.add("Concat", m.x(1, 1, 5), m.constant(np.ones((1, 2, 5), np.float32)), axis=1)
    m.add("Transpose", x, perm=[2, 0, 1])
    m.add("Slice", x, m.constant([3, -1]), m.constant([0, -6]), m.constant([1, 2]), m.constant([-2, -2]))
    m.add("Gather", x, m.constant([[0, -1], [2, 1]]), axis=1)
    m.add("Gather", x, m.feed(np.array([[-3, 2], [1, -1]], np.int64)), axis=0)
    m.add("GatherElements", x, m.feed(np.array([[[1, 0, 2, 0, 1]] * 4], np.int64)), axis=0)
    m.add("ScatterElements", x, m.feed(np.array([[[1, 0, 2, 0, 1]]], np.int64)), m.x(1, 1, 5), axis=0)
    again = m.feed(np.array([[[1, 1, 0, 0, 1]]], np.int64))
    m.add("ScatterElements", m.x(1, 1, 5), again, m.x(1, 1, 5), axis=2, reduction="add")
    m.add("OneHot", m.feed(np.array([0, 2, 1])), m.constant(3), m.constant(np.array([0, 1], np.float32)))
    m.add("ScatterND", x, m.constant([[0, 1], [2, 3]]), m.x(2, 5))
    m.add("Pad", x, m.constant([0, 1, 2, 1, 0, 0]), m.constant(np.float32(-np.inf)))
    m.add("Pad", x, m.constant([0, 1, 2, 0, 0, 1]), mode="reflect")
    m.add("Tile", x, m.constant([1, 2, 1]))
    m.add("Expand", m.x(3, 1, 5), m.constant([2, 1, 4, 1]))
    m.add("Resize", m.x(1, 2, 3, 4), "", "", m.constant([1, 2, 6, 9]), mode="linear")
    m.add("DepthToSpace", m.x(1, 8, 2, 3), blocksize=2)
    m.add("Reshape", x, m.constant([-1, 10]))  # outputs that are views of an input
    m.add("Flatten", x, axis=1)
    m.add("Unsqueeze", x, m.constant([0, 2]))
    m.add("Trilu", m.x(4, 5), upper=0)


def elements(m: Model) -> None:
    x, y = m.x(3, 1, 5), m.x(4, 1)
    for operator in ("Add", "Sub", "Mul", "Div", "Max", "Min", "PRelu"):
        m.add(operator, x, y if operator != "PRelu" else m.w(5))
    for operator in ("Relu", "Erf", "Elu", "Selu", "HardSigmoid", "HardSwish", "Softplus", "Sign", "Round"):
        m.add(operator, x)
    m.add("PRelu", m.x(1, 3, 2, 4), m.w(3, 1, 1))
    m.add("Clip", x, m.constant(np.float32(-0.5)), m.constant(np.float32(0.5)))
    m.add("Where", m.value("Greater", x, y), x, y)
    m.add("Where", m.value("Less", x, y), x, m.constant(np.float32(-np.inf)))
    m.add("Shrink", x, lambd=0.5, bias=0.1)
    m.add("Mul", x, x)
    m.add("Add", m.value("Mul", m.x(), m.x()), m.constant(np.float32(2)))
    chain = m.value("Exp", m.value("Sub", x, m.value("Abs", x)))
    m.add("Mul", chain, m.value("Add", chain, x))
    for dtype in (np.int8, np.uint8, np.int32, np.int64, np.float64, np.float16):
        a, b = m.feed(np.array([1, 5, 100, 7], dtype)), m.feed(np.array([3, 2, 50, 1], dtype))
        for operator in ("Add", "Mul", "Sub") if dtype not in (np.int8, np.uint8) else ("Greater", "Equal"):
            m.add(operator, a, b)
        for to in (TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL, TensorProto.UINT8):
            m.add("Cast", a, to=to)
    m.add("Not", m.value("And", m.feed([True, False]), m.feed([True, True])))
    m.add(
        "BitShift", m.feed(np.array([1, 2], np.uint8)), m.feed(np.array([3, 1], np.uint8)), direction="LEFT"
    )
    m.add("Mod", m.feed(np.array([-7, 7], np.int32)), m.feed(np.array([3, -3], np.int32)))
    m.add("Mod", m.feed(np.array([-7, 7], np.float16)), m.constant(np.array([3, -3], np.float16)), fmod=1)
    odd = np.array([5.5, -5.5, 0.0, -3.0, np.inf, np.nan, 1e30, -7.25], np.float32)
    by = np.array([2.0, np.inf, 3.0, -3.0, 2.0, 1.0, 0.3, -np.inf], np.float32)
    m.add("Mod", m.feed(odd), m.feed(by), fmod=1)
    m.add("IsNaN", m.feed(np.array([np.nan, 1], np.float32)))


def regions(m: Model) -> None:
    corners = m.constant(np.array([[0.3, 0.7, 4.1, 5.2], [-3, 2, 9.3, 3.9], [1, 1, 1, 1]], np.float32))
    images = m.constant([1, 0, 1])
    for x in (m.x(2, 3, 6, 7), m.x(2, 2, 1, 5)):
        for ratio in (0, 2):
            m.add(
                "RoiAlign",
                x,
                corners,
                images,
                mode="max",
                output_height=2,
                output_width=3,
                sampling_ratio=ratio,
            )


GROUPS: tuple[Callable[[Model], None], ...] = (
    convolutions,
    products,
    poolings,
    reductions,
    scans,
    infinities,
    movements,
    elements,
    regions,
)


ON_A_GPU = (products, infinities)
"""Of these the fast suite has code for a GPU, too; tests of schedules have kernels of all kinds."""
SLOW_ON_A_GPU = [
    pytest.param(group, TARGETS[-1].values[0], marks=[*TARGETS[-1].marks, pytest.mark.slow])
    for group in GROUPS
    if group not in ON_A_GPU
]


@pytest.mark.parametrize(
    ("group", "target"),
    [
        *(pytest.param(group, *on.values, marks=on.marks) for on in CPU_TARGETS for group in GROUPS),
        *(pytest.param(group, *TARGETS[-1].values, marks=TARGETS[-1].marks) for group in ON_A_GPU),
        *SLOW_ON_A_GPU,
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_operators_agree_with_onnxruntime(group, target, tmp_path):
    model = Model()
    group(model)
    assert_like_onnxruntime(model, target, tmp_path)


@pytest.mark.parametrize("target", TARGETS[::2])
def test_transposed_convolutions_in_double_precision(target, tmp_path):  # ONNX Runtime has none
    model = Model()
    x, w = (model.random.standard_normal(shape) for shape in ((1, 2, 4, 5), (2, 3, 3, 3)))
    model.add("ConvTranspose", model.feed(x), model.constant(w), strides=[2, 2])
    [expected] = ReferenceEvaluator(model.proto()).run(None, model.feeds)
    [got] = run(model.proto(), model.feeds, target, tmp_path)
    assert fault(got, np.asarray(expected), 1e-12) is None


@pytest.mark.parametrize("target", TARGETS[::2])
def test_bits_and_remainders_of_new_opsets(target, tmp_path):  # ONNX Runtime has none
    model = Model(28)
    rng = np.random.default_rng(0)
    words = rng.integers(-(2**31), 2**31, 50).astype(np.int32)
    words[:2] = 0x7F800001, -1  # no numbers, whose bits stay as they are
    half = rng.integers(0, 2**16, 40).astype(np.uint16)
    for array, to in (
        (words, TensorProto.FLOAT),
        (words.view(np.float32), TensorProto.UINT32),
        (half, TensorProto.FLOAT16),
        (half.view(np.float16), TensorProto.INT16),
        (rng.standard_normal(7), TensorProto.INT64),
    ):
        model.add("BitCast", model.feed(array), to=to)
    bits = list(model.outputs)
    odd = np.array([5.5, -5.5, 0.0, -3.0, 3.0, -5.5, 1e10, -7.25, np.inf, 1], np.float32)
    by = np.array([2.0, np.inf, -3.0, -3.0, -np.inf, 2.0, -0.3, np.nan, 2, 0], np.float32)
    for dtype in (np.float32, np.float64):
        model.add("Mod", model.feed(odd.astype(dtype)), model.feed(by.astype(dtype)))
    got = dict(zip(model.outputs, run(model.proto(), model.feeds, target, tmp_path), strict=True))
    expected = dict(zip(model.outputs, ReferenceEvaluator(model.proto()).run(None, model.feeds), strict=True))
    assert all(got[name].tobytes() == expected[name].tobytes() for name in bits)
    for name in model.outputs[len(bits) :]:
        np.testing.assert_array_equal(got[name], expected[name])


@pytest.mark.parametrize("target", TARGETS[::2])
def test_empty_tensors_are_handed_through(target, tmp_path):
    model = Model()
    model.add("Slice", model.x(2, 3), model.constant([3]), model.constant([5]), model.constant([1]))
    model.add("Concat", model.x(2, 3), model.constant(np.zeros((2, 0), np.float32)), axis=1)
    model.add("Identity", model.constant(np.zeros((0, 3), np.float32)))
    assert_like_onnxruntime(model, target, tmp_path)


# ------------------------------------------------------------------------ ONNX's own backend tests


def backend_tests() -> list[Any]:
    """Tests of single nodes: (name, model, data_sets), most with feeds for shapes and axes too.

    `tests/onnx_suite` makes constants of these, and knows which results are random or disputed.
    """
    from onnx.backend.test.loader import load_model_tests

    return [case for case in load_model_tests(kind="node") if case.name not in {*INEXACT, *DISPUTED}]


def as_arrays(values: list[Any]) -> list[np.ndarray | None]:
    """Tensors as arrays; None for sequences and optionals."""
    arrays = [numpy_helper.to_array(v) if isinstance(v, TensorProto) else v for v in values]
    return [np.asarray(a) if isinstance(a, np.ndarray | np.generic) else None for a in arrays]


def frozen(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """The model with all inputs but the first as initializers: shapes, axes and sizes must be constant."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    del changed.graph.input[1:]
    first = changed.graph.input[0].name
    changed.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in feeds.items() if n != first)
    return changed


def backend_fault(case: Any, target: str, folder: Path) -> str | None:
    """None if the case passes or is refused as a model that hybridc does not support."""
    feeds, expected = (as_arrays(values) for values in case.data_sets[0])
    named = {p.name: a for p, a in zip(case.model.graph.input, feeds, strict=False) if a is not None}
    if len(named) < len(feeds):
        return None
    for model in (case.model, frozen(case.model, named)) if named else (case.model,):
        try:
            got = run(model, named, target, folder)
        except HybridcError as error:
            if error.code.startswith("HC1"):
                continue
            return str(error)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        small = any(e is not None and e.dtype.itemsize < 4 and e.dtype.kind not in "iub" for e in expected)
        pairs = [(g, e) for g, e in zip(got, expected, strict=True) if e is not None]
        return next((f for g, e in pairs if (f := fault(g, e, 2e-2 if small else case.rtol))), None)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_backend_tests_pass_or_are_refused(target, tmp_path):
    cases = backend_tests()
    if target.startswith("cuda"):  # a tenth of the speed: each operator's first two
        of_operator: dict[str, list[Any]] = {}
        for case in cases:
            of_operator.setdefault(case.model.graph.node[-1].op_type, []).append(case)
        cases = [case for named in of_operator.values() for case in named[:2]]
    faults = {}
    for number, case in enumerate(cases):
        found = backend_fault(case, target, tmp_path / str(number))
        if found is not None:
            faults[case.name] = found
    assert not faults
