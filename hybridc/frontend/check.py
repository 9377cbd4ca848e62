"""Refuse a model that is malformed, unsafe or beyond what hybridc knows; put its nodes in order."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator, Sequence

import onnx
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto

from hybridc.errors import ModelError
from hybridc.frontend import codes
from hybridc.frontend.expand.table import MICROSOFT, is_expanded
from hybridc.frontend.load import Loaded
from hybridc.frontend.opsets import NEWEST_OPSET, OLDEST_OPSET
from hybridc.frontend.tensors import MOST_DECIDING
from hybridc.frontend.values import NARROW_TYPES, SUPPORTED_TYPES

MAX_NODES = 200_000
"""Nodes after inlining: nested functions can ask for exponentially many."""
_DEFAULT_DOMAINS = ("", "ai.onnx")
_CHECK_AGAIN = "export the network again; onnx.checker.check_model(model, full_check=True) gives more details"
_UNSUPPORTED_TYPE = re.compile(r"\(op_type:(\w+),.*typestr: (\w+), has unsupported type: (\S+)")
"""Of a message of onnx: the operator, the name of the type that varies, and which type it may not be."""


def check_model(loaded: Loaded) -> None:
    """Check operators, names and types, and sort the nodes topologically in place.

    Requires: tensors are checked, nodes are named, operators are of known domains. Raises ModelError HC107 to
    HC109 and HC118.
    """
    model, name = loaded.proto, loaded.source.name
    _check_functions(model, name)
    _check_definitions(model.graph, name)
    _sort_nodes(model.graph, name)
    _run_onnx_checker(model, model.graph.input, name)


def check_with_inputs(checked: Loaded, inputs: Iterable[ValueInfoProto]) -> None:
    """Check once more a model that is checked but has `inputs` of these shapes. Raises ModelError HC109."""
    _run_onnx_checker(checked.proto, inputs, checked.source.name)


def check_domains(loaded: Loaded, refusals: codes.Refusals) -> None:
    """Refuse operators that neither ONNX nor the model defines: ModelError HC105."""
    model, name = loaded.proto, loaded.source.name
    functions = {(f.domain, f.name) for f in model.functions}
    unknown: dict[str, list[str]] = {}
    nodes = [*_nodes_within(model.graph.node)]
    for function in model.functions:
        nodes += _nodes_within(function.node)
    for node in nodes:
        is_known = node.domain in _DEFAULT_DOMAINS or is_expanded(node.domain, node.op_type)
        if not is_known and (node.domain, node.op_type) not in functions:
            unknown.setdefault(f"{node.domain}::{node.op_type}", []).append(node.name)
    for group in refusals.grouped(unknown):
        what = f"operators that are not ONNX's, and unknown: {', '.join(group)}"
        where = f"{name}: node {next(iter(group.values()))[0]!r}"
        remedy = "export with operators that docs/operators.md lists"
        refusals.add(ModelError(codes.UNKNOWN_DOMAIN, what, where=where, remedy=remedy))


def _nodes_within(nodes: Iterator[NodeProto] | list[NodeProto]) -> Iterator[NodeProto]:
    """Nodes and those of their subgraphs, at any depth."""
    for node in nodes:
        yield node
        for graph in _subgraphs(node):
            yield from _nodes_within(graph.node)


def _subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _check_functions(model: onnx.ModelProto, name: str) -> None:
    """Inlining must end, and end with a bounded number of nodes."""
    bodies = {(f.domain, f.name): f.node for f in model.functions}
    inlined: dict[tuple[str, str], int | None] = {}

    def count(nodes: Iterator[NodeProto] | list[NodeProto]) -> int:
        total = 0
        for node in _nodes_within(nodes):
            key = (node.domain, node.op_type)
            if key not in bodies:
                total += 1
                continue
            if key not in inlined:
                inlined[key] = None
                inlined[key] = count(bodies[key])
            size = inlined[key]
            if size is None:
                raise ModelError(
                    codes.CYCLE,
                    f"function {node.op_type!r} calls itself",
                    where=f"{name}: node {node.name!r} ({node.op_type})",
                    remedy="ONNX functions cannot be recursive",
                )
            total += size
        return total

    try:
        total = count(model.graph.node)
    except RecursionError as error:
        raise ModelError(codes.TOO_LARGE, "functions are nested too deeply", where=name) from error
    if total > MAX_NODES:
        raise ModelError(
            codes.TOO_LARGE,
            f"the model has {total} nodes after inlining, more than {MAX_NODES}",
            where=name,
            remedy="split the model",
        )


def check_interface(loaded: Loaded, refusals: codes.Refusals) -> None:
    """Inputs and outputs must be tensors of numbers: ModelError HC110."""
    graph, name = loaded.proto.graph, loaded.source.name
    for kind, values in (("input", graph.input), ("output", graph.output)):
        for value in values:
            if kind == "output" and not value.HasField("type"):
                continue
            if value.type.tensor_type.elem_type not in SUPPORTED_TYPES | NARROW_TYPES:
                what, where = (
                    f"{kind} {value.name!r} is not a numeric tensor",
                    f"{name}: {kind} {value.name!r}",
                )
                remedy = "use bool, integers or floating point numbers"
                refusals.add(ModelError(codes.UNSUPPORTED_TYPE, what, where=where, remedy=remedy))


def _check_definitions(graph: GraphProto, name: str) -> None:
    """Each value is defined once, and what is used is defined somewhere in the graph."""
    initializers = {tensor.name for tensor in graph.initializer}
    if len(initializers) != len(graph.initializer) or len({i.name for i in graph.input}) != len(graph.input):
        raise _bad_definition("two inputs or two initializers have the same name", name)
    defined = initializers | {value.name for value in graph.input}
    for node in graph.node:
        for output in filter(None, node.output):
            if output in defined:
                raise _bad_definition(f"value {output!r} is defined twice", _at(name, node))
            defined.add(output)
    for node in graph.node:
        for used in _used(node):
            if used not in defined:
                raise _bad_definition(f"value {used!r} is used but never defined", _at(name, node))
    for value in graph.output:
        if value.name not in defined:
            raise _bad_definition(f"output {value.name!r} is never computed", name)


def _used(node: NodeProto) -> set[str]:
    """Names of the values that a node reads, those that its subgraphs capture included."""
    names = {name for name in node.input if name}
    for graph in _subgraphs(node):
        local = {v.name for v in graph.input} | {t.name for t in graph.initializer}
        local.update(output for inner in graph.node for output in inner.output)
        for inner in graph.node:
            names |= _used(inner) - local
        names |= {v.name for v in graph.output if v.name} - local
    return names


def _sort_nodes(graph: GraphProto, name: str) -> None:
    """Kahn's algorithm; among the nodes that are ready the first of the file goes first."""
    producer = {output: i for i, node in enumerate(graph.node) for output in node.output if output}
    needs = [{producer[v] for v in _used(node) if v in producer} for node in graph.node]
    users: list[list[int]] = [[] for _ in graph.node]
    for i, sources in enumerate(needs):
        for source in sources:
            users[source].append(i)
    missing = [len(sources) for sources in needs]
    ready = [i for i, count in enumerate(missing) if count == 0]
    order: list[int] = []
    while ready:
        order.append(heapq.heappop(ready))
        for user in users[order[-1]]:
            missing[user] -= 1
            if missing[user] == 0:
                heapq.heappush(ready, user)
    if len(order) < len(graph.node):
        stuck = next(i for i, count in enumerate(missing) if count)
        raise ModelError(
            codes.CYCLE,
            "the graph has a cycle",
            where=_at(name, graph.node[stuck]),
            remedy="ONNX graphs must be acyclic: a node cannot depend on its own output",
        )
    if order != sorted(order):
        nodes = [graph.node[i] for i in order]
        ordered = GraphProto()
        ordered.node.extend(nodes)
        del graph.node[:]
        graph.node.extend(ordered.node)


