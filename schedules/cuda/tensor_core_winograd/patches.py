"""How patches get from global memory through registers, transformed, to shared memory.

A thread takes what two neighbouring tiles read of a channel, and makes all points of it. Where lines have
whole accesses of 128 bits, it takes what four tiles read of it instead, but three of the four lines, and
makes half of the points; another thread of its warp makes the others. What lies beyond either end is in
registers of neighbours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from tvm import ir, sym, tirx
from tvm.tirx.op import tvm_warp_shuffle_down, tvm_warp_shuffle_up

from hybridc.schedules.cpu.core.micro_kernel import integer, unrolled, vectorized
from hybridc.schedules.cpu.core.nest import substitute, uses
from hybridc.schedules.cuda.core.launch import WARP
from hybridc.schedules.cuda.tensor_core.instructions import packed
from hybridc.schedules.cuda.tensor_core.read import Element, element_of, flattened
from hybridc.schedules.cuda.tensor_core.staging import either
from hybridc.schedules.cuda.tensor_core_winograd.arrays import CHUNK, POINT_WORDS, SPAN, Arrays, word_at
from hybridc.schedules.cuda.tensor_core_winograd.plan import CHANNELS, PAIRS, TensorCorePlan
from hybridc.schedules.cuda.tile.access import WIDTH
from hybridc.schedules.cuda.winograd.kernel import data_transformed, stores
from hybridc.schedules.cuda.winograd.plan import OUTPUTS, SIDE
from hybridc.schedules.cuda.winograd.read import TAPS
from hybridc.schedules.safety.statements import sequence

Read = tuple[Callable[[ir.Expr], ir.Expr], Sequence[ir.Expr]]
"""Neighbouring elements, and the conditions under which they are read; else they are zero."""
Runs = Callable[[ir.Expr, ir.Expr, ir.Expr, ir.Expr], Read]
"""By channel, image, row of the padded images, and run across."""
SCALE = 4.0
"""By which transformed patches are divided."""
_OCTET = 8
"""Elements of an access of 128 bits: the inner columns of four tiles."""
_LINES = SIDE - 1
"""That half of the points are made of."""


class Patches(ABC):
    """A thread's part of what a block reads of the images."""

    def __init__(
        self, plan: TensorCorePlan, arrays: Arrays, first_pair: ir.Expr, own_pair: ir.Expr,
        own_channel: ir.Expr,
    ) -> None:  # fmt: skip
        self.plan, self.conv, self.arrays = plan, plan.conv, arrays
        self.pair, self.own_pair, self.own_channel = first_pair + own_pair, own_pair, own_channel
        self.image, self.top, self.left = (tirx.Var(name, "int64") for name in ("image", "top", "left"))

    def note_place(self) -> list[tirx.Stmt]:
        """Where a thread's patches are, once for all slices."""
        place = place_of(self.plan, self.pair)
        variables = (self.image, self.top, self.left)
        return [tirx.Bind(variable, at) for variable, at in zip(variables, place, strict=True)]

    @abstractmethod
    def load(self, slice_number: ir.Expr) -> tirx.Stmt:
        """A thread's part of a slice into registers; zero where there is nothing."""

    @abstractmethod
    def columns(self) -> list[tirx.Stmt]:
        """`B^T d`. All lanes of a warp do this together."""

    @abstractmethod
    def words(self, stage: ir.Expr) -> list[tirx.Stmt]:
        """`B^T d B` of the tiles of a pair, rounded, to shared memory, side by side."""

    def _channel(self, slice_number: ir.Expr) -> ir.Expr:
        return slice_number * integer(CHANNELS) + self.own_channel

    def _loaded(self, first: ir.Expr, width: int, read: Read, guards: Sequence[ir.Expr]) -> tirx.Stmt:
        """Neighbours to registers from `first` on; where no branch stores zeros nvcc makes a predicate of the
        conditions."""

        def stored(value: Callable[[ir.Expr], ir.Expr]) -> tirx.Stmt:
            return vectorized(width, lambda n: tirx.BufferStore(self.arrays.patches, value(n), [first + n]))

        load, conditions = read
        zeros = stored(lambda n: tirx.FloatImm("float32", 0.0))
        if self.plan.pairs % PAIRS:
            guards = [self.pair < integer(self.plan.pairs), *guards]
        conditions = [*guards, *conditions]
        return sequence([*([zeros] if conditions else []), either(conditions, stored(load), None)])

    def _element(self, channel: ir.Expr, y: ir.Expr, x: ir.Expr) -> Read:
        read = element_of(self.conv.read(channel, self.image, y, x), sym.Analyzer())
        return lambda _: read.load, read.conditions

    def _exists(self, y: ir.Expr) -> list[ir.Expr]:
        """The last tiles may reach beyond the padded images."""
        return [y < integer(self.conv.height + TAPS - 1)] if self.conv.height % OUTPUTS else []

    def _half(self, line: int, column: int) -> ir.Expr:
        return tirx.BufferLoad(self.arrays.half, [integer(line * self._span + column)])

    @property
    @abstractmethod
    def _span(self) -> int:
        """Columns that a thread reads."""

    def _packed_points(self, line: int, pair: int, column: int) -> list[tirx.Stmt]:
        """Round what a line's transform has in a column of both tiles of a pair, to a word."""
        start = pair * 2 * OUTPUTS
        tiles = [
            data_transformed([self._half(line, start + tile * OUTPUTS + j) for j in range(SIDE)])
            for tile in range(2)
        ]
        arrays = self.arrays
        word = tirx.BufferLoad(arrays.words, [integer(pair)])
        return [
            stores(arrays.line, [([integer(n)], tile[column]) for n, tile in enumerate(tiles)]),
            packed(word, tirx.BufferLoad(arrays.line, [integer(0)]), "float16"),
        ]


