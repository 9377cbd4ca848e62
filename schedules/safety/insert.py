"""Make checks of markers.

A check stands as far outside of the loops as the variables of its value allow, so that it runs once for a
row of an embedding and not for each of its elements:

    for row:
        fed = indices[row]                                  a marker's value
        position = fed + extent if fed < 0 else fed
        safe = unsigned_min(position, extent - 1)           what stands for the marker
        if safe != position:
            faults[number, 0], faults[number, 1] = 1, fed
        for column (vectorized):
            out[row, column] = data[safe, column]

Where every turn of an innermost loop has its own value, a branch for each would keep the loop from being
vectorised. There the worst position of all is kept, and judged once, behind the outermost loop of a task:

    worst = 0
    for row:
        for column:
            position, safe = ...                            as above
            worst = unsigned_max(worst, position)           too large, or negative, which is larger
            out[row, column] = data[row, safe]
    if worst >= extent (unsigned):
        faults[number, 0], faults[number, 1] = 1, worst as it was fed
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import tvm_ffi
from tvm import ir, tirx

from hybridc.checks import Marker, read_marker
from hybridc.ir import CheckKind
from hybridc.schedules.safety.statements import Rebuilder, is_conditional, remade, sequence, variables
from hybridc.schedules.shapes import index_shape


@dataclass
class _Scope:
    """A place that checks may be put into: before the statement, or the loop's body, that it stands for."""

    defined: set[ir.Var] = field(default_factory=set)
    """Variables that are known from here on."""
    condition: set[ir.Var] = field(default_factory=set)
    """Variables of a condition that holds here and not outside."""
    binds_threads: bool = False
    """Outside of it there is no GPU."""
    loop: tirx.For | None = None
    """The innermost loop whose body it is, if it is one of vectors or LLVM may make it one."""
    is_task: bool = False
    """All of it runs on one thread, and more than that does not."""
    worst: dict[tuple[int, int], ir.Var] = field(default_factory=dict)
    """Of a task: by number and lanes of a check, where the worst of its values are kept."""
    checks: list[tirx.Stmt] = field(default_factory=list)
    after: list[tirx.Stmt] = field(default_factory=list)
    """What comes behind the body."""
    made: list[tuple[ir.Expr, int, ir.Expr]] = field(default_factory=list)
    """Value, number and result of the checks here."""

    def named(self, name: str, value: ir.Expr) -> ir.Expr:
        """A name that has a value from here on; the value itself in vectors, which TVM gives no names."""
        if self.loop is not None and self.loop.kind == tirx.ForKind.VECTORIZED:
            return value
        var = tirx.Var(name, str(value.ty.dtype))
        self.checks.append(tirx.Bind(var, value))
        self.defined.add(var)
        return var


