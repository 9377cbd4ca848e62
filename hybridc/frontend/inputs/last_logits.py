"""Logits of one token of each sequence, as generating text needs: the head of a decoder for one row each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, MutableSequence, Set

from onnx import GraphProto, NodeProto, TensorProto, TensorShapeProto, ValueInfoProto, helper

from hybridc.errors import UsageError
from hybridc.frontend.load import Loaded

LAST_TOKEN = "last_token"
"""The input that says which: int64 [batch], from 0."""
LOGITS, _IDS = "logits", "input_ids"
_HEADS = ("MatMul", "MatMulNBits")
"""Products of rows with a matrix, in whose other forms rows may be columns."""
_OF_ELEMENTS = ("Add", "Cast", "Div", "Mul", "Tanh")
"""What may follow the head: a bias, a scale, a cap, whose other operand has no rows."""
_LEAST_OPSET = 12
"""From which on GatherND has batch dimensions."""


def with_last_logits(model: Loaded) -> Loaded:
    """The model with `logits` [batch, 1, vocabulary] of the tokens that a new input names, `last_token`.

    Rows are taken in front of the head where that is a product with a matrix, perhaps scaled, else of the
    logits. Raises UsageError HC539 if it is no decoder, or of an opset that is too old.
    """
    model = model.copy()
    graph, name = model.proto.graph, model.source.name
    inputs = {value.name: value for value in graph.input}
    logits = next((value for value in graph.output if value.name == LOGITS), None)
    makers = {output: node for node in graph.node for output in node.output}
    if _IDS not in inputs or logits is None or LOGITS not in makers or len(_dims(logits)) != 3:
        what = f"the model has not {_IDS}, and {LOGITS} [batch, tokens, vocabulary]"
        raise _refused(name, what, "remove the option")
    if LAST_TOKEN in inputs:
        raise _refused(name, f"the model has an input {LAST_TOKEN!r}", "remove the option")
    opset = next((each.version for each in model.proto.opset_import if each.domain in ("", "ai.onnx")), 0)
    if opset < _LEAST_OPSET:
        what = f"the model is of opset {opset}"
        raise _refused(name, what, f"export it for opset {_LEAST_OPSET} or later")
    fewer = _take_rows(graph, makers)
    batch = _dims(inputs[_IDS])[0]
    graph.input.append(helper.make_tensor_value_info(LAST_TOKEN, TensorProto.INT64, [None]))
    _dims(graph.input[-1])[0].CopyFrom(batch)
    _dims(logits)[1].Clear()
    _dims(logits)[1].dim_value = 1
    # what the file says of these is of all rows
    kept = [each for each in graph.value_info if each.name not in fewer]
    del graph.value_info[:]
    graph.value_info.extend(kept)
    return model


def _dims(value: ValueInfoProto) -> MutableSequence[TensorShapeProto.Dimension]:
    return value.type.tensor_type.shape.dim


def _take_rows(graph: GraphProto, makers: Mapping[str, NodeProto]) -> Set[str]:
    """Put what takes one row of each sequence in front of the head, or behind everything; names of results
    that may have fewer rows then."""
    head = _head(graph, makers)
    nodes = list(graph.node)
    if head is None:
        last = makers[LOGITS]
        rows = f"{LOGITS} of all tokens"
        last.output[:] = [rows if each == LOGITS else each for each in last.output]
        made = [*nodes, *_one_row(rows, LOGITS)]
    else:
        row = f"{head.input[0]} of {LAST_TOKEN}"
        at = next(i for i, node in enumerate(nodes) if node is head)
        made = [*nodes[:at], *_one_row(head.input[0], row), *nodes[at:]]
        head.input[0] = row
    fewer = {LOGITS} if head is None else {name for node in nodes[at:] for name in node.output}
    copies = [NodeProto.FromString(node.SerializeToString()) for node in made]
    del graph.node[:]
    graph.node.extend(copies)
    return fewer


def _one_row(rows: str, row: str) -> list[NodeProto]:
    """[batch, tokens, n] to [batch, 1, n]."""
    shape, places = f"{row}, shape of places", f"{row}, places"
    return [
        helper.make_node("Constant", [], [shape], value_ints=[0, 1, 1]),
        helper.make_node("Reshape", [LAST_TOKEN, shape], [places]),
        helper.make_node("GatherND", [rows, places], [row], batch_dims=1),
    ]


def _head(graph: GraphProto, makers: Mapping[str, NodeProto]) -> NodeProto | None:
    """The product that makes the logits, if nothing else reads what it makes."""
    read = Counter(name for node in graph.node for name in node.input)
    read.update(value.name for value in graph.output)
    small = {each.name for each in graph.initializer if len(each.dims) < 2}
    small |= {each for node in graph.node if _is_small_constant(node) for each in node.output}
    node = makers[LOGITS]
    while all(read[each] <= 1 for each in node.output):
        if node.op_type in _HEADS:
            return node
        operands = [name for name in node.input if name not in small]
        if node.op_type not in _OF_ELEMENTS or len(operands) != 1 or operands[0] not in makers:
            return None
        node = makers[operands[0]]
    return None


def _is_small_constant(node: NodeProto) -> bool:
    return node.op_type == "Constant" and all(len(each.t.dims) < 2 for each in node.attribute)


def _refused(name: str, what: str, remedy: str) -> UsageError:
    return UsageError("HC539", f"--last-logits is given, and {what}", where=name, remedy=remedy)