class PairPatches(Patches):
    """What two tiles side by side read of a channel; the inner columns at once where they lie so."""

    def __init__(self, plan: TensorCorePlan, arrays: Arrays, first_pair: ir.Expr, thread: ir.Expr) -> None:
        super().__init__(
            plan, arrays, first_pair,
            tirx.floormod(thread, integer(PAIRS)), tirx.floordiv(thread, integer(PAIRS)),
        )  # fmt: skip
        self.inner = _runs(plan, WIDTH)

    @property
    def _span(self) -> int:
        return SPAN

    def load(self, slice_number: ir.Expr) -> tirx.Stmt:
        channel = self._channel(slice_number)

        def across(j: int, width: int) -> list[ir.Expr]:
            if width % (2 * OUTPUTS) == 0:
                return []
            return [self.left + integer(j) < integer(self.conv.width + TAPS - 1)]

        def element(i: ir.Expr, j: int) -> tirx.Stmt:
            read = self._element(channel, self.top + i, self.left + integer(j))
            guards = [*self._exists(self.top + i), *across(j, self.conv.width)]
            return self._loaded(_patch_at(i, j), 1, read, guards)

        def line(i: ir.Expr) -> tirx.Stmt:
            if self.inner is None:
                return sequence([element(i, j) for j in range(SPAN)])
            y = self.top + i
            read = self.inner(channel, self.image, y, tirx.floordiv(self.left, integer(WIDTH)))
            inner = self._loaded(_patch_at(i, 1), WIDTH, read, self._exists(y))
            return sequence([inner, element(i, 0), element(i, SPAN - 1)])

        return unrolled(SIDE, line)

    def columns(self) -> list[tirx.Stmt]:
        arrays, scale = self.arrays, tirx.FloatImm("float32", 1 / SCALE)

        def column(j: int) -> tirx.Stmt:
            lines = [tirx.BufferLoad(arrays.patches, [_patch_at(integer(i), j)]) for i in range(SIDE)]
            values = [value * scale for value in data_transformed(lines)]
            return stores(arrays.half, [([integer(i * SPAN + j)], v) for i, v in enumerate(values)])

        return [column(j) for j in range(SPAN)]

    def words(self, stage: ir.Expr) -> list[tirx.Stmt]:
        """Point by point."""
        chunk, within = (f(self.own_pair, integer(CHUNK)) for f in (tirx.floordiv, tirx.floormod))
        place = word_at(stage, self.own_channel, chunk) + within
        word = tirx.BufferLoad(self.arrays.words, [integer(0)])

        def point(i: int, j: int) -> tirx.Stmt:
            at = place + integer((i * SIDE + j) * POINT_WORDS)
            return tirx.SeqStmt([
                *self._packed_points(i, 0, j),
                tirx.BufferStore(self.arrays.shared, word, [at]),
            ])  # fmt: skip

        return [point(i, j) for i in range(SIDE) for j in range(SIDE)]


