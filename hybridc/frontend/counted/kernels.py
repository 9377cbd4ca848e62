"""The kernels behind `operators.py`, as plain loops that run on both devices.

A launch makes each outermost loop: in parallel the classes of NonMaxSuppression, one thread does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import onnx_ir as ir
from onnx import NodeProto
from tvm import relax, te, tirx
from tvm.ir import Expr
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter

Body = Callable[[list[tirx.Buffer], list[tirx.Buffer]], tirx.Stmt]


def positions(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr:
    """One pass over the mask."""

    def body(inputs: list[tirx.Buffer], outputs: list[tirx.Buffer]) -> tirx.Stmt:
        (mask,), (found, count) = inputs, outputs
        extent, zero = int(mask.shape[0]), _int(0)
        number = tirx.BufferLoad(count, [zero])

        def visit(i: Expr) -> tirx.Stmt:
            take = [tirx.BufferStore(found, i, [number]), tirx.BufferStore(count, number + 1, [zero])]
            return tirx.IfThenElse(tirx.BufferLoad(mask, [i]), tirx.SeqStmt(take), None)

        clear = _loop(extent, lambda i: tirx.BufferStore(found, zero, [i]))
        return tirx.SeqStmt([tirx.BufferStore(count, zero, [zero]), clear, _loop(extent, visit)])

    extent = int(importer._nodes[proto.input[0]].ty.shape[0])
    return _emit(importer, proto, body, [(extent,), (1,)], "positions")


def suppression(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr:
    """Greedily, as ONNX Runtime: of equal scores the first one is picked."""
    batch, classes, boxes = (int(n) for n in importer._nodes[proto.input[1]].ty.shape)
    picks = node.attributes["picks"].as_int()
    is_centred, has_threshold = (bool(node.attributes[n].as_int()) for n in ("is_centred", "has_threshold"))

    def body(inputs: list[tirx.Buffer], outputs: list[tirx.Buffer]) -> tirx.Stmt:
        pick = partial(_class_picks, inputs, outputs, (classes, boxes, picks), is_centred, has_threshold)
        return _loop(batch * classes, pick, parallel=True)

    shapes = [(batch * classes, picks), (batch * classes, boxes + 3)]
    return _emit(importer, proto, body, shapes, "non_max_suppression")


def _class_picks(
    inputs: list[tirx.Buffer],
    outputs: list[tirx.Buffer],
    extents: tuple[int, int, int],
    is_centred: bool,
    has_threshold: bool,
    row: Expr,
) -> tirx.Stmt:
    """Picks of one batch and class. `work` holds the boxes that are left, and behind them three numbers."""
    boxes, scores, most, iou, least, valid = inputs
    picked, work = outputs
    classes, count, picks = extents
    image, own = tirx.floordiv(row, classes), tirx.floormod(row, classes)
    zero = _int(0)
    left_at, best_at, kept_at = ([row, _int(count + i)] for i in range(3))
    left, best, kept = (tirx.BufferLoad(work, at) for at in (left_at, best_at, kept_at))

    def score(box: Expr) -> Expr:
        return tirx.BufferLoad(scores, [image, own, box])

    def candidate(j: Expr) -> Expr:
        return tirx.BufferLoad(work, [row, j])

    def listed(j: Expr, body: tirx.Stmt) -> tirx.Stmt:
        """A branch: `tirx.all` evaluates both sides, and behind the list there are no boxes' numbers."""
        return tirx.IfThenElse(j < left, body, None)

    def begin(i: Expr) -> tirx.Stmt:
        counts = i < tirx.BufferLoad(valid, [zero])
        if has_threshold:
            counts = tirx.all(counts, score(i) > tirx.BufferLoad(least, [zero]))
        take = [tirx.BufferStore(work, i, [row, left]), tirx.BufferStore(work, left + 1, left_at)]
        return tirx.IfThenElse(counts, tirx.SeqStmt(take), None)

    def compare(j: Expr) -> tirx.Stmt:
        is_better = score(candidate(j)) > score(best)
        return listed(j, tirx.IfThenElse(is_better, tirx.BufferStore(work, candidate(j), best_at), None))

    def keep(j: Expr) -> tirx.Stmt:
        one, other = (
            [tirx.BufferLoad(boxes, [image, box, _int(k)]) for k in range(4)] for box in (candidate(j), best)
        )
        is_suppressed = _overlaps(one, other, is_centred, tirx.BufferLoad(iou, [zero]))
        take = [tirx.BufferStore(work, candidate(j), [row, kept]), tirx.BufferStore(work, kept + 1, kept_at)]
        stays = tirx.all(candidate(j) != best, tirx.Not(is_suppressed))
        return listed(j, tirx.IfThenElse(stays, tirx.SeqStmt(take), None))

    def pick(t: Expr) -> tirx.Stmt:
        steps = [
            tirx.BufferStore(work, candidate(zero), best_at),
            _loop(count, compare),
            tirx.BufferStore(picked, best, [row, t]),
            tirx.BufferStore(work, zero, kept_at),
            _loop(count, keep),
            tirx.BufferStore(work, kept, left_at),
        ]
        is_any = tirx.all(t < tirx.BufferLoad(most, [zero]), left > 0)
        return tirx.IfThenElse(is_any, tirx.SeqStmt(steps), tirx.BufferStore(picked, _int(-1), [row, t]))

    clear = [tirx.BufferStore(work, zero, at) for at in (left_at, best_at, kept_at)]
    return tirx.SeqStmt([*clear, _loop(count, begin), _loop(picks, pick)])


