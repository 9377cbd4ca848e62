"""ONNX graphs in PyTorch: what gradients, training steps and loss curves are compared with.

A small interpreter, independent of the compiler: each node becomes a call of torch, in float64 or float32, so
that autograd differentiates the graph. Parameters have the names of their initializers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import Tensor

Inputs = Sequence[Any]
"""Tensors of a node, None where an optional one is left out."""
Attributes = Mapping[str, Any]
Operator = Callable[[Inputs, Attributes], Tensor | tuple[Tensor, ...]]


class TorchReference:
    """A model whose float initializers of rank 1 and more are parameters, but for running statistics.

    In training BatchNormalization uses statistics of the batch and updates the running ones, as torch does;
    Dropout is always the identity.
    """

    def __init__(
        self, model: onnx.ModelProto, *, dtype: torch.dtype = torch.float64, training: bool = True
    ) -> None:
        self.graph = model.graph
        self.training = training
        self.dtype = dtype
        self.relu_inputs: list[Tensor] = []
        """What went into each ReLU: where rounding decides about a sign, gradients cannot be compared."""
        statistics = statistics_of(model)
        self.parameters: dict[str, Tensor] = {}
        self.constants: dict[str, Tensor] = {}
        for initializer in self.graph.initializer:
            tensor = self._tensor(numpy_helper.to_array(initializer))
            if tensor.is_floating_point() and tensor.ndim and initializer.name not in statistics:
                self.parameters[initializer.name] = tensor.requires_grad_()
            else:
                self.constants[initializer.name] = tensor

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """Outputs of the model by name."""
        values = self.constants | self.parameters | {n: self._tensor(array) for n, array in feeds.items()}
        for node in self.graph.node:
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            results = self._run(node, [values[name] if name else None for name in node.input], attributes)
            values.update(zip(node.output, results, strict=False))
        return {output.name: values[output.name] for output in self.graph.output}

    def gradients(self, loss: Tensor) -> dict[str, np.ndarray]:
        """Of all parameters that the loss depends on."""
        found = torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True)
        return {n: g.numpy() for n, g in zip(self.parameters, found, strict=True) if g is not None}

    def _tensor(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.array(array))
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def _run(self, node: onnx.NodeProto, inputs: Inputs, attributes: Attributes) -> tuple[Tensor, ...]:
        if node.op_type == "BatchNormalization":
            return (self._batch_norm(inputs, attributes),)
        if node.op_type in ("Constant", "Cast"):
            result = OPERATORS[node.op_type](inputs, attributes)
            assert isinstance(result, Tensor)
            return (result.to(self.dtype) if result.is_floating_point() else result,)
        if node.op_type == "Relu":
            self.relu_inputs.append(inputs[0].detach())
        result = OPERATORS[node.op_type](inputs, attributes)
        return result if isinstance(result, tuple) else (result,)

    def _batch_norm(self, inputs: Inputs, attributes: Attributes) -> Tensor:
        x, scale, bias, mean, variance = inputs
        momentum = 1 - attributes.get("momentum", 0.9)
        epsilon = attributes.get("epsilon", 1e-5)
        return F.batch_norm(x, mean, variance, scale, bias, self.training, momentum, epsilon)


def statistics_of(model: onnx.ModelProto) -> set[str]:
    """Names of running means and variances."""
    nodes = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    return {name for node in nodes for name in node.input[3:5]}


def parameter_names(model: onnx.ModelProto) -> list[str]:
    """Initializers that are trained: float, of rank 1 or more, and no statistics."""
    statistics = statistics_of(model)
    return [
        t.name
        for t in model.graph.initializer
        if t.dims and t.data_type == onnx.TensorProto.FLOAT and t.name not in statistics
    ]


# --------------------------------------------------------------------------- windows over spatial axes


def _conv(inputs: Inputs, a: Attributes) -> Tensor:
    x, weight, bias = (*inputs, None)[:3]
    rank = x.ndim - 2
    x, padding = _even(x, _pads(a, rank), 0.0)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    strides, dilations = a.get("strides", [1] * rank), a.get("dilations", [1] * rank)
    return convolve(x, weight, bias, strides, padding, dilations, a.get("group", 1))


def _conv_transpose(inputs: Inputs, a: Attributes) -> Tensor:
    x, weight, bias = (*inputs, None)[:3]
    rank = x.ndim - 2
    convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
    y = convolve(
        x,
        weight,
        bias,
        a.get("strides", [1] * rank),
        0,
        a.get("output_padding", [0] * rank),
        a.get("group", 1),
        a.get("dilations", [1] * rank),
    )
    return _padded(y, [-n for n in a.get("pads", [0] * 2 * rank)], 0.0)


def _max_pool(inputs: Inputs, a: Attributes) -> Tensor:
    (x,) = inputs
    rank = x.ndim - 2
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[rank - 1]
    x, padding = _even(x, _pads(a, rank), -math.inf)
    strides, dilations = a.get("strides", [1] * rank), a.get("dilations", [1] * rank)
    return pool(x, a["kernel_shape"], strides, padding, dilations, ceil_mode=bool(a.get("ceil_mode", 0)))


def _average_pool(inputs: Inputs, a: Attributes) -> Tensor:
    """The mean of the window's elements that lie in the image, or with `count_include_pad` in its padding."""
    (x,) = inputs
    rank, counts_padding = x.ndim - 2, bool(a.get("count_include_pad", 0))
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[rank - 1]
    window = a["kernel_shape"], a.get("strides", [1] * rank)
    rest = bool(a.get("ceil_mode", 0)), counts_padding
    even, padding = _even(x, _pads(a, rank), 0.0)
    if even is x or counts_padding:
        return pool(even, *window, padding, *rest)
    share, _ = _even(torch.ones_like(x), _pads(a, rank), 0.0)
    return pool(even, *window, padding, *rest) / pool(share, *window, padding, *rest)


