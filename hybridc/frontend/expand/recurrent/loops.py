"""Recurrences as plain loops: what they mean, for schedules to replace (`hybridc/recurrence/`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import onnx_ir as ir
import tvm
from onnx import NodeProto
from tvm import relax, s_tir, te, tirx
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter

from hybridc.recurrence.cell import RECURRENCE, Phase, Recurrence
from hybridc.recurrence.tensors import Tensors, by_direction, step_of

_Row = tuple[tvm.ir.Expr, tvm.ir.Expr, tvm.ir.Expr]
"""Step, direction, row of the batch."""


def recurrence(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr:
    """One call of a function for all steps."""
    own = Recurrence.from_text(node.attributes["recurrence"].as_string())
    operands = [importer._nodes[name] for name in proto.input if name]
    call = importer.bb.call_te(partial(_computed, own), operands, primfunc_name_hint=own.cell.lower())
    results = importer.bb.emit(call)
    for i, name in enumerate(proto.output):
        if name:
            importer._nodes[name] = relax.TupleGetItem(results, i)
    return importer._nodes[proto.output[0]]


def _computed(own: Recurrence, operands: list[te.Tensor]) -> list[te.Tensor]:
    steps, batch, directions, _, hidden = (int(e) for e in operands[0].shape)
    last = (directions, batch, hidden)
    shapes = [(steps, *last), last, last][: 3 if own.has_memory else 2]

    def body(inputs: list[tirx.Buffer], outputs: list[tirx.Buffer]) -> tirx.Stmt:
        loops = plain_loops(own, Tensors.of(own, inputs, outputs))
        # a block of its own: TVM drops the annotations of the one that it makes
        block = s_tir.SBlock([], [], [], "recurrence", loops, annotations={RECURRENCE: own.to_text()})
        return s_tir.SBlockRealize([], True, block)

    buffers = [tirx.decl_buffer(shape, "float32", f"result_{i}") for i, shape in enumerate(shapes)]
    return te.extern(shapes, operands, body, name="recurrence", dtype="float32", out_buffers=buffers)


def plain_loops(own: Recurrence, tensors: Tensors) -> tirx.Stmt:
    """Rows and directions one after the other; the states are kept in the last result and the memory."""
    steps, batch, directions, _, hidden = tensors.extents
    last, memory = tensors.last, tensors.memory

    def row(d: tvm.ir.Expr, b: tvm.ir.Expr) -> tirx.Stmt:
        def begin(j: tvm.ir.Expr) -> tirx.Stmt:
            stores = [tirx.BufferStore(last, tensors.initial(0, d, b, j), [d, b, j])]
            if memory is not None:
                stores.append(tirx.BufferStore(memory, tensors.initial(1, d, b, j), [d, b, j]))
            return _sequence(stores)

        def step(s: tvm.ir.Expr) -> tirx.Stmt:
            t = step_of(own, steps, s, d)
            phases = [_phase(own, tensors, phase, (t, d, b)) for phase in own.phases()]
            return _within_length(tensors, (t, d, b), phases)

        return tirx.SeqStmt([_loop(hidden, begin), _loop(steps, step)])

    return _loop(directions, lambda d: _loop(batch, lambda b: row(d, b)))


def _within_length(tensors: Tensors, at: _Row, phases: list[tirx.Stmt]) -> tirx.Stmt:
    """A step of one row; behind the end of its sequence, results are zero and states stay."""
    t, d, b = at
    hidden = tensors.extents[4]

    def keep(j: tvm.ir.Expr) -> tirx.Stmt:
        return tirx.BufferStore(tensors.last, tirx.BufferLoad(tensors.result, [t, d, b, j]), [d, b, j])

    def clear(j: tvm.ir.Expr) -> tirx.Stmt:
        return tirx.BufferStore(tensors.result, tirx.const(0.0, "float32"), [t, d, b, j])

    step = tirx.SeqStmt([*phases, _loop(hidden, keep)])
    if tensors.lengths is None:
        return step
    length = tirx.Cast("int64", tirx.BufferLoad(tensors.lengths, [b]))
    return tirx.IfThenElse(t < length, step, _loop(hidden, clear))


def _phase(own: Recurrence, tensors: Tensors, phase: Phase, at: _Row) -> tirx.Stmt:
    """Products of the phase's gates for each hidden unit of a row, one number after the other."""
    t, d, b = at
    hidden = tensors.extents[4]
    left = tensors.memory if phase.of_memory else tensors.last
    sums = tirx.decl_buffer((len(phase.gates),), "float32", "sums")
    places = {gate: tirx.IntImm("int64", i) for i, gate in enumerate(phase.gates)}

    def product(gate: int) -> tvm.ir.Expr:
        return tirx.BufferLoad(sums, [places[gate]])

    def unit(j: tvm.ir.Expr) -> tirx.Stmt:
        def add(k: tvm.ir.Expr) -> tirx.Stmt:
            stores = []
            for gate in phase.gates:
                weight = tirx.BufferLoad(tensors.weights, [d, tirx.IntImm("int64", gate), j, k])
                value = product(gate) + tirx.BufferLoad(left, [d, b, k]) * weight
                stores.append(tirx.BufferStore(sums, value, [places[gate]]))
            return _sequence(stores)

        clear = [tirx.BufferStore(sums, tirx.const(0.0, "float32"), [place]) for place in places.values()]
        old = tirx.BufferLoad(tensors.last, [d, b, j])
        element = tensors.element((t, d, b, j), product, old)
        ends = by_direction(own, d, lambda functions: _sequence(phase.element(element, functions)))
        return tirx.SeqStmt([tirx.AllocBuffer(sums), *clear, _loop(hidden, add), ends])

    return _loop(hidden, unit)


def _sequence(statements: list[tirx.Stmt]) -> tirx.Stmt:
    return tirx.SeqStmt(statements) if len(statements) > 1 else statements[0]


def _loop(extent: int, body: Callable[[tvm.ir.Expr], tirx.Stmt]) -> tirx.Stmt:
    i, (zero, end) = tirx.Var("i", "int64"), (tirx.IntImm("int64", n) for n in (0, extent))
    return tirx.For(i, zero, end, tirx.ForKind.SERIAL, body(i))
