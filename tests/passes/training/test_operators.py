"""Every operator that the frontend takes: its gradient against central differences, or why it has none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

from hybridc.frontend import read_model
from hybridc.frontend.importer import supported_operators
from hybridc.passes.program.program import Program, tensor_shape
from hybridc.passes.training.differentiate import differentiate
from hybridc.passes.training.network import NetworkCopy
from tests.support.gradients import compiled, distinct, normal

WITHOUT = {
    "integers, booleans and shapes": """
        AllClassNMS And ArgMax ArgMin BitCast BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor
        CheckedCount CheckedTrips DynamicQuantizeLinear Equal Greater GreaterOrEqual IsInf IsNaN Less
        LessOrEqual MatMulInteger MatMulInteger16 NonMaxSuppression NonZero Not OptionalHasElement Or
        QuantizeLinear SequenceLength Shape ShiftWithin Size Xor""",
    "of constants, integers or shapes only": "Constant ConstantOfShape DequantizeLinear EyeLike OneHot Range",
    "refused: the shape of the result depends on data": "Compress Positions Suppression Unique",
    "gone before import, or refused": """
        If Loop Scan SequenceEmpty SequenceErase SequenceInsert SequenceMap""",
    "of com.microsoft, which is refused": """
        Attention BiasGelu EmbedLayerNormalization FastGelu SkipLayerNormalization""",
    "what LSTM, GRU and RNN become, but not in training": "Recurrence",
    "what readers of packed weights become, but not in training": "PackedGather PackedProduct",
    "what GroupQueryAttention appends to its past by, but not in training": "AppendedRows",
    "in no file: what the frontend makes for training, tested in `rules`": """
        TrainingBatchNormalization TrainingDropout""",
}
PIECEWISE_CONSTANT = ("Ceil", "Floor", "Hardmax", "Round", "Sign")

UNARY = """
    Abs Acos Asin Asinh Atan Atanh Ceil Cos Cosh Erf Exp Floor Gelu HardSigmoid HardSwish Identity LeakyRelu
    Mish Neg Relu Round Sigmoid Sign Sin Sinh Softplus Softsign Tan Tanh"""
"""Of one operand between -1 and 1."""
SINGLE: dict[str, Any] = {"step": 1e-2, "tolerance": 1e-3}
"""For operators that compute in single precision."""


@dataclass(frozen=True, slots=True)
class Checked:
    operator: str
    inputs: tuple[str, ...]
    output: str
    step: float
    tolerance: float


@dataclass
class Network:
    """Operators side by side, each with inputs of its own."""

    opset: int = 20
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    tested: list[Checked] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)

    def x(self, array: np.ndarray) -> str:
        """What there is a gradient of."""
        return self._named(self.inputs, array)

    def k(self, *values: Any, dtype: Any = None) -> str:
        array = values[0] if len(values) == 1 else values
        return self._named(self.constants, np.asarray(array, dtype))

    def _named(self, values: dict[str, np.ndarray], array: np.ndarray) -> str:
        name = f"v{len(self.inputs) + len(self.constants)}"
        values[name] = array
        return name

    def value(self, operator: str, *inputs: str, results: int = 1, **attributes: Any) -> str:
        """The first result of an operator, for another one to read."""
        names = [f"{operator}_{len(self.nodes)}_{i}" for i in range(results)]
        self.nodes.append(helper.make_node(operator, inputs, names, **attributes))
        return names[0]

    def add(
        self,
        operator: str,
        *inputs: str,
        step: float = 1e-5,
        tolerance: float = 1e-6,
        shape: tuple[int, ...] | None = None,
        **attributes: Any,
    ) -> None:
        """An operator whose first result is held against differences. `shape` is told where ONNX cannot."""
        output = self.value(operator, *inputs, **attributes)
        before = {name for test in self.tested for name in test.inputs}
        own = tuple(name for name in self.inputs if name not in before)
        self.tested.append(Checked(operator, own, output, step, tolerance))
        if shape is None:
            self.outputs.append(onnx.ValueInfoProto(name=output))
        else:
            dtype = helper.np_dtype_to_tensor_dtype(self.inputs[inputs[0]].dtype)
            self.outputs.append(helper.make_tensor_value_info(output, dtype, shape))

    def proto(self) -> onnx.ModelProto:
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in self.inputs.items()
        ]
        constants = [numpy_helper.from_array(array, name) for name, array in self.constants.items()]
        graph = helper.make_graph(self.nodes, "operators", inputs, self.outputs, constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)
        return onnx.shape_inference.infer_shapes(model)


def faults(network: Network) -> dict[str, str]:
    """Results whose change along a random direction is not what the gradients say."""
    model = read_model(network.proto())
    copy = NetworkCopy.of(Program(model.module, model.weights, model.origins), [])
    copy.run(lambda copied, call: None)
    emitter, outputs = copy.emitter, copy.outputs()
    rng = np.random.default_rng(0)
    weights = [rng.uniform(0.5, 1.5, tensor_shape(y)) for y in outputs]
    total: relax.Expr = relax.const(0.0, "float64")
    for y, weight in zip(outputs, weights, strict=True):
        wide = emitter.emit(relax.op.astype(y, "float64"))
        known = emitter.builder.weight(weight, "weights")
        total = emitter.emit(relax.op.add(total, relax.op.sum(relax.op.multiply(wide, known))))
    variables = {info.name: info.variable for info in model.inputs}
    made = differentiate(emitter.builder.finish([total, *outputs], copy.functions()), [*variables.values()])
    run = compiled(made.program)
    values = {variables[name]: array for name, array in network.inputs.items()}
    results = run(values)
    gradients = {name: results[at] for name, (at,) in made.results.items()}
    found: dict[str, str] = {}
    for _ in range(2):
        steps = {name: test.step for test in network.tested for name in test.inputs}
        along = {variables[n]: steps[n] * rng.standard_normal(a.shape) for n, a in network.inputs.items()}
        ahead, behind = (
            run({name: (array + sign * along[name]).astype(array.dtype) for name, array in values.items()})
            for sign in (1, -1)
        )
        for i, test in enumerate(network.tested):
            own = [variables[name] for name in test.inputs if variables[name] in gradients]
            change = float((weights[i] * (ahead[1 + i].astype(np.float64) - behind[1 + i])).sum()) / 2
            expected = float(sum((gradients[name] * along[name]).sum() for name in own))
            scale = sum(np.linalg.norm(gradients[name]) * np.linalg.norm(along[name]) for name in own)
            if abs(change - expected) > test.tolerance * (scale + 1e-3 * test.step):
                found[test.output] = f"{expected / test.step} instead of {change / test.step}"
            if not scale and test.operator not in PIECEWISE_CONSTANT:
                found[test.output] = "no gradient"
    return found


def elements(n: Network) -> None:
    for operator in UNARY.split():
        n.add(operator, n.x(distinct(0, 3, 4)))
    single = distinct(0, 3, 4).astype(np.float32)
    n.add("Elu", n.x(single), alpha=0.3, **SINGLE)
    n.add("Selu", n.x(single), **SINGLE)
    n.add("ThresholdedRelu", n.x(single), alpha=0.3, **SINGLE)
    for operator in ("Sqrt", "Log", "Reciprocal", "Acosh"):
        n.add(operator, n.x(distinct(0, 3, 4) + (1.2 if operator != "Acosh" else 2.5)))
    n.add("Gelu", n.x(distinct(1, 3, 4)), approximate="tanh")
    n.add("Shrink", n.x(distinct(0, 3, 4)), lambd=0.3, bias=0.1)
    n.add("Clip", n.x(distinct(0, 3, 4)), n.k(-0.5), n.k(0.5))
    for operator in ("Add", "Sub", "Mul", "Max", "Min", "Mean", "Sum"):
        n.add(operator, n.x(distinct(0, 3, 1, 5)), n.x(distinct(3, 4, 1)))
    n.add("Div", n.x(normal(0, 3, 1, 5)), n.x(distinct(3, 4, 1) + 2))
    n.add("Pow", n.x(distinct(0, 3, 1, 5) + 1.5), n.x(distinct(3, 4, 1)))
    n.add("PRelu", n.x(distinct(0, 3, 5)), n.x(distinct(1, 5)))
    n.add("Mod", n.x(distinct(0, 3, 4) * 5), n.x(distinct(1, 3, 4) + 2), fmod=1)
    n.add("Where", n.k(True, False, True, True), n.x(normal(0, 3, 4)), n.x(normal(1, 4)))
    n.add("Cast", n.x(normal(0, 3, 4)), to=TensorProto.FLOAT, step=1.0)
    n.add("CastLike", n.x(normal(0, 3, 4)), n.k(0, dtype=np.float32), step=1.0)


def movements(n: Network) -> None:
    n.add("Concat", n.x(normal(0, 2, 3)), n.x(normal(1, 2, 4)), axis=1)
    n.add("Split", n.x(normal(0, 2, 4)), n.k(1, 3), results=2, axis=1)
    n.add("Transpose", n.x(normal(0, 2, 3, 4)), perm=[2, 0, 1])
    n.add("Slice", n.x(normal(0, 5, 6)), n.k([1]), n.k([5]), n.k([1]), n.k([2]))
    n.add("Squeeze", n.x(normal(0, 1, 5)), n.k([0]))
    n.add("Unsqueeze", n.x(normal(0, 5)), n.k([0]))
    n.add("Flatten", n.x(normal(0, 2, 3, 4)))
    n.add("Reshape", n.x(normal(0, 4, 3)), n.k(2, 6))
    n.add("Expand", n.x(normal(0, 3, 1)), n.k(2, 3, 4))
    n.add("Tile", n.x(normal(0, 2, 3)), n.k(2, 1))
    for mode in ("constant", "reflect", "edge", "wrap"):
        n.add("Pad", n.x(normal(0, 3, 4)), n.k(1, 0, 0, 2), mode=mode)
    n.add("Pad", n.x(normal(0, 3, 4)), n.k(-1, 0, 2, -1))  # another function of the same name
    n.add("Gather", n.x(normal(0, 4, 3)), n.k(0, 2, 2))
    n.add("GatherElements", n.x(normal(0, 3, 3)), n.k([[1, 2, 0], [2, 0, 0]]), axis=0)
    n.add("GatherND", n.x(normal(0, 2, 3, 4)), n.k([[0, 1], [1, 0]]))
    n.add("GatherND", n.x(normal(0, 2, 3, 4)), n.k([[1], [0]]), batch_dims=1)
    n.add("TopK", n.x(distinct(0, 3, 5)), n.k([2]), results=2, axis=1)
    n.add("TopK", n.x(distinct(0, 3, 5)), n.k([2]), results=2, axis=0, largest=0)
    n.add("Trilu", n.x(normal(0, 4, 5)), upper=0)
    n.add("CumSum", n.x(normal(0, 3, 4)), n.k(1))
    n.add("DepthToSpace", n.x(normal(0, 1, 8, 2, 3)), blocksize=2)
    n.add("SpaceToDepth", n.x(normal(0, 1, 2, 4, 6)), blocksize=2)
    n.add("Resize", n.x(normal(0, 1, 2, 3, 4)), "", "", n.k(1, 2, 6, 8), mode="linear", step=1.0)
    n.add("ConcatFromSequence", n.value("SequenceConstruct", n.x(normal(0, 2)), n.x(normal(1, 3))), axis=0)
    n.add("SequenceAt", n.value("SplitToSequence", n.x(normal(0, 4, 3)), n.k(2), axis=0), n.k(1))
    n.add("OptionalGetElement", n.value("Optional", n.x(normal(0, 2))))


def scatters(n: Network) -> None:
    for reduction in ("none", "add", "mul", "max", "min"):
        rows, cells = n.k([[1], [2]]), n.k([[1, 0, 2]])
        n.add("ScatterND", n.x(distinct(0, 3, 3)), rows, n.x(distinct(1, 2, 3)), reduction=reduction)
        n.add("ScatterElements", n.x(distinct(0, 3, 3)), cells, n.x(distinct(1, 1, 3)), reduction=reduction)
    unpooled = n.k([[[[0, 3], [8, 15]]]])
    n.add("MaxUnpool", n.x(normal(0, 1, 1, 2, 2)), unpooled, kernel_shape=[2, 2], strides=[2, 2])


def products(n: Network) -> None:
    n.add("MatMul", n.x(normal(0, 2, 3, 4)), n.x(normal(1, 4, 5)))
    n.add(
        "Gemm", n.x(normal(0, 4, 3)), n.x(normal(1, 5, 4)), n.x(normal(2, 5)), transA=1, transB=1, alpha=0.5
    )
    n.add("Einsum", n.x(normal(0, 2, 3, 4)), n.x(normal(1, 2, 4, 5)), equation="bij,bjk->bik")
    n.add("Einsum", n.x(normal(0, 2, 3)), n.x(normal(1, 4)), equation="ij,k->ikj")
    n.add("Conv", n.x(normal(0, 1, 2, 5, 5)), n.x(normal(1, 3, 2, 3, 3)), n.x(normal(2, 3)))
    n.add("ConvTranspose", n.x(normal(0, 1, 2, 4, 4)), n.x(normal(1, 2, 3, 3, 3)), strides=[2, 2])
    n.add("NegativeLogLikelihoodLoss", n.x(normal(0, 3, 4)), n.k(0, 2, 1))
    n.add("SoftmaxCrossEntropyLoss", n.x(normal(0, 3, 4)), n.k(0, 2, 1))


def reductions(n: Network) -> None:
    for operator in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare"):
        n.add(f"Reduce{operator}", n.x(distinct(0, 3, 4, 5) + 2 * (operator == "LogSum")), n.k(0, 2))
    n.add("MaxPool", n.x(distinct(0, 1, 2, 6, 6)), kernel_shape=[2, 2])
    n.add("AveragePool", n.x(normal(0, 1, 2, 6, 6)), kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    n.add("LpPool", n.x(normal(0, 1, 2, 6, 6)), kernel_shape=[2, 2], strides=[2, 2])
    for operator in ("GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool"):
        n.add(operator, n.x(distinct(0, 2, 3, 4, 5)))


def norms(n: Network) -> None:
    affine = [n.x(normal(i, 3)) for i in (1, 2)]
    n.add("BatchNormalization", n.x(normal(0, 2, 3, 4)), *affine, n.k(normal(3, 3)), n.k(0.5, 1.0, 2.0))
    n.add("InstanceNormalization", n.x(normal(0, 2, 3, 4)), n.x(normal(1, 3)), n.x(normal(2, 3)))
    single = [n.x(normal(i, *shape).astype(np.float32)) for i, shape in enumerate([(2, 3, 4), (4,), (4,)])]
    n.add("LayerNormalization", *single, **SINGLE)
    n.add("LRN", n.x(normal(0, 2, 4, 3, 3).astype(np.float32)), size=3, alpha=0.5, **SINGLE)
    image = n.x(normal(0, 2, 3, 4, 5).astype(np.float32))
    n.add("MeanVarianceNormalization", image, axes=[0, 2, 3], shape=(2, 3, 4, 5), **SINGLE)
    for operator in ("Softmax", "LogSoftmax", "Hardmax"):
        n.add(operator, n.x(distinct(0, 3, 4, 5)), axis=1)
    n.add("Dropout", n.x(normal(0, 3, 4)))


def regions(n: Network) -> None:
    theta = n.x(normal(0, 2, 2, 3))
    n.add("AffineGrid", theta, n.k(2, 3, 4, 5), tolerance=1e-5)
    points = np.random.default_rng(1).uniform(-1.3, 1.3, (2, 3, 3, 2))
    n.add("GridSample", n.x(normal(0, 2, 3, 4, 5)), n.x(points))
    corners = np.array([[0.3, 0.7, 4.1, 5.2], [1, 2, 5.3, 3.9]])
    data = n.x(normal(0, 2, 3, 6, 7))
    n.add("RoiAlign", data, n.k(corners), n.k(1, 0), output_height=2, output_width=3)
    boxes = n.k([[0, 0, 0, 3, 3], [1, 1, 2, 5, 4]], dtype=np.float64)
    n.add("MaxRoiPool", n.x(distinct(0, 2, 2, 6, 6)), boxes, pooled_shape=[2, 2])


def of_other_opsets() -> list[Network]:
    old, older, new, newest = Network(9), Network(10), Network(21), Network(23)
    old.add("Upsample", old.x(normal(0, 1, 2, 3, 4)), old.k(1, 1, 2, 2, dtype=np.float32), step=1.0)
    older.add("Scatter", older.x(normal(0, 3, 3)), older.k([[1, 0, 2]]), older.x(normal(1, 1, 3)))
    groups = [new.x(normal(i, *shape)) for i, shape in enumerate([(2, 4, 3), (4,), (4,)])]
    new.add("GroupNormalization", *groups, num_groups=2, shape=(2, 4, 3), **SINGLE)
    newest.add("RMSNormalization", newest.x(normal(0, 2, 3, 4)), newest.x(normal(1, 3, 4)), axis=1)
    return [old, older, new, newest]


def networks() -> list[Network]:
    made = []
    families: list[Callable[[Network], None]] = [
        elements,
        movements,
        scatters,
        products,
        reductions,
        norms,
        regions,
    ]
    for family in families:
        network = Network()
        family(network)
        made.append(network)
    return [*made, *of_other_opsets()]


NETWORKS = networks()


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.nodes[0].op_type)
def test_gradients_are_those_of_the_operators(network: Network) -> None:
    assert not faults(network)


def test_every_operator_has_a_gradient_or_a_reason() -> None:
    tested = {node.op_type for network in NETWORKS for node in network.nodes}
    without = {name for names in WITHOUT.values() for name in names.split()}
    assert tested | without == supported_operators()
    assert not tested & without