def _pads(a: Attributes, rank: int) -> list[int]:
    if a.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        raise NotImplementedError("auto_pad")
    return list(a.get("pads", [0] * 2 * rank))


def _even(x: Tensor, pads: list[int], value: float) -> tuple[Tensor, list[int]]:
    """`(x, padding)` for torch, which pads both ends alike; x is padded here where they differ."""
    rank = len(pads) // 2
    if pads[:rank] == pads[rank:]:
        return x, pads[:rank]
    return _padded(x, pads, value), [0] * rank


def _padded(x: Tensor, pads: Sequence[int], value: float) -> Tensor:
    """ONNX lists beginnings of the last axes and then their ends; torch pairs, the last axis first."""
    rank = len(pads) // 2
    pairs = [n for axis in reversed(range(rank)) for n in (pads[axis], pads[rank + axis])]
    return F.pad(x, pairs, value=value) if any(pairs) else x


def _lrn(inputs: Inputs, a: Attributes) -> Tensor:
    """ONNX's definition over channels; torch's own pads an even size the other way round."""
    (x,), size = inputs, a["size"]
    squares = F.pad(
        x.square().flatten(2).transpose(1, 2).unsqueeze(2), [(size - 1) // 2, size // 2, 0, 0]
    ).squeeze(2)
    sums = squares.unfold(2, size, 1).sum(-1).transpose(1, 2).reshape(x.shape)
    return x * (a.get("bias", 1.0) + a.get("alpha", 1e-4) / size * sums) ** -a.get("beta", 0.75)


def _resize(inputs: Inputs, a: Attributes) -> Tensor:
    """By whole factors: nearest, or linear with half_pixel or align_corners."""
    x, _, scales, *sizes = (*inputs, None, None)[:4]
    to = sizes[0] if sizes and sizes[0] is not None else torch.round(scales * torch.tensor(x.shape)).long()
    spatial = [int(n) for n in to[2:]]
    if a.get("mode", b"nearest") == b"nearest":
        factors = [n / old for n, old in zip(spatial, x.shape[2:], strict=True)]
        for axis, factor in enumerate(factors):
            if factor != int(factor):
                raise NotImplementedError("nearest Resize by a fraction")
            x = x.repeat_interleave(int(factor), dim=2 + axis)
        return x
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[len(spatial)]
    corners = a.get("coordinate_transformation_mode", b"half_pixel") == b"align_corners"
    return F.interpolate(x, size=spatial, mode=mode, align_corners=corners)


def _depth_to_space(inputs: Inputs, a: Attributes) -> Tensor:
    (x,), block = inputs, a["blocksize"]
    n, c, h, w = x.shape
    if a.get("mode", b"DCR") == b"CRD":
        return F.pixel_shuffle(x, block)
    split = x.reshape(n, block, block, c // block**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return split.reshape(n, c // block**2, h * block, w * block)


# --------------------------------------------------------------------------------- matrices and shapes


def _gemm(inputs: Inputs, a: Attributes) -> Tensor:
    x, y, *c = inputs
    x, y = x.T if a.get("transA", 0) else x, y.T if a.get("transB", 0) else y
    product = a.get("alpha", 1.0) * (x @ y)
    return product + a.get("beta", 1.0) * c[0] if c and c[0] is not None else product


def _layer_norm(inputs: Inputs, a: Attributes) -> Tensor:
    x, scale, bias = (*inputs, None)[:3]
    axis = a.get("axis", -1) % x.ndim
    return F.layer_norm(x, x.shape[axis:], scale, bias, a.get("epsilon", 1e-5))


def _flatten(inputs: Inputs, a: Attributes) -> Tensor:
    (x,) = inputs
    axis = a.get("axis", 1) % (x.ndim + 1)
    return x.reshape(math.prod(x.shape[:axis]), -1)


def _reshape(inputs: Inputs, a: Attributes) -> Tensor:
    x, shape = inputs
    return x.reshape([x.shape[i] if n == 0 else n for i, n in enumerate(shape.tolist())])


def _axes(inputs: Inputs, a: Attributes) -> list[int]:
    """An attribute up to some opset, an input from there on."""
    return inputs[1].tolist() if len(inputs) > 1 and inputs[1] is not None else list(a.get("axes", []))


def _squeeze(inputs: Inputs, a: Attributes) -> Tensor:
    return inputs[0].squeeze(tuple(_axes(inputs, a)))


def _unsqueeze(inputs: Inputs, a: Attributes) -> Tensor:
    x, axes = inputs[0], _axes(inputs, a)
    for axis in sorted(axis % (x.ndim + len(axes)) for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _reduce(reduction: Callable[..., Tensor]) -> Operator:
    def run(inputs: Inputs, a: Attributes) -> Tensor:
        axes = _axes(inputs, a) or list(range(inputs[0].ndim))
        return reduction(inputs[0], dim=axes, keepdim=bool(a.get("keepdims", 1)))

    return run


def _split(inputs: Inputs, a: Attributes) -> tuple[Tensor, ...]:
    x, axis = inputs[0], a.get("axis", 0)
    return x.split(inputs[1].tolist(), axis) if len(inputs) > 1 else x.chunk(a["num_outputs"], axis)


def _slice(inputs: Inputs, a: Attributes) -> Tensor:
    x, starts, ends, axes, steps = (*inputs, None, None)[:5]
    axes = torch.arange(len(starts)) if axes is None else axes
    where = [slice(None)] * x.ndim
    for i, axis in enumerate(axes.tolist()):
        where[axis] = slice(int(starts[i]), int(ends[i]), 1 if steps is None else int(steps[i]))
    return x[tuple(where)]


def _gather(inputs: Inputs, a: Attributes) -> Tensor:
    x, indices = inputs
    axis = a.get("axis", 0) % x.ndim
    rows = x.index_select(axis, (indices % x.shape[axis]).flatten())
    return rows.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


def _clip(inputs: Inputs, a: Attributes) -> Tensor:
    low, high = (*inputs[1:], None, None)[:2]
    return inputs[0].clamp(low, high)


def _constant(inputs: Inputs, a: Attributes) -> Tensor:
    return torch.from_numpy(np.array(numpy_helper.to_array(a["value"])))


def _cast(inputs: Inputs, a: Attributes) -> Tensor:
    return inputs[0].to(torch.from_numpy(np.empty(0, onnx.helper.tensor_dtype_to_np_dtype(a["to"]))).dtype)


def _pad(inputs: Inputs, a: Attributes) -> Tensor:
    return _padded(inputs[0], inputs[1].tolist(), float(inputs[2]) if len(inputs) > 2 else 0.0)


def _elementwise(function: Callable[..., Tensor]) -> Operator:
    return lambda inputs, a: function(*inputs)


OPERATORS: dict[str, Operator] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "GlobalAveragePool": lambda i, a: i[0].mean(dim=tuple(range(2, i[0].ndim)), keepdim=True),
    "LRN": _lrn,
    "Resize": _resize,
    "DepthToSpace": _depth_to_space,
    "Gemm": _gemm,
    "MatMul": _elementwise(torch.matmul),
    "LayerNormalization": _layer_norm,
    "Softmax": lambda i, a: i[0].softmax(a.get("axis", -1)),
    "LogSoftmax": lambda i, a: i[0].log_softmax(a.get("axis", -1)),
    "Flatten": _flatten,
    "Reshape": _reshape,
    "Transpose": lambda i, a: i[0].permute(a.get("perm", list(range(i[0].ndim))[::-1])),
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Concat": lambda i, a: torch.cat(list(i), a["axis"]),
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "Expand": lambda i, a: i[0] * torch.ones(i[1].tolist(), dtype=i[0].dtype),
    "Shape": lambda i, a: torch.tensor(i[0].shape[a.get("start", 0) : a.get("end")]),
    "Pad": _pad,
    "ReduceMean": _reduce(torch.mean),
    "ReduceSum": _reduce(torch.sum),
    "ReduceMax": _reduce(torch.amax),
    "Clip": _clip,
    "Relu": _elementwise(F.relu),
    "LeakyRelu": lambda i, a: F.leaky_relu(i[0], a.get("alpha", 0.01)),
    "PRelu": lambda i, a: torch.where(i[0] > 0, i[0], i[1] * i[0]),
    "Gelu": lambda i, a: F.gelu(i[0], approximate=a.get("approximate", b"none").decode()),
    "HardSwish": _elementwise(F.hardswish),
    "Constant": _constant,
    "Cast": _cast,
    "Identity": _elementwise(lambda x: x),
    "Dropout": lambda i, a: i[0],
    "Where": _elementwise(torch.where),
    "Not": _elementwise(torch.logical_not),
    "Add": _elementwise(torch.add),
    "Sub": _elementwise(torch.sub),
    "Mul": _elementwise(torch.mul),
    "Div": _elementwise(torch.div),
    "Pow": _elementwise(torch.pow),
    "Sqrt": _elementwise(torch.sqrt),
    "Exp": _elementwise(torch.exp),
    "Log": _elementwise(torch.log),
    "Neg": _elementwise(torch.neg),
    "Abs": _elementwise(torch.abs),
    "Reciprocal": _elementwise(torch.reciprocal),
    "Erf": _elementwise(torch.erf),
    "Tanh": _elementwise(torch.tanh),
    "Sigmoid": _elementwise(torch.sigmoid),
    "Softplus": _elementwise(F.softplus),
}
"""Every operator of the models of `hybridc.models`, and what exporters put beside them."""
