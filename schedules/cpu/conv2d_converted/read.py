"""Convolutions that can be computed in the blocked layout: which parameter they read, and where from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import ir, sym, tirx

from hybridc.schedules.cpu.conv2d.read import Convolution, read_convolution
from hybridc.schedules.cpu.core.micro_kernel import integer
from hybridc.schedules.cpu.core.nest import NestBlock, loads, substitute
from hybridc.schedules.rule import Request


@dataclass(frozen=True, slots=True)
class Extent:
    """What a convolution reads of an axis of its input: `inputs` elements from `first` on, between zeros."""

    first: int
    inputs: int
    before: int
    """Zeros in front of the first element."""
    behind: int


@dataclass(frozen=True, slots=True)
class PlainConvolution:
    """A convolution `[N, C, H, W]` to `[N, O, H', W']`, dense or depthwise."""

    conv: Convolution
    source: ir.Var
    """The parameter that it reads."""
    weight: int | None
    """Position of the parameter; None of weights that the function computes."""
    rows: Extent
    columns: Extent

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel has a kernel of its own."""
        return self.conv.groups > 1

    @property
    def channels(self) -> int:
        """Of the data."""
        return self.conv.groups * self.conv.group_inputs

    @property
    def outputs(self) -> int:
        """Channels of the results."""
        return self.conv.groups * self.conv.group_outputs

    @property
    def padding(self) -> tuple[int, int, int, int]:
        """Top, left, bottom, right."""
        return self.rows.before, self.columns.before, self.rows.behind, self.columns.behind

    @property
    def reads_all(self) -> bool:
        """Whether it reads all rows and columns of the parameter."""
        height, width = (int(e) for e in self.source.shape[2:])
        return (self.rows.inputs, self.columns.inputs) == (height, width)


def read_plain_convolution(request: Request) -> PlainConvolution | None:
    """What a function computes, if the blocked layout has a kernel for it."""
    conv = read_convolution(request.function)
    if conv is None or conv.height.output is None:
        return None
    if conv.groups > 1 and (conv.group_inputs, conv.group_outputs) != (1, 1):
        return None
    nest = conv.contraction.nest
    weight = nest.parameter(conv.weight.source)
    producer = nest.producer(conv.data.source)
    if producer is None:
        rows, columns = (Extent(0, axis.padded, 0, 0) for axis in (conv.height, conv.width))
        return PlainConvolution(conv, conv.data.source, weight, rows, columns)
    producer = replace(producer, value=nest.inlined(producer.value))
    found = loads(producer.value)
    if len(found) != 1 or nest.parameter(found[0].source) is None or len(producer.spatial) != 4:
        return None
    extents = _extents(producer, found[0])
    return extents and PlainConvolution(conv, found[0].source, weight, *extents)


def _extents(producer: NestBlock, load: ir.TensorLoad) -> tuple[Extent, Extent] | None:
    """Of the rows and columns that a block reads as they are, between zeros; None of any other block."""
    analyzer = sym.Analyzer()
    shape, padded = ([int(e) for e in buffer.shape] for buffer in (load.source, producer.buffer))
    if len(shape) != 4 or shape[:2] != padded[:2]:
        return None
    for index, variable, extent in zip(load.indices[:2], producer.spatial[:2], shape[:2], strict=True):
        if extent > 1 and not analyzer.can_prove_equal(index, variable):
            return None

    def is_zero(y: int, x: int) -> bool | None:
        """Of a place that is read; None of anything but zeros and elements of the data."""
        values = dict(zip(producer.spatial, map(integer, (0, 0, y, x)), strict=True))
        value = analyzer.simplify(substitute(producer.value, values))
        if isinstance(value, ir.TensorLoad):
            return False
        return True if isinstance(value, tirx.FloatImm) and float(value) == 0.0 else None

    middle, found = (padded[2] // 2, padded[3] // 2), list[Extent]()
    for axis in (2, 3):
        shift = analyzer.simplify(producer.spatial[axis] - load.indices[axis])
        if not isinstance(shift, tirx.IntImm):
            return None

        def zero_at(place: int, axis: int = axis) -> bool | None:
            return is_zero(place, middle[1]) if axis == 2 else is_zero(middle[0], place)

        # conditions compare an index with a bound, so that zeros are in front of all elements or behind them
        first, last = max(int(shift), 0), min(shape[axis] + int(shift), padded[axis]) - 1
        while first < middle[axis - 2] and zero_at(first):
            first += 1
        while last > middle[axis - 2] and zero_at(last):
            last -= 1
        outside = [p for p in (first - 1, last + 1) if 0 <= p < padded[axis]]
        if any(zero_at(p) is not False for p in (first, last)) or not all(map(zero_at, outside)):
            return None
        found.append(Extent(first - int(shift), last + 1 - first, first, padded[axis] - 1 - last))
    return found[0], found[1]
