"""The last word on a scheduled function: it touches nothing outside of its buffers, whatever it is fed.

Positions that follow from loops are right if the schedule is. For those that follow from data, and for
divisors, this file proves that no value does harm, or makes it so: a position is moved to the nearest one
inside, a divisor of zero replaced by one. No kernel can leave its buffers because its author forgot to check.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import tvm
import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.ir.transform import Sequential

from hybridc.checks import CHECKS
from hybridc.schedules.mutation import mutate
from hybridc.schedules.rule import Scheduled
from hybridc.schedules.safety.fed import is_zero
from hybridc.schedules.safety.insert import CheckInserter
from hybridc.schedules.safety.statements import Rebuilder, is_conditional, is_prefetch, remade
from hybridc.schedules.shapes import index_shape, shape_of

_TO_LOOPS = Sequential(
    [
        s_tir.transform.CanonicalizeLoop(),
        s_tir.transform.LowerCrossThreadReduction(),
        s_tir.transform.LowerInitBlock(),
        s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
        s_tir.transform.ConvertBlocksToOpaque(),
        s_tir.transform.LiftThreadBinding(),
        s_tir.transform.ManifestSharedMemoryLocalStage(),
        s_tir.transform.CompactBufferAllocation(),
        s_tir.transform.LowerAutoCopy(),
        s_tir.transform.UnifyThreadBinding(),
        s_tir.transform.LowerMatchBuffer(),
        # compiling the function compacts it again, and then fails at differences of vectors for indices
        s_tir.transform.StmtSimplify(),
        s_tir.transform.InjectSoftwarePipeline(),
        s_tir.transform.LowerOpaqueBlock(),
    ]
)
"""What TVM does first when it compiles a function: behind it there are loops and no blocks."""
_POSITION_LIMIT = 1 << 30
"""Positions computed as floating point numbers are cut off here, which leaves room for sums of them in 32
bits. No axis has as many elements."""
_EXACT_BITS = 32
"""Quotients of integers of so many bits are exact in float64, once cut off. TVM fails to make vectors of the
casts of narrower ones."""
_DIVISIONS = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)


def made_safe(scheduled: Scheduled, gpu: tvm.target.Target | None = None) -> Scheduled:
    """The function with checks for its markers, and no access outside of its buffers.

    Ensures: where it has checks, a parameter `faults` behind all others, int64 [checks, 2]: a check that
    fails writes a one and the value, as it was fed, to its row. A function whose accesses follow from loops
    alone is left as it is. `gpu` is the target of a function that was scheduled for one.
    """
    function = scheduled.function
    checks = function.attrs[CHECKS] if scheduled.has_checks else ()
    if not checks and not _follows_data(function):
        return scheduled
    function = as_loops(function, gpu)
    body, parameters = function.body, list(function.params)
    positions: Mapping[ir.Var, int] = {}
    if checks:
        faults = tirx.decl_buffer(index_shape((len(checks), 2)), "int64", "faults", layout=None)
        inserter = CheckInserter(faults, _written(body))
        body, positions = inserter.function_body(body), inserter.positions
        parameters.append(faults)
    body = _Guard(positions, on_gpu=gpu is not None).statement(body)
    made = tirx.PrimFunc(parameters, body, function.ret_type, function.attrs, function.span)
    return replace(scheduled, function=made)


def as_loops(function: tirx.PrimFunc, gpu: tvm.target.Target | None) -> tirx.PrimFunc:
    """The function with loops and no blocks. `gpu` is the target of one that was scheduled for a GPU."""
    named = function.with_attr("global_symbol", "kernel")
    named = named if gpu is None else named.with_attr("target", gpu)
    lowered = _TO_LOOPS(tvm.IRModule({"kernel": named}))["kernel"]
    attributes = dict(function.attrs or {})
    for name in ("global_symbol", "target"):
        if name not in attributes:
            lowered = lowered.without_attr(name)
    return lowered.with_attrs(attributes)


def _written(body: tirx.Stmt) -> set[ir.Var]:
    stores: list[tirx.BufferStore] = []
    tvm_ffi.structural_walk(body, (tirx.BufferStore, stores.append))
    return {store.buffer for store in stores}


def _follows_data(function: tirx.PrimFunc) -> bool:
    """Whether the position of an access, or an integer divisor, may follow from data."""
    data: set[ir.Var] = set()
    found: list[object] = []

    def name(named: tirx.Bind | tirx.Let) -> None:
        if _comes_from(named.value, data):
            data.add(named.var)

    def access(node: ir.TensorLoad | tirx.BufferStore) -> None:
        if not found:
            found.extend(index for index in node.indices if _comes_from(index, data))

    def division(node: ir.Expr) -> None:
        if not found and _is_integer(node) and _comes_from(node.b, data):
            found.append(node)

    def count(loop: tirx.For) -> None:
        if _comes_from(loop.min, data) or _comes_from(loop.extent, data):
            data.add(loop.loop_var)

    tvm_ffi.structural_walk(function.body, (((tirx.Bind, tirx.Let), name), (tirx.For, count)), order="pre")
    accesses = ((ir.TensorLoad, tirx.BufferStore), access)
    tvm_ffi.structural_walk(function.body, [accesses, (_DIVISIONS, division)])
    return bool(found)


def _comes_from(expr: ir.Expr, data: set[ir.Var]) -> bool:
    """Whether an expression reads memory or one of these variables."""
    if isinstance(expr, tirx.IntImm):  # most divisors, and many indices
        return False
    if isinstance(expr, ir.Var):
        return expr in data
    read: list[ir.Expr] = []
    tvm_ffi.structural_walk(expr, ((ir.Var, ir.TensorLoad), read.append))
    return any(isinstance(each, ir.TensorLoad) or each in data for each in read)


def _is_integer(expr: ir.Expr) -> bool:
    return str(expr.ty.dtype).startswith(("int", "uint"))


class _Guard(Rebuilder):
    """Makes every access and division harmless that follows from data.

    `positions` are buffers of the function's own that hold numbers from 0 to below what is given.
    """

    def __init__(self, positions: Mapping[ir.Var, int], *, on_gpu: bool) -> None:
        self.positions, self.on_gpu = positions, on_gpu
        self.known = sym.Analyzer()
        self.data: set[ir.Var] = set()
        """Variables that follow from data."""

    def follows_data(self, expr: ir.Expr) -> bool:
        """Whether an expression's value is known to a run only."""
        return _comes_from(expr, self.data)

    def loop(self, node: tirx.For) -> tirx.Stmt:
        lower, extent = self.expression(node.min), self.expression(node.extent)
        if self.follows_data(lower) or self.follows_data(extent):
            self.data.add(node.loop_var)
            # both ends are read once, when the loop begins
            least, end = self._bounds(lower), self._bounds(lower + extent)
            if least.min_value < end.max_value < sym.ConstIntBound.POS_INF:
                within = sym.ConstIntBound(least.min_value, end.max_value - 1)
                self.known.update(node.loop_var, within, True)
        else:
            self.known.bind(node.loop_var, ir.Range.from_min_extent(lower, extent))
        node = tirx.For(
            node.loop_var,
            lower,
            extent,
            node.kind,
            node.body,
            node.thread_binding,
            node.annotations,
            node.step,
        )
        return remade(node, self.statement(node.body))

    def branches(self, node: tirx.IfThenElse) -> tirx.Stmt:
        condition = self.expression(node.condition)
        with self._given(condition):
            then = self.statement(node.then_case)
        with self._given(tirx.Not(condition)):
            other = None if node.else_case is None else self.statement(node.else_case)
        return tirx.IfThenElse(condition, then, other, node.span)

    def attribute(self, node: tirx.AttrStmt) -> tirx.Stmt:
        if node.attr_key in ("thread_extent", "virtual_thread"):
            zero = tirx.const(0, str(node.value.ty.dtype))
            self.known.bind(node.node.var, ir.Range.from_min_extent(zero, node.value), True)
        return super().attribute(node)

    def binding(self, node: tirx.Bind) -> tirx.Stmt:
        value = self.expression(node.value)
        if self.follows_data(value):
            self.data.add(node.var)
            if _is_integer(value) and "x" not in str(value.ty.dtype):
                self.known.update(node.var, self._bounds(value), True)
        return tirx.Bind(node.var, value, node.span)

    def store(self, node: tirx.BufferStore) -> tirx.Stmt:
        indices = self._inside(node.buffer, [self.expression(index) for index in node.indices])
        return tirx.BufferStore(node.buffer, self.expression(node.value), indices, node.span)

    def expression(self, expr: ir.Expr) -> ir.Expr:
        """With accesses and divisions that do no harm."""
        if isinstance(expr, tirx.IntImm | tirx.FloatImm | ir.Var):
            return expr

        def load(node: ir.TensorLoad, mutator: tvm_ffi.StructuralMutator) -> ir.Expr:
            node = mutator.default_mutate(node)
            indices = self._inside(node.source, list(node.indices))
            return tirx.BufferLoad(node.source, indices)

        def call(node: ir.Call, mutator: tvm_ffi.StructuralMutator) -> ir.Expr:
            if is_prefetch(node):
                return node
            if not is_conditional(node):
                return mutator.default_mutate(node)
            condition = mutator.mutate(node.args[0])
            with self._given(condition):
                then = mutator.mutate(node.args[1])
            with self._given(tirx.Not(condition)):
                other = mutator.mutate(node.args[2])
            return tirx.if_then_else(condition, then, other)

        def division(node: ir.Expr, mutator: tvm_ffi.StructuralMutator) -> ir.Expr:
            return self._divided(mutator.default_mutate(node))

        callbacks = ((ir.TensorLoad, load), (ir.Call, call), (_DIVISIONS, division))
        return mutate(expr, callbacks)

    @contextmanager
    def _given(self, condition: ir.Expr) -> Iterator[None]:
        """What a condition says of loops helps to prove something; data may change between two reads."""
        if self.follows_data(condition):
            yield
        else:
            with self.known.constraint_scope(condition):
                yield

    def _bounds(self, expr: ir.Expr) -> sym.ConstIntBound:
        """The least and the greatest value, for all data."""

        def unknown(load: ir.TensorLoad) -> ir.Expr:
            dtype = str(load.ty.dtype)
            var = tirx.Var("data", dtype)
            if load.source in self.positions:
                ends = (tirx.const(n, dtype) for n in (0, self.positions[load.source]))
                self.known.bind(var, ir.Range.from_min_extent(*ends))
            return var

        def lane(ramp: tirx.Ramp, mutator: tvm_ffi.StructuralMutator) -> ir.Expr:
            var = tirx.Var("lane", str(ramp.stride.ty.dtype))
            self.known.bind(var, ir.Range.from_min_extent(tirx.const(0, str(var.ty.dtype)), ramp.lanes))
            return mutator.mutate(ramp.base) + var * ramp.stride

        scalar = mutate(expr, ((tirx.Ramp, lane),))
        return self.known.const_int_bound(tvm_ffi.structural_map(scalar, (ir.TensorLoad, unknown)))

    def _is_within(self, index: ir.Expr, extent: int) -> bool:
        bounds = self._bounds(index)
        return bounds.min_value >= 0 and bounds.max_value < extent

    def _inside(self, buffer: ir.Var, indices: list[ir.Expr]) -> list[ir.Expr]:
        """Indices of the same element, or of one inside of the buffer if some data could lead outside."""
        if not any(self.follows_data(index) for index in indices):
            return indices
        indices = [_in_range(index) for index in indices]
        shape = shape_of(buffer)
        if all(self._is_within(i, extent) for i, extent in zip(indices, shape, strict=True)):
            return indices
        # schedules name elements by their row-major offset, too, as code generation does
        offset, total = indices[0], shape[0]
        for index, extent in zip(indices[1:], shape[1:], strict=True):
            offset, total = offset * extent + index, total * extent
        if not buffer.strides and self._is_within(offset, total):
            return indices
        if any(not _is_nought(index) for index in indices[:-1]):
            return [_clamped(i, extent) for i, extent in zip(indices, shape, strict=True)]
        return [*indices[:-1], _clamped(indices[-1], total)]

    def _divided(self, node: ir.Expr) -> ir.Expr:
        """A quotient or remainder: by one instead of zero, and of the least integer by -1 as if by one."""
        if not _is_integer(node) or not self.follows_data(node.b):
            return node
        if self._bounds(node.b).min_value > 0:
            return node
        if not self.on_gpu and node.ty.dtype.bits == _EXACT_BITS:
            return _divided_as_float(node)
        # a branch, which is predicted, costs less than to choose a divisor
        return tirx.if_then_else(_is_unit(node.b), _by_unit(node), node)


