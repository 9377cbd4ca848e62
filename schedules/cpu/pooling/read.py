"""Reading functions that reduce windows: `out[o] = reduction over k of in[o * stride + k - before]`.

Read off the indices, as Relax's legalisation writes them: whatever reduces a window is accepted, pooling of
plain and blocked tensors, and sums that come from other operators. What passes annotate, maxima with their
positions, `max_indices.py` reads.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import ir, sym, tirx

from hybridc.schedules.cpu.core.micro_kernel import ceil_div, integer
from hybridc.schedules.cpu.core.nest import loads, substitute, uses
from hybridc.schedules.cpu.reduction.read import Reduction, RowReductions

MAX_TAPS = 128
"""Taps of a window, most of which are unrolled."""
MAX_CHANNELS = 64
"""Channels of a block, which are unrolled too."""


@dataclass(frozen=True, slots=True)
class WindowAxis:
    """Output `o` and tap `k` read input `o * stride + k - before`; taps outside of `inputs` do not exist."""

    output: ir.Var
    tap: ir.Var
    outputs: int
    taps: int
    stride: int
    before: int
    inputs: int

    @property
    def inside(self) -> tuple[int, int]:
        """First and last plus one of the outputs whose taps all exist."""
        first = min(ceil_div(self.before, self.stride), self.outputs)
        last = (self.inputs - self.taps + self.before) // self.stride + 1
        return first, max(first, min(last, self.outputs))

    def taps_of(self, output: ir.Expr) -> tuple[ir.Expr | int, ir.Expr | int]:
        """First and last plus one of the taps that exist."""
        if self.inside == (0, self.outputs):
            return 0, self.taps
        first = output * integer(self.stride) - integer(self.before)
        return tirx.max(integer(0) - first, integer(0)), tirx.min(
            integer(self.inputs) - first, integer(self.taps)
        )


@dataclass(frozen=True, slots=True)
class Windows:
    """`out[rows] = epilogue(reduction over a window of load)`, padding left out."""

    rows: RowReductions
    reduction: Reduction
    load: ir.TensorLoad
    """The operand inside of the input."""
    axes: tuple[WindowAxis, ...]
    """Of the window; the last one is the innermost in memory."""
    outer: tuple[int, ...]
    """Positions of the row's axes that are tasks."""
    channel: int | None
    """Position of the axis of channels that are vectors; None if columns are."""

    @property
    def columns(self) -> WindowAxis:
        """The axis that is innermost in memory."""
        return self.axes[-1]


def read_windows(rows: RowReductions) -> Windows | None:
    """The windows that a function reduces, or None."""
    if (
        len(rows.stages) != 1
        or rows.writes_elements
        or len(rows.stages[0].reductions) != 1
        or not rows.reduced
    ):
        return None
    (reduction,) = rows.stages[0].reductions
    found = [load for load in loads(reduction.operand) if load.indices]
    if len(found) != 1 or rows.stages[0].kept:
        return None
    (load,) = found
    axes, used = [], []
    for tap in rows.reduced:
        position = [i for i, index in enumerate(load.indices) if uses(index, tap)]
        axis = _axis(rows, load, position[0], tap) if len(position) == 1 else None
        if axis is None:
            return None
        axes.append(axis)
        used.append(position[0])
    # taps in the order of memory, few enough to unroll
    if used != sorted(used) or rows.reduced_length > MAX_TAPS or not _is_padding(rows, reduction, load):
        return None
    last = load.indices[-1]
    channel = len(rows.row) - 1 if used[-1] == len(load.indices) - 2 and last.same_as(rows.row[-1]) else None
    if channel is not None and rows.row_extents[channel] > MAX_CHANNELS:
        return None
    if channel is None and (
        used[-1] != len(load.indices) - 1 or axes[-1].stride > 2 or axes[-1].stride > axes[-1].taps
    ):
        return None
    vectors = (channel, next(i for i, v in enumerate(rows.row) if v.same_as(axes[-1].output)))
    outer = tuple(i for i in range(len(rows.row)) if i not in vectors)
    windows = Windows(rows, reduction, load, tuple(axes), outer, channel)
    return windows if _writes_in_order(windows) else None


def _axis(rows: RowReductions, load: ir.TensorLoad, position: int, tap: ir.Var) -> WindowAxis | None:
    """Stride and padding, from the index at small points; None if it has another form."""
    index = load.indices[position]
    outputs = [i for i, v in enumerate(rows.row) if uses(index, v)]
    taps = [v for v in rows.reduced if uses(index, v)]
    if len(outputs) != 1 or len(taps) != 1:
        return None
    analyzer, output = sym.Analyzer(), rows.row[outputs[0]]

    def at(o: int, k: int) -> int:
        return int(analyzer.simplify(substitute(index, {output: integer(o), tap: integer(k)})))

    # an affine index is known by its values at two points; it is proved below
    before, stride = -at(0, 0), at(1, 0) - at(0, 0)
    expected = output * integer(stride) + tap - integer(before)
    if stride < 1 or before < 0 or not analyzer.can_prove_equal(index, expected):
        return None
    extent = rows.reduced_extents[next(i for i, v in enumerate(rows.reduced) if v.same_as(tap))]
    inputs = int(load.source.shape[position])
    return WindowAxis(output, tap, rows.row_extents[outputs[0]], extent, stride, before, inputs)


def _is_padding(rows: RowReductions, reduction: Reduction, load: ir.TensorLoad) -> bool:
    """Whether the operand is the load wherever that exists, and elsewhere nothing that changes the result."""
    operand = reduction.operand
    if isinstance(operand, ir.TensorLoad):
        return True
    if not isinstance(operand, ir.Call) or not operand.op.name.endswith("if_then_else"):
        return False
    condition, value, padding = operand.args
    if not isinstance(value, ir.TensorLoad) or not isinstance(padding, tirx.FloatImm):
        return False
    neutral = (
        float(padding.value) == 0.0
        if reduction.combine is tirx.Add
        else reduction.combine is tirx.Max
        and float(padding.value) <= float(tirx.min_value(str(padding.ty.dtype)).value)
    )
    analyzer = sym.Analyzer()
    for var, extent in zip(
        (*rows.row, *rows.reduced), (*rows.row_extents, *rows.reduced_extents), strict=True
    ):
        analyzer.bind(var, ir.Range(0, extent))
    inside = [
        check
        for i, e in zip(load.indices, load.source.shape, strict=True)
        for check in (i >= 0, i < integer(int(e)))
    ]
    # the condition may not exclude anything that exists in the input
    with analyzer.constraint_scope(tirx.all(*inside)):
        return neutral and analyzer.can_prove(condition)


def _writes_in_order(windows: Windows) -> bool:
    """The last axis of the output is the axis of vectors, and so is that of whatever the epilogue reads."""
    rows = windows.rows
    inner = rows.row[-1] if windows.channel is not None else windows.columns.output
    operands = [load for load in loads(rows.value) if load.indices]
    operands.append(tirx.BufferLoad(rows.output, rows.indices))
    return all(
        not any(uses(i, inner) for i in load.indices[:-1])
        and (load.indices[-1].same_as(inner) or not uses(load.indices[-1], inner))
        for load in operands
    ) and rows.indices[-1].same_as(inner)
