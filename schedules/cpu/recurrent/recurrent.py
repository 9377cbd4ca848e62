"""LSTM, GRU and RNN: a thin matrix product a step, whose sums stay in registers until they are activated.

Steps depend on each other; within one, hidden units do not. So a step is a parallel region, whose tasks are
blocks of hidden units times blocks of rows of the batch, and a core has the same part of the weights in each
step: they stay in its cache. Where those of both directions would not, all steps of one direction are made
before those of the other; where those of one do not either, every other step goes through them backwards. The
weights are packed so that a task reads them in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import ir, tirx

from hybridc.recurrence.activations import Activation
from hybridc.recurrence.cell import Phase, Recurrence
from hybridc.recurrence.tensors import Tensors, by_direction, recurrence_of, step_of
from hybridc.schedules.cpu.core.micro_kernel import (
    CACHE_LINE_FLOATS,
    Point,
    Tile,
    ceil_div,
    clamp,
    function_of,
    grid,
    integer,
    loop,
    micro_kernel,
    prefetch,
    sequence,
    unflattened,
    unrolled,
    vectorized,
    when,
    write_columns,
)
from hybridc.schedules.cpu.core.nest import finish
from hybridc.schedules.cpu.recurrent.plan import RecurrencePlan, recurrence_plan
from hybridc.schedules.rule import Request, Scheduled, schedule_rule
from hybridc.schedules.shapes import shape_of


@schedule_rule(family="matmul")
def recurrent(request: Request) -> Scheduled | None:
    """Accepts what the frontend annotates as a recurrence.

    The result of the step before and the new one are two buffers that take turns, since all units of a step
    read all of the one before. Weights that are known at run time only are packed by each run.
    """
    own = recurrence_of(request.function.body)
    if own is None:
        return None
    outputs = 3 if own.has_memory else 2
    params = list(request.function.params)
    tensors = Tensors.of(own, params[:-outputs], params[-outputs:])
    plan = recurrence_plan(request, own, tensors)
    position = next(i for i, p in enumerate(params) if p.same_as(tensors.weights))
    is_known = position in request.constants
    packing = plan.packing
    packed = tirx.decl_buffer(packing.packed_shape, "float32", "packed_weights")
    if is_known:
        params[position] = packed
    kernel = _Kernel(own, tensors, plan, packed)
    stages = [*([] if is_known else [kernel.pack()]), *kernel.stages()]
    buffers = [kernel.states, *kernel.local, *([] if is_known else [packed])]
    packings = [(position, packing)] if is_known else []
    return finish(function_of(request.function, params, stages, buffers), recurrent.__name__, packings)


class _Kernel:
    """The statements of a recurrence."""

    def __init__(self, own: Recurrence, tensors: Tensors, plan: RecurrencePlan, packed: ir.Var) -> None:
        self.own, self.tensors, self.plan, self.packed = own, tensors, plan, packed
        _, batch, directions, _, hidden = tensors.extents
        self.states = tirx.decl_buffer((2, directions, batch, hidden), "float32", "states")
        self.local: list[ir.Var] = []

    def pack(self) -> tirx.Stmt:
        """The weights as `RecurrencePlan.packing` has them, in each run."""
        plan, (_, _, _, _, hidden) = self.plan, self.tensors.extents

        def element(point: tuple[ir.Expr, ...]) -> tirx.Stmt:
            if plan.gates_apart:
                d, block, gate, k, vector = point
            else:
                d, block, k, gate, vector = point

            def lane(at: ir.Expr) -> tirx.Stmt:
                unit = (block * integer(plan.width) + vector) * integer(plan.lanes) + at
                is_whole = plan.blocks * plan.width * plan.lanes == hidden
                weight = tirx.BufferLoad(
                    self.tensors.weights, [d, gate, clamp(unit, hidden, inside=is_whole), k]
                )
                return tirx.BufferStore(self.packed, weight, [*point, at])

            return loop(plan.lanes, lane)

        return grid(shape_of(self.packed)[:-1], element, parallel=plan.is_parallel)

    def stages(self) -> list[tirx.Stmt]:
        """The initial states, the steps, the last result."""
        steps, _, directions, _, _ = self.tensors.extents

        def begin(d: ir.Expr, b: ir.Expr, j: ir.Expr) -> tirx.Stmt:
            first = tirx.BufferStore(self.states, self.tensors.initial(0, d, b, j), [integer(0), d, b, j])
            if self.tensors.memory is None:
                return first
            memory = tirx.BufferStore(self.tensors.memory, self.tensors.initial(1, d, b, j), [d, b, j])
            return tirx.SeqStmt([first, memory])

        def end(d: ir.Expr, b: ir.Expr, j: ir.Expr) -> tirx.Stmt:
            value = tirx.BufferLoad(self.states, [integer(steps % 2), d, b, j])
            return tirx.BufferStore(self.tensors.last, value, [d, b, j])

        def all_steps(first: ir.Expr, count: int) -> tirx.Stmt:
            phases = self.own.phases()
            return loop(steps, lambda s: sequence([self._phase(phase, s, first, count) for phase in phases]))

        if self.plan.directions_apart:
            made = loop(directions, lambda d: all_steps(d, 1))
        else:
            made = all_steps(integer(0), directions)
        return [self._each_state(begin), made, self._each_state(end)]

    def _each_state(self, body: Callable[[ir.Expr, ir.Expr, ir.Expr], tirx.Stmt]) -> tirx.Stmt:
        _, batch, directions, _, hidden = self.tensors.extents
        return loop(directions, lambda d: loop(batch, lambda b: loop(hidden, lambda j: body(d, b, j))))

    def _phase(self, phase: Phase, s: ir.Expr, first: ir.Expr, directions: int) -> tirx.Stmt:
        """A phase of a step of so many directions from the first on."""
        plan = self.plan
        extents = (directions, plan.blocks, ceil_div(self.tensors.extents[1], plan.rows))

        # rows are the innermost: the block's weights are in a cache when the next rows need them
        def task(point: tuple[ir.Expr, ...]) -> tirx.Stmt:
            d, block, rows = point
            return self._tile(phase, s, first + d, block, rows)

        if not plan.turns:
            return grid(extents, task, parallel=plan.is_parallel)
        tasks = math.prod(extents)
        each = ceil_div(tasks, plan.shares)

        def share(point: tuple[ir.Expr, ...]) -> tirx.Stmt:
            def one(i: ir.Expr) -> tirx.Stmt:
                back = tirx.floormod(s, integer(2)) * (integer(each - 1) - integer(2) * i)
                number = point[0] * integer(each) + i + back
                made = task(unflattened(number, extents))
                return when(number < integer(tasks), made, always=tasks % plan.shares == 0)

            return loop(each, one)

        return grid((plan.shares,), share, parallel=plan.is_parallel)

    def _tile(self, phase: Phase, s: ir.Expr, d: ir.Expr, block: ir.Expr, row_tile: ir.Expr) -> tirx.Stmt:
        """Products of a task, through a small buffer to what is made of them."""
        plan, (steps, batch, _, _, hidden) = self.plan, self.tensors.extents
        at_once = 1 if plan.one_by_one else len(phase.gates)
        tile = Tile(plan.rows, at_once, plan.width, plan.lanes)
        first, is_whole = row_tile * integer(plan.rows), batch % plan.rows == 0
        old = tirx.floormod(s, integer(2))

        def left(k: Point, m: ir.Expr) -> ir.Expr:
            b = clamp(first + m, batch, inside=is_whole)
            if phase.of_memory:
                return tirx.BufferLoad(self.tensors.memory, [d, b, k[0]])
            return tirx.BufferLoad(self.states, [old, d, b, k[0]])

        def right(k: Point, gate: ir.Expr, vector: ir.Expr, lane: ir.Expr) -> ir.Expr:
            gate = gate + integer(phase.gates[0])
            place = [d, block, gate, k[0]] if plan.gates_apart else [d, block, k[0], gate]
            return tirx.BufferLoad(self.packed, [*place, vector, lane])

        products = tirx.decl_buffer(
            (plan.rows, len(phase.gates), plan.width, plan.lanes), "float32", "products", scope="local"
        )
        self.local.append(products)

        def multiply(begin: ir.Expr) -> tirx.Stmt:
            """Products of the gates that are multiplied at once, from `begin` on."""

            def write(sum_at: Callable[..., ir.Expr]) -> tirx.Stmt:
                def copy(m: ir.Expr, g: ir.Expr, w: ir.Expr) -> tirx.Stmt:
                    return vectorized(plan.lanes, lambda lane: tirx.BufferStore(
                        products, sum_at(m, g, w, lane), [m, begin + g, w, lane]))  # fmt: skip

                return unrolled(plan.rows, lambda m: unrolled(
                    at_once, lambda g: unrolled(plan.width, lambda w: copy(m, g, w))))  # fmt: skip

            made, sums = micro_kernel(
                tile, (hidden,), left, lambda k, gate, *at: right(k, begin + gate, *at), write
            )
            self.local.append(sums)
            return made

        t = step_of(self.own, steps, s, d)

        def row(m: ir.Expr) -> tirx.Stmt:
            b = first + m
            units = loop(
                plan.width, lambda w: self._vector(phase, (s, t, d, b), (tile, block, m, w), products)
            )
            return when(b < integer(batch), units, always=is_whole)

        ahead = self._fetch_given(phase, (t, d, block, first))
        return sequence([*ahead, loop(len(phase.gates) // at_once, multiply), loop(plan.rows, row)])

    def _fetch_given(self, phase: Phase, at: tuple[ir.Expr, ...]) -> list[tirx.Stmt]:
        """Bring what is added to a task's products into L1: a cache line here and there, of a tensor that is
        too large for the caches, is nothing that the hardware's prefetcher expects."""
        t, d, block, first = at
        start = block * integer(self.plan.width * self.plan.lanes)
        return [
            prefetch(self.tensors.given((t, d, first + integer(m), start + integer(j)), gate))
            for m in range(self.plan.rows)
            for gate in phase.gates
            for j in range(0, self.plan.width * self.plan.lanes, CACHE_LINE_FLOATS)
        ]

    def _vector(
        self,
        phase: Phase,
        at: tuple[ir.Expr, ...],
        within: tuple[Tile, ir.Expr, ir.Expr, ir.Expr],
        products: ir.Var,
    ) -> tirx.Stmt:
        """Activations of one vector of hidden units of one row."""
        s, t, d, b = at
        tile, block, m, w = within
        hidden = self.tensors.extents[4]
        is_last = phase.gates[-1] == self.own.gates - 1
        old, new = (tirx.floormod(s + integer(i), integer(2)) for i in (0, 1))
        start = block * integer(tile.columns)

        def columns(body: Callable[[ir.Expr, ir.Expr], tirx.Stmt]) -> tirx.Stmt:
            return write_columns(start, hidden, tile, w, body)

        def unit(j: ir.Expr, lane: ir.Expr, functions: tuple[Activation, ...]) -> tirx.Stmt:
            def product(gate: int) -> ir.Expr:
                return tirx.BufferLoad(products, [m, integer(gate - phase.gates[0]), w, lane])

            element = self.tensors.element(
                (t, d, b, j), product, tirx.BufferLoad(self.states, [old, d, b, j])
            )
            stores = phase.element(element, functions)
            if is_last:
                stores.append(tirx.BufferStore(self.states, element.result(), [new, d, b, j]))
            return sequence(stores)

        def behind(j: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
            kept = tirx.BufferLoad(self.states, [old, d, b, j])
            return tirx.SeqStmt(
                [
                    tirx.BufferStore(self.tensors.result, tirx.const(0.0, "float32"), [t, d, b, j]),
                    tirx.BufferStore(self.states, kept, [new, d, b, j]),
                ]
            )

        made = by_direction(self.own, d, lambda functions: columns(lambda j, lane: unit(j, lane, functions)))
        if self.tensors.lengths is None or not is_last:
            return made
        length = tirx.Cast("int64", tirx.BufferLoad(self.tensors.lengths, [b]))
        return tirx.IfThenElse(t < length, made, columns(behind))
