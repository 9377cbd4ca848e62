"""Convolutions along one axis with fewer multiplications: the rule and its loops.

A task transforms what a block of outputs reads, for all input channels; the transformed input stays in its
second-level cache. For each micro-kernel of output channels x vectors of tiles it sums every product of the
algorithm over the channels, in registers, and makes outputs of these sums:

    for p in products:  for c:  for m in rows:  for v in vectors:
        sums[m, v, :] += weight[p, c, m] * transformed[p, c, v, :]

Errors, as a fraction of the output's largest element, are below 2e-6 for normally distributed data and 512
channels, direct sums' 1e-6. NaN and infinities spread to all outputs of a tile that reads one: an infinity
becomes NaN there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.cpu.conv1d.blocks import OutputBlock, block_tasks
from hybridc.schedules.cpu.conv1d.plan import direct_cost
from hybridc.schedules.cpu.conv1d.winograd.plan import WinogradConv1dPlan, plans_of
from hybridc.schedules.cpu.conv2d.read import read_convolution, unpadded
from hybridc.schedules.cpu.core.micro_kernel import (
    CACHE_LINE_FLOATS,
    Point,
    Tile,
    ceil_div,
    function_of,
    integer,
    loop,
    sequence,
    unrolled,
    when,
    write_columns,
)
from hybridc.schedules.cpu.core.nest import finish
from hybridc.schedules.cpu.core.register_tile import Stream, reduction, register_tile
from hybridc.schedules.cpu.core.shuffles import picked
from hybridc.schedules.cpu.core.strided_copy import take_apart
from hybridc.schedules.packing import LinearMap, Packing
from hybridc.schedules.rule import Request, Scheduled, pick, schedule_rule

DIRECT = "direct"
_MOST_CHOICES = 6
_GAIN = 0.95
"""What it must leave of direct convolution's time: weights are up to three times the model's bytes."""


@schedule_rule(family="winograd")
def winograd_conv1d(request: Request) -> Scheduled | None:
    """Accepts convolutions along one axis of 2 taps or more and constant weights, with a stride or a dilation
    of few elements, where predicted to be faster than direct sums.

    Tiling (AVX-512): 13 x 2, 8 x 3 or 6 x 4 sums of output channels x vectors of tiles of 2 or 4 outputs.
    """
    if not request.winograd or request.many_sizes or request.choice == DIRECT:
        return None
    conv = read_convolution(request.function)
    if conv is None or conv.multiply_adds == 0:
        return None
    if conv.contraction.nest.parameter(conv.weight.source) not in request.constants:
        return None
    isa, threads = request.target.isa, request.threads
    found = sorted(plans_of(conv, isa, threads), key=lambda plan: plan.cost)[:_MOST_CHOICES]
    if not found or found[0].cost > _GAIN * direct_cost(conv, isa, threads):
        return None
    ranked = {plan.label: plan for plan in found}
    return schedule_plan(request, pick(request, ranked), (*ranked, DIRECT))


def schedule_plan(request: Request, plan: WinogradConv1dPlan, choices: tuple[str, ...] = ()) -> Scheduled:
    """Emit: a task transforms what its block reads, then runs through tiles, output channels outside."""
    conv, algorithm = plan.conv, plan.algorithm
    position = conv.contraction.nest.parameter(conv.weight.source)
    assert position is not None
    weight, packing = _packed_weight(plan)
    buffers = {
        "transformed": plan.transformed_shape,
        "apart": (plan.phases, plan.line),
        "edge": (plan.line * algorithm.step,),
        "sums": (algorithm.products, plan.rows, plan.vectors, plan.lanes),
        "outputs": (algorithm.outputs, plan.lanes),
    }
    scratch = {name: tirx.decl_buffer(shape, "float32", name) for name, shape in buffers.items()}
    params = list(request.function.params)
    params[position] = weight
    body = _Loops(plan, weight, unpadded(conv), **scratch).nest()
    function = function_of(request.function, params, [body], list(scratch.values()))
    return finish(function, winograd_conv1d.__name__, [(position, packing)], choices)


def _packed_weight(plan: WinogradConv1dPlan) -> tuple[ir.Var, Packing]:
    """`[O / rows, products, I, rows]`: the scalars of one step lie side by side."""
    conv, products = plan.conv, plan.algorithm.products
    blocks = ceil_div(conv.groups * conv.group_outputs, plan.rows)
    line = () if conv.height.output is None else (1,)
    padded = (blocks * plan.rows, conv.group_inputs, *line, products)
    split = (blocks, plan.rows, conv.group_inputs, products)
    transform = LinearMap(plan.algorithm.of_weights, (2 + len(line),))
    packed = tirx.decl_buffer((blocks, products, conv.group_inputs, plan.rows), "float32", "packed_weight")
    return packed, Packing(padded, split, (0, 3, 2, 1), transform)


@dataclass(frozen=True, slots=True)
class _Loops:
    """The loops of a plan, and the scratch memory of a task."""

    plan: WinogradConv1dPlan
    weight: ir.Var
    data: tuple[ir.Var, int] | None
    """The parameter that is read, and how many zeros stand before it; None if it is computed on the way."""
    transformed: ir.Var
    apart: ir.Var
    """A channel's line by phases of the tiles' step."""
    edge: ir.Var
    """A channel's line with its padding."""
    sums: ir.Var
    outputs: ir.Var
    """A vector of tiles of outputs, in order."""

    def nest(self) -> tirx.Stmt:
        return block_tasks(self.plan, self._transform, self._tile)

    def _transform(self, block: OutputBlock) -> tirx.Stmt:
        """What a block reads; most blocks read no padding."""
        plan, conv, step = self.plan, self.plan.conv, self.plan.algorithm.step
        length = plan.line * step
        start = block.number * integer(plan.tiles * plan.places * step)

        def each_channel(line: Callable[[ir.Expr], tirx.Stmt]) -> tirx.Stmt:
            def channel(c: ir.Expr) -> tirx.Stmt:
                own = block.g * integer(conv.group_inputs) + c
                return sequence([line(own), self._combine(c)])

            return loop(conv.group_inputs, channel)

        def apart(read: Callable[[ir.Expr], ir.Expr]) -> tirx.Stmt:
            def write(phase: ir.Expr, x: ir.Expr, value: ir.Expr) -> tirx.Stmt:
                return tirx.BufferStore(self.apart, value, [phase, x])

            return take_apart(step, plan.phases, plan.line, plan.lanes, read, write)

        def padded(channel: ir.Expr) -> tirx.Stmt:
            def element(x: ir.Expr) -> tirx.Stmt:
                value = conv.padded(block.n, channel, integer(0), start + x)
                return tirx.BufferStore(self.edge, value, [x])

            return sequence([loop(length, element), apart(lambda x: tirx.BufferLoad(self.edge, [x]))])

        if self.data is None:
            return each_channel(padded)
        data, before = self.data

        def inside(channel: ir.Expr) -> tirx.Stmt:
            line = [integer(0)] * (len(data.shape) - 3)
            return apart(
                lambda x: tirx.BufferLoad(data, [block.n, channel, *line, start + x - integer(before)])
            )

        last = before + int(data.shape[-1]) - length
        is_inside = tirx.all(start >= integer(before), start <= integer(last))
        return tirx.IfThenElse(is_inside, each_channel(inside), each_channel(padded))

    def _combine(self, c: ir.Expr) -> tirx.Stmt:
        """The products' inputs for one channel."""
        plan, algorithm = self.plan, self.plan.algorithm

        def vector(tile: ir.Expr, v: ir.Expr) -> tirx.Stmt:
            statements = list[tirx.Stmt]()
            first = (tile * integer(plan.vectors) + v) * integer(plan.lanes)

            def element(u: int) -> ir.Expr:
                shift, phase = divmod(u, algorithm.step)
                place = tirx.Ramp(first + integer(shift), integer(1), plan.lanes)
                statements.append(
                    tirx.Bind(
                        var := tirx.Var("d", f"float32x{plan.lanes}"),
                        tirx.BufferLoad(self.apart, [integer(phase), place]),
                    )
                )
                return var

            inputs = [element(u) for u in range(algorithm.inputs)]
            at = tirx.Ramp(v * integer(plan.lanes), integer(1), plan.lanes)
            for p, row in enumerate(algorithm.of_inputs):
                value = _combination(row, inputs)
                statements.append(tirx.BufferStore(self.transformed, value, [tile, integer(p), c, at]))
            return sequence(statements)

        return loop(plan.tiles, lambda tile: loop(plan.vectors, lambda v: vector(tile, v)))

    def _tile(self, block: OutputBlock, row_block: ir.Expr, number: ir.Expr) -> tirx.Stmt:
        """The micro-kernel: each product's sums stay in registers for all channels."""
        plan = self.plan
        own = block.part * integer(plan.part_blocks) + row_block
        weights = block.g * integer(plan.row_blocks) + own

        def product(p: ir.Expr) -> tirx.Stmt:
            tile = register_tile(plan.rows, plan.vectors, plan.lanes)

            def step(k: Point) -> tirx.Stmt:
                (c,) = k

                def value(m: int, v: ir.Expr, lane: ir.Expr) -> ir.Expr:
                    place = v * integer(plan.lanes) + lane
                    data = tirx.BufferLoad(self.transformed, [number, p, c, place])
                    weight = tirx.BufferLoad(self.weight, [weights, p, c, integer(m)])
                    return tile.sum_at(m, v, lane) + weight * data

                return tile.set(value)

            def keep(m: int, v: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
                return tirx.BufferStore(self.sums, tile.sum_at(m, v, lane), [p, integer(m), v, lane])

            place = (row_block * integer(plan.tiles) + number) * integer(plan.algorithm.products) + p
            streams = [*self._next_inputs(block, place), *self._lines_to_write(block, own, number, p)]
            summed = reduction((plan.conv.group_inputs,), tile, step, streams)
            return tile.within([tile.clear(), summed, tile.each(keep)])

        products = loop(plan.algorithm.products, product)
        return sequence([products, self._write(block, own, number)])

    def _next_inputs(self, block: OutputBlock, place: ir.Expr) -> list[Stream]:
        """Of what the next block reads and this one does not, the share of a product of a micro-kernel."""
        plan, conv = self.plan, self.plan.conv
        if self.data is None:
            return []
        data, before = self.data
        ahead = plan.tiles * plan.places * plan.algorithm.step
        lines = ceil_div(ahead, CACHE_LINE_FLOATS)
        shares = plan.part_blocks * plan.tiles * plan.algorithm.products
        share = ceil_div(conv.group_inputs * lines, shares)
        overlap = max(plan.algorithm.inputs - plan.algorithm.step, 0)
        start = (block.number + integer(1)) * integer(ahead) + integer(overlap - before)

        def line(outer: Point, n: ir.Expr) -> tirx.BufferLoad:
            number = place * integer(share) + n
            channel = block.g * integer(conv.group_inputs) + tirx.floordiv(number, integer(lines))
            column = start + tirx.floormod(number, integer(lines)) * integer(CACHE_LINE_FLOATS)
            return tirx.BufferLoad(data, [block.n, channel, *[integer(0)] * (len(data.shape) - 3), column])

        return [Stream(0, share, line)]

    def _lines_to_write(self, block: OutputBlock, own: ir.Expr, number: ir.Expr, p: ir.Expr) -> list[Stream]:
        """Of the lines that this tile will write, the share of a product."""
        plan, conv = self.plan, self.plan.conv
        lines = ceil_div(plan.tile_columns, CACHE_LINE_FLOATS)
        share = ceil_div(plan.rows * lines, plan.algorithm.products)
        start = (block.number * integer(plan.tiles) + number) * integer(plan.tile_columns)

        def line(outer: Point, n: ir.Expr) -> tirx.BufferLoad:
            place = p * integer(share) + n
            o = block.g * integer(conv.group_outputs) + own * integer(plan.rows)
            row, column = tirx.floordiv(place, integer(lines)), tirx.floormod(place, integer(lines))
            point = conv.point(block.n, o + row, integer(0), start + column * integer(CACHE_LINE_FLOATS))
            store = conv.contraction.store(point, tirx.FloatImm("float32", 0.0))
            return tirx.BufferLoad(store.buffer, store.indices)

        return [Stream(0, share, line, write=True)]

    def _write(self, block: OutputBlock, own: ir.Expr, number: ir.Expr) -> tirx.Stmt:
        """Combine sums into outputs, put these in order and store them through the epilogue."""
        plan, conv, algorithm = self.plan, self.plan.conv, self.plan.algorithm
        tile = (block.number * integer(plan.tiles) + number) * integer(plan.tile_columns)
        shape = Tile(plan.rows, 1, plan.vectors * algorithm.outputs, plan.lanes)

        def row(m: ir.Expr) -> tirx.Stmt:
            channel = own * integer(plan.rows) + m
            o = block.g * integer(conv.group_outputs) + channel

            def vector(v: ir.Expr) -> tirx.Stmt:
                def stored(i: ir.Expr) -> tirx.Stmt:
                    def element(column: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
                        value = tirx.BufferLoad(self.outputs, [i, lane])
                        return conv.contraction.store(conv.point(block.n, o, integer(0), column), value)

                    at = v * integer(algorithm.outputs) + i
                    return write_columns(tile, conv.width.outputs, shape, at, element)

                return sequence([self._combined_outputs(m, v), unrolled(algorithm.outputs, stored)])

            body = loop(plan.vectors, vector)
            return when(
                channel < integer(conv.group_outputs), body, always=conv.group_outputs % plan.rows == 0
            )

        return loop(plan.rows, row)

    def _combined_outputs(self, m: ir.Expr, v: ir.Expr) -> tirx.Stmt:
        plan, algorithm = self.plan, self.plan.algorithm
        ramp = tirx.Ramp(integer(0), integer(1), plan.lanes)
        statements = list[tirx.Stmt]()

        def named(value: ir.Expr) -> ir.Expr:
            statements.append(tirx.Bind(var := tirx.Var("y", f"float32x{plan.lanes}"), value))
            return var

        sums = [
            named(tirx.BufferLoad(self.sums, [integer(p), m, v, ramp])) for p in range(algorithm.products)
        ]
        outputs = [named(_combination(row, sums)) for row in algorithm.to_outputs]
        for i in range(algorithm.outputs):
            # the output at place i * lanes + lane is one of tile number place // outputs
            places = (divmod(i * plan.lanes + lane, algorithm.outputs) for lane in range(plan.lanes))
            value = picked(outputs, [(output, place) for place, output in places])
            statements.append(tirx.BufferStore(self.outputs, value, [integer(i), ramp]))
        return sequence(statements)


def _combination(factors: Sequence[float], terms: Sequence[ir.Expr]) -> ir.Expr:
    """Sum of factor times term; a term taken once comes first, so that the others are multiply-adds."""
    pairs = [(factor, term) for factor, term in zip(factors, terms, strict=True) if factor]
    pairs.sort(key=lambda pair: pair[0] != 1)
    values = [term if factor == 1 else term * tirx.FloatImm("float32", factor) for factor, term in pairs]
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total
