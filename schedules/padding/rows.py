"""Rows of a product, counted as a run has them: its own follow one another, whatever lies between them.

In a bucket of 8 x 64 rows a run of 2 x 33 has the rows 0 to 32 and 64 to 96. Tiles of rows that follow the
bucket would have padding at the end of each sample; so tiles are of the run's rows, 0 to 65, each of which is
read and written where it lies.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import reduce

import tvm_ffi
from tvm import ir, tirx

from hybridc.schedules.rule import Rows
from hybridc.schedules.safety.statements import Rebuilder, remade, sequence

ROW = "row"
"""The name that a schedule binds numbers of rows to, those of a tile in ascending order in one sequence of
statements. It reads and writes by them alone, and writes no row whose number is not less than all rows'."""

GROUPS = "hybridc.groups_of_rows"
"""Annotation of a loop around such statements: how many steps go through a group of rows, and how many rows
that are. Groups follow one another; the steps of each go through its rows alone."""


def named(value: ir.Expr, name: str) -> tuple[ir.Var, tirx.Stmt]:
    """A variable of this name, and the statement that names a value so."""
    variable = tirx.Var(name, str(value.ty.dtype))
    return variable, tirx.Bind(variable, opaque(value))


def opaque(value: ir.Expr) -> ir.Expr:
    """The value, which LLVM takes as it is, and is told that it is probably true, or 0.

    TVM does not look through it: it would else put the value back in a name's place, or take long to find the
    bounds of what is indexed by it.
    """
    dtype = str(value.ty.dtype)
    return tirx.call_llvm_intrin(dtype, "llvm.expect", value, tirx.const(int(dtype == "bool"), dtype))


def is_number(node: tirx.Stmt) -> bool:
    """Whether a statement names the number of a row."""
    return isinstance(node, tirx.Bind) and node.var.name == ROW and isinstance(node.value, ir.Call)


def _value(node: tirx.Bind) -> ir.Expr:
    """What `named` was given."""
    return node.value.args[1]


def own_rows(node: tirx.SeqStmt, rows: Rows, extents: Sequence[ir.Expr | int]) -> tirx.Stmt:
    """A sequence that names numbers of rows, for a run of these `extents`, each at least 1.

    Tiles behind the run's last row do nothing, and rows behind it are not written.
    """
    total = reduce(operator.mul, map(_int32, extents))
    first = _value(next(inner for inner in node.seq if is_number(inner)))
    made: list[tirx.Stmt] = []
    for inner in node.seq:
        if is_number(inner):
            value = _value(inner)
            place = tirx.Cast(str(value.ty.dtype), _place(_int32(value), rows, extents))
            beyond = tirx.const(math.prod(places for places, _ in rows), str(value.ty.dtype))
            place = tirx.Select(_int32(value) < total, place, beyond)
            inner = tirx.Bind(inner.var, opaque(place))
        made.append(inner)
    return tirx.IfThenElse(opaque(_int32(first) < total), sequence(made), None)


def in_groups(node: tirx.Stmt, steps: int, rows: int) -> tirx.Stmt:
    """A loop with the annotation GROUPS, or another statement as it is."""
    if not isinstance(node, tirx.For):
        return node
    return remade(node, node.body, annotations={GROUPS: [steps, rows]})


def own_groups(node: tirx.For, extents: Sequence[ir.Expr | int]) -> tirx.For:
    """A loop in groups without steps for groups of rows that a run of these `extents` does not have.

    Each of them would see that by itself: of ten thousand in a bucket of 4,096 rows, 162 rows need hundreds.
    Requires: the extents are as for `own_rows`.
    """
    steps, rows = (int(each) for each in node.annotations[GROUPS])
    groups = tirx.floordiv(reduce(operator.mul, map(_int32, extents)) + (rows - 1), tirx.const(rows, "int32"))
    needed = tirx.Cast(str(node.extent.ty.dtype), groups) * steps
    return remade(node, node.body, extent=tirx.min(needed, node.extent), annotations={})


def _place(number: ir.Expr, rows: Rows, extents: Sequence[ir.Expr | int]) -> ir.Expr:
    """Where the row of a number among the run's own lies. Divisions of 32 bits are much faster than of 64."""
    axes = [(places, extent) for (places, _), extent in zip(rows, extents, strict=True) if places > 1]
    if all(isinstance(extent, int) for _, extent in axes[1:]):
        return number  # the run's own rows are the first ones
    place, step = tirx.const(0, "int32"), 1
    for i, (places, extent) in reversed(list(enumerate(axes))):
        digit = tirx.Mod(number, _int32(extent)) if i else number
        place, step = place + digit * tirx.const(step, "int32"), step * places
        number = tirx.Div(number, _int32(extent)) if i else number
    return place


def _int32(value: ir.Expr | int) -> ir.Expr:
    return tirx.const(value, "int32") if isinstance(value, int) else tirx.Cast("int32", value)


class _Inliner(Rebuilder):
    def __init__(self) -> None:
        self.values: dict[ir.Var, ir.Expr] = {}

    def binding(self, node: tirx.Bind) -> tirx.Stmt:
        if not is_number(node):
            return super().binding(node)
        self.values[node.var] = _value(node)
        return tirx.Evaluate(tirx.const(0, "int32"))


def without_names(body: tirx.Stmt) -> tirx.Stmt:
    """The statement with numbers of rows in place of their names."""
    inliner = _Inliner()
    body = inliner.statement(body)
    return tvm_ffi.structural_map(body, (ir.Var, lambda var: inliner.values.get(var, var)))
