"""The launch that reduces rows by warps or blocks, for rows whose accesses have been read as vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, tirx

from hybridc.schedules.cpu.core.nest import loads, substitute
from hybridc.schedules.cpu.reduction.read import Kept, Reduction, RowReductions
from hybridc.schedules.cuda.core.kernel import (
    KernelBuilder,
    Threads,
    integer,
    launch,
    loop,
    point_of,
    sequence,
    unrolled,
    vectorized,
    when,
)
from hybridc.schedules.cuda.core.launch import WARP
from hybridc.schedules.cuda.core.vectors import Lanes
from hybridc.schedules.cuda.core.warps import combined_by_block

HELD = 64
"""Elements of a row that a thread holds: with as many temporaries, half a multiprocessor's warps fit it."""
WARPS = 4
"""Rows of a block, if each has a warp."""
MANY_ROWS = 1 << 10
"""So many rows keep a GPU busy with a warp each."""
CHUNKS = 8
"""Most vectors of a row that one lane has, if each row has a warp: more take long one after the other."""


@dataclass(frozen=True, slots=True)
class RowInLanes:
    """A row whose values are those of `lanes.lane` in vector `lanes.vector` of the row."""

    row: RowReductions
    """Its `indices` are the position in the result of the row's first element, if it writes elements."""
    lanes: Lanes
    operands: tuple[ir.Expr, ...]
    """Loads that are made as vectors."""

    @property
    def vectors(self) -> int:
        return self.row.reduced_length // self.lanes.width

    @property
    def arrays(self) -> int:
        """Arrays of a row's elements that a thread holds: what is loaded, kept, and the result."""
        return len(self.operands) + sum(len(stage.kept) for stage in self.row.stages)


@dataclass(frozen=True, slots=True)
class Shares:
    """How rows are shared among threads."""

    threads: int
    """Of a row."""
    rows: int
    """Of a block."""
    chunks: int
    """Vectors of a thread."""
    is_held: bool
    """Whether a thread's vectors fit its registers."""


