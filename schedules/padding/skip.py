"""Conditions in a scheduled function, under which loops and blocks of threads do only what a run needs.

A bucket's kernels are scheduled for its largest sizes. A task or a loop's step that writes nothing but
padding is left out when the function runs: the sizes are parameters, and of what a step writes the least
place along each open dimension follows from the loops around it. Loops keep their bounds, so whatever the
sizes are no access leaves its buffer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import reduce

import tvm
import tvm_ffi
from tvm import ir, sym, tirx
from tvm.tirx import op

from hybridc.schedules.padding.elements import OpenAxis, within_axis
from hybridc.schedules.padding.intervals import Interval, Intervals, point
from hybridc.schedules.padding.rows import GROUPS, is_number, own_groups, own_rows, without_names
from hybridc.schedules.rule import Rows, Scheduled
from hybridc.schedules.safety.guard import as_loops
from hybridc.schedules.safety.statements import Rebuilder, is_prefetch, remade, sequence, variables
from hybridc.schedules.shapes import index_shape, shape_of

_SKIPS = "hybridc.skips_padding"
"""Attribute of a function that skips padding."""
Padding = Sequence[Sequence[OpenAxis]]
"""Of each result the open dimensions along which it is padded."""


def with_sizes(
    scheduled: Scheduled,
    inputs: int,
    padding: Padding,
    sizes: Sequence[str],
    gpu: tvm.target.Target | None = None,
) -> tuple[Scheduled, bool]:
    """The function with parameters for these sizes behind its `inputs`, and whether it skips padding by them.

    `gpu` is the target of a function that was scheduled for one. Results come behind the inputs. What is
    padding of a result is as it was in memory, or computed, where steps or blocks write more than that.
    """
    function = as_loops(scheduled.function, gpu)
    own = {
        size: tirx.decl_buffer(index_shape((1,)), "int64", f"size{i}", layout=None)
        for i, size in enumerate(sizes)
    }
    results = function.params[inputs : inputs + len(padding)]
    # nobody asks for faults in padding
    free = {*function.params[:inputs], *(function.params[-1:] if scheduled.has_checks else ())}
    extents = _extents_of_rows(scheduled.rows, padding[0], own) if len(padding) == 1 else None
    body = without_names(function.body) if scheduled.rows and extents is None else function.body
    rows = None if extents is None else (scheduled.rows, extents)
    skip = _Skip(dict(zip(results, padding, strict=True)), own, free, rows=rows, on_gpu=gpu is not None)
    body = skip.statement(body)
    parameters = [*function.params[:inputs], *own.values(), *function.params[inputs:]]
    made = tirx.PrimFunc(parameters, body, function.ret_type, function.attrs, function.span)
    if skip.conditions:
        made = made.with_attr(_SKIPS, True)
    return replace(scheduled, function=made), skip.conditions > 0


def _extents_of_rows(
    rows: Rows, padding: Sequence[OpenAxis], sizes: Mapping[str, ir.Var]
) -> list[ir.Expr | int] | None:
    """What a run has of the axes that numbers of rows go through; None if that is always all."""
    found: list[ir.Expr | int] = []
    for extent, inner in rows:
        size = next((own.size for own in padding if (own.inner, own.extent) == (inner, extent)), None)
        if size is None:
            found.append(extent)
        else:
            # whatever it is, no access leaves its buffer
            given = tirx.BufferLoad(sizes[size], [tirx.const(0, "int64")])
            found.append(tirx.max(tirx.min(given, tirx.const(extent, "int64")), tirx.const(1, "int64")))
    return None if all(isinstance(own, int) for own in found) else found


def skips_padding(function: tirx.PrimFunc) -> bool:
    """Whether a function does less work for smaller sizes."""
    return _SKIPS in (function.attrs or {})


@dataclass
class _Writes:
    """What a statement writes, and by which indices."""

    local: set[ir.Var] = field(default_factory=set)
    """Buffers that live inside of it."""
    stores: list[tuple[ir.Var, list[Interval | None]]] = field(default_factory=list)
    is_known: bool = True
    """Whether that is all."""


class _Skip(Rebuilder):
    def __init__(
        self,
        padding: Mapping[ir.Var, Sequence[OpenAxis]],
        sizes: Mapping[str, ir.Var],
        free: AbstractSet[ir.Var],
        *,
        rows: tuple[Rows, Sequence[ir.Expr | int]] | None,
        on_gpu: bool,
    ) -> None:
        self.padding, self.sizes, self.on_gpu = padding, sizes, on_gpu
        self.rows = rows
        """What numbers of rows go through, and what a run has of it, if its own rows are counted."""
        self.free = free
        """Parameters of which nothing is read that the function has written."""
        self.intervals = Intervals()
        self.analyzer = sym.Analyzer()
        self.conditions = 0
        self.lanes: set[ir.Var] = set()
        """Variables of loops over vectors, or that may become such."""

    # ------------------------------------------------------------------------- where conditions are put

    def statement(self, node: tirx.Stmt) -> tirx.Stmt:
        if self.rows is None or not isinstance(node, tirx.SeqStmt) or not any(map(is_number, node.seq)):
            return super().statement(node)
        made = super().statement(node)
        assert isinstance(made, tirx.SeqStmt)
        self.conditions += 1
        return own_rows(made, *self.rows)

    def loop(self, node: tirx.For) -> tirx.Stmt:
        if self.on_gpu:
            return node
        # an innermost loop may become one of vectors, which a condition would prevent
        is_innermost = not _has_loop(node.body)
        if node.kind == tirx.ForKind.VECTORIZED or is_innermost:
            self.lanes.add(node.loop_var)
        if node.kind not in (tirx.ForKind.SERIAL, tirx.ForKind.PARALLEL):
            return remade(node, self.statement(node.body))
        self.analyzer.bind(node.loop_var, ir.Range.from_min_extent(node.min, node.extent), True)
        self.intervals.known[node.loop_var] = point(node.loop_var)
        body = self.statement(node.body)
        if self.rows is not None and GROUPS in node.annotations:
            node = own_groups(node, self.rows[1])
        condition = None if is_innermost else self._needed(node.body, {node.loop_var})
        if condition is not None:
            body = tirx.IfThenElse(condition, body, None)
        return remade(node, body)

    def attribute(self, node: tirx.AttrStmt) -> tirx.Stmt:
        if node.attr_key != "thread_extent":
            return super().attribute(node)
        launch, blocks = node, set()
        around: list[tirx.AttrStmt] = []
        while isinstance(launch, tirx.AttrStmt) and launch.attr_key == "thread_extent":
            around.append(launch)
            var, extent = launch.node.var, launch.value
            zero = tirx.const(0, str(extent.ty.dtype))
            # functions of several launches bind a thread's variable several times
            self.analyzer.bind(var, ir.Range.from_min_extent(zero, extent), True)
            if str(launch.node.thread_tag).startswith("blockIdx"):
                blocks.add(var)
                self.intervals.known[var] = point(var)
            else:
                self.intervals.known[var] = _all_below(extent)
            launch = launch.body
        condition = self._needed(launch, blocks)
        if condition is None:
            return node
        # all threads of a block return, so none waits for another
        leave = tirx.IfThenElse(tirx.Not(condition), tirx.Evaluate(op.thread_return()), None)
        body = sequence([leave, launch])
        for each in reversed(around):
            body = tirx.AttrStmt(each.node, each.attr_key, each.value, body, each.span)
        return body

    def binding(self, node: tirx.Bind) -> tirx.Stmt:
        self._name(node)
        return node

    def store(self, node: tirx.BufferStore) -> tirx.Stmt:
        """A choice that holds for a whole vector reads what it takes alone: padding, which other runs have
        written if any, lies in no cache."""

        def chosen(select: tirx.Select) -> ir.Expr:
            named = variables(select.condition)
            if self.lanes & named or not named:
                return select
            return tirx.if_then_else(select.condition, select.true_value, select.false_value)

        value = tvm_ffi.structural_map(node.value, (tirx.Select, chosen))
        return tirx.BufferStore(node.buffer, value, node.indices, node.span)

    # -------------------------------------------------------------------------------- what they look at

    def _needed(self, body: tirx.Stmt, own: set[ir.Var]) -> ir.Expr | None:
        """Whether a run needs what a statement writes; None if that does not depend on variables of its own,
        or is not known."""
        writes = _Writes()
        self._collect(body, writes)
        written: dict[ir.Var, list[list[Interval | None]]] = {}
        for buffer, indices in writes.stores:
            if buffer in self.padding:
                written.setdefault(buffer, []).append(indices)
            elif buffer not in writes.local and buffer not in self.free:
                return None  # another step may read it
        if not writes.is_known or not written:
            return None
        conditions = [self._some_needed(buffer, stores) for buffer, stores in written.items()]
        known = [each for each in conditions if each is not None]
        if len(known) < len(conditions):
            return None
        condition = self.analyzer.simplify(reduce(tirx.Or, known))
        if isinstance(condition, tirx.IntImm) or own.isdisjoint(variables(condition)):
            return None
        self.conditions += 1
        return condition

    def _some_needed(self, buffer: ir.Var, stores: Sequence[list[Interval | None]]) -> ir.Expr | None:
        shape = shape_of(buffer)
        if all(_is_offset(indices) for indices in stores):  # row-major offsets, whatever the shape
            shape, stores = (math.prod(shape),), [indices[-1:] for indices in stores]
        found = []
        for each in self.padding[buffer]:
            axes = [axis for axis in range(len(shape)) if within_axis(each, shape, axis) is not None]
            places = self._places(each, shape, axes[0], stores) if axes else None
            if places is not None:
                size = tirx.BufferLoad(self.sizes[each.size], [tirx.const(0, "int64")])
                found.append(tirx.Cast("int64", places) < size)
        return reduce(tirx.And, found) if found else None

    def _places(
        self, each: OpenAxis, shape: Sequence[int], axis: int, stores: Sequence[list[Interval | None]]
    ) -> ir.Expr | None:
        """The least place along an open dimension, or less."""
        intervals = [indices[axis] for indices in stores]
        known = [interval for interval in intervals if interval is not None]
        if len(known) < len(intervals):
            return None
        step = within_axis(each, shape, axis)
        assert step is not None
        low = reduce(self._smaller, (interval.low for interval in known))
        high = reduce(self._greater, (interval.high for interval in known))
        whole = Interval(tirx.floordiv(low, step), tirx.floordiv(high, step))
        if step * each.extent == shape[axis]:
            return whole.low
        var = tirx.Var("whole", str(low.ty.dtype))
        self.intervals.known[var] = whole
        place = self.intervals.of(tirx.floormod(var, tirx.const(each.extent, str(low.ty.dtype))))
        return None if place is None else place.low

    def _smaller(self, one: ir.Expr, other: ir.Expr) -> ir.Expr:
        if self.analyzer.can_prove(one <= other):
            return one
        return other if self.analyzer.can_prove(other <= one) else tirx.min(one, other)

    def _greater(self, one: ir.Expr, other: ir.Expr) -> ir.Expr:
        if self.analyzer.can_prove(one >= other):
            return one
        return other if self.analyzer.can_prove(other >= one) else tirx.max(one, other)

    def _collect(self, node: tirx.Stmt, writes: _Writes) -> None:
        """What a statement writes, for all values of loops inside of it."""
        match node:
            case tirx.SeqStmt():
                for inner in node.seq:
                    self._collect(inner, writes)
            case tirx.For():
                self._collect_loop(node, writes)
            case tirx.IfThenElse():
                self._collect(node.then_case, writes)
                if node.else_case is not None:
                    self._collect(node.else_case, writes)
            case tirx.AttrStmt():
                if node.attr_key == "thread_extent":
                    self.intervals.known[node.node.var] = _all_below(node.value)
                self._collect(node.body, writes)
            case tirx.While():
                self._collect(node.body, writes)
            case tirx.Bind():
                self._name(node)
            case tirx.AllocBuffer():
                writes.local.add(node.buffer)
            case tirx.BufferStore():
                writes.stores.append((node.buffer, [self.intervals.of(index) for index in node.indices]))
            case tirx.Evaluate():
                self._collect_call(node.value, writes)
            case _:
                writes.is_known = False

    def _name(self, node: tirx.Bind) -> None:
        value = None if is_number(node) else self.intervals.of(node.value)
        if value is None:
            self.intervals.known.pop(node.var, None)
        else:
            self.intervals.known[node.var] = value

    def _collect_loop(self, node: tirx.For, writes: _Writes) -> None:
        if node.kind == tirx.ForKind.THREAD_BINDING:
            writes.is_known = False
            return
        first, extent = self.intervals.of(node.min), self.intervals.of(node.extent)
        if first is not None and extent is not None and node.step is None:
            self.intervals.known[node.loop_var] = Interval(first.low, first.high + extent.high - 1)
        else:
            self.intervals.known.pop(node.loop_var, None)
        self._collect(node.body, writes)

    def _collect_call(self, value: ir.Expr, writes: _Writes) -> None:
        """A call may write what it is given the address of."""
        if isinstance(value, tirx.IntImm) or (isinstance(value, ir.Call) and is_prefetch(value)):
            return
        loads: list[ir.TensorLoad] = []
        tvm_ffi.structural_walk(value, (ir.TensorLoad, loads.append))
        for load in loads:
            if load.source not in self.free:
                writes.stores.append((load.source, [self.intervals.of(index) for index in load.indices]))
        named = variables(value) & self.padding.keys()
        if named - {load.source for load in loads}:
            writes.is_known = False


def _all_below(extent: ir.Expr) -> Interval:
    return Interval(tirx.const(0, str(extent.ty.dtype)), extent - 1)


def _has_loop(node: tirx.Stmt) -> bool:
    found: list[tirx.For] = []
    tvm_ffi.structural_walk(node, (tirx.For, found.append))
    return bool(found)


def _is_offset(indices: Sequence[Interval | None]) -> bool:
    """Whether all indices but the last are nought."""
    return all(
        each is not None and each.is_point and isinstance(each.low, tirx.IntImm) and int(each.low) == 0
        for each in indices[:-1]
    )
