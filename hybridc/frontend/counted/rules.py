"""Operators that compute each element from those at the same place along padded axes: padding stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from hybridc.frontend.counted.ledger import Axes, Ledger
from hybridc.frontend.expand.builder import Unsupported, constant_of, dtype_of, operand, shape_of
from hybridc.frontend.parameters import TRAINING_BATCH_NORM, TRAINING_DROPOUT
from hybridc.frontend.values import static_shape

Rule = Callable[[ir.Node, Sequence[Axes]], Sequence[Axes]]
"""Padded axes of a node's results, from those of its operands. Raises Unsupported where elements would be
computed from padding, NotYet if shapes must be known first. Requires: shapes of results, where known, are
inferred."""

ALONG = "along an axis whose extent is not fixed"
_UNARY = (
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Cast", "Ceil", "Celu"),
    *("Cos", "Cosh", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity", "IsInf"),
    *("IsNaN", "LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round", "Selu", "Shrink"),
    *("Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Swish", "Tan", "Tanh"),
    "ThresholdedRelu",
)
_BROADCASTING = (
    *("Add", "And", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Clip", "Div", "Equal", "Greater"),
    *("GreaterOrEqual", "Less", "LessOrEqual", "Max", "Mean", "Min", "Mod", "Mul", "Or", "PRelu", "Pow"),
    *("Sub", "Sum", "Where", "Xor"),
)
_BY_SAMPLE = (
    *("AveragePool", "Conv", "ConvInteger", "ConvTranspose", "DepthToSpace", "GlobalAveragePool"),
    *("GlobalLpPool", "GlobalMaxPool", "GroupNormalization", "InstanceNormalization", "LRN"),
    *("LpPool", "MaxPool", "Resize", "SpaceToDepth"),
)
"""What computes each sample, along axis 0 of the first operand, alone."""


def elementwise(node: ir.Node, taken: Sequence[Axes]) -> Sequence[Axes]:
    """Operands broadcast: along a padded axis all are padded by the same count, or have one element."""
    operands = [(value, axes) for value, axes in zip(node.inputs, taken, strict=True) if value is not None]
    shapes = [shape_of(value) for value, _ in operands]
    rank = max(map(len, shapes))
    # by distance from the last axis
    padded = {
        axis - len(shape): number
        for shape, (_, axes) in zip(shapes, operands, strict=True)
        for axis, number in axes.items()
    }
    for at, number in padded.items():
        for shape, (_, axes) in zip(shapes, operands, strict=True):
            axis = len(shape) + at
            if axis >= 0 and axes.get(axis) != number and (shape[axis] != 1 or axis in axes):
                raise Unsupported(f"with operands of different extents {ALONG}")
    return [{rank + at: number for at, number in padded.items()}]


def check_places(axes: Axes) -> None:
    """Raises Unsupported if elements that count have other places along an axis than in the real network:
    one that merges a padded axis into another has padding between them."""
    if not all(map(Ledger.is_prefix, axes.values())):
        raise Unsupported(f"{ALONG}, which merges several ones")


def _only_first(node: ir.Node, taken: Sequence[Axes]) -> Axes:
    if any(taken[1:]):
        raise Unsupported("whose second or a later operand has an extent that is not fixed")
    return taken[0]


def _along_axis(node: ir.Node, taken: Sequence[Axes]) -> Sequence[Axes]:
    """Softmax and the like, whose axis must not be padded."""
    axes, rank = _only_first(node, taken), len(shape_of(operand(node, 0)))
    axis = node.attributes.get_int("axis", -1) % rank
    is_flat = node.op_type in ("Hardmax", "LogSoftmax", "Softmax") and (node.version or 13) < 13
    if any(each == axis or (is_flat and each > axis) for each in axes):
        raise Unsupported(ALONG)
    return [axes]


def without(axes: Axes, removed: Sequence[int], *, keepdims: bool = False) -> Axes:
    """Axes behind a reduction of others, or a Squeeze."""
    if keepdims:
        return axes
    return {axis - sum(each < axis for each in removed): number for axis, number in axes.items()}


def _transpose(node: ir.Node, taken: Sequence[Axes]) -> Sequence[Axes]:
    rank = len(shape_of(operand(node, 0)))
    order = node.attributes.get_ints("perm", None) or range(rank)[::-1]
    return [{to: taken[0][axis] for to, axis in enumerate(order) if axis in taken[0]}]


def listed_axes(node: ir.Node, rank: int) -> list[int] | None:
    """The attribute or second operand `axes`, None where it is left out. Raises Unsupported."""
    axes = node.attributes.get_ints("axes", None)
    if axes is None and len(node.inputs) > 1 and node.inputs[1] is not None:
        axes = constant_of(node.inputs[1], "axes").reshape(-1).tolist()
    return None if axes is None else [int(axis) % rank for axis in axes]


def _squeeze(node: ir.Node, taken: Sequence[Axes]) -> Sequence[Axes]:
    shape = shape_of(operand(node, 0))
    removed = listed_axes(node, len(shape))
    if removed is None:
        raise Unsupported("without axes of what has an extent that is not fixed")
    if any(axis in taken[0] for axis in removed):
        raise Unsupported(ALONG)
    return [without(taken[0], removed)]


def _unsqueeze(node: ir.Node, taken: Sequence[Axes]) -> Sequence[Axes]:
    axes = node.attributes.get_ints("axes", None)
    count = len(axes) if axes is not None else constant_of(operand(node, 1), "axes").size
    rank = len(shape_of(operand(node, 0))) + count
    added = listed_axes(node, rank) or []
    left = [axis for axis in range(rank) if axis not in added]
    return [{left[axis]: number for axis, number in taken[0].items()}]


def _split(node: ir.Node, taken: Sequence[Axes]) -> Sequence[Axes]:
    rank = len(shape_of(operand(node, 0)))
    if node.attributes.get_int("axis", 0) % rank in taken[0]:
        raise Unsupported(ALONG)
    return [taken[0]] * len(node.outputs)


def _packed_product(node: ir.Node, taken: Sequence[Axes]) -> Sequence[Axes]:
    if len(shape_of(operand(node, 0))) - 1 in taken[0]:
        raise Unsupported(ALONG)
    return [taken[0]]


def _gemm(node: ir.Node, taken: Sequence[Axes]) -> Sequence[Axes]:
    axes = _only_first(node, taken)
    if node.attributes.get_int("transA", 0) or set(axes) != {0}:
        raise Unsupported(ALONG)
    if len(node.inputs) > 2 and (static_shape(node.inputs[2]) or (1,))[:-1] not in ((), (1,)):
        raise Unsupported("with a matrix that is added to what has an extent that is not fixed")
    return [axes]


def _by_sample(node: ir.Node, taken: Sequence[Axes]) -> Sequence[Axes]:
    axes = _only_first(node, taken)
    if set(axes) != {0}:
        raise Unsupported(ALONG)
    return [axes] * len(node.outputs)


def _samples_of_all(node: ir.Node, taken: Sequence[Axes]) -> Sequence[Axes]:
    """Sample by sample of every operand."""
    if any(set(axes) - {0} or axes != taken[0] for axes in taken):
        raise Unsupported(ALONG)
    return [taken[0]] * len(node.outputs)


def _by_channel(node: ir.Node, taken: Sequence[Axes]) -> Sequence[Axes]:
    axes = _only_first(node, taken)
    if 1 in axes:
        raise Unsupported(ALONG)
    return [axes] * len(node.outputs)


def _triangle(node: ir.Node, taken: Sequence[Axes]) -> Sequence[Axes]:
    """What is kept follows from an element's place."""
    axes, rank = _only_first(node, taken), len(shape_of(operand(node, 0)))
    check_places({axis: count for axis, count in axes.items() if axis >= rank - 2})
    return [axes]


