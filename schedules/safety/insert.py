"""Make checks of markers.

A check stands as far outside of the loops as the variables of its value allow, so that it runs once for a
row of an embedding and not for each of its elements:

    for row:
        v = indices[row]                                    a marker's value
        if v < lower or v > upper:
            faults[number, 0], faults[number, 1] = 1, v
        safe = max(min(v < 0 ? v + extent : v, upper), 0)   what stands for the marker
        for column (vectorized):
            out[row, column] = data[safe, column]

Where every turn of an innermost loop has its own value, a branch for each would keep the loop from being
vectorised. There the values are surveyed in a loop of their own, which is, ahead of it:

    least, greatest = lower, upper
    for column:
        least, greatest = min(least, indices[column]), max(greatest, indices[column])
    if least < lower or greatest > upper:
        faults[number, 0], faults[number, 1] = 1, the one that is outside
    for column:
        safe = ...                                          as above
        out[column] = data[safe]
"""

from __future__ import annotations

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
    """The innermost loop whose body it is, if its turns come one after the other."""
    checks: list[tirx.Stmt] = field(default_factory=list)
    made: list[tuple[ir.Expr, int, ir.Var]] = field(default_factory=list)
    """Value, number and result of the checks here."""


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
        return sequence([*self.scopes[0].checks, body])

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
        threads = node.kind == tirx.ForKind.THREAD_BINDING
        survey = node.kind == tirx.ForKind.SERIAL and node.step is None and not _has_loop(node.body)
        scope = _Scope({node.loop_var}, binds_threads=threads, loop=node if survey else None)
        body = self._inside(scope, node.body)
        # a check for each lane is no vector operation, and an unrolled one would name its value again and
        # again
        at_once = node.kind in (tirx.ForKind.VECTORIZED, tirx.ForKind.UNROLLED)
        return remade(node, body, tirx.ForKind.SERIAL if scope.checks and at_once else None)

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
        return sequence([*scope.checks, made])

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
        value = marker.value
        for guard in reversed(self.guards):
            value = tirx.if_then_else(
                guard, value, tirx.const(1 if marker.kind is CheckKind.DIVISOR else 0, dtype)
            )
        scope = self._scope(value)
        for known, number, result in scope.made:
            if number == marker.number and tvm_ffi.structural_equal(known, value):
                return result
        fed, safe = tirx.Var("fed", dtype), tirx.Var("safe", dtype)
        failed, result = _verdict(marker, fed)
        scope.checks.append(tirx.Bind(fed, value))
        if not self._surveyed(marker, value, scope):
            scope.checks.append(tirx.IfThenElse(failed, self._report(marker, fed), None))
        scope.checks.append(tirx.Bind(safe, result))
        scope.made.append((value, marker.number, safe))
        scope.defined |= {fed, safe}
        return safe

    def _report(self, marker: Marker, fed: ir.Expr) -> tirx.Stmt:
        row = tirx.IntImm("int64", marker.number)
        return sequence(
            [
                tirx.BufferStore(self.faults, what, [row, tirx.IntImm("int64", column)])
                for column, what in enumerate((tirx.const(1, "int64"), tirx.Cast("int64", fed)))
            ]
        )

    def _surveyed(self, marker: Marker, value: ir.Expr, scope: _Scope) -> bool:
        """Check the values of all turns of the loop ahead of it, where they are known there.

        Not on a GPU, whose threads take a branch each anyway.
        """
        loop = scope.loop
        if loop is None or any(outer.binds_threads for outer in self.scopes):
            return False
        needed = variables(value) | variables(loop.min) | variables(loop.extent)
        known_in_loop = scope.defined - {loop.loop_var}
        if needed & (known_in_loop | self.written):
            return False
        ahead = self._scope_of(needed - {loop.loop_var})
        ahead.checks += self._survey(marker, value, loop)
        return True

    def _survey(self, marker: Marker, value: ir.Expr, loop: tirx.For) -> list[tirx.Stmt]:
        turn, fed = tirx.Var("turn", str(loop.loop_var.ty.dtype)), tirx.Var("fed", str(value.ty.dtype))
        value = tvm_ffi.structural_map(
            value, (ir.Var, lambda var: turn if var.same_as(loop.loop_var) else var)
        )
        # TVM keeps a small buffer of this scope on the stack, LLVM then in registers; others are allocated
        seen = tirx.decl_buffer(index_shape((2,)), "int64", "seen", scope="global", layout=None)
        places = [[tirx.IntImm("int64", place)] for place in range(2)]
        least, greatest = (tirx.BufferLoad(seen, place) for place in places)

        def store(*values: ir.Expr) -> list[tirx.Stmt]:
            return [tirx.BufferStore(seen, v, place) for v, place in zip(values, places, strict=True)]

        lower, upper = (tirx.IntImm("int64", limit) for limit in (marker.lower, marker.upper))
        if marker.kind is CheckKind.DIVISOR:
            # of divisors only whether there is a zero, as a one among zeros
            judged, outside = tirx.Cast("int64", is_zero(fed)), tirx.const(0, "int64")
        else:
            judged, outside = fed, tirx.Select(least < lower, least, greatest)
        look = [tirx.Bind(fed, value), *store(tirx.min(least, judged), tirx.max(greatest, judged))]
        return [
            tirx.AllocBuffer(seen),
            *store(lower, upper),
            tirx.For(turn, loop.min, loop.extent, tirx.ForKind.SERIAL, sequence(look)),
            tirx.IfThenElse(tirx.any(least < lower, greatest > upper), self._report(marker, outside), None),
        ]

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


def _has_loop(body: tirx.Stmt) -> bool:
    found: list[tirx.For] = []
    tvm_ffi.structural_walk(body, (tirx.For, found.append))
    return bool(found)


def is_zero(integer: ir.Expr) -> ir.Expr:
    """Whether an integer is zero, of 64 bits: TVM cannot simplify comparisons of unsigned numbers."""
    return tirx.EQ(tirx.Cast("int64", integer), tirx.IntImm("int64", 0))


def _verdict(marker: Marker, fed: ir.Expr) -> tuple[ir.Expr, ir.Expr]:
    """Whether a value is illegal, and what to go on with."""
    if marker.kind is CheckKind.DIVISOR:
        return is_zero(fed), fed  # `guard.py` makes divisions harmless

    def number(value: int) -> tirx.IntImm:
        return tirx.IntImm("int64", value)

    failed = tirx.any(fed < number(marker.lower), fed > number(marker.upper))
    position = tirx.Select(fed < number(0), fed + number(marker.upper + 1), fed) if marker.lower else fed
    return failed, tirx.max(tirx.min(position, number(marker.upper)), number(0))
