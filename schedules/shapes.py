"""Static shapes, as numbers and as the index expressions that TE and TIR take."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import ir, tirx


def shape_of(buffer: ir.Var) -> tuple[int, ...]:
    """Extents of a buffer whose shape is static."""
    return tuple(int(extent) for extent in buffer.shape)


def index_shape(shape: Sequence[int]) -> list[tirx.IntImm]:
    """Extents in 64 bits: from plain numbers TE would make indices of 32 bits."""
    return [tirx.IntImm("int64", extent) for extent in shape]
