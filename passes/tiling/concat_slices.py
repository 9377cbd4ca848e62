"""A kernel that concatenates slices of tensors: a tile with the halo from its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import te, tirx

from hybridc.schedules.annotation import Pattern
from hybridc.schedules.shapes import index_shape


@dataclass(frozen=True, slots=True)
class SourceSlice:
    """Indices `begin` to `end` of a source, given by its position; zeros where it is None."""

    source: int | None
    begin: int
    end: int

    @property
    def extent(self) -> int:
        """Number of indices."""
        return self.end - self.begin


def concat_slices(
    shapes: Sequence[Sequence[int]], slices: Sequence[SourceSlice], axis: int, dtype: str
) -> tirx.PrimFunc:
    """A function that concatenates slices of its parameters along `axis`.

    The parameters have these shapes, which are equal except along `axis`, and this dtype.
    """
    sources = [te.placeholder(index_shape(shape), dtype, f"x{i}") for i, shape in enumerate(shapes)]
    total = sum(sliced.extent for sliced in slices)
    extents = [tirx.IntImm("int64", total if a == axis else e) for a, e in enumerate(shapes[0])]

    def element(*at: te.Var) -> te.Expr:
        value, begin = None, total
        for sliced in reversed(slices):
            end, begin = begin, begin - sliced.extent
            moved = at[axis] + (sliced.begin - begin)
            own = (
                tirx.const(0, dtype)
                if sliced.source is None
                else sources[sliced.source](*at[:axis], moved, *at[axis + 1 :])
            )
            value = own if value is None else tirx.if_then_else(at[axis] < end, own, value)
        return value

    function = te.create_prim_func([*sources, te.compute(extents, element, name="stacked")])
    return function.with_attr("op_pattern", int(Pattern.INJECTIVE)).with_attr("tirx.noalias", True)
