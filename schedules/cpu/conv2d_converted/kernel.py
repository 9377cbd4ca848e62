"""A convolution of plain activations by a kernel for blocked ones, between stages that convert.

data in blocks   for Winograd's algorithm and depthwise convolution          a transposition
weights          blocked when compiling, or here if they are trained
sums in blocks   by a rule for blocked convolutions
results          transposed back, through the epilogue                       `plain_results.py`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tvm import ir, tirx

from hybridc.schedules.blocked_operators import ConvWindow, blocked_conv2d, blocked_depthwise
from hybridc.schedules.cpu.conv2d_converted.plain_results import plain_results
from hybridc.schedules.cpu.conv2d_converted.read import PlainConvolution
from hybridc.schedules.cpu.core.micro_kernel import INDEX, ceil_div, function_of, integer
from hybridc.schedules.cpu.core.nest import Nest, NestBlock, finish
from hybridc.schedules.cpu.elementwise.elementwise import written
from hybridc.schedules.mutation import renamed
from hybridc.schedules.packing import Packing
from hybridc.schedules.rule import Request, Scheduled
from hybridc.schedules.shapes import index_shape
from hybridc.targets import Isa

Way = Callable[[Request], Scheduled | None]
"""A rule for blocked convolutions, or a part of one."""
_WEIGHT = 1
"""Position among the parameters of a blocked convolution: data, weights, results."""


@dataclass(frozen=True, slots=True)
class Blocking:
    """A convolution with its channels in blocks."""

    plain: PlainConvolution
    outputs: int
    """Lanes of a block of output channels."""
    inputs: int | None = None
    """Lanes of a block of input channels, of which there is a whole number; None: data stay plain."""

    @property
    def blocks(self) -> int:
        """Of output channels."""
        return ceil_div(self.plain.outputs, self.outputs)

    @property
    def taps(self) -> tuple[int, int]:
        """Down and across."""
        return self.plain.conv.height.taps, self.plain.conv.width.taps

    @property
    def data_shape(self) -> tuple[int, ...]:
        """`[N, IB, H, W, i]`, or that of the parameter."""
        conv, size = self.plain.conv, (self.plain.rows.inputs, self.plain.columns.inputs)
        if self.inputs is None:
            return conv.batches, self.plain.channels, *size
        return conv.batches, self.plain.channels // self.inputs, *size, self.inputs

    @property
    def result_shape(self) -> tuple[int, ...]:
        """`[N, OB, H', W', o]`."""
        conv = self.plain.conv
        return conv.batches, self.blocks, conv.height.outputs, conv.width.outputs, self.outputs

    @property
    def weight_packing(self) -> Packing:
        """Weights `[O, C, KH, KW]` as `[OB, IB, KH, KW, i, o]`, `[OB, KH, KW, C, o]` of plain data, or
        `[OB, KH, KW, o]` of depthwise convolutions."""
        channels = self.plain.conv.group_inputs
        padded = (self.blocks * self.outputs, channels, *self.taps)
        if self.plain.is_depthwise:
            return Packing(padded, (self.blocks, self.outputs, *self.taps), (0, 2, 3, 1))
        if self.inputs is None:
            return Packing(padded, (self.blocks, self.outputs, *padded[1:]), (0, 3, 4, 2, 1))
        split = (self.blocks, self.outputs, channels // self.inputs, self.inputs, *self.taps)
        return Packing(padded, split, (0, 2, 4, 5, 3, 1))

    def request(self, request: Request) -> Request:
        """For the blocked convolution, as `request` is for the plain one."""
        conv = self.plain.conv
        window = ConvWindow(
            (conv.height.stride, conv.width.stride),
            self.plain.padding,
            (conv.height.dilation, conv.width.dilation),
        )
        operator = blocked_depthwise if self.plain.is_depthwise else blocked_conv2d
        function = operator(self.data_shape, self.weight_packing.packed_shape, window)
        constants = frozenset({_WEIGHT} if self.plain.weight in request.constants else ())
        return replace(request, function=function, constants=constants)


def converted(request: Request, blocking: Blocking, rule: Way, name: str) -> Scheduled | None:
    """What `rule` makes of the blocked convolution, as a kernel of the plain one; None if it refuses."""
    asked = blocking.request(request)
    made = rule(asked)
    if made is None:
        return None
    plain, isa = blocking.plain, request.target.isa
    stages = _Stages()
    data = plain.source
    if blocking.inputs is not None:
        data = stages.write(request, isa, _data_in_blocks(blocking))
    params, packings = list(request.function.params), []
    weight = made.function.params[_WEIGHT]
    if plain.weight in request.constants:
        found = dict(made.packings).get(_WEIGHT)
        packing = blocking.weight_packing if found is None else replace(found, before=blocking.weight_packing)
        params[plain.weight] = weight
        packings.append((plain.weight, packing))
    else:
        weight = stages.write(request, isa, _weight_in_blocks(blocking))
    sums = tirx.decl_buffer(index_shape(blocking.result_shape), "float32", "blocked_results")
    scratch = made.function.params[_WEIGHT + 2 :]
    kernel = renamed(made.function, [data, weight, sums, *scratch]).body.block
    stages.statements.extend([kernel.body, plain_results(plain, sums)])
    stages.buffers.extend([sums, *scratch, *kernel.alloc_buffers])
    function = function_of(request.function, params, stages.statements, stages.buffers)
    return finish(function, name, packings, made.choices)


@dataclass(frozen=True, slots=True)
class _Stages:
    """Of a kernel, one after the other, and the buffers that it allocates."""

    statements: list[tirx.Stmt] = field(default_factory=list)
    buffers: list[ir.Var] = field(default_factory=list)

    def write(self, request: Request, isa: Isa, block: NestBlock) -> ir.Var:
        """A stage that writes the buffer of a block."""
        statement, registers = written(Nest(request.function, (block,)), block, isa)
        self.statements.append(statement)
        self.buffers.extend([block.buffer, *registers])
        return block.buffer


def _data_in_blocks(blocking: Blocking) -> NestBlock:
    """What the convolution reads of its data."""
    plain, variables = blocking.plain, tuple(tirx.Var(v, INDEX) for v in ("n", "cb", "y", "x", "c"))
    n, cb, y, x, c = variables
    assert blocking.inputs is not None
    channel = cb * integer(blocking.inputs) + c
    place = [n, channel, y + integer(plain.rows.first), x + integer(plain.columns.first)]
    return _block("blocked_data", blocking.data_shape, variables, tirx.BufferLoad(plain.source, place))


def _weight_in_blocks(blocking: Blocking) -> NestBlock:
    """Weights that are known at run time only; zero behind the last output channel."""
    conv, shape = blocking.plain.conv, blocking.weight_packing.packed_shape
    variables = tuple(tirx.Var(f"i{axis}", INDEX) for axis in range(len(shape)))
    ob, *_, o = variables
    output, kept = ob * integer(blocking.outputs) + o, blocking.plain.outputs
    if blocking.plain.is_depthwise:
        kh, kw, c = variables[1], variables[2], integer(0)
    else:
        kh, kw, c = variables[-4:-1]
        if blocking.inputs is not None:
            c = variables[1] * integer(blocking.inputs) + c
    value = conv.weight_at(output, c, kh, kw)
    if kept % blocking.outputs:
        exists = output < integer(kept)
        value = tirx.if_then_else(exists, value, tirx.FloatImm("float32", 0.0))
    return _block("blocked_weight", shape, variables, value)


def _block(name: str, shape: tuple[int, ...], variables: tuple[ir.Var, ...], value: ir.Expr) -> NestBlock:
    buffer = tirx.decl_buffer(index_shape(shape), "float32", name)
    extents = dict(zip(variables, shape, strict=True))
    return NestBlock(name, variables, (), extents, buffer, variables, value)