def shares_of(found: RowInLanes) -> Shares:
    """A warp for each of many or short rows, else the smallest block that holds the row in registers."""
    held = max(1, HELD // (found.lanes.width * max(found.arrays, 1)))
    by_warp = -(-found.vectors // WARP)
    if by_warp <= min(held, CHUNKS) and (found.row.row_count >= MANY_ROWS or by_warp <= 2):
        return Shares(WARP, WARPS, by_warp, True)
    for threads in (64, 128, 256, 512):
        chunks = -(-found.vectors // threads)
        if chunks <= min(held, CHUNKS // 2 if threads < 512 else CHUNKS):
            return Shares(threads, 1, chunks, True)
    return Shares(512, 1, -(-found.vectors // 512), False)


def row_kernel(function: tirx.PrimFunc, found: RowInLanes, shares: Shares) -> tirx.PrimFunc:
    """The function as one launch."""
    writer = _Writer(KernelBuilder(function), found, shares, {}, [])
    blocks = -(-found.row.row_count // shares.rows)
    threads = (shares.threads, shares.rows) if shares.rows > 1 else shares.threads
    return writer.builder.function([launch(blocks, threads, writer.of_thread)])


@dataclass(frozen=True, slots=True)
class _Writer:
    """Statements of a thread. `known` has what results and kept values are read as; `loaded` where operands
    are."""

    builder: KernelBuilder
    found: RowInLanes
    shares: Shares
    known: dict[ir.Var, ir.Expr]
    loaded: list[tuple[ir.Expr, ir.Var]]

    def of_thread(self, thread: Threads) -> tirx.Stmt:
        """All of a row: loads, a pass for each stage, and the results."""
        row, lanes, shares = self.found.row, self.found.lanes, self.shares
        size = (shares.chunks if shares.is_held else 1) * lanes.width
        for operand in self.found.operands:
            array = self.builder.registers((size,), str(operand.ty.dtype), "row")
            self.loaded.append((operand, array))
        statements: list[tirx.Stmt] = []
        if shares.is_held and self.loaded:
            statements.append(self._sweep(thread, lambda chunk: self._loads(chunk, self.loaded)))
        for stage in row.stages:
            statements += self._stage(thread, stage.kept, stage.reductions, size)
        statements += self._results(thread)
        number = thread.block * integer(shares.rows) + thread.y
        body = substitute(
            sequence(statements), dict(zip(row.row, point_of(number, row.row_extents), strict=True))
        )
        return when(number < integer(row.row_count), body, always=row.row_count % shares.rows == 0)

    def _sweep(self, thread: Threads, body: Callable[[ir.Expr], Sequence[tirx.Stmt]]) -> tirx.Stmt:
        """`body` for each of the thread's vectors that exist; its argument says which of them it is."""
        shares, vectors = self.shares, self.found.vectors

        def chunk(number: ir.Expr) -> tirx.Stmt:
            vector = number * integer(shares.threads) + thread.x
            statement = substitute(sequence(list(body(number))), {self.found.lanes.vector: vector})
            return when(vector < integer(vectors), statement, always=vectors % shares.threads == 0)

        return unrolled(shares.chunks, chunk) if shares.is_held else loop(shares.chunks, chunk)

    def _loads(self, chunk: ir.Expr, operands: Sequence[tuple[ir.Expr, ir.Var]]) -> list[tirx.Stmt]:
        lanes = self.found.lanes

        def load(operand: ir.Expr, array: ir.Var) -> tirx.Stmt:
            def element(lane: ir.Expr) -> tirx.Stmt:
                value = substitute(operand, {lanes.lane: lane})
                return tirx.BufferStore(array, value, [self._place(chunk, lane)])

            return vectorized(lanes.width, element)

        return [load(operand, array) for operand, array in operands]

    def _place(self, chunk: ir.Expr, lane: ir.Expr) -> ir.Expr:
        return chunk * integer(self.found.lanes.width) + lane if self.shares.is_held else lane

    def _loads_of(self, chunk: ir.Expr, values: Sequence[ir.Expr]) -> list[tirx.Stmt]:
        """Loads of what values need, where registers do not hold it."""
        if self.shares.is_held:
            return []
        read = [node for value in values for node in loads(substitute(value, self.known))]
        needed = [
            (operand, array)
            for operand, array in self.loaded
            if any(tvm_ffi.structural_equal(node, operand) for node in read)
        ]
        return self._loads(chunk, needed)

    def _in_registers(self, value: ir.Expr, chunk: ir.Expr, lane: ir.Expr) -> ir.Expr:
        """A value of an element, from what registers have."""
        place = self._place(chunk, self.found.lanes.lane)

        def replaced(node: ir.TensorLoad) -> ir.Expr:
            for operand, array in self.loaded:
                if tvm_ffi.structural_equal(node, operand):
                    return tirx.BufferLoad(array, [place])
            return node

        value = tvm_ffi.structural_map(substitute(value, self.known), (ir.TensorLoad, replaced))
        return substitute(value, {self.found.lanes.lane: lane, _CHUNK: chunk})

    def _stage(
        self, thread: Threads, kept: Sequence[Kept], reductions: Sequence[Reduction], size: int
    ) -> list[tirx.Stmt]:
        """One pass over the row, then what its threads have is combined."""
        held: list[tuple[Kept, ir.Var]] = []
        if self.shares.is_held:
            held = [(k, self.builder.registers((size,), str(k.value.ty.dtype), "kept")) for k in kept]
        else:
            self.known.update({k.var: substitute(k.value, self.known) for k in kept})
        sums = [(r, self.builder.registers((1,), str(r.result.ty.dtype), "sum")) for r in reductions]
        values = [*(k.value for k in kept), *(r.operand for r in reductions)]

        def element(chunk: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
            names = {k.var: tirx.BufferLoad(array, [self._place(chunk, lane)]) for k, array in held}
            keep = [
                tirx.BufferStore(array, self._in_registers(k.value, chunk, lane), [self._place(chunk, lane)])
                for k, array in held
            ]
            add = [
                _added(array, r, substitute(self._in_registers(r.operand, chunk, lane), names))
                for r, array in sums
            ]
            return sequence([*keep, *add])

        def chunk(number: ir.Expr) -> list[tirx.Stmt]:
            lanes = unrolled(self.found.lanes.width, lambda lane: element(number, lane))
            return [*self._loads_of(number, values), lanes]

        statements: list[tirx.Stmt] = [tirx.BufferStore(a, r.identity, [integer(0)]) for r, a in sums]
        statements.append(self._sweep(thread, chunk))
        for reduction, array in sums:
            statements += combined_by_block(
                self.builder, array, reduction.combine, thread, self.shares.threads
            )
        at = self._place(_CHUNK, self.found.lanes.lane)
        self.known.update({k.var: tirx.BufferLoad(array, [at]) for k, array in held})
        self.known.update({r.result: tirx.BufferLoad(array, [integer(0)]) for r, array in sums})
        return statements

    def _results(self, thread: Threads) -> list[tirx.Stmt]:
        row, lanes = self.found.row, self.found.lanes
        if not row.writes_elements:
            value = substitute(row.value, self.known)
            one = tirx.BufferStore(row.output, value, list(row.indices))
            return [when(thread.x.equal(integer(0)), one)]
        made = self.builder.registers((lanes.width,), str(row.output.dtype), "result")
        zeros = [integer(0) for _ in row.output.shape[1:]]

        def chunk(number: ir.Expr) -> list[tirx.Stmt]:
            def element(lane: ir.Expr) -> tirx.Stmt:
                return tirx.BufferStore(made, self._in_registers(row.value, number, lane), [lane])

            def store(lane: ir.Expr) -> tirx.Stmt:
                position = row.indices[0] + lanes.vector * integer(lanes.width) + lane
                return tirx.BufferStore(row.output, tirx.BufferLoad(made, [lane]), [*zeros, position])

            return [
                *self._loads_of(number, [row.value]),
                unrolled(lanes.width, element),
                vectorized(lanes.width, store),
            ]

        return [self._sweep(thread, chunk)]


_CHUNK = tirx.Var("chunk", "int64")
"""Stands for the vector of a thread in what `_Writer.known` has of its elements."""


def _added(array: ir.Var, reduction: Reduction, operand: ir.Expr) -> tirx.Stmt:
    own = tirx.BufferLoad(array, [integer(0)])
    return tirx.BufferStore(array, reduction.combine(own, operand), [integer(0)])
