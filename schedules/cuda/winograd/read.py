"""Convolutions that Winograd's algorithm computes: 3x3 taps, stride and dilation one, known weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, sym, tirx

from hybridc.schedules.cpu.core.micro_kernel import integer
from hybridc.schedules.cpu.core.nest import substitute
from hybridc.schedules.cuda.tile.read import Product
from hybridc.schedules.packing import Packing
from hybridc.schedules.rule import Request
from hybridc.schedules.shapes import index_shape, shape_of

TAPS = 3


@dataclass(frozen=True, slots=True)
class Convolution:
    """`product.right` as a function of where in the padded images it reads."""

    product: Product
    position: int
    """Of the weights among the parameters; `[outputs, channels, 3, 3]`."""
    channels: int
    outputs: int
    images: int
    height: int
    width: int
    """Of the output."""
    source: ir.Expr
    """What is read, by `channel`, `image`, `y` and `x`: of the padded images."""
    channel: ir.Var
    image: ir.Var | None
    y: ir.Var
    x: ir.Var

    @property
    def packing(self) -> Packing:
        """Weights as `[channels, 3, 3, outputs]`: neighbouring threads read neighbouring outputs."""
        shape = (self.outputs, self.channels, TAPS, TAPS)
        return Packing(shape, shape, (1, 2, 3, 0))

    def packed_weights(self) -> ir.Var:
        """The parameter in place of the weights."""
        shape = index_shape(self.packing.packed_shape)
        return tirx.decl_buffer(shape, "float32", "weights_packed", layout=None)

    def read(self, channel: ir.Expr, image: ir.Expr, y: ir.Expr, x: ir.Expr) -> ir.Expr:
        """An element of the padded images."""
        point = {self.channel: channel, self.y: y, self.x: x}
        return substitute(self.source, point if self.image is None else point | {self.image: image})

    def columns_at(self, image: ir.Expr, y: ir.Expr, x: ir.Expr) -> Mapping[ir.Var, ir.Expr]:
        """The product's columns at an element of the output."""
        return dict(
            zip(self.product.columns.axes[-3:], (image, y, x)[-len(self.product.columns.axes) :], strict=True)
        )


def read_convolution(product: Product, request: Request) -> Convolution | None:
    """The product as such a convolution, or None."""
    rows, columns, depth = product.rows, product.columns, product.depth
    if product.batch.axes or len(rows.axes) != 1 or len(columns.axes) not in (2, 3):
        return None
    if len(depth.axes) != 3 or depth.extents[1:] != (TAPS, TAPS):
        return None
    weights, (channel, *taps) = product.left, depth.axes
    wanted = (rows.axes[0], channel, *taps)
    if not isinstance(weights, ir.TensorLoad) or len(weights.indices) != len(wanted):
        return None
    if not all(index.same_as(v) for index, v in zip(weights.indices, wanted, strict=True)):
        return None
    parameters = request.function.params
    position = next((i for i, p in enumerate(parameters) if p.same_as(weights.source)), None)
    shape = (rows.size, depth.extents[0], TAPS, TAPS)
    if position not in request.own_constants or shape_of(weights.source) != shape:
        return None
    assert position is not None
    found = _window(product)
    if found is None:
        return None
    source, y, x = found
    images, height, width = (1, *columns.extents)[-3:]
    return Convolution(
        product, position, shape[1], shape[0], images, height, width, source, channel,
        columns.axes[0] if len(columns.axes) == 3 else None, y, x,
    )  # fmt: skip


def _window(product: Product) -> tuple[ir.Expr, ir.Var, ir.Var] | None:
    """What is read by the sums of an output's row and a tap's, and of its column and a tap's, if nothing else
    of these matters."""
    (down, across), taps = product.columns.axes[-2:], product.depth.axes[1:]
    y, x = (tirx.Var(name, "int64") for name in ("y", "x"))
    zero = integer(0)
    source = substitute(product.right, {down: y, across: x, taps[0]: zero, taps[1]: zero})
    analyzer = sym.Analyzer()
    for group in (product.rows, product.columns, product.depth):
        for axis, extent in zip(group.axes, group.extents, strict=True):
            analyzer.bind(axis, ir.Range(zero, integer(extent)))
    again = substitute(source, {y: down + taps[0], x: across + taps[1]})
    same = tvm_ffi.structural_equal(_simplified(again, analyzer), _simplified(product.right, analyzer))
    return (source, y, x) if same else None


def _simplified(value: ir.Expr, analyzer: sym.Analyzer) -> ir.Expr:
    """With simple indices and conditions; a condition's negation is not used to simplify what it guards."""

    def load(node: ir.TensorLoad) -> ir.Expr:
        return tirx.BufferLoad(node.source, [analyzer.simplify(index) for index in node.indices])

    return analyzer.simplify(tvm_ffi.structural_map(value, (ir.TensorLoad, load)))
