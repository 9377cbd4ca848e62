"""Weights that are laid out for tensor cores, where they are known when compiling.

Those of convolutions have taps in front of input channels. A slice of the depth, or a thread's part of it, is
then channels of one tap: threads find out once for all its elements where the tap reads, and whether that is
inside of the image. Integers lie along the depth, as no instruction transposes them; or where
that has no whole chunks, along the positions, from which words are transposed. So do 16-bit floats of such a
depth, as that of a first layer, whose windows have three channels: 27, 75, 147.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from tvm import ir, sym, tirx

from hybridc.schedules.cuda.tensor_core.instructions import INT8, TF32
from hybridc.schedules.cuda.tensor_core.read import Axis, MatrixProduct
from hybridc.schedules.cuda.tensor_core.staging import CHUNK_BYTES
from hybridc.schedules.packing import Packing
from hybridc.schedules.shapes import index_shape, shape_of

Packings = tuple[tuple[int, Packing], ...]


def packed(product: MatrixProduct, constants: Collection[int]) -> tuple[MatrixProduct, Packings]:
    """The product as it reads packed weights, and how they are packed; as it is where nothing is gained."""
    chunk = CHUNK_BYTES // product.item_bytes
    unit = product.steps if product.dtype == TF32 else chunk
    if product.slides and product.depth.extents[0] % unit == 0:
        return _with_taps_first(product, constants)
    if product.dtype == INT8 or (product.item_bytes == 2 and product.depth.extent % chunk):
        return _with_neighbours(product, constants, chunk)
    return product, ()


def _with_taps_first(product: MatrixProduct, constants: Collection[int]) -> tuple[MatrixProduct, Packings]:
    channels, *taps = product.depth.iterators
    if math.prod(product.depth.extents[1:]) == 1:
        return product, ()
    order = (*taps, channels)
    extents = dict(zip(product.depth.iterators, product.depth.extents, strict=True))
    # weights have the rows of results with channels first, and the columns of those with channels last
    for name, positions in (("left", product.row), ("right", product.column)):
        if len(positions.iterators) != 1:
            continue
        # of a grouped convolution the output channel is made of two iterators
        [own] = [value for _, value in product.split] or positions.iterators
        position = _plain_weight(product, name, (own, channels, *taps))
        if position in constants:
            assert position is not None
            changed = replace(product, depth=Axis(order, tuple(extents[v] for v in order)))
            return _with_axes(changed, name, position, (0, *range(2, len(taps) + 2), 1))
    return product, ()


def _with_neighbours(
    product: MatrixProduct, constants: Collection[int], chunk: int
) -> tuple[MatrixProduct, Packings]:
    """A weight in the order of which a thread can load several elements: along the depth if that has whole
    chunks, else along the positions."""
    depth = product.depth.iterators
    in_chunks = product.depth.extent % chunk == 0
    for name, positions in (("left", product.row), ("right", product.column)):
        own = positions.iterators
        if product.dtype != INT8 and positions.extent % chunk:
            continue  # single elements in either order
        for indices, lies_along_depth in (((*depth, *own), False), ((*own, *depth), True)):
            position = _plain_weight(product, name, indices)
            if position not in constants or lies_along_depth is in_chunks:
                continue
            assert position is not None
            first = len(depth) if in_chunks else len(own)
            axes = (*range(first, len(indices)), *range(first))
            return _with_axes(product, name, position, axes)
    return product, ()


def _plain_weight(product: MatrixProduct, name: str, indices: Sequence[ir.Expr]) -> int | None:
    """The position of a parameter that a factor is an element of, at these indices."""
    value = getattr(product, name).value
    if not isinstance(value, ir.TensorLoad) or len(indices) != len(value.indices):
        return None
    known = sym.Analyzer()
    if not all(known.can_prove_equal(i, e) for i, e in zip(value.indices, indices, strict=True)):
        return None
    return next((i for i, p in enumerate(product.parameters) if p.same_as(value.source)), None)


def _with_axes(
    product: MatrixProduct, name: str, position: int, axes: tuple[int, ...]
) -> tuple[MatrixProduct, Packings]:
    """The product with a factor's axes in another order."""
    factor = getattr(product, name)
    shape = shape_of(factor.value.source)
    packing = Packing(shape, shape, axes)
    source = tirx.decl_buffer(
        index_shape(packing.packed_shape), factor.dtype, f"{factor.value.source.name}_packed", layout=None
    )
    load = tirx.BufferLoad(source, [factor.value.indices[axis] for axis in axes])
    parameters = tuple(source if i == position else p for i, p in enumerate(product.parameters))
    changed = replace(product, parameters=parameters, **{name: replace(factor, value=load)})
    return changed, ((position, packing),)
