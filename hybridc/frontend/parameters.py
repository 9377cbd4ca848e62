"""What training needs of a model: its parameters as inputs, BatchNorm and Dropout as they train."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto

from hybridc.errors import ModelError
from hybridc.frontend import codes
from hybridc.frontend.load import Loaded
from hybridc.frontend.values import constant_array

Chooser = Callable[[str], bool]
"""Whether the parameter of this name is trained."""

TRAINING_BATCH_NORM, TRAINING_DROPOUT = "TrainingBatchNormalization", "TrainingDropout"
"""Operators that no file can have: `to_training_form` makes them of ONNX's."""

_SETTINGS = frozenset({"Resize", "Upsample", "RoiAlign", "QuantizeLinear", "DequantizeLinear"})
"""Their float operands after the first are not parameters."""
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
"""Key of what PyTorch's exporter with dynamo tells of an initializer."""
_PARAMETER = "PARAMETER"


def promote(loaded: Loaded, is_trained: Chooser) -> dict[str, np.ndarray]:
    """Make trained initializers inputs, in place, so that nothing folds, transposes or merges them.

    Frozen ones stay. Running statistics of BatchNorm become inputs, too, unless one of the pair is frozen.
    Returns their values by name, in the file's order; they may be memory maps. Requires: tensors are checked.
    Raises ModelError HC122 if there are none.
    """
    graph = loaded.proto.graph
    statistics = _statistics(graph)
    buffers = _buffers(graph) - {name for pair in statistics for name in pair}
    chosen = {name for name in _candidates(loaded.proto) if name not in buffers and is_trained(name)}
    for pair in statistics:
        if not chosen.issuperset(pair):
            chosen.difference_update(pair)
    if not chosen:
        raise ModelError(
            codes.NO_PARAMETERS,
            "the model has no trainable parameters",
            where=loaded.source.name,
            remedy="trainable parameters are float32 initializers that nodes read and --freeze does not"
            " match, of rank 1 or more unless PyTorch wrote the model",
        )
    tensors = [tensor for tensor in graph.initializer if tensor.name in chosen]
    values = {tensor.name: _value(tensor, loaded) for tensor in tensors}
    kept = [tensor for tensor in graph.initializer if tensor.name not in chosen]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    own_inputs = [value for value in graph.input if value.name not in chosen]  # old files list weights, too
    del graph.input[:]
    graph.input.extend(own_inputs)
    for name, array in values.items():
        graph.input.append(onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape))
    return values


def _candidates(proto: onnx.ModelProto) -> Iterator[str]:
    """Initializers of float32 that some node computes with.

    Scalars are constants, but where PyTorch says that they are parameters, or traced the model: then
    constants are nodes.
    """
    graph, used = proto.graph, set(_operands(proto.graph))
    kinds = _kinds(graph)
    is_traced = proto.producer_name == "pytorch" and not kinds
    for tensor in graph.initializer:
        is_own = is_traced and ":" not in tensor.name  # with a colon the exporter has computed it
        may_train = bool(tensor.dims) or is_own or kinds.get(tensor.name) == _PARAMETER
        if may_train and tensor.data_type == TensorProto.FLOAT and tensor.name in used:
            yield tensor.name


def _operands(graph: onnx.GraphProto) -> Iterator[str]:
    """What nodes compute with, those of loops and branches, too."""
    for node in graph.node:
        yield from filter(None, node.input[:1] if node.op_type in _SETTINGS else node.input)
        for attribute in node.attribute:
            for body in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                yield from _operands(body)


def _kinds(graph: onnx.GraphProto) -> dict[str, str]:
    """What PyTorch says that initializers are, such as PARAMETER or BUFFER; one that traces says nothing."""
    return {v.name: p.value for v in graph.value_info for p in v.metadata_props if p.key == _KIND}


def _buffers(graph: onnx.GraphProto) -> set[str]:
    """Initializers that PyTorch says are no parameters."""
    return {name for name, kind in _kinds(graph).items() if kind != _PARAMETER}


def _statistics(graph: onnx.GraphProto) -> list[tuple[str, str]]:
    """Names of running mean and variance of each BatchNorm."""
    nodes = (node for node in graph.node if node.op_type == "BatchNormalization")
    return [(node.input[3], node.input[4]) for node in nodes]


def _value(tensor: TensorProto, loaded: Loaded) -> np.ndarray:
    if tensor.name in loaded.weights:
        return loaded.weights[tensor.name].numpy()
    if tensor.data_location == TensorProto.EXTERNAL:
        external = ir.serde.deserialize_tensor(tensor)
        assert isinstance(external, ir.ExternalTensor) and loaded.folder is not None
        external.base_dir = loaded.folder
        return external.numpy()
    return onnx.numpy_helper.to_array(tensor)


