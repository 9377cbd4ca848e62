"""Which accesses of neighbouring results are neighbours in memory, and their vectors in registers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, sym, tirx
from tvm_ffi import WalkResult

from hybridc.ir.graph import dtype_bits
from hybridc.schedules.cpu.core.nest import NestBlock, loads, substitute
from hybridc.schedules.cuda.core.kernel import INDEX, KernelBuilder, integer, point_of, vectorized
from hybridc.schedules.safety.statements import is_conditional
from hybridc.schedules.shapes import shape_of

VECTOR_BITS = 128
"""Of the widest load and store of a thread."""
VECTOR_DTYPES = ("float32", "float16", "bfloat16", "int32", "int64", "int8", "uint8")
"""What TVM prints as vectors that are laid out as memory is; vectors of bool are not."""
MANY_READERS = 4
"""An operand with this many times fewer bytes than the result is read from L1 anyway, element by element."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """`width` neighbouring positions `vector * width + lane`."""

    width: int
    vector: ir.Var
    lane: ir.Var
    analyzer: sym.Analyzer

    @staticmethod
    def of(positions: int, width: int) -> Lanes:
        """Those of a range of positions that begins at 0."""
        vector, lane = tirx.Var("vector", INDEX), tirx.Var("lane", INDEX)
        analyzer = sym.Analyzer()
        analyzer.bind(vector, ir.Range(integer(0), integer(-(-positions // width))))
        analyzer.bind(lane, ir.Range(integer(0), integer(width)))
        return Lanes(width, vector, lane, analyzer)

    def point(self, lane: ir.Expr, shape: Sequence[int]) -> list[ir.Expr]:
        """Row-major indices of a lane's position."""
        width = integer(self.width)
        if self.within_rows(shape):
            # the other indices do not depend on the lane
            *outer, inner = point_of(self.vector, [*shape[:-1], shape[-1] // self.width])
            return [*outer, inner * width + lane]
        return [self.analyzer.simplify(i) for i in point_of(self.vector * width + lane, shape)]

    def within_rows(self, shape: Sequence[int]) -> bool:
        """Whether no vector of a row-major tensor reaches from one row into the next."""
        return bool(shape) and shape[-1] % self.width == 0

    def flat(self, lane: ir.Expr, shape: Sequence[int]) -> list[ir.Expr]:
        """Indices of the same element that TVM need not simplify: all but the last are zero."""
        if not shape:
            return []
        return [*(integer(0) for _ in shape[1:]), self.vector * integer(self.width) + lane]

    def simplified(self, value: ir.Expr) -> ir.Expr:
        """A value whose indices are as simple as the ranges of vector and lane allow."""

        def load(node: ir.TensorLoad) -> ir.Expr:
            return tirx.BufferLoad(node.source, [self.analyzer.simplify(index) for index in node.indices])

        return tvm_ffi.structural_map(value, (ir.TensorLoad, load))

    def is_uniform(self, value: ir.Expr) -> bool:
        """Whether a value is the same in all lanes."""
        return self._same(value, self._first(value))

    def is_contiguous(self, load: ir.TensorLoad) -> bool:
        """Whether the lanes' elements are neighbours, the first of which is aligned to the vector."""
        address = self.analyzer.simplify(address_of(load))
        first = self._first(address)
        return self._same(address - self.lane, first) and self._same(
            tirx.floormod(first, integer(self.width)), integer(0)
        )

    def _first(self, value: ir.Expr) -> ir.Expr:
        return self.analyzer.simplify(substitute(value, {self.lane: integer(0)}))

    def _same(self, left: ir.Expr, right: ir.Expr) -> bool:
        return bool(tvm_ffi.structural_equal(self.analyzer.simplify(left), self.analyzer.simplify(right)))


def address_of(load: ir.TensorLoad) -> ir.Expr:
    """Position of an element in its buffer."""
    found: ir.Expr = integer(0)
    for index, extent in zip(load.indices, shape_of(load.source), strict=True):
        found = found * integer(extent) + index
    return found


def first_step(flat: ir.Expr, axis: ir.Var, axes: Sequence[ir.Var]) -> int:
    """By how much a position moves with the first step of an iterator, the others being zero."""
    start = {v: integer(0) for v in axes}
    moved = substitute(flat, {**start, axis: integer(1)}) - substitute(flat, start)
    step = sym.Analyzer().simplify(moved)
    return int(step) if isinstance(step, tirx.IntImm) else 0


def moved(value: ir.Expr) -> list[ir.Expr]:
    """What a value is computed from: loads, and choices between loads. Not those that a condition guards,
    unless the choice as a whole is one of them."""
    found: list[ir.Expr] = []

    def enter(node: ir.Expr) -> WalkResult:
        if isinstance(node, ir.Call) and not _is_choice(node):
            return WalkResult.ADVANCE
        is_new = not any(tvm_ffi.structural_equal(node, other) for other in found)
        if is_new and (isinstance(node, ir.TensorLoad) or _only_moves(node)):
            found.append(node)
        return WalkResult.SKIP

    tvm_ffi.structural_walk(value, [((ir.TensorLoad, ir.Call, tirx.And, tirx.Or), enter)], order="pre")
    return found


def _is_choice(node: ir.Expr) -> bool:
    return isinstance(node, ir.Call) and is_conditional(node)


def _only_moves(node: ir.Expr) -> bool:
    if _is_choice(node):
        return all(_only_moves(branch) for branch in node.args[1:])
    return isinstance(node, (ir.TensorLoad, tirx.IntImm, tirx.FloatImm))


def sources(node: ir.Expr) -> list[ir.TensorLoad]:
    """The loads whose elements are moved, without those of their indices."""
    if _is_choice(node):
        return [load for branch in node.args[1:] for load in sources(branch)]
    return [node] if isinstance(node, ir.TensorLoad) else []


def _conditions(node: ir.Expr) -> list[ir.Expr]:
    if not _is_choice(node):
        return []
    return [node.args[0], *(c for branch in node.args[1:] for c in _conditions(branch))]


def value_in_lane(value: ir.Expr, block: NestBlock, lanes: Lanes) -> ir.Expr:
    """A value at a point of a block's iterators as that in a lane of the block's result."""
    shape = shape_of(block.buffer)
    point = dict(zip(block.indices, lanes.point(lanes.lane, shape), strict=True))
    within_rows, analyzer = lanes.within_rows(shape), sym.Analyzer()
    own = address_of(tirx.BufferLoad(block.buffer, list(block.indices)))
    for var, extent in block.extents.items():
        analyzer.bind(var, ir.Range(integer(0), integer(extent)))

    def load(node: ir.TensorLoad) -> ir.Expr:
        if not within_rows and analyzer.can_prove_equal(address_of(node), own):
            return tirx.BufferLoad(node.source, lanes.flat(lanes.lane, shape_of(node.source)))
        return node

    value = tvm_ffi.structural_map(value, (ir.TensorLoad, load))
    iterators = {axis: at for axis, at in point.items() if isinstance(axis, ir.Var)}
    rest: dict[ir.Var, ir.Expr] = {v: tirx.const(0, str(v.ty.dtype)) for v in block.spatial}
    return lanes.simplified(substitute(value, rest | iterators))


def vector_operands(value: ir.Expr, lanes: Lanes, result_bytes: int) -> list[ir.Expr] | None:
    """What can be loaded as vectors of a value in one lane; None if something else is worth a vector and
    cannot be one."""
    found = [node for node in moved(value) if _is_vector(node, lanes)]
    vectors = [load for node in found for load in sources(node)]
    for load in loads(value):
        is_large = size_bytes(load.source) * MANY_READERS > result_bytes
        is_moved = any(tvm_ffi.structural_equal(load, vector) for vector in vectors)
        if is_large and not is_moved and not lanes.is_uniform(address_of(load)):
            return None
    return found


def _is_vector(node: ir.Expr, lanes: Lanes) -> bool:
    """Whether every load of it is the same in all lanes or a vector, and one is a vector."""
    vectors = [load for load in sources(node) if not lanes.is_uniform(address_of(load))]
    return (
        bool(vectors)
        and all(lanes.is_contiguous(v) and str(v.source.dtype) in VECTOR_DTYPES for v in vectors)
        and all(lanes.is_uniform(condition) for condition in _conditions(node))
    )


def size_bytes(buffer: ir.Var) -> int:
    return math.prod(shape_of(buffer)) * dtype_bits(str(buffer.dtype)) // 8


def loaded(
    builder: KernelBuilder, operands: Sequence[ir.Expr], lanes: Lanes
) -> tuple[list[tirx.Stmt], Callable[[ir.Expr, ir.Expr], ir.Expr]]:
    """Statements that load operands into registers, and a function that takes them from there: of a value in
    the lane `lanes.lane`, and the lane that is wanted."""
    places = [(node, builder.registers((lanes.width,), str(node.ty.dtype), "vector")) for node in operands]

    def load(node: ir.Expr, place: ir.Var) -> tirx.Stmt:
        def element(lane: ir.Expr) -> tirx.Stmt:
            return tirx.BufferStore(place, substitute(node, {lanes.lane: lane}), [lane])

        return vectorized(lanes.width, element)

    def taken(value: ir.Expr, lane: ir.Expr) -> ir.Expr:
        def replaced(node: ir.Expr) -> ir.Expr:
            for operand, place in places:
                if tvm_ffi.structural_equal(node, operand):
                    return tirx.BufferLoad(place, [lanes.lane])
            return node

        value = tvm_ffi.structural_map(value, ((ir.TensorLoad, ir.Call), replaced))
        return substitute(value, {lanes.lane: lane})

    return [load(node, place) for node, place in places], taken