def _divided_as_float(node: ir.Expr) -> ir.Expr:
    """A quotient or remainder of 32-bit integers by way of float64, which rounds none of these to
    another integer: CPUs have vector divisions of floating point numbers only."""
    dtype, is_signed = str(node.ty.dtype), str(node.ty.dtype).startswith("int")
    zero, one = (tirx.const(value, dtype) for value in (0, 1))
    divisor = tirx.Select(_overflows(node) if is_signed else is_zero(node.b), one, node.b)
    quotient = tirx.Cast(dtype, tirx.Cast("float64", node.a) / tirx.Cast("float64", divisor))
    if isinstance(node, tirx.Div):
        return quotient
    rest = node.a - quotient * divisor
    if isinstance(node, tirx.Mod) or not is_signed:
        return quotient if isinstance(node, tirx.FloorDiv) else rest
    rounded_up = tirx.all(tirx.NE(rest, zero), tirx.bitwise_xor(rest, divisor) < zero)
    if isinstance(node, tirx.FloorDiv):
        return tirx.Select(rounded_up, quotient - one, quotient)
    return tirx.Select(rounded_up, rest + divisor, rest)


def _overflows(node: ir.Expr) -> ir.Expr:
    """Whether a signed division is one by zero, or of the least integer by -1."""
    dtype = str(node.ty.dtype)
    # TVM takes `a == min_value` for false
    rest = tirx.bitwise_xor(node.a, tirx.min_value(dtype))
    is_least = tirx.EQ(rest, tirx.const(0, dtype))
    return tirx.any(is_zero(node.b), tirx.all(tirx.EQ(node.b, tirx.const(-1, dtype)), is_least))