class CheckInserter(Rebuilder):
    """Replaces the markers of a function by checks that report to the buffer `faults`.

    `written` are the buffers that the function writes: a value read from one must be read where it stands.
    """

    def __init__(self, faults: ir.Var, written: set[ir.Var]) -> None:
        self.faults, self.written = faults, written
        self.scopes: list[_Scope] = [_Scope()]
        self.guards: list[ir.Expr] = []

    def function_body(self, body: tirx.Stmt) -> tirx.Stmt:
        """The body of a function, with its checks."""
        body = self.statement(body)
        return sequence([*self.scopes[0].checks, body, *self.scopes[0].after])

    def statement(self, node: tirx.Stmt) -> tirx.Stmt:
        """With the checks that have to stand right before it."""
        if isinstance(node, tirx.SeqStmt):
            return super().statement(node)
        scope = _Scope()
        self.scopes.append(scope)
        made = super().statement(node)
        self.scopes.pop()
        if isinstance(node, tirx.Bind):
            self.scopes[-1].defined.add(node.var)
        return sequence([*scope.checks, made])

    def loop(self, node: tirx.For) -> tirx.Stmt:
        kinds, kind = tirx.ForKind, node.kind
        is_innermost = kind == kinds.SERIAL and node.step is None and not _has_loop(node.body)
        scope = _Scope(
            {node.loop_var},
            binds_threads=kind == kinds.THREAD_BINDING,
            loop=node if is_innermost or kind == kinds.VECTORIZED else None,
            is_task=kind == kinds.PARALLEL,
        )
        body = self._inside(scope, node.body)
        # a branch for each lane is no vector operation, and unrolled checks would name their values again
        at_once = kind in (kinds.VECTORIZED, kinds.UNROLLED) and _has_check(body)
        return remade(node, body, kinds.SERIAL if at_once else None)

    def branches(self, node: tirx.IfThenElse) -> tirx.Stmt:
        condition = self.expression(node.condition)
        known = variables(condition)
        then = self._inside(_Scope(condition=known), node.then_case)
        other = None if node.else_case is None else self._inside(_Scope(condition=known), node.else_case)
        return tirx.IfThenElse(condition, then, other, node.span)

    def attribute(self, node: tirx.AttrStmt) -> tirx.Stmt:
        threads = node.attr_key in ("thread_extent", "virtual_thread")
        scope = _Scope({node.node.var} if threads else set(), binds_threads=threads)
        body = self._inside(scope, node.body)
        return tirx.AttrStmt(node.node, node.attr_key, node.value, body, node.span)

    def _inside(self, scope: _Scope, body: tirx.Stmt) -> tirx.Stmt:
        self.scopes.append(scope)
        made = self.statement(body)
        self.scopes.pop()
        return sequence([*scope.checks, made, *scope.after])

    def expression(self, expr: ir.Expr) -> ir.Expr:
        """With names of checked values for markers; what is computed under a condition is checked under
        it."""

        def call(node: ir.Call, mutator: tvm_ffi.StructuralMutator) -> ir.Expr:
            if is_conditional(node):
                return self._conditional(node, mutator)
            node = mutator.default_mutate(node)
            marker = read_marker(node)
            return node if marker is None else self._check(marker)

        return tvm_ffi.structural_mutate(expr, ((ir.Call, call),))

    def _conditional(self, node: ir.Call, mutator: tvm_ffi.StructuralMutator) -> ir.Expr:
        condition, then, other = node.args
        condition = mutator.mutate(condition)
        self.guards.append(condition)
        then = mutator.mutate(then)
        self.guards[-1] = tirx.Not(condition)
        other = mutator.mutate(other)
        self.guards.pop()
        return tirx.if_then_else(condition, then, other)

    def _check(self, marker: Marker) -> ir.Expr:
        dtype = str(marker.value.ty.dtype)
        value, is_divisor = marker.value, marker.kind is CheckKind.DIVISOR
        for guard in reversed(self.guards):
            value = tirx.if_then_else(guard, value, tirx.const(int(is_divisor), dtype))
        scope = self._scope(value)
        for known, number, result in scope.made:
            if number == marker.number and tvm_ffi.structural_equal(known, value):
                return result
        fed = scope.named("fed", value)
        if is_divisor:  # `guard.py` makes divisions harmless
            safe, badness, failed = fed, tirx.Cast("uint64", is_zero(fed)), is_zero(fed)
        else:
            position = scope.named("position", _from_start(marker, fed))
            # of the illegal ones some are negative: they are huge if unsigned
            badness = tirx.Cast("uint64", position)
            inside = tirx.min(badness, tirx.const(marker.upper, "uint64"))
            safe = scope.named("safe", tirx.Cast("int64", inside))
            failed = tirx.NE(position, safe)
        scope.checks.append(self._judged(marker, fed, badness, failed, scope))
        scope.made.append((value, marker.number, safe))
        return safe

    def _judged(
        self, marker: Marker, fed: ir.Expr, badness: ir.Expr, failed: ir.Expr, scope: _Scope
    ) -> tirx.Stmt:
        """Report a value that has failed: at once, or behind loops that a branch would keep scalar."""
        if scope.loop is None or any(outer.binds_threads for outer in self.scopes):
            return tirx.IfThenElse(failed, self._report(marker, fed), None)
        return self._collected(marker, badness, scope.loop)

    def _report(self, marker: Marker, fed: ir.Expr) -> tirx.Stmt:
        row = tirx.IntImm("int64", marker.number)
        return sequence(
            [
                tirx.BufferStore(self.faults, what, [row, tirx.IntImm("int64", column)])
                for column, what in enumerate((tirx.const(1, "int64"), tirx.Cast("int64", fed)))
            ]
        )

    def _collected(self, marker: Marker, badness: ir.Expr, loop: tirx.For) -> tirx.Stmt:
        """Keep the greatest `badness`, uint64, of a task's values; it is judged behind the task's loops."""
        task = next((scope for scope in reversed(self.scopes) if scope.is_task), self.scopes[0])
        in_vectors = loop.kind == tirx.ForKind.VECTORIZED
        lanes = int(loop.extent) if in_vectors else 1
        worst = task.worst.get((marker.number, lanes))
        if worst is None:
            # TVM keeps a small buffer of this scope on the stack, LLVM then in registers
            worst = tirx.decl_buffer(index_shape((lanes,)), "uint64", "worst", scope="global", layout=None)
            task.worst[marker.number, lanes] = worst
            none = tirx.const(0, "uint64")
            task.checks += [
                tirx.AllocBuffer(worst),
                _loop(lanes, tirx.ForKind.VECTORIZED, lambda at: tirx.BufferStore(worst, none, [at])),
            ]
            task.after.append(_loop(lanes, tirx.ForKind.SERIAL, lambda at: self._sentence(marker, worst, at)))
        at = loop.loop_var - loop.min if in_vectors else tirx.IntImm("int64", 0)
        return tirx.BufferStore(worst, tirx.max(tirx.BufferLoad(worst, [at]), badness), [at])

    def _sentence(self, marker: Marker, worst: ir.Var, at: tirx.Var) -> tirx.Stmt:
        """Report the worst value, as it was fed, if it is illegal."""
        found = tirx.Var("found", "int64")
        failed = tirx.any(found < 0, found > tirx.IntImm("int64", marker.upper))
        return sequence(
            [
                tirx.Bind(found, tirx.Cast("int64", tirx.BufferLoad(worst, [at]))),
                tirx.IfThenElse(failed, self._report(marker, _as_fed(marker, found)), None),
            ]
        )

    def _scope(self, value: ir.Expr) -> _Scope:
        """The outermost place where a value is known and may be computed."""
        needed = variables(value)
        return self.scopes[-1] if needed & self.written else self._scope_of(needed)

    def _scope_of(self, needed: set[ir.Var]) -> _Scope:
        """The outermost place where variables are known."""
        for scope in reversed(self.scopes):
            if scope.binds_threads or needed & (scope.defined | scope.condition):
                return scope
        return self.scopes[0]


