"""Weights in the order that a kernel reads: packed when compiling, or in front of the kernel in each run.

Weights that are trained are known at run time only. They stay float32 in memory; a kernel of bf16 packs a
copy of them in its workspace, rounded as `Packing` rounds constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.cpu.core.dot_products import bf16_pair
from hybridc.schedules.cpu.core.micro_kernel import PARALLEL_WORK, Point, grid, integer
from hybridc.schedules.packing import Packing
from hybridc.schedules.rule import Request


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Where a kernel reads packed weights, and what its function needs for it."""

    buffer: ir.Var
    params: tuple[ir.Var, ...]
    stages: tuple[tirx.Stmt, ...] = ()
    """In front of the kernel: those that pack."""
    buffers: tuple[ir.Var, ...] = ()
    packings: tuple[tuple[int, Packing], ...] = ()


def packed_weight(
    request: Request, position: int, packing: Packing | None, name: str, dtype: str = "int32"
) -> PackedWeight:
    """The parameter at `position`, packed when compiling if it is constant, else in each run.

    Without `packing` it is read where it is. `dtype` is that of the packed elements.

    Raises: ValueError for a parameter that is not constant and a packing of anything but bf16 pairs.
    """
    params = list(request.function.params)
    if packing is None:
        return PackedWeight(params[position], tuple(params))
    packed = tirx.decl_buffer(packing.packed_shape, dtype, name)
    if position in request.constants:
        params[position] = packed
        return PackedWeight(packed, tuple(params), packings=((position, packing),))
    if packing.vnni_dtype != "bfloat16" or packing.transform is not None or packing.combined is not None:
        raise ValueError(f"only bf16 pairs are packed at run time, not {packing}")
    stage = _pack(params[position], packing, packed)
    return PackedWeight(packed, tuple(params), (stage,), (packed,))


def _pack(weight: ir.Var, packing: Packing, packed: ir.Var) -> tirx.Stmt:
    """What `Packing.apply` does, element by element."""

    def word(point: Point) -> tirx.Stmt:
        pair = [_element(weight, packing, [*point, integer(i)]) for i in (0, 1)]
        return tirx.BufferStore(packed, bf16_pair(*pair), list(point))

    elements = 1
    for extent in packing.packed_shape:
        elements *= extent
    return grid(packing.packed_shape, word, parallel=elements >= PARALLEL_WORK)


def _element(weight: ir.Var, packing: Packing, place: Sequence[ir.Expr]) -> ir.Expr:
    """That which stands at a place of the permuted array; zero behind the end of an axis."""
    digits = dict(zip(packing.axes, place, strict=True))
    indices, exists, axis = list[ir.Expr](), list[ir.Expr](), 0
    for extent, padded in zip(weight.shape, packing.padded, strict=True):
        index, size = integer(0), 1
        # the axes of `shape` that make up this one, the slowest first
        while size < padded:
            index = index * integer(packing.shape[axis]) + digits[axis]
            size *= packing.shape[axis]
            axis += 1
        if padded > int(extent):
            exists.append(index < extent)
        indices.append(index)
    value = tirx.BufferLoad(weight, indices)
    return tirx.if_then_else(tirx.all(*exists), value, tirx.FloatImm("float32", 0.0)) if exists else value
