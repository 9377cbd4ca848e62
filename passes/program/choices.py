"""Choices between two tensors by a condition that only a run knows: which of its operands a kernel needs."""

from __future__ import annotations

from tvm import relax, tirx

from hybridc.frontend.expand.control.choices import CHOOSE
from hybridc.passes.program.operators import Fact, has_fact
from hybridc.passes.program.program import Program, is_op, operator_name

CHOICE = "choice"
"""Attribute of such a function, once composed: the positions of these three among its parameters."""


def is_choice(expr: relax.Expr) -> bool:
    """Whether an expression is a choice between tensors of one shape, by one bool."""
    # TVM numbers functions of one name
    return is_op(expr, "call_tir") and operator_name(expr).rstrip("0123456789") == CHOOSE


def conditions_of_choices(program: Program) -> frozenset[relax.Var]:
    """The variables that choices look at, and those that these are views of."""
    values = {binding.var: binding.value for binding in program.bindings}
    found = set[relax.Var]()
    for value in filter(is_choice, values.values()):
        condition = value.args[1].fields[0]
        found.add(condition)
        while has_fact(values.get(condition), Fact.VIEW):
            condition = values[condition].args[0]
            found.add(condition)
    return frozenset(found)


def choice_of(function: tirx.PrimFunc) -> tuple[int, ...]:
    """Which parameters are condition, taken and other operand; empty if the function is no choice."""
    return tuple(int(position) for position in (function.attrs or {}).get(CHOICE, ()))
