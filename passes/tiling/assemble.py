"""One kernel that puts pieces of tensors one behind the other: a band between the borders of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import te, tirx

from hybridc.passes.program.prim_funcs import Pattern
from hybridc.schedules.shapes import index_shape


@dataclass(frozen=True, slots=True)
class Piece:
    """Indices `begin` to `end` of a source, by its position; zeros where there is none."""

    source: int | None
    begin: int
    end: int

    @property
    def extent(self) -> int:
        return self.end - self.begin


def stacked(shapes: Sequence[Sequence[int]], pieces: Sequence[Piece], axis: int, dtype: str) -> tirx.PrimFunc:
    """Pieces of sources of these shapes, which are equal but along `axis`, in the order given along it."""
    sources = [te.placeholder(index_shape(shape), dtype, f"x{i}") for i, shape in enumerate(shapes)]
    total = sum(piece.extent for piece in pieces)
    extents = [tirx.IntImm("int64", total if a == axis else e) for a, e in enumerate(shapes[0])]

    def element(*at: te.Var) -> te.Expr:
        value, begin = None, total
        for piece in reversed(pieces):
            end, begin = begin, begin - piece.extent
            moved = at[axis] + (piece.begin - begin)
            own = (
                tirx.const(0, dtype)
                if piece.source is None
                else sources[piece.source](*at[:axis], moved, *at[axis + 1 :])
            )
            value = own if value is None else tirx.if_then_else(at[axis] < end, own, value)
        return value

    function = te.create_prim_func([*sources, te.compute(extents, element, name="stacked")])
    return function.with_attr("op_pattern", int(Pattern.INJECTIVE)).with_attr("tirx.noalias", True)