class OctetPatches(Patches):
    """Three lines of what four tiles side by side read of a channel, and half of the points, by `side`."""

    def __init__(
        self, plan: TensorCorePlan, arrays: Arrays, first_pair: ir.Expr, thread: ir.Expr, octets: Runs
    ) -> None:
        lane, warp = tirx.floormod(thread, integer(WARP)), tirx.floordiv(thread, integer(WARP))
        count = PAIRS // 2
        # lanes that store at the same time have different channels, not sides, whose points share banks
        self.octet = tirx.floormod(lane, integer(count))
        rest = tirx.floordiv(lane, integer(count))
        self.side = tirx.floordiv(rest, integer(2))
        channel = warp * integer(2) + tirx.floormod(rest, integer(2))
        super().__init__(plan, arrays, first_pair, self.octet * integer(2), channel)
        self.octets, self.last = octets, integer(count - 1)

    @property
    def _span(self) -> int:
        return _OCTET + 2

    def load(self, slice_number: ir.Expr) -> tirx.Stmt:
        """The first and the last thread of a line of octets load what lies beyond its end, too."""
        channel = self._channel(slice_number)
        is_end = tirx.any(self.octet.equal(integer(0)), self.octet.equal(self.last))
        beyond = tirx.Select(self.octet.equal(integer(0)), integer(0), integer(_OCTET + 1))

        def line(i: ir.Expr) -> tirx.Stmt:
            y = self.top + self.side + i
            read = self.octets(channel, self.image, y, tirx.floordiv(self.left, integer(_OCTET)))
            octet = self._loaded(i * integer(_OCTET), _OCTET, read, self._exists(y))
            end = self._element(channel, y, self.left + beyond)
            return sequence([octet, self._loaded(_end_at(i), 1, end, [is_end, *self._exists(y)])])

        return unrolled(_LINES, line)

    def columns(self) -> list[tirx.Stmt]:
        """Lines 0 and 1 of the transform, or 3 and 2."""
        arrays, scale = self.arrays, tirx.FloatImm("float32", 1 / SCALE)
        zero = tirx.FloatImm("float32", 0.0)

        def shuffled(shuffle: Callable[..., ir.Expr], i: int, j: int) -> ir.Expr:
            mask, by, warp = (
                tirx.const(0xFFFFFFFF, "uint32"),
                tirx.const(1, "int32"),
                tirx.const(WARP, "int32"),
            )
            return shuffle(mask, tirx.BufferLoad(arrays.patches, [integer(i * _OCTET + j)]), by, warp, warp)

        def end(column: int) -> list[tirx.Stmt]:
            """Beyond an end: from a neighbour, from memory, or zero at the end of a line of the image."""
            if column:
                shuffle, j, at_end = tvm_warp_shuffle_down, 0, self.last
                is_zero = (self.left + integer(_OCTET)).equal(integer(self.conv.width))
            else:
                shuffle, j, at_end = tvm_warp_shuffle_up, _OCTET - 1, integer(0)
                is_zero = self.left.equal(integer(0))
            found: list[tirx.Stmt] = []
            for i in range(_LINES):
                at = integer(i)
                found.append(tirx.BufferStore(arrays.ends, shuffled(shuffle, i, j), [at]))
                inside = tirx.Select(is_zero, zero, tirx.BufferLoad(arrays.ends, [at]))
                of_memory = tirx.BufferLoad(arrays.patches, [_end_at(at)])
                value = tirx.Select(self.octet.equal(at_end), of_memory, inside)
                found.append(tirx.BufferStore(arrays.ends, value, [at]))
            return found

        def element(i: int, j: int) -> ir.Expr:
            if j in (0, _OCTET + 1):
                return tirx.BufferLoad(arrays.ends, [integer(i)])
            return tirx.BufferLoad(arrays.patches, [integer(i * _OCTET + j - 1)])

        def column(j: int) -> tirx.Stmt:
            first, middle, last = (element(i, j) for i in range(_LINES))
            # d0 - d2 and d1 + d2, or d1 - d3 and d2 - d1
            added = tirx.Select(self.side.equal(integer(0)), last, -first)
            values = [(first - last) * scale, (middle + added) * scale]
            return stores(arrays.half, [([integer(i * self._span + j)], v) for i, v in enumerate(values)])

        last = self._span - 1
        inner = (column(j) for j in range(1, last))
        return [*end(0), column(0), *end(last), column(last), *inner]

    def words(self, stage: ir.Expr) -> list[tirx.Stmt]:
        """Of both pairs at once."""
        chunk, within = (f(self.own_pair, integer(CHUNK)) for f in (tirx.floordiv, tirx.floormod))
        place = word_at(stage, self.own_channel, chunk) + within
        lines = self.side * integer(SIDE - 1), self.side + integer(1)

        def point(i: int, j: int) -> tirx.Stmt:
            at = place + (lines[i] * integer(SIDE) + integer(j)) * integer(POINT_WORDS)

            def word(n: ir.Expr) -> tirx.Stmt:
                return tirx.BufferStore(self.arrays.shared, tirx.BufferLoad(self.arrays.words, [n]), [at + n])

            both = [statement for pair in range(2) for statement in self._packed_points(i, pair, j)]
            return tirx.SeqStmt([*both, vectorized(2, word)])

        return [point(i, j) for i in range(2) for j in range(SIDE)]


