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

And where such a loop is run through again and again with the same values, they are surveyed once, and
the loops inside take positions that are known to be legal:

    for column:
        position, worst = ...                               as above
        positions[column] = unsigned_min(position, extent - 1)
    for row:
        for column:
            out[row, column] = data[row, positions[column]]
"""

from __future__ import annotations

from collections.abc import Callable

import tvm_ffi
from tvm import ir, tirx

from hybridc.checks import Marker, read_marker
from hybridc.ir import CheckKind
from hybridc.schedules.mutation import mutate
from hybridc.schedules.safety.fed import as_fed, from_start, is_zero, nearest
from hybridc.schedules.safety.scopes import Scope, Survey, survey_of
from hybridc.schedules.safety.statements import Rebuilder, is_conditional, remade, sequence, variables
from hybridc.schedules.shapes import index_shape


class CheckInserter(Rebuilder):
    """Replaces the markers of a function by checks that report to the buffer `faults`.

    `written` are the buffers that the function writes: a value read from one must be read where it stands.
    """

    def __init__(self, faults: ir.Var, written: set[ir.Var]) -> None:
        self.faults, self.written = faults, written
        self.scopes: list[Scope] = [Scope()]
        self.guards: list[ir.Expr] = []
        self.positions: dict[ir.Var, int] = {}
        """Buffers of surveyed positions, and the extents of their axes."""

    def function_body(self, body: tirx.Stmt) -> tirx.Stmt:
        """The body of a function, with its checks."""
        body = self.statement(body)
        return sequence([*self.scopes[0].checks, body, *self.scopes[0].after])

    def statement(self, node: tirx.Stmt) -> tirx.Stmt:
        """With the checks that have to stand right before it."""
        if isinstance(node, tirx.SeqStmt):
            return super().statement(node)
        scope = Scope()
        self.scopes.append(scope)
        made = super().statement(node)
        self.scopes.pop()
        if isinstance(node, tirx.Bind):
            self.scopes[-1].defined.add(node.var)
        return sequence([*scope.checks, made])

    def loop(self, node: tirx.For) -> tirx.Stmt:
        kinds, kind = tirx.ForKind, node.kind
        is_innermost = kind == kinds.SERIAL and node.step is None and not _has_loop(node.body)
        scope = Scope(
            {node.loop_var},
            binds_threads=kind == kinds.THREAD_BINDING,
            loop=node,
            at_once=is_innermost or kind == kinds.VECTORIZED,
            is_task=kind == kinds.PARALLEL,
        )
        body = self._inside(scope, node.body)
        # a branch for each lane is no vector operation, and unrolled checks would name their values again
        at_once = kind in (kinds.VECTORIZED, kinds.UNROLLED) and _has_check(body)
        return remade(node, body, kinds.SERIAL if at_once else None)

    def branches(self, node: tirx.IfThenElse) -> tirx.Stmt:
        condition = self.expression(node.condition)
        known = variables(condition)
        then = self._inside(Scope(condition=known), node.then_case)
        other = None if node.else_case is None else self._inside(Scope(condition=known), node.else_case)
        return tirx.IfThenElse(condition, then, other, node.span)

    def attribute(self, node: tirx.AttrStmt) -> tirx.Stmt:
        threads = node.attr_key in ("thread_extent", "virtual_thread")
        scope = Scope({node.node.var} if threads else set(), binds_threads=threads)
        body = self._inside(scope, node.body)
        return tirx.AttrStmt(node.node, node.attr_key, node.value, body, node.span)

    def _inside(self, scope: Scope, body: tirx.Stmt) -> tirx.Stmt:
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

        return mutate(expr, ((ir.Call, call),))

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
        survey = None
        if scope.at_once and not is_divisor and not variables(value) & self.written:
            survey = survey_of(self.scopes, variables(value))
        place = scope if survey is None else survey.place
        for known, number, result in place.made:
            if number == marker.number and tvm_ffi.structural_equal(known, value):
                return result
        if survey is not None:
            safe = self._surveyed(marker, value, survey)
            place.made.append((value, marker.number, safe))
            return safe
        fed = scope.named("fed", value)
        if is_divisor:  # `guard.py` makes divisions harmless
            safe, badness, failed = fed, tirx.Cast("uint64", is_zero(fed)), is_zero(fed)
        else:
            position = scope.named("position", from_start(marker, fed))
            badness = tirx.Cast("uint64", position)
            safe = scope.named("safe", nearest(marker, position))
            failed = tirx.NE(position, safe)
        scope.checks.append(self._judged(marker, fed, badness, failed, scope))
        scope.made.append((value, marker.number, safe))
        return safe

    def _surveyed(self, marker: Marker, value: ir.Expr, survey: Survey) -> ir.Expr:
        """The position that a survey in front of the loops around has found for `value`."""
        # TVM takes large ones from a pool of the thread
        positions = tirx.decl_buffer(index_shape(survey.extents), "int64", "positions", layout=None)
        self.positions[positions] = marker.upper + 1
        survey.place.defined.add(positions)

        def body(at: list[ir.Expr], fed: ir.Expr) -> tirx.Stmt:
            position = tirx.Var("position", "int64")
            return sequence(
                [
                    tirx.Bind(position, from_start(marker, fed)),
                    tirx.BufferStore(positions, nearest(marker, position), at),
                    self._collected(marker, tirx.Cast("uint64", position), None),
                ]
            )

        survey.place.checks += [tirx.AllocBuffer(positions), survey.over(value, body)]
        return tirx.BufferLoad(positions, survey.indices)

    def _judged(
        self, marker: Marker, fed: ir.Expr, badness: ir.Expr, failed: ir.Expr, scope: Scope
    ) -> tirx.Stmt:
        """Report a value that has failed: at once, or behind loops that a branch would keep scalar."""
        if scope.loop is None or not scope.at_once or any(outer.binds_threads for outer in self.scopes):
            return tirx.IfThenElse(failed, self._report(marker, fed), None)
        in_vectors = scope.loop.kind == tirx.ForKind.VECTORIZED
        return self._collected(marker, badness, scope.loop if in_vectors else None)

    def _report(self, marker: Marker, fed: ir.Expr) -> tirx.Stmt:
        row = tirx.IntImm("int64", marker.number)
        return sequence(
            [
                tirx.BufferStore(self.faults, what, [row, tirx.IntImm("int64", column)])
                for column, what in enumerate((tirx.const(1, "int64"), tirx.Cast("int64", fed)))
            ]
        )

    def _collected(self, marker: Marker, badness: ir.Expr, vector: tirx.For | None) -> tirx.Stmt:
        """Keep the greatest `badness`, uint64, of a task's values, for each lane if they are computed in a
        vector; it is judged behind the task's loops."""
        task = next((scope for scope in reversed(self.scopes) if scope.is_task), self.scopes[0])
        lanes = 1 if vector is None else int(vector.extent)
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
        at = tirx.IntImm("int64", 0) if vector is None else vector.loop_var - vector.min
        return tirx.BufferStore(worst, tirx.max(tirx.BufferLoad(worst, [at]), badness), [at])

    def _sentence(self, marker: Marker, worst: ir.Var, at: tirx.Var) -> tirx.Stmt:
        """Report the worst value, as it was fed, if it is illegal."""
        found = tirx.Var("found", "int64")
        failed = tirx.any(found < 0, found > tirx.IntImm("int64", marker.upper))
        return sequence(
            [
                tirx.Bind(found, tirx.Cast("int64", tirx.BufferLoad(worst, [at]))),
                tirx.IfThenElse(failed, self._report(marker, as_fed(marker, found)), None),
            ]
        )

    def _scope(self, value: ir.Expr) -> Scope:
        """The outermost place where a value is known and may be computed."""
        needed = variables(value)
        return self.scopes[-1] if needed & self.written else self._scope_of(needed)

    def _scope_of(self, needed: set[ir.Var]) -> Scope:
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


def _loop(extent: int, kind: int, body: Callable[[tirx.Var], tirx.Stmt]) -> tirx.For:
    at = tirx.Var("at", "int64")
    return tirx.For(at, tirx.IntImm("int64", 0), tirx.IntImm("int64", extent), kind, body(at))