def _has_check(body: tirx.Stmt) -> bool:
    found: list[tirx.Stmt] = []
    tvm_ffi.structural_walk(body, ((tirx.IfThenElse, tirx.Bind), found.append))
    return bool(found)


def _has_loop(body: tirx.Stmt) -> bool:
    found: list[tirx.For] = []
    tvm_ffi.structural_walk(body, (tirx.For, found.append))
    return bool(found)


def is_zero(integer: ir.Expr) -> ir.Expr:
    """Whether an integer is zero, of 64 bits: TVM cannot simplify comparisons of unsigned numbers."""
    return tirx.EQ(tirx.Cast("int64", integer), tirx.IntImm("int64", 0))


def _from_start(marker: Marker, fed: ir.Expr) -> ir.Expr:
    """An index counted from 0; it is outside of the axis if it was illegal."""
    if not marker.lower:
        return fed
    return tirx.Select(fed < 0, fed + tirx.IntImm("int64", marker.upper + 1), fed)


def _as_fed(marker: Marker, found: ir.Expr) -> ir.Expr:
    """The value whose unsigned position, or being a divisor of zero, was `found` to be illegal."""
    if marker.kind is CheckKind.DIVISOR:
        return tirx.IntImm("int64", 0)
    below = found - tirx.IntImm("int64", marker.upper + 1) if marker.lower else found
    return tirx.Select(found < 0, below, found)


def _loop(extent: int, kind: int, body: Callable[[tirx.Var], tirx.Stmt]) -> tirx.For:
    at = tirx.Var("at", "int64")
    return tirx.For(at, tirx.IntImm("int64", 0), tirx.IntImm("int64", extent), kind, body(at))
