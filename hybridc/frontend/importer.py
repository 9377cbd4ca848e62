"""Import a simplified ONNX graph to Relax, node by node, remembering which node made which binding."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
import tvm
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from hybridc.errors import ModelError
from hybridc.frontend import codes
from hybridc.frontend.converters import CONVERTERS
from hybridc.frontend.expand.table import is_expanded
from hybridc.frontend.folding import origin
from hybridc.frontend.names import safe_names
from hybridc.frontend.restrictions import (
    FOLDED_AWAY,
    check_elements,
    check_nodes,
    is_undecided,
    remedy_of,
)
from hybridc.frontend.values import NARROW_TYPES, static_shape, stored_as

FROZEN_ELEMENTS = 64
"""Integers up to this many become constants: operators need shapes, axes and pads at compile time."""
_BROADCASTING = ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min")


@dataclass(frozen=True, slots=True)
class Emitted:
    """A Relax function as the importer leaves it: not yet in normal form."""

    module: tvm.IRModule
    bindings: tuple[tuple[relax.Binding, str], ...]
    """In order, each with the name of the ONNX node that emitted it."""
    inputs: tuple[relax.Var, ...]
    outputs: tuple[relax.Expr, ...]
    weights: Mapping[str, tuple[relax.Var, np.ndarray]]


def supported_operators() -> frozenset[str]:
    """ONNX operators that can be imported."""
    return frozenset(onnx_frontend._get_convert_map()) | set(CONVERTERS) | FOLDED_AWAY


def check_operators(graph: ir.Graph, name: str, refusals: codes.Refusals) -> None:
    """Refuse operators that nothing can import: ModelError HC113 that lists them, and nodes of each."""
    # these are refused already
    refusals.give_up(*(n for n in graph if n.domain and not is_expanded(n.domain, n.op_type)))
    supported, refused = supported_operators(), refusals.in_doubt(graph)
    nodes = [node for node in graph if node.domain or node.op_type not in supported]
    missing: dict[str, list[ir.Node]] = {}
    for node in nodes:
        if node not in refused:
            missing.setdefault(node.op_type, []).append(node)
    for group in refusals.grouped(missing):
        where = "; ".join(
            f"{op}: {', '.join(repr(origin(n)) for n in found[:3])}{', ...' * (len(found) > 3)}"
            for op, found in group.items()
        )
        what = f"hybridc cannot import the operators {', '.join(group)}"
        remedy = "export the network without them: decomposed, or with loops and branches unrolled"
        error = ModelError(codes.MISSING_OPERATOR, what, where=f"{name}: {where}", remedy=remedy)
        refusals.add(error, *(node for found in group.values() for node in found))


def import_graph(
    model: ir.Model, name: str, node_names: Mapping[str, str], refusals: codes.Refusals
) -> Emitted:
    """Emit the graph's nodes in order.

    `node_names` gives the user's node for a value, where a pass replaced the node that makes it.
    Refuses ModelError HC110, HC113 to HC115 or HC118, naming the node; where refusals are noted, the function
    has zeros for what such nodes make, and lacks what is not known.
    """
    check_operators(model.graph, name, refusals)
    check_nodes(model.graph, name, refusals)
    return _GraphImporter(model, name, node_names, refusals).run()


class _GraphImporter:
    """Drives TVM's importer one node at a time over one BlockBuilder."""

    def __init__(
        self, model: ir.Model, name: str, node_names: Mapping[str, str], refusals: codes.Refusals
    ) -> None:
        self.graph, self.name, self.node_names, self.refusals = model.graph, name, node_names, refusals
        self.tvm = onnx_frontend.ONNXGraphImporter({}, {}, keep_params_in_input=True, sanitize=False)
        self.tvm.opset = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 0))
        values = [*self.graph.inputs, *self.graph.initializers.values()]
        values += [output for node in self.graph for output in node.outputs]
        self.identifiers = safe_names(value.name for value in values if value.name)
        self.markers: list[tuple[relax.Var, str]] = []

    def run(self) -> Emitted:
        inputs = [self._variable(value, static_shape(value)) for value in self.graph.inputs]
        self._bind_initializers()
        weights = {identifier: entry for identifier, entry in self.tvm._params.items()}
        bb = self.tvm.bb
        parameters = [*inputs, *(variable for variable, _ in weights.values())]
        with _quiet(), bb.function("main", params=parameters):
            with bb.dataflow():
                failures = self._emit_all()
                names = [self.identifiers[v.name or ""] for v in self.graph.outputs]
                outputs = [self.tvm._nodes[name] for name in names if name in self.tvm._nodes]
                result = bb.emit_output(relax.Tuple([o for o in outputs if isinstance(o, relax.Var)]))
            bb.emit_func_output(result)
        for failure in failures:
            self.refusals.add(failure)
        module = bb.get()
        bindings = module["main"].body.blocks[0].bindings
        return Emitted(module, tuple(self._with_origins(bindings)), tuple(inputs), tuple(outputs), weights)

    def _variable(self, value: ir.Value, shape: tuple[int, ...] | None) -> relax.Var:
        """A parameter with the value's type."""
        assert shape is not None and value.dtype is not None
        identifier = self.identifiers[value.name or ""]
        variable = relax.Var(identifier, relax.TensorType(shape, stored_as(value)))
        self.tvm._nodes[identifier] = variable
        return variable

    def _bind_initializers(self) -> None:
        """Weights become parameters; small integers and scalars become constants."""
        for value in self.graph.initializers.values():
            assert value.const_value is not None
            array = value.const_value.numpy()
            if value.dtype in NARROW_TYPES:
                array = array.view(stored_as(value))
            identifier = self.identifiers[value.name or ""]
            if array.ndim == 0 or (array.dtype.kind in "iub" and array.size <= FROZEN_ELEMENTS):
                self.tvm._nodes[identifier] = relax.const(array, str(array.dtype))
            elif array.size == 1 and _is_scalar_operand(value):
                self.tvm._nodes[identifier] = relax.const(array.reshape(()), str(array.dtype))
            else:
                self.tvm._params[identifier] = (self._variable(value, array.shape), array)

    def _emit_all(self) -> list[ModelError]:
        """Import every node; behind one that is refused, those of whose operands the shapes are known.

        Failures are returned: raised here, they would leave the builder's blocks open.
        """
        failures: list[ModelError] = []
        unknown: set[ir.Value] = set()
        refused = self.refusals.in_doubt(self.graph)
        for node in self.graph:
            if node not in refused and unknown.isdisjoint(node.inputs):
                failure = self._attempt(node)
                if failure is None:
                    continue
                failures.append(failure)
            unknown |= self._stand_in(node)
        return failures

    def _attempt(self, node: ir.Node) -> ModelError | None:
        """Import a node; returns why it cannot be imported."""
        try:
            self._emit(node)
        except ModelError as error:
            return error
        except Exception as error:  # TVM's converters raise anything, InternalError and KeyError among them
            failure = self._failure(node, error)
            failure.__cause__ = error
            return failure
        return None

    def _stand_in(self, node: ir.Node) -> set[ir.Value]:
        """Zeros for what a refused node makes; returns its outputs whose shapes are not known."""
        made = [value for value in node.outputs if value.name]
        for value in filter(codes.is_static, made):
            assert value.dtype is not None
            zeros = relax.op.zeros(static_shape(value), stored_as(value))
            self.tvm._nodes[self.identifiers[value.name or ""]] = self.tvm.bb.emit(zeros)
        return {value for value in made if not codes.is_static(value)}

    def _emit(self, node: ir.Node) -> None:
        """Import one node and bind each of its outputs to a variable."""
        proto = self._renamed(node)
        converter = CONVERTERS.get(node.op_type)
        result = converter(self.tvm, proto, node) if converter else None
        if result is not None:
            self.tvm._nodes[proto.output[0]] = self.tvm.bb.normalize(result)
        else:
            self.tvm._construct_nodes(onnx.GraphProto(node=[proto]))
        for output, declared in zip(proto.output, node.outputs, strict=True):
            if output:
                self._bind(output, declared)
        marker = self.tvm.bb.emit(relax.Tuple([]), name_hint="_end")
        self.markers.append((marker, self._origin(node)))

    def _bind(self, output: str, declared: ir.Value) -> None:
        """Converters return nested expressions; a variable keeps users from emitting them again.

        The result is compared with what ONNX infers: a converter may forget the type, or get the shape wrong.
        """
        value = self.tvm._nodes[output] = self._of_type(self.tvm._nodes[output], declared)
        if not isinstance(value, (relax.Var, tvm.ir.GenericConst, relax.ShapeExpr)) and isinstance(
            value, relax.Expr
        ):
            self.tvm._nodes[output] = self.tvm.bb.emit(value, name_hint=output)

    def _of_type(self, value: relax.Expr, declared: ir.Value) -> relax.Expr:
        type_ = getattr(value, "ty", None)
        if not isinstance(type_, relax.TensorType) or not isinstance(type_.shape, relax.ShapeExpr):
            return value
        if all(isinstance(dim, tvm.tirx.IntImm) for dim in type_.shape):
            shape, expected = tuple(map(int, type_.shape)), static_shape(declared)
            if expected is not None and shape != expected:
                raise ValueError(f"its result would have shape {shape} instead of {expected}")
            check_elements(shape, declared.producer(), self.name)
        if declared.dtype is None or stored_as(declared) == str(type_.dtype):
            return value
        return self.tvm.bb.normalize(relax.op.astype(value, stored_as(declared)))

    def _renamed(self, node: ir.Node) -> onnx.NodeProto:
        """The node as protobuf with safe value names."""
        proto = ir.serde.serialize_node(node)
        inputs = [self.identifiers.get(name, "") for name in proto.input]
        outputs = [self.identifiers.get(name, "") for name in proto.output]
        del proto.input[:], proto.output[:]
        proto.input.extend(inputs)
        proto.output.extend(outputs)
        return proto

    def _origin(self, node: ir.Node) -> str:
        """The node of the user's file: a pass may have replaced it."""
        names = (self.node_names.get(output.name or "") for output in node.outputs)
        return next(filter(None, names), origin(node))

    def _with_origins(self, bindings: list[relax.Binding]) -> Iterator[tuple[relax.Binding, str]]:
        """Bindings between two markers belong to one node. What follows the last marker is the result."""
        markers = iter(self.markers)
        marker, origin = next(markers, (None, ""))
        for binding in bindings:
            if marker is None:
                return
            if binding.var.same_as(marker):
                marker, origin = next(markers, (None, ""))
            else:
                yield binding, origin

    def _failure(self, node: ir.Node, error: Exception) -> ModelError:
        where = f"{self.name}: node {self._origin(node)!r} ({node.op_type})"
        if is_undecided(node):
            what = f"{node.op_type} needs sizes and axes that are constant"
            return ModelError(codes.IMPORT_FAILED, what, where=where, remedy=remedy_of(node))
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return ModelError(
            codes.IMPORT_FAILED,
            f"cannot import the node: {type(error).__name__}: {lines[-1].strip()}",
            where=where,
            remedy="fix dynamic dimensions with --shape or --dim, or export the node in another form",
        )


def _is_scalar_operand(value: ir.Value) -> bool:
    """Whether every use is an elementwise operation whose other operand has at least the same rank."""
    rank = len(value.shape or ())

    def harmless(node: ir.Node) -> bool:
        others = [v for v in node.inputs if v is not value and v is not None]
        return node.op_type in _BROADCASTING and any(
            v.shape is not None and len(v.shape) >= rank for v in others
        )

    return not value.is_graph_output() and all(harmless(node) for node, _ in value.uses())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """TVM's importer prints and warns about what is reported as an error here."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
