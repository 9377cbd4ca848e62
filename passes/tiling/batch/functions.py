"""What a function does with the samples of a batch, read off its blocks, and the function of some of them.

A function treats samples one by one if each block addresses what depends on the batch by one and the same
loop: by its loop, and by nothing else of it, along the axis of the batch. Where that loop is a sum's the
result is a sum over samples: the sums over micro-batches add up to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.tirx import IterVar

SUM = -1
"""In place of the axis of the batch: a sum over samples, to which each micro-batch adds its own."""

Label = int | None
"""The axis along which a tensor has the samples of the batch; None: it does not depend on them."""


class IsSummed(Exception):
    """A block reads what is a sum over samples: it has to wait for all of them."""


@dataclass(frozen=True, slots=True)
class BatchFunction:
    """A function whose parameters have samples along these axes."""

    function: tirx.PrimFunc
    labels: tuple[Label, ...]
    """Of the parameters, results behind operands."""
    loops: tuple[tirx.Var, ...]
    """Iterators of blocks that go through the batch."""
    buffers: tuple[tuple[tirx.Var, int], ...]
    """What has samples along an axis, between the blocks too."""
    counts: bool
    """Whether elements depend on the sample's number, as random ones do."""

    def of_samples(self, begin: int, end: int) -> tirx.PrimFunc:
        """The function of the samples `begin` to `end`."""
        extent = tirx.IntImm("int64", end - begin)
        renamed = {buffer: _with_extent(buffer, axis, extent) for buffer, axis in self.buffers}
        loops, axes = set(self.loops), dict(self.buffers)
        outer: set[tirx.Var] = set()

        def note(realize: s_tir.SBlockRealize) -> None:
            pairs = zip(realize.block.iter_vars, realize.iter_values, strict=True)
            outer.update(value for axis, value in pairs if axis.var in loops)

        def counted(block: s_tir.SBlock) -> s_tir.SBlock:
            own = [axis.var for axis in block.iter_vars if axis.var in loops]
            return _with_body(block, _shifted(block.body, own[0], begin, axes)) if own else block

        def loop(stmt: tirx.For) -> tirx.For:
            if stmt.loop_var not in outer:
                return stmt
            rest = stmt.thread_binding, stmt.annotations, stmt.step
            return tirx.For(stmt.loop_var, stmt.min, extent, stmt.kind, stmt.body, *rest)

        def domain(axis: IterVar) -> IterVar:
            if axis.var not in loops:
                return axis
            return IterVar(ir.Range(0, extent), axis.var, axis.iter_type, axis.thread_tag)

        body = self.function.body
        tvm_ffi.structural_walk(body, (s_tir.SBlockRealize, note))
        if self.counts and begin:
            body = tvm_ffi.structural_map(body, (s_tir.SBlock, counted))
        body = tvm_ffi.structural_map(body, ((tirx.For, loop), (IterVar, domain)))
        body = tvm_ffi.structural_map(body, (ir.Var, lambda var: renamed.get(var, var)))
        params = [renamed.get(p, p) for p in self.function.params]
        return tirx.PrimFunc(params, body, self.function.ret_type, self.function.attrs)


def batch_function(function: tirx.PrimFunc, known: Mapping[int, int]) -> BatchFunction | None:
    """How a function treats a batch, if it can be computed for some of the samples by themselves.

    `known` are axes of the batch, by position of the operand. Other operands turn out to have one too where
    they are read by the same loop. Raises IsSummed if it uses what it sums over the batch.
    """
    params = list(function.params)
    axes: dict[tirx.Var, Label] = {params[i]: axis for i, axis in known.items()}
    while True:
        before = len(axes)
        walked = _walk(function, axes)
        if walked is None:
            return None
        if len(axes) == before:
            break
    loops, counts = walked
    buffers = tuple((buffer, axis) for buffer, axis in axes.items() if axis is not None and axis != SUM)
    return BatchFunction(function, tuple(axes.get(p) for p in params), tuple(loops), buffers, counts)


def blocks_of(function: tirx.PrimFunc) -> list[s_tir.SBlock] | None:
    """The blocks of a function as it was defined, in order; None of one whose loops were written by hand."""
    if function.body.block.name_hint != "root":
        return None
    schedule = s_tir.Schedule(function)
    return [schedule.get(block) for block in schedule.get_child_blocks(schedule.get_sblock("root"))]


def _walk(function: tirx.PrimFunc, axes: dict[tirx.Var, Label]) -> tuple[list[tirx.Var], bool] | None:
    """The loops over the batch, and whether its numbers are used; adds what it learns to `axes`."""
    loops: list[tirx.Var] = []
    counts = False
    blocks = blocks_of(function)
    if blocks is None:
        return None
    for block in blocks:
        loop = _batch_loop(block, axes)
        if loop is None:
            continue
        if not isinstance(loop, IterVar) or not _note(block, loop, axes):
            return None
        loops.append(loop.var)
        counts = counts or _counts(block, loop.var, axes)
    return loops, counts