def to_training_form(graph: ir.Graph, name: str) -> None:
    """BatchNorm by the batch's own statistics where running ones are inputs, and Dropout that drops.

    Frozen running statistics are used by BatchNorm in whatever mode the file asks for. Dropout always drops,
    since the file is trained. Unused second outputs are removed.
    Raises ModelError HC114 for Dropout whose mask is read or whose rate is not known.
    """
    inputs = set(graph.inputs)
    for node in list(graph):
        if node.op_type == "BatchNormalization":
            _drop_unread_outputs(node)
            if inputs.issuperset(node.inputs[3:5]):
                node.op_type = TRAINING_BATCH_NORM
            else:
                node.attributes.pop("training_mode", None)
        elif node.op_type == "Dropout":
            _drop_unread_outputs(node)
            ratio = _dropout_ratio(node)
            if ratio is None or len(node.outputs) > 1:
                raise _dropout_refusal(node, name)
            node.op_type = TRAINING_DROPOUT
            node.attributes["ratio"] = ir.AttrFloat32("ratio", ratio)
            node.resize_inputs(1)


def _dropout_ratio(node: ir.Node) -> float | None:
    """None if it is known at run time only."""
    if len(node.inputs) < 2 or node.inputs[1] is None:
        return node.attributes.get_float("ratio", 0.5)
    ratio = constant_array(node.inputs[1])
    return None if ratio is None else float(ratio)


def _dropout_refusal(node: ir.Node, name: str) -> ModelError:
    return ModelError(
        codes.WRONG_RESULT,
        "Dropout whose mask is used, or whose rate is computed, cannot be trained",
        where=f"{name}: node {node.name!r} (Dropout)",
        remedy="export the network without it",
    )


def _drop_unread_outputs(node: ir.Node) -> None:
    if not any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        node.resize_outputs(1)


# ------------------------------------------------------------------ what exporters change in a model

_REMEDY = (
    "export it for training: torch.onnx.export(model, args, path, dynamo=False,"
    " training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False)"
)
_COPIED_ELEMENTS = 64
"""Smaller arrays may be equal by chance, or because they are new."""


def check_export(loaded: Loaded, values: Mapping[str, np.ndarray]) -> None:
    """Refuse models that would not train like the network they were exported from.

    `values` are those of `promote`. Raises ModelError HC120 or HC121.
    """
    graph, where = loaded.proto.graph, loaded.source.name
    if loaded.proto.producer_name == "pytorch":
        _check_norms(graph, where, values)
        _check_merged(graph, where, values)
    _check_copies(where, values)


def _check_norms(graph: onnx.GraphProto, where: str, values: Mapping[str, np.ndarray]) -> None:
    """PyTorch's exporters leave traces: one renames the weights, the other keeps the result's name."""
    for node in graph.node:
        if not node.op_type.startswith("Conv") or node.input[1] not in values:
            continue
        if node.input[1].startswith("onnx::Conv") or node.output[0].partition("_")[0] == "getitem":
            raise ModelError(
                codes.FOLDED_NORM,
                f"the exporter has folded BatchNorm into {node.input[1]!r}, which changes how the model"
                " trains",
                where=f"{where}: node {node.name!r} ({node.op_type})",
                remedy=f"{_REMEDY}; or freeze such weights: --freeze '{node.input[1]}'",
            )


def _check_merged(graph: onnx.GraphProto, where: str, values: Mapping[str, np.ndarray]) -> None:
    """If not told to train, PyTorch's exporter merges parameters that only happen to be equal."""
    for node in graph.node:
        if node.op_type == "Identity" and node.input[0] in values:
            raise _changed_ties(
                f"the exporter has merged {node.input[0]!r} and {node.output[0]!r} into one parameter, as"
                " their values were equal",
                f"{where}: node {node.name!r} (Identity)",
            )


def _check_copies(where: str, values: Mapping[str, np.ndarray]) -> None:
    """Constant folding copies a tied weight that one of its readers transposes."""
    seen: dict[tuple[tuple[int, ...], bytes], str] = {}
    for name, array in values.items():
        if array.ndim != 2 or array.size < _COPIED_ELEMENTS or array.min() == array.max():
            continue
        transposed = seen.get((array.shape[::-1], _first_row(array.T)))
        if transposed is not None and np.array_equal(values[transposed], array.T):
            raise _changed_ties(f"{name!r} is a transposed copy of {transposed!r}: they were tied", where)
        seen[array.shape, _first_row(array)] = name


def _first_row(array: np.ndarray) -> bytes:
    return array[0].tobytes()


def _changed_ties(what: str, where: str) -> ModelError:
    return ModelError(codes.CHANGED_TIES, what, where=where, remedy=_REMEDY)