def _batch_statistics(node: ir.Node, taken: Sequence[Axes]) -> Sequence[Axes]:
    """Of a batch whose examples are counted where gradients are taken (`passes/training`)."""
    axes = _only_first(node, taken)
    if set(axes) != {0} or not isinstance(axes[0], int):
        raise Unsupported(ALONG)
    return [axes] * len(node.outputs)


def _roi_align(node: ir.Node, taken: Sequence[Axes]) -> Sequence[Axes]:
    if taken[0] or dict(taken[1]) != dict(taken[2]) or set(taken[1]) != {0}:
        raise Unsupported("with regions and images of different numbers")
    return [taken[1]]


def _layer_normalization(node: ir.Node, taken: Sequence[Axes]) -> Sequence[Axes]:
    axes, rank = _only_first(node, taken), len(shape_of(operand(node, 0)))
    if any(axis >= node.attributes.get_int("axis", -1) % rank for axis in axes):
        raise Unsupported(ALONG)
    return [axes] * len(node.outputs)


def _by_step(node: ir.Node, taken: Sequence[Axes]) -> Sequence[Axes]:
    """To steps or from them: of one size, or of one for each element of an axis that is not padded."""
    axes, scale = _only_first(node, taken), shape_of(operand(node, 1))
    rank = len(shape_of(operand(node, 0)))
    is_one, is_blocked = scale in ((), (1,)), len(scale) > 1
    if not is_one and (is_blocked or node.attributes.get_int("axis", 1) % rank in axes):
        raise Unsupported(f"with steps that differ {ALONG}")
    return [axes]


def _one_hot(node: ir.Node, taken: Sequence[Axes]) -> Sequence[Axes]:
    axes, rank = _only_first(node, taken), len(shape_of(operand(node, 0))) + 1
    axis = node.attributes.get_int("axis", -1) % rank
    dtype_of(operand(node, 2))
    return [{a + (a >= axis): number for a, number in axes.items()}]


RULES: Mapping[str, Rule] = {
    **dict.fromkeys((*_UNARY, *_BROADCASTING), elementwise),
    "Hardmax": _along_axis,
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _layer_normalization),
    **dict.fromkeys(_BY_SAMPLE, _by_sample),
    **dict.fromkeys(("DequantizeLinear", "QuantizeLinear"), _by_step),
    "BatchNormalization": _by_channel,
    "Gemm": _gemm,
    "GridSample": _samples_of_all,
    TRAINING_BATCH_NORM: _batch_statistics,
    TRAINING_DROPOUT: elementwise,
    "OneHot": _one_hot,
    "PackedProduct": _packed_product,
    "RoiAlign": _roi_align,
    "Split": _split,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Trilu": _triangle,
    "Unsqueeze": _unsqueeze,
}