def patches_of(plan: TensorCorePlan, arrays: Arrays, first_pair: ir.Expr, thread: ir.Expr) -> Patches:
    """By octets, if lines have whole ones, and zeros at either end."""
    octets = _runs(plan, _OCTET) if plan.octets else None
    if octets is None or not _is_zero_beyond(plan):
        return PairPatches(plan, arrays, first_pair, thread)
    return OctetPatches(plan, arrays, first_pair, thread, octets)


def place_of(plan: TensorCorePlan, pair: ir.Expr) -> tuple[ir.Expr, ir.Expr, ir.Expr]:
    """Image, and the first row and column of the output, of a pair of tiles."""
    across, down = integer(plan.across), integer(plan.down)
    rest = tirx.floordiv(pair, across)
    image = tirx.floordiv(rest, down) if plan.conv.images > 1 else integer(0)
    line = tirx.floormod(rest, down) if plan.conv.images > 1 else rest
    return image, line * integer(OUTPUTS), tirx.floormod(pair, across) * integer(2 * OUTPUTS)


def _patch_at(line: ir.Expr, column: int) -> ir.Expr:
    """Where a patch has an element: the inner four of a line come first, as they may be loaded at once."""
    return line * integer(2 * WIDTH) + integer((4, 0, 1, 2, 3, 5)[column])


def _end_at(line: ir.Expr) -> ir.Expr:
    """Where what lies beyond the end of a line of octets is loaded to: behind the octets."""
    return line + integer(_LINES * _OCTET)


def _runs(plan: TensorCorePlan, width: int) -> Runs | None:
    """So many elements of a line from the second one of a patch on, if they lie side by side in memory, from
    a multiple of their number on, and are read under one condition."""
    conv = plan.conv
    if conv.width % width:
        return None
    known, zero = sym.Analyzer(), integer(0)
    extents = {
        "channel": conv.channels,
        "image": conv.images,
        "y": conv.height + TAPS - 1,
        "across": conv.width // width,
    }
    variables = [tirx.Var(name, "int64") for name in extents]
    lane = tirx.Var("lane", "int64")
    for variable, extent in zip((*variables, lane), (*extents.values(), width), strict=True):
        known.bind(variable, ir.Range.from_min_extent(zero, integer(extent)))
    channel, image, y, across = variables
    value = conv.read(channel, image, y, across * integer(width) + integer(1) + lane)
    element = element_of(flattened(value, known), known)
    conditions = [c for c in element.conditions if not known.can_prove(c)]
    offset = element.load.indices[-1]
    start = known.simplify(substitute(offset, {lane: zero}))
    if any(uses(condition, lane) for condition in conditions) or not (
        known.can_prove_equal(known.simplify(offset - start), lane)
        and known.can_prove_equal(tirx.floormod(start, integer(width)), zero)
    ):
        return None

    def runs(*at: ir.Expr) -> Read:
        place = dict(zip(variables, at, strict=True))
        zeros = [zero] * (len(element.load.indices) - 1)

        def load(n: ir.Expr) -> ir.Expr:
            return tirx.BufferLoad(element.load.source, [*zeros, substitute(start, place) + n])

        return load, [substitute(condition, place) for condition in conditions]

    return runs


def _is_zero_beyond(plan: TensorCorePlan) -> bool:
    """Whether the padded images have zeros in their first and their last column, and nowhere else beyond
    what octets read."""
    conv, known, zero = plan.conv, sym.Analyzer(), integer(0)
    extents = (conv.channels, conv.images, conv.height + TAPS - 1)
    variables = channel, image, y = tuple(tirx.Var(name, "int64") for name in ("channel", "image", "y"))
    for variable, extent in zip(variables, extents, strict=True):
        known.bind(variable, ir.Range.from_min_extent(zero, integer(extent)))

    def is_zero(element: Element) -> bool:
        return any(known.can_prove(tirx.Not(condition)) for condition in element.conditions)

    columns = (zero, integer(conv.width + TAPS - 2))
    return all(is_zero(element_of(conv.read(channel, image, y, column), known)) for column in columns)
