"""Weights as the threads of a tile load them: the rows (or columns) of a step of the depth side by side.

Weights of a convolution lie along the depth. Read so, four steps of a row at a time, the accesses of a warp
lie in as many lines as it reads rows, and each number is stored into shared memory by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from tvm import ir, tirx

from hybridc.schedules.cpu.core.nest import loads
from hybridc.schedules.cuda.tile.access import WIDTH
from hybridc.schedules.cuda.tile.group import Group
from hybridc.schedules.cuda.tile.read import PackedWeight, Product
from hybridc.schedules.packing import Packing
from hybridc.schedules.shapes import index_shape, shape_of


def with_depth_first(product: Product, parameters: Sequence[ir.Var], constants: Collection[int]) -> Product:
    """The product with those factors packed that are `constants`, by their positions among the parameters."""
    for side, group in (("left", product.rows), ("right", product.columns)):
        value = getattr(product, side)
        others = [product.right if side == "left" else product.left, product.store.value]
        position = _position_of(value, others, parameters)
        if position in constants and group.size % WIDTH == 0:
            assert position is not None
            product = _packed(product, side, value, group, position)
    return product


def _position_of(value: ir.Expr, others: Sequence[ir.Expr], parameters: Sequence[ir.Var]) -> int | None:
    """Of the parameter that a factor is, if the function reads it nowhere else."""
    if not isinstance(value, ir.TensorLoad):
        return None
    if any(load.source.same_as(value.source) for other in others for load in loads(other)):
        return None
    return next((i for i, p in enumerate(parameters) if p.same_as(value.source)), None)


def _packed(product: Product, side: str, value: ir.TensorLoad, group: Group, position: int) -> Product:
    """With a factor whose depth is in front of its rows or columns; as it is where that changes nothing, or
    where an index is not an iterator that goes through all of its axis."""
    shape = shape_of(value.source)
    groups = (product.batch, product.depth, group)
    extents = {v: e for g in groups for v, e in zip(g.axes, g.extents, strict=True)}
    own = {i: v for i, v in enumerate(value.indices) if isinstance(v, ir.Var)}
    if any(extents.get(v) != shape[i] for i, v in own.items()) or len(set(own.values())) < len(own):
        return product
    if any(extent > 1 for i, extent in enumerate(shape) if i not in own):
        return product
    order = [v for g in groups for v in g.axes if v in own.values()]
    place = {v: i for i, v in own.items()}
    axes = (*(i for i in range(len(shape)) if i not in own), *(place[v] for v in order))
    if axes == tuple(range(len(shape))) or len(order) != len(own):
        return product
    packing = Packing(shape, shape, axes)
    buffer = tirx.decl_buffer(
        index_shape(packing.packed_shape), str(value.source.dtype), f"{value.source.name}_packed", layout=None
    )
    load = tirx.BufferLoad(buffer, [value.indices[i] for i in axes])
    weight = PackedWeight(position, packing, buffer)
    return replace(product, **{side: load}, weights=(*product.weights, weight))