def _run_onnx_checker(model: onnx.ModelProto, inputs: Iterable[ValueInfoProto], name: str) -> None:
    """`onnx.checker` on a copy without large initializers, which it would serialise or look for on disk: they
    are inputs, as their values decide no shape."""
    skeleton = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    skeleton.functions.extend(model.functions)
    skeleton.graph.name = model.graph.name or "graph"
    skeleton.graph.node.extend(model.graph.node)
    skeleton.graph.input.extend(inputs)
    _set_apart(skeleton)
    # outputs need no shape here, though the checker wants one: all shapes are inferred anyway
    skeleton.graph.output.extend(v for v in model.graph.output if v.type.tensor_type.HasField("shape"))
    known = {value.name for value in model.graph.input}
    for tensor in model.graph.initializer:
        elements = 1
        for dim in tensor.dims:
            elements *= dim
        if elements <= MOST_DECIDING and tensor.data_location != TensorProto.EXTERNAL:
            skeleton.graph.initializer.append(tensor)
        elif tensor.name not in known:
            info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            skeleton.graph.input.append(info)
    try:
        onnx.checker.check_model(skeleton, full_check=True)
    except Exception as error:  # the checker raises many kinds, RuntimeError and ValueError among them
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            codes.CHECKER,
            f"the ONNX checker rejects the model: {lines[0]}",
            where=name,
            remedy=_remedy_of_type(lines[0]) or _CHECK_AGAIN,
        ) from error


def _remedy_of_type(message: str) -> str | None:
    """Where the checker says that an operator does not take a type: from which opset on it does."""
    match = _UNSUPPORTED_TYPE.search(message)
    if match is None:
        return None
    operator, formal, dtype = match.groups()
    for opset in range(OLDEST_OPSET, NEWEST_OPSET + 1):
        if onnx.defs.has(operator, opset, "") and dtype in _types(operator, formal, opset):
            newer = f"with opset {opset} or newer, where {operator} takes {dtype}"
            return f"export the network {newer}, or in float32"
    return f"export the network without {operator}, or in float32"


def _types(operator: str, formal: str, opset: int) -> Sequence[str]:
    """That a type variable of an operator may be."""
    constraints = onnx.defs.get_schema(operator, opset, "").type_constraints
    return next((each.allowed_type_strs for each in constraints if each.type_param_str == formal), ())


def _set_apart(model: onnx.ModelProto) -> None:
    """Operators that onnxruntime adds to ONNX's domain go to its own, of which the checker knows nothing."""
    opset = next((o.version for o in model.opset_import if o.domain in _DEFAULT_DOMAINS), 0)
    for node in _nodes_within(model.graph.node):
        is_added = is_expanded("", node.op_type) and not onnx.defs.has(node.op_type, opset, "")
        if node.domain in _DEFAULT_DOMAINS and is_added:
            node.domain = MICROSOFT
    if all(o.domain != MICROSOFT for o in model.opset_import):
        model.opset_import.add(domain=MICROSOFT, version=1)


def _at(name: str, node: NodeProto) -> str:
    return f"{name}: node {node.name!r} ({node.op_type})"


def _bad_definition(what: str, where: str) -> ModelError:
    return ModelError(codes.BAD_DEFINITION, what, where=where, remedy="export the network again")
