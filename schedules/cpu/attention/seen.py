"""How many keys have a weight at all: those up to the last one that some query sees.

A decoder's cache has room for more positions than it holds, and a mask hides the others. What a mask hides by
the least number weighs exactly zero, so that kernels leave out the keys behind the last one that is seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from tvm import ir, tirx

from hybridc.schedules.cpu.core.attention import AttentionBlocks
from hybridc.schedules.cpu.core.micro_kernel import ceil_div, grid, integer, loop, sequence, vectorized
from hybridc.schedules.cpu.core.nest import substitute

HIDES = -(2.0**127)
"""A mask that adds this or less hides a key: no score makes up for it, and the exponential is zero. Exporters
write -inf, or the least float32, which is twice as much."""
WORTH_KEYS = 64
"""Of fewer keys it takes longer to look than to compute."""


@dataclass(frozen=True, slots=True)
class SeenKeys:
    """By what a mask says, the keys up to the last one that some query of a batch sees."""

    found: AttentionBlocks
    mask: ir.TensorLoad
    """What is added to a score, at the iterators of the block `logits`."""
    lanes: int
    ends: ir.Var
    """int32 [batches that the mask distinguishes]: the vector of keys behind the last one that is seen."""
    lasts: ir.Var
    """int32 [lanes], of a row: the vector behind the last one whose key in this lane is seen."""

    @property
    def buffers(self) -> list[ir.Var]:
        """What the function's root block has to allocate."""
        return [self.ends, self.lasts]

    @property
    def vectors(self) -> int:
        """Of all keys."""
        return ceil_div(self.found.columns, self.lanes)

    def find(self) -> tirx.Stmt:
        """Write `ends`."""
        *batch, rows = _extents(self.found, self.mask)

        def each(point: Sequence[ir.Expr]) -> tirx.Stmt:
            begin = tirx.BufferStore(self.ends, _int32(0), [self._number(point)])
            return sequence([begin, loop(rows, lambda m: self._row(point, m))])

        return grid(batch, each)

    def groups(self, batch: Sequence[ir.Expr], vectors: int) -> ir.Expr:
        """Groups of so many vectors of keys that hold all that are seen: at most those that there are,
        whatever is in memory."""
        end = tirx.BufferLoad(self.ends, [self._number(batch)]).astype("int64")
        groups = tirx.floordiv(end + integer(vectors - 1), integer(vectors))
        return tirx.max(tirx.min(groups, integer(ceil_div(self.vectors, vectors))), integer(0))

    def _row(self, batch: Sequence[ir.Expr], row: ir.Expr) -> tirx.Stmt:
        """Move the end behind what a query sees; behind all keys if it sees none: all weigh the same then."""
        whole, rest = divmod(self.found.columns, self.lanes)

        def note(vector: ir.Expr, width: int) -> tirx.Stmt:
            number = vector.astype("int32") + _int32(1)

            def key(lane: ir.Expr) -> tirx.Stmt:
                is_hidden = self._hides((*batch, row, vector * integer(self.lanes) + lane))
                last = tirx.Select(is_hidden, tirx.BufferLoad(self.lasts, [lane]), number)
                return tirx.BufferStore(self.lasts, last, [lane])

            return vectorized(width, key)

        notes = [loop(whole, lambda vector: note(vector, self.lanes))] if whole else []
        notes += [note(integer(whole), rest)] if rest else []
        end, at = tirx.Var("end", "int32"), [self._number(batch)]
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

    def _hides(self, point: Sequence[ir.Expr]) -> ir.Expr:
        """Whether the mask hides a key; what is not a number hides nothing."""
        places = dict(zip(self.found.blocks["logits"].spatial, point, strict=True))
        mask = tirx.BufferLoad(self.mask.source, [substitute(i, places) for i in self.mask.indices])
        return mask <= tirx.FloatImm("float32", HIDES)

    def _number(self, batch: Sequence[ir.Expr]) -> ir.Expr:
        """Of a batch, among those that the mask distinguishes."""
        number: ir.Expr = integer(0)
        for extent, at in zip(_extents(self.found, self.mask)[:-1], batch, strict=True):
            number = number * integer(extent) + (at if extent > 1 else integer(0))
        return number


def seen_keys(found: AttentionBlocks, lanes: int) -> SeenKeys | None:
    """None if no mask is added to the scores that distinguishes keys, or there are few of them."""
    columns = found.blocks["logits"].spatial[-1]
    masks = [load for load in _added(found) if load.indices[-1].same_as(columns)]
    if not masks or found.columns < WORTH_KEYS:
        return None
    # of several the one with fewest elements, as a mask of positions is the same for all heads
    mask = min(masks, key=lambda load: math.prod(_extents(found, load)))
    batches = math.prod(_extents(found, mask)[:-1])
    buffers = (tirx.decl_buffer((n,), "int32", name) for name, n in (("ends", batches), ("lasts", lanes)))
    return SeenKeys(found, mask, lanes, *buffers)


def _added(found: AttentionBlocks) -> list[ir.TensorLoad]:
    """What is added to the scores last."""
    value, masks = found.blocks["logits"].value, []
    while isinstance(value, tirx.Add):
        sides = (value.a, value.b), (value.b, value.a)
        is_mask = [
            isinstance(a, ir.TensorLoad) and found.nest.parameter(a.source) is not None for a, _ in sides
        ]
        if not any(is_mask):
            break
        mask, value = sides[is_mask.index(True)]
        masks.append(mask)
    return masks


def _extents(found: AttentionBlocks, mask: ir.TensorLoad) -> tuple[int, ...]:
    """Batches and rows that a mask distinguishes; one along an axis that its element does not depend on."""
    logits = found.blocks["logits"]
    return tuple(
        logits.extents[axis] if any(index.same_as(axis) for index in mask.indices) else 1
        for axis in logits.spatial[:-1]
    )


def _int32(value: int) -> ir.Expr:
    return tirx.const(value, "int32")
