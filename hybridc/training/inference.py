"""The inference form of a model that was exported for training."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, ValueInfoProto, helper

from hybridc.labels import LOSS_NODES

LOG_SOFTMAX_OF_AN_AXIS = 13
"""The first opset whose LogSoftmax is of one axis, as that of a loss is."""

Nodes = list[NodeProto]


def to_inference(model: ModelProto, *, has_loss: bool) -> None:
    """Change a model in place: BatchNorm by running statistics, Dropout off, and no loss.

    With `has_loss` the first output is the loss. It goes with all that only it needs, labels among it, if the
    model has other outputs; a loss node that is the only output gives way to the scores that it reads. A loss
    of other operators that is the only output stays, since nothing tells what else is the result. What
    Dropout would drop and what BatchNorm would update is still there: the model can be trained again.
    """
    read = {name for nodes in _bodies(model) for node in nodes for name in _read(node)}
    read |= {value.name for value in model.graph.output}
    read |= {name for function in model.functions for name in function.output}
    for nodes in _bodies(model):
        _switch_off(nodes, read)
    if has_loss:
        _remove_loss(model)


def _bodies(model: ModelProto) -> Iterator[Nodes]:
    """The nodes of the graph, of its subgraphs and of functions: lists that may be changed."""
    found = [model.graph.node, *(function.node for function in model.functions)]
    while found:
        nodes = found.pop()
        found += [graph.node for node in nodes for graph in _subgraphs(node)]
        yield nodes


def _subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from attribute.graphs


def _read(node: NodeProto) -> Iterator[str]:
    """Names that a node reads, and those that its subgraphs read or return."""
    yield from filter(None, node.input)
    for graph in _subgraphs(node):
        for inner in graph.node:
            yield from _read(inner)
        yield from (value.name for value in graph.output)


def _switch_off(nodes: Nodes, read: set[str]) -> None:
    """Outputs of training that somebody reads are what they are in inference."""
    more = []
    for node in nodes:
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type == "Dropout":
            del node.input[2:]  # without `training_mode` it is off
            if not read.intersection(node.output[1:]):
                del node.output[1:]
        elif node.op_type == "BatchNormalization":
            kept = [a for a in node.attribute if a.name != "training_mode"]
            del node.attribute[:]
            node.attribute.extend(kept)
            for statistic, output in zip(node.input[3:5], node.output[1:3], strict=False):
                if output in read:
                    more.append(helper.make_node("Identity", [statistic], [output], f"{output}_in_inference"))
            del node.output[1:]
    for node in more:
        nodes.insert(0, node)


def _remove_loss(model: ModelProto) -> None:
    graph = model.graph
    before = set(_live_names(graph))
    if len(graph.output) > 1:
        del graph.output[0]
    else:
        scores = _scores(graph)
        if scores is None:
            return
        graph.output[0].CopyFrom(scores)
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    if opset >= LOG_SOFTMAX_OF_AN_AXIS:
        _keep_logarithms(graph)
    _prune(graph, before)


def _scores(graph: GraphProto) -> ValueInfoProto | None:
    """What the loss node that makes the only output reads; None if another node makes it."""
    output = graph.output[0]
    node = next((node for node in graph.node if node.output[:1] == [output.name]), None)
    if node is None or node.op_type not in LOSS_NODES:
        return None
    known = {value.name: value for value in (*graph.input, *graph.value_info)}
    scores, labels = node.input[:2]
    if scores in known:
        return known[scores]
    if labels not in known:
        return None
    batch, *rest = (
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
        for dim in known[labels].type.tensor_type.shape.dim
    )
    shape = [batch, None, *rest]  # an output must have a rank
    return helper.make_tensor_value_info(scores, output.type.tensor_type.elem_type, shape)


def _keep_logarithms(graph: GraphProto) -> None:
    """A loss node of which only the logarithms of the probabilities are still read computes only these."""
    live = set(_live_names(graph))
    for node in graph.node:
        is_read = [output in live for output in node.output]
        if node.op_type == "SoftmaxCrossEntropyLoss" and is_read == [False, True]:
            node.CopyFrom(helper.make_node("LogSoftmax", node.input[:1], node.output[1:], node.name, axis=1))


def _live_names(graph: GraphProto) -> Iterator[str]:
    """Names of all values that the outputs depend on."""
    producers = {output: node for node in graph.node for output in node.output if output}
    found: set[str] = set()
    waiting = [value.name for value in graph.output]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        yield name
        if name in producers:
            waiting.extend(_read(producers[name]))


def _prune(graph: GraphProto, before: set[str]) -> None:
    """Remove nodes and weights that no output depends on, and inputs that outputs depended on `before`."""
    live = set(_live_names(graph))
    nodes = [node for node in graph.node if live.intersection(node.output)]
    weights = [tensor for tensor in graph.initializer if tensor.name in live]
    inputs = [value for value in graph.input if value.name in live or value.name not in before]
    known = [value for value in graph.value_info if value.name in live]
    for field, kept in (
        (graph.node, nodes),
        (graph.initializer, weights),
        (graph.input, inputs),
        (graph.value_info, known),
    ):
        del field[:]
        field.extend(kept)
