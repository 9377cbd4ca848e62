"""Weights of convolutions with taps in front of input channels, where they are known when compiling.

A slice of the depth is then channels of one tap: the threads find out once for all its elements where the tap
reads, and whether that is inside of the image.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from tvm import ir, tirx

from hybridc.schedules.cuda.tensor_core.read import Axis, MatrixProduct
from hybridc.schedules.packing import Packing
from hybridc.schedules.shapes import index_shape, shape_of


def with_taps_first(
    product: MatrixProduct, constants: Collection[int]
) -> tuple[MatrixProduct, tuple[tuple[int, Packing], ...]]:
    """The product as it reads packed weights, and how they are packed; as it is where nothing is gained."""
    weight = product.left
    channels, *taps = product.depth.iterators
    if not taps or product.depth.extents[0] % product.steps or not isinstance(weight, ir.TensorLoad):
        return product, ()
    if math.prod(product.depth.extents[1:]) == 1:
        return product, ()
    position = next((i for i, p in enumerate(product.parameters) if p.same_as(weight.source)), None)
    wanted = (*product.row.iterators, channels, *taps)
    plain = len(wanted) == len(weight.indices) and all(
        index.same_as(v) for index, v in zip(weight.indices, wanted, strict=True)
    )
    if position not in constants or len(product.row.iterators) != 1 or not plain:
        return product, ()
    assert position is not None
    shape = shape_of(weight.source)
    axes = (0, *range(2, len(shape)), 1)
    packing = Packing(shape, shape, axes)
    packed = tirx.decl_buffer(
        index_shape(packing.packed_shape), "float32", f"{weight.source.name}_packed", layout=None
    )
    order = (*taps, channels)
    extents = dict(zip(product.depth.iterators, product.depth.extents, strict=True))
    load = tirx.BufferLoad(packed, [product.row.iterators[0], *order])
    parameters = [packed if i == position else p for i, p in enumerate(product.parameters)]
    changed = replace(
        product, left=load, depth=Axis(order, tuple(extents[v] for v in order)), parameters=tuple(parameters)
    )
    return changed, ((position, packing),)
