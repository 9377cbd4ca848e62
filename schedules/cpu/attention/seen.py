"""How many keys have a weight at all: those up to the last one that some query sees.

A decoder's cache has room for more positions than it holds, and a mask hides the others; and of a prompt each
query sees what stands before it. What a mask hides by the least number weighs exactly zero, so that kernels
leave out the keys behind the last one that a block of queries sees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from tvm import ir, tirx

from hybridc.schedules.cpu.core.attention import AttentionBlocks
from hybridc.schedules.cpu.core.micro_kernel import (
    PARALLEL_WORK,
    ceil_div,
    grid,
    integer,
    loop,
    sequence,
    vectorized,
)


@dataclass(frozen=True, slots=True)
class SeenKeys:
    """By what a mask says, the keys up to the last one that some query of a block sees."""

    found: AttentionBlocks
    mask: ir.TensorLoad
    """What is added to a score, at the iterators of the block `logits`."""
    lanes: int
    rows: int
    """Queries of a block."""
    ends: ir.Var
    """int32 [batches, blocks], as far as the mask distinguishes them: the vector of keys behind the last one
    that is seen."""
    furthest: ir.Var
    """int32 [batches]: the greatest of a batch."""
    lasts: ir.Var
    """int32 [lanes], of a row: the vector behind the last one whose key in this lane is seen."""

    @property
    def buffers(self) -> list[ir.Var]:
        """What the function's root block has to allocate."""
        return [self.ends, self.furthest, self.lasts]

    @property
    def vectors(self) -> int:
        """Of all keys."""
        return ceil_div(self.found.columns, self.lanes)

    def find(self) -> list[tirx.Stmt]:
        """Write `ends`, then `furthest`."""
        *batch, rows = self.found.lines(self.mask)
        blocks = int(self.ends.shape[1])

        def ends(point: Sequence[ir.Expr]) -> tirx.Stmt:
            *at, block = point
            first, count = block * integer(self.rows), integer(min(self.rows, rows))
            if rows % self.rows and blocks > 1:
                count = tirx.min(count, integer(rows) - first)
            end = [self._number(at), block]

            def row(m: ir.Expr) -> tirx.Stmt:
                is_open = tirx.BufferLoad(self.ends, end) < _int32(self.vectors)
                return tirx.IfThenElse(is_open, self._row(at, first + m, block), None)

            return sequence([tirx.BufferStore(self.ends, _int32(0), end), loop(count, row)])

        def furthest(at: Sequence[ir.Expr]) -> tirx.Stmt:
            number = self._number(at)

            def block(i: ir.Expr) -> tirx.Stmt:
                end, before = (
                    tirx.BufferLoad(self.ends, [number, i]),
                    tirx.BufferLoad(self.furthest, [number]),
                )
                return tirx.BufferStore(self.furthest, tirx.max(before, end), [number])

            return sequence([tirx.BufferStore(self.furthest, _int32(0), [number]), loop(blocks, block)])

        is_parallel = blocks > 1 and math.prod(batch) * rows * self.found.columns >= PARALLEL_WORK
        return [grid((*batch, blocks), ends, parallel=is_parallel), grid(batch, furthest)]

    def groups(self, batch: Sequence[ir.Expr], vectors: int, block: ir.Expr | None = None) -> ir.Expr:
        """Groups of so many vectors of keys that hold all that a block sees, or any block: at most those that
        there are, whatever is in memory."""
        number = self._number(batch)
        if block is None:
            end = tirx.BufferLoad(self.furthest, [number])
        else:
            end = tirx.BufferLoad(self.ends, [number, block if int(self.ends.shape[1]) > 1 else integer(0)])
        groups = tirx.floordiv(end.astype("int64") + integer(vectors - 1), integer(vectors))
        return tirx.max(tirx.min(groups, integer(ceil_div(self.vectors, vectors))), integer(0))

    def _row(self, batch: Sequence[ir.Expr], row: ir.Expr, block: ir.Expr) -> tirx.Stmt:
        """Move the end behind what a query sees; behind all keys if it sees none: all weigh the same then."""
        whole, rest = divmod(self.found.columns, self.lanes)

        def note(vector: ir.Expr, width: int) -> tirx.Stmt:
            number = vector.astype("int32") + _int32(1)

            def key(lane: ir.Expr) -> tirx.Stmt:
                is_hidden = self.found.hides(self.mask, (*batch, row, vector * integer(self.lanes) + lane))
                last = tirx.Select(is_hidden, tirx.BufferLoad(self.lasts, [lane]), number)
                return tirx.BufferStore(self.lasts, last, [lane])

            return vectorized(width, key)

        notes = [loop(whole, lambda vector: note(vector, self.lanes))] if whole else []
        notes += [note(integer(whole), rest)] if rest else []
        end, at = tirx.Var("end", "int32"), [self._number(batch), block]
        lanes = [tirx.BufferLoad(self.lasts, [integer(lane)]) for lane in range(self.lanes)]
        furthest = tirx.max(tirx.BufferLoad(self.ends, at), end)
        sees_any = end > _int32(0)
        return sequence(
            [
                vectorized(self.lanes, lambda lane: tirx.BufferStore(self.lasts, _int32(0), [lane])),
                *notes,
                tirx.Bind(end, reduce(tirx.max, lanes)),
                tirx.BufferStore(self.ends, tirx.Select(sees_any, furthest, _int32(self.vectors)), at),
            ]
        )

    def _number(self, batch: Sequence[ir.Expr]) -> ir.Expr:
        """Of a batch, among those that the mask distinguishes."""
        number: ir.Expr = integer(0)
        for extent, at in zip(self.found.lines(self.mask)[:-1], batch, strict=True):
            number = number * integer(extent) + (at if extent > 1 else integer(0))
        return number


def seen_keys(found: AttentionBlocks, lanes: int, rows: int) -> SeenKeys | None:
    """By blocks of so many queries; None if no mask hides keys, or there are few of them."""
    mask = found.hiding_mask
    if mask is None:
        return None
    *batch, queries = found.lines(mask)
    batches = math.prod(batch)
    shapes = {"ends": (batches, ceil_div(queries, rows)), "furthest": (batches,), "lasts": (lanes,)}
    buffers = (tirx.decl_buffer(shape, "int32", name) for name, shape in shapes.items())
    return SeenKeys(found, mask, lanes, rows, *buffers)


def _int32(value: int) -> ir.Expr:
    return tirx.const(value, "int32")
