"""Pooling of windows: maximum and average, of plain activations and of blocked ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import ir, sym, tirx

from hybridc.ir.graph import dtype_bits
from hybridc.schedules.cpu.core.micro_kernel import (
    PARALLEL_WORK,
    Point,
    ceil_div,
    function_of,
    grid,
    integer,
    loop,
    sequence,
    vectorized,
)
from hybridc.schedules.cpu.core.nest import finish, loads, substitute
from hybridc.schedules.cpu.pooling.read import WindowAxis, Windows, read_windows
from hybridc.schedules.cpu.reduction.read import read_rows
from hybridc.schedules.cpu.reduction.vectors import Registers, Values, element, lanes_of, tail_pieces
from hybridc.schedules.rule import Request, Scheduled, schedule_rule

VECTORS = 4
"""Accumulators in flight: they hide the latency of a maximum or a sum."""
LONG_ROW_BYTES = 2 * 4096
"""Prefetchers follow streams within a page: for longer image rows it does not matter that several
alternate."""


@schedule_rule(family="pooling")
def pooling(request: Request) -> Scheduled | None:
    """Accepts `out[..., y, x] = epilogue(reduction over windows of in[..., y * s + i - p, x * s + j - p])`.

    Blocked activations (`[N, C/b, H, W, b]`) with any stride are vectors of channels; plain ones vectors of
    columns, with stride 1 or 2. Where windows stick out of the input only the taps inside are visited, so
    that padding is neither written nor tested for; the columns between need no test at all. Of blocked data
    one image row after the other is added to a row of outputs, so that memory is read as one stream. Of plain
    data with stride 2 whole vectors are combined over the window's rows first and then pulled apart into
    even and odd columns.
    """
    rows = read_rows(request.function)
    windows = None if rows is None else read_windows(rows)
    if windows is None:
        return None
    lanes = lanes_of(windows.rows, request.target.isa)
    registers = Registers("global" if windows.rows.row_count > windows.columns.outputs else "local")
    nest = _PoolingNest(windows, lanes, registers, request.target.isa.vector_registers // 2)
    outer = [windows.rows.row_extents[i] for i in windows.outer]
    work = windows.rows.row_count * windows.rows.reduced_length
    body = grid(outer, nest.image_row, parallel=work >= PARALLEL_WORK)
    function = function_of(request.function, list(request.function.params), [body], registers.buffers)
    return finish(function, pooling.__name__)


@dataclass(frozen=True, slots=True)
class _PoolingNest:
    windows: Windows
    lanes: int
    registers: Registers
    vector_registers: int
    """For the accumulators of a strided window. A long piece of one image row is read before the next row's,
    because prefetchers follow one stream better than two that alternate."""

    def image_row(self, outer: Point) -> tirx.Stmt:
        """All columns of one image row of outputs (and of one block of channels)."""
        windows, columns = self.windows, self.windows.columns
        known: Values = {windows.rows.row[i]: v for i, v in zip(windows.outer, outer, strict=True)}
        first, last = columns.inside
        edge = self._blocked_edge if windows.channel is not None else self._plain_edge
        inside = self._blocked_inside if windows.channel is not None else self._plain_inside
        parts = [loop(first, lambda x: edge(known, x))] if first else []
        parts += [inside(known)] if last > first else []
        if last < columns.outputs:
            parts.append(loop(columns.outputs - last, lambda x: edge(known, x + integer(last))))
        return sequence(parts)

    # ------------------------------------------------------------------------------- vectors of channels

    def _channels(self) -> list[tuple[int, int]]:
        assert self.windows.channel is not None
        extent = self.windows.rows.row_extents[self.windows.channel]
        return [(s, self.lanes) for s in range(0, extent - extent % self.lanes, self.lanes)] + tail_pieces(
            extent, self.lanes
        )

    def _blocked_edge(self, known: Values, column: ir.Expr) -> tirx.Stmt:
        taps = self.windows.columns.taps_of(column)
        return self._blocked(known, [column], lambda body: _span(taps, body))

    def _blocked_inside(self, known: Values) -> tirx.Stmt:
        columns = self.windows.columns
        first, last = columns.inside
        # as many columns as make up the accumulators in flight
        step = max(VECTORS // len(self._channels()), 1)
        if last - first > step and self._reads_row_by_row:
            return self._row_by_row(known)

        def taps(body: Callable[[ir.Expr], tirx.Stmt]) -> tirx.Stmt:
            return sequence([body(integer(k)) for k in range(columns.taps)])

        def block(x: ir.Expr, size: int) -> tirx.Stmt:
            return self._blocked(known, [x + integer(i) for i in range(size)], taps)

        rest = (last - first) % step
        count = (last - first) // step
        parts = [loop(count, lambda i: block(integer(first) + i * integer(step), step))] if count else []
        return sequence([*parts, block(integer(last - rest), rest)] if rest else parts)

    @property
    def _reads_row_by_row(self) -> bool:
        """Whether image rows are short and the output can hold sums: nothing that is read later may lie
        there."""
        windows, rows = self.windows, self.windows.rows
        assert windows.channel is not None
        dtype = str(windows.reduction.operand.ty.dtype)
        row_bytes = windows.columns.inputs * rows.row_extents[windows.channel] * dtype_bits(dtype) // 8
        others = [load for load in loads(rows.value) if load.indices]
        return row_bytes <= LONG_ROW_BYTES and str(rows.output.dtype) == dtype and not others

    def _row_by_row(self, known: Values) -> tirx.Stmt:
        """To an image row of outputs one row of the input after the other is added.

        Reading rows in turn, a few columns of each, would take twice as long: prefetchers follow one stream.
        """
        windows, columns, rows = self.windows, self.windows.columns, self.windows.rows
        assert windows.channel is not None
        channel = rows.row[windows.channel]
        first, last = columns.inside

        def each(body: Callable[[Values], tirx.Stmt]) -> tirx.Stmt:
            def column(x: ir.Expr) -> tirx.Stmt:
                at = known | {columns.output: x + integer(first)}
                return sequence([
                    vectorized(width, lambda lane: body(at | {channel: lane + integer(start)}))  # noqa: B023
                    for start, width in self._channels()
                ])  # fmt: skip

            return loop(last - first, column)

        def place(at: Values) -> list[ir.Expr]:
            return [substitute(index, at) for index in rows.indices]

        def accumulate(window: Values) -> tirx.Stmt:
            def add(at: Values) -> tirx.Stmt:
                result: ir.Expr = tirx.BufferLoad(rows.output, place(at))
                for tap in range(columns.taps):
                    value = self._input(at | window | {columns.tap: integer(tap)})
                    result = windows.reduction.combine(result, value)
                return tirx.BufferStore(rows.output, result, place(at))

            return each(add)

        clear = each(lambda at: tirx.BufferStore(rows.output, windows.reduction.identity, place(at)))
        write = each(lambda at: self._write(rows.value, at, tirx.BufferLoad(rows.output, place(at))))
        # without an epilogue the sums are the output
        is_finished = rows.value.same_as(windows.reduction.result)
        return sequence([clear, self._window_rows(known, accumulate), *([] if is_finished else [write])])

    def _blocked(
        self,
        known: Values,
        columns: Sequence[ir.Expr],
        taps: Callable[[Callable[[ir.Expr], tirx.Stmt]], tirx.Stmt],
    ) -> tirx.Stmt:
        windows = self.windows
        assert windows.channel is not None
        channel = windows.rows.row[windows.channel]
        sums = [(x, s, w, self._register(w)) for x in columns for s, w in self._channels()]

        def each(body: Callable[[Values, ir.Var, ir.Expr], tirx.Stmt]) -> tirx.Stmt:
            def one(x: ir.Expr, start: int, width: int, buffer: ir.Var) -> tirx.Stmt:
                at = known | {windows.columns.output: x}
                return vectorized(
                    width, lambda lane: body(at | {channel: lane + integer(start)}, buffer, lane)
                )

            return sequence([one(*item) for item in sums])

        def accumulate(window: Values) -> tirx.Stmt:
            def columns_of(tap: ir.Expr) -> tirx.Stmt:
                at = window | {windows.columns.tap: tap}
                return each(lambda point, buffer, lane: self._add(buffer, lane, self._input(point | at)))

            return taps(columns_of)

        return sequence([
            each(lambda at, buffer, lane: self._clear(buffer, lane)),
            self._window_rows(known, accumulate),
            each(lambda at, buffer, lane: self._write(windows.rows.value, at, element(buffer, lane))),
        ])  # fmt: skip

    # -------------------------------------------------------------------------------- vectors of columns

    def _plain_edge(self, known: Values, column: ir.Expr) -> tirx.Stmt:
        columns = self.windows.columns
        buffer = self._register(1)
        zero = integer(0)
        known = known | {columns.output: column}

        def accumulate(window: Values) -> tirx.Stmt:
            return _span(
                columns.taps_of(column),
                lambda tap: self._add(buffer, zero, self._input(known | window | {columns.tap: tap})),
            )

        write = self._write(self.windows.rows.value, known, element(buffer, zero))
        return sequence([self._clear(buffer, zero), self._window_rows(known, accumulate), write])

    def _plain_inside(self, known: Values) -> tirx.Stmt:
        columns, lanes = self.windows.columns, self.lanes
        first, last = columns.inside
        contiguous = columns.stride == 1
        kernel = self._contiguous if contiguous else self._strided
        # an output vector of stride 2 needs two registers for each pair of taps
        strided_vectors = self.vector_registers // (2 * ceil_div(columns.taps, 2))
        vectors = VECTORS if contiguous else max(strided_vectors, 1)
        width = vectors * lanes
        # columns between the edges, where all taps of a window exist
        whole, rest = divmod(last - first, width)
        block = [(u * lanes, lanes) for u in range(vectors)]
        parts = (
            [loop(whole, lambda i: kernel(known, integer(first) + i * integer(width), block))]
            if whole
            else []
        )
        if rest:
            pieces = [(u * lanes, lanes) for u in range(rest // lanes)] + tail_pieces(rest, lanes)
            # aligned to the end: whole vectors first, then powers of two
            parts.append(kernel(known, integer(last - rest), pieces))
        return sequence(parts)

    def _contiguous(self, known: Values, first: ir.Expr, pieces: Sequence[tuple[int, int]]) -> tirx.Stmt:
        """Outputs from `first` on, `(offset, width)` each."""
        columns = self.windows.columns
        sums = [(offset, width, self._register(width)) for offset, width in pieces]

        def each(body: Callable[[Values, ir.Var, ir.Expr], tirx.Stmt]) -> tirx.Stmt:
            def one(offset: int, width: int, buffer: ir.Var) -> tirx.Stmt:
                return vectorized(
                    width,
                    lambda lane: body(known | {columns.output: first + integer(offset) + lane}, buffer, lane),
                )

            return sequence([one(*item) for item in sums])

        def accumulate(window: Values) -> tirx.Stmt:
            def tap(number: int) -> tirx.Stmt:
                at = window | {columns.tap: integer(number)}
                return each(lambda point, buffer, lane: self._add(buffer, lane, self._input(point | at)))

            return sequence([tap(k) for k in range(columns.taps)])

        value = self._inside_value()
        return sequence([
            each(lambda at, buffer, lane: self._clear(buffer, lane)),
            self._window_rows(known, accumulate),
            each(lambda at, buffer, lane: self._write(value, at, element(buffer, lane))),
        ])  # fmt: skip

    def _strided(self, known: Values, first: ir.Expr, pieces: Sequence[tuple[int, int]]) -> tirx.Stmt:
        """Stride 2: two vectors for each pair of taps, whose even and odd elements belong to one tap each."""
        columns = self.windows.columns
        # an odd number of taps ends with a pair whose first half was counted before
        bases = [min(k, columns.taps - 2) for k in range(0, columns.taps, 2)]
        vectors = [
            (offset, width, [(base, self._register(2 * width)) for base in bases], self._register(width))
            for offset, width in pieces
        ]

        def each(body: Callable[[Values, ir.Var, ir.Expr], tirx.Stmt]) -> tirx.Stmt:
            def half(offset: int, size: int, base: int, register: ir.Var, start: int) -> tirx.Stmt:
                at = known | {columns.output: first + integer(offset)}
                taps = integer(base + start)
                return vectorized(
                    size,
                    lambda lane: body(at | {columns.tap: taps + lane}, register, lane + integer(start)),
                )

            return sequence([
                half(offset, width, base, register, start)
                for offset, width, pairs, _ in vectors
                for base, register in pairs
                for start in (0, width)
            ])  # fmt: skip

        def add(window: Values) -> tirx.Stmt:
            return each(lambda at, register, lane: self._add(register, lane, self._input(window | at)))

        value = self._inside_value()

        def finish(
            offset: int, width: int, pairs: Sequence[tuple[int, ir.Var]], buffer: ir.Var
        ) -> list[tirx.Stmt]:
            values = []
            for number, (base, register) in enumerate(pairs):
                values += [_picked(register, width, 0)] if base == 2 * number else []
                values.append(_picked(register, width, 1))
            result = values[0]
            for other in values[1:]:
                result = self.windows.reduction.combine(result, other)

            def write(lane: ir.Expr) -> tirx.Stmt:
                at = known | {columns.output: first + integer(offset) + lane}
                return self._write(value, at, element(buffer, lane))

            return [tirx.BufferStore(buffer, result, [_ramp(0, width)]), vectorized(width, write)]

        return sequence([
            each(lambda at, register, lane: self._clear(register, lane)),
            self._window_rows(known, add),
            *(stmt for vector in vectors for stmt in finish(*vector)),
        ])  # fmt: skip

    # --------------------------------------------------------------------------------------------- parts

    def _window_rows(self, known: Values, body: Callable[[Values], tirx.Stmt]) -> tirx.Stmt:
        """Loops over the window's outer axes, where the input exists."""

        def nest(axes: Sequence[WindowAxis], at: Values) -> tirx.Stmt:
            if not axes:
                return body(at)
            axis, *inner = axes
            taps = axis.taps_of(known[axis.output])
            return _span(taps, lambda tap: nest(inner, at | {axis.tap: tap}))

        return nest(self.windows.axes[:-1], {})

    def _inside_value(self) -> ir.Expr:
        """The output, knowing that all columns of the window exist."""
        analyzer = sym.Analyzer()
        first, last = self.windows.columns.inside
        analyzer.bind(self.windows.columns.output, ir.Range(first, last))
        return analyzer.simplify(self.windows.rows.value)

    def _register(self, width: int) -> ir.Var:
        return self.registers.vector(width, str(self.windows.reduction.operand.ty.dtype), "window")

    def _clear(self, buffer: ir.Var, lane: ir.Expr) -> tirx.Stmt:
        return tirx.BufferStore(buffer, self.windows.reduction.identity, [lane])

    def _add(self, buffer: ir.Var, lane: ir.Expr, value: ir.Expr) -> tirx.Stmt:
        return tirx.BufferStore(buffer, self.windows.reduction.combine(element(buffer, lane), value), [lane])

    def _input(self, at: Values) -> ir.Expr:
        load = self.windows.load
        return tirx.BufferLoad(load.source, [substitute(index, at) for index in load.indices])

    def _write(self, value: ir.Expr, at: Values, result: ir.Expr) -> tirx.Stmt:
        rows = self.windows.rows
        at = at | {self.windows.reduction.result: result}
        return tirx.BufferStore(rows.output, substitute(value, at), [substitute(i, at) for i in rows.indices])


def _ramp(start: int, lanes: int) -> ir.Expr:
    return tirx.Ramp(start, 1, lanes) if lanes > 1 else integer(start)


def _picked(register: ir.Var, width: int, parity: int) -> ir.Expr:
    """The even or the odd elements of a register of twice the width."""
    halves = [tirx.BufferLoad(register, [_ramp(start, width)]) for start in (0, width)]
    return halves[parity] if width == 1 else tirx.Shuffle(halves, [2 * i + parity for i in range(width)])


def _span(taps: tuple[ir.Expr | int, ir.Expr | int], body: Callable[[ir.Expr], tirx.Stmt]) -> tirx.Stmt:
    first, last = taps
    if isinstance(first, int) and isinstance(last, int):
        return sequence([body(integer(k)) for k in range(first, last)])
    return loop(last - first, lambda k: body(first + k))