def _batch_loop(block: s_tir.SBlock, axes: Mapping[tirx.Var, Label]) -> IterVar | bool | None:
    """The iterator that goes through the samples; None without samples, False if there is no such one."""
    found: list[tirx.Var] = []
    for read in block.reads:
        axis = axes.get(read.source)
        if axis == SUM:
            raise IsSummed
        if axis is not None:
            at = read.region[axis]
            if not isinstance(at.extent, tirx.IntImm) or int(at.extent) != 1:
                return False
            found.append(at.min)
    if not found:
        return None
    iterators = [v for v in block.iter_vars if all(v.var.same_as(at) for at in found)]
    return iterators[0] if iterators else False


def _note(block: s_tir.SBlock, loop: IterVar, axes: dict[tirx.Var, Label]) -> bool:
    """Label what a block reads and writes by the loop; False if that cannot be done."""
    for region in (*block.reads, *block.writes):
        exact = [axis for axis, at in enumerate(region.region) if at.min.same_as(loop.var)]
        if exact:
            extents = [int(region.source.shape[axis]) for axis in exact]
            if extents != [int(loop.dom.extent)] or axes.setdefault(region.source, exact[0]) != exact[0]:
                return False
    for region in (*block.reads, *block.writes):
        label, zero = axes.get(region.source), tirx.IntImm("int64", 0)
        for axis, at in enumerate(region.region):
            # a sample's own number may be an index where it is an element of the sample
            if axis != label and _reads(_addressed(at.min, loop.var, zero, axes), loop.var):
                return False
    if int(loop.iter_type) == int(IterVar.CommReduce):
        return _is_sum(block, loop) and all(axes.setdefault(w.source, SUM) == SUM for w in block.writes)
    return all(axes.get(w.source) is not None for w in block.writes)


def _is_sum(block: s_tir.SBlock, loop: IterVar) -> bool:
    """Whether a block adds to what it writes, beginning at zero."""
    store = block.body
    if not isinstance(store, tirx.BufferStore) or not isinstance(block.init, tirx.BufferStore):
        return False
    value, zero = store.value, block.init.value
    starts = isinstance(zero, tirx.FloatImm | tirx.IntImm) and float(zero.value) == 0.0
    return (
        starts
        and int(loop.iter_type) == int(IterVar.CommReduce)
        and isinstance(value, tirx.Add)
        and isinstance(value.a, ir.TensorLoad)
        and value.a.source.same_as(store.buffer)
    )


def _reads(expr: ir.Expr, var: tirx.Var) -> bool:
    found: list[tirx.Var] = []
    tvm_ffi.structural_walk(expr, (ir.Var, found.append))
    return any(v.same_as(var) for v in found)


def _counts(block: s_tir.SBlock, loop: tirx.Var, axes: Mapping[tirx.Var, Label]) -> bool:
    """Whether the loop is used for anything but to address samples."""
    return _reads(_addressed(block.body, loop, tirx.IntImm("int64", 0), axes), loop)


def _shifted(body: tirx.Stmt, loop: tirx.Var, begin: int, axes: Mapping[tirx.Var, Label]) -> tirx.Stmt:
    """A block's body with the first sample's number `begin`, at address 0 all the same."""
    shifted = tvm_ffi.structural_map(body, (ir.Var, lambda v: v + begin if v.same_as(loop) else v))
    return _addressed(shifted, None, loop, axes)


def _addressed(
    body: tirx.Stmt, old: tirx.Var | None, new: ir.Expr, axes: Mapping[tirx.Var, Label]
) -> tirx.Stmt:
    """Samples at `new`, where they are at `old`, or at whatever."""

    def moved(buffer: tirx.Var, indices: Sequence[ir.Expr]) -> list[ir.Expr] | None:
        axis = axes.get(buffer)
        if axis is None or axis == SUM or not (old is None or indices[axis].same_as(old)):
            return None
        return [new if i == axis else at for i, at in enumerate(indices)]

    def load(expr: ir.TensorLoad) -> ir.Expr:
        indices = moved(expr.source, expr.indices)
        return expr if indices is None else tirx.BufferLoad(expr.source, indices)

    def store(stmt: tirx.BufferStore) -> tirx.Stmt:
        indices = moved(stmt.buffer, stmt.indices)
        return stmt if indices is None else tirx.BufferStore(stmt.buffer, stmt.value, indices)

    return tvm_ffi.structural_map(body, ((ir.TensorLoad, load), (tirx.BufferStore, store)))


def _with_extent(buffer: tirx.Var, axis: int, extent: tirx.IntImm) -> tirx.Var:
    shape = [extent if i == axis else e for i, e in enumerate(buffer.shape)]
    return tirx.decl_buffer(shape, str(buffer.dtype), buffer.name, layout=None)


def _with_body(block: s_tir.SBlock, body: tirx.Stmt) -> s_tir.SBlock:
    return s_tir.SBlock(
        block.iter_vars,
        block.reads,
        block.writes,
        block.name_hint,
        body,
        block.init,
        block.alloc_buffers,
        block.match_buffers,
        block.annotations,
    )


def unnumbered(name: str) -> str:
    """The name of a function without its number."""
    stem, _, number = name.rpartition("_")
    return stem if number.isdigit() and stem else name