def _is_unit(divisor: ir.Expr) -> ir.Expr:
    """Whether a divisor is zero or -1."""
    dtype = str(divisor.ty.dtype)
    if dtype.startswith("uint"):
        return is_zero(divisor)
    return tirx.any(is_zero(divisor), tirx.EQ(divisor, tirx.const(-1, dtype)))


def _by_unit(node: ir.Expr) -> ir.Expr:
    """What is made of a division by zero, as if by one, or by -1; without dividing."""
    dtype = str(node.ty.dtype)
    if isinstance(node, (tirx.Mod, tirx.FloorMod)):
        return tirx.const(0, dtype)
    if dtype.startswith("uint"):
        return node.a
    return tirx.Select(_overflows(node), node.a, tirx.const(0, dtype) - node.a)


def _is_nought(expr: ir.Expr) -> bool:
    return isinstance(expr, tirx.IntImm) and int(expr) == 0


def _clamped(index: ir.Expr, extent: int) -> ir.Expr:
    if isinstance(index, tirx.Ramp):
        last = extent - 1 - (int(index.lanes) - 1) * int(index.stride)
        return tirx.Ramp(_clamped(index.base, max(last, 0) + 1), index.stride, index.lanes)
    zero, end = (tirx.const(value, str(index.ty.dtype)) for value in (0, extent - 1))
    return tirx.max(tirx.min(index, end), zero)


def _in_range(index: ir.Expr) -> ir.Expr:
    """The index with numbers cut off before they become integers: a NaN or a huge number would be none."""

    def cast(node: tirx.Cast, mutator: tvm_ffi.StructuralMutator) -> ir.Expr:
        node = mutator.default_mutate(node)
        dtype, source = str(node.ty.dtype), str(node.value.ty.dtype)
        if not dtype.startswith("int") or not source.startswith(("float", "bfloat")):
            return node
        low, high = (tirx.const(limit, source) for limit in (-_POSITION_LIMIT, _POSITION_LIMIT))
        least, greatest = (tirx.const(limit, dtype) for limit in (-_POSITION_LIMIT, _POSITION_LIMIT))
        below = tirx.Select(node.value <= high, node, greatest)
        return tirx.Select(node.value >= low, below, least)

    return mutate(index, ((tirx.Cast, cast),))