def _overlaps(one: list[Expr], other: list[Expr], is_centred: bool, threshold: Expr) -> Expr:
    """Whether two boxes cover each other by more than the threshold: the intersection's share of the union.

    Boxes without an area never do. Corners are y, x, y, x in any order; centred ones x, y, width, height.
    """
    sides, areas = [], []
    for box in (one, other):
        if is_centred:
            spans = [(box[i] - box[i + 2] / 2, box[i] + box[i + 2] / 2) for i in range(2)]
        else:
            spans = [(tirx.min(box[i], box[i + 2]), tirx.max(box[i], box[i + 2])) for i in range(2)]
        sides.append(spans)
        areas.append((spans[0][1] - spans[0][0]) * (spans[1][1] - spans[1][0]))
    shared = [tirx.min(a[1], b[1]) - tirx.max(a[0], b[0]) for a, b in zip(*sides, strict=True)]
    intersection = shared[0] * shared[1]
    union = areas[0] + areas[1] - intersection
    have_area = [value > 0 for value in (*shared, intersection, *areas, union)]
    return tirx.all(*have_area, intersection / union > threshold)


def _emit(
    importer: ONNXGraphImporter, proto: NodeProto, body: Body, shapes: Sequence[tuple[int, ...]], name: str
) -> relax.Expr:
    """One call of a function with int64 results."""

    def computed(operands: list[te.Tensor]) -> list[te.Tensor]:
        buffers = [tirx.decl_buffer(shape, "int64", f"result_{i}") for i, shape in enumerate(shapes)]
        return te.extern(shapes, operands, body, name=name, dtype="int64", out_buffers=buffers)

    operands = [importer._nodes[each] for each in proto.input]
    results = importer.bb.emit(importer.bb.call_te(computed, operands, primfunc_name_hint=name))
    for i, output in enumerate(proto.output):
        if output:
            importer._nodes[output] = relax.TupleGetItem(results, i)
    return importer._nodes[proto.output[0]]


def _int(value: int) -> Expr:
    return tirx.IntImm("int64", value)


def _loop(extent: int, body: Callable[[Expr], tirx.Stmt], *, parallel: bool = False) -> tirx.Stmt:
    i, kind = tirx.Var("i", "int64"), tirx.ForKind.PARALLEL if parallel else tirx.ForKind.SERIAL
    return tirx.For(i, _int(0), _int(extent), kind, body(i))
