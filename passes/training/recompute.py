"""Recompute in the backward pass, instead of storing, what follows from a stored tensor cheaply.

Exporters decompose activations and normalisation: GELU is a division, erf, an addition and two products, and
the backward pass reads four of these five results. All follow from the first operand. Recomputed, each is
part of the kernel that reads it; and in the forward pass the chain, whose results have no other readers then,
becomes one kernel. (Larger recomputation is the planner's, which weighs time against memory.)
"""

from __future__ import annotations

from collections.abc import Set

from tvm import relax

from hybridc.passes.program.operators import Fact, has_fact
from hybridc.passes.program.program import Program, ProgramBuilder, substitute, variables

LONGEST = 8
"""Operators from a stored tensor to a recomputed one: GELU has five, and each reader computes all of them."""


def recompute_cheap(program: Program, forward: Set[relax.Var]) -> Program:
    """Let every reader in the backward pass recompute what it reads, where that is cheap.

    Requires: `forward` holds the variables of the forward pass, which comes first.
    Ensures: the same results; no parameter is read later than before.
    """
    read = {v for b in program.bindings if b.var not in forward for v in variables(b.value)}
    recipes = _recipes(program, forward, read)
    if recipes.keys().isdisjoint(read):
        return program
    builder = ProgramBuilder(program.inputs)
    new = builder.take_parameters(program)

    def recomputed(var: relax.Var, origins: tuple[str, ...]) -> relax.Expr:
        """A variable, recomputed at this place if it has a recipe."""
        if var not in recipes:
            return new[var]
        value = substitute(recipes[var], lambda v: recomputed(v, origins))
        return builder.emit(value, origins, var.name)

    for binding in program.bindings:
        origins = program.origins.get(binding.var.name, ())
        if binding.var in forward:
            operands = {v: new[v] for v in variables(binding.value)}
        else:
            operands = {v: recomputed(v, origins) for v in dict.fromkeys(variables(binding.value))}
        value = substitute(binding.value, operands.__getitem__)
        new[binding.var] = builder.emit(value, origins, binding.var.name)
    outputs = [substitute(output, lambda v: new[v]) for output in program.outputs]
    return builder.finish(outputs, program.functions)


def _recipes(program: Program, forward: Set[relax.Var], read: Set[relax.Var]) -> dict[relax.Var, relax.Expr]:
    """Values, by variable, of what need not be stored and of the steps to it from what is.

    `read` are variables that the backward pass reads.
    """
    results = {v for output in program.outputs for v in variables(output)}
    steps: dict[relax.Var, int] = dict.fromkeys(program.main.params, 0)
    found: dict[relax.Var, relax.Expr] = {}
    for binding in program.bindings:
        var, value = binding.var, binding.value
        if var not in forward:
            break
        operands = variables(value)
        if has_fact(value, Fact.CHEAP) and var not in results and all(v in steps for v in operands):
            length = 1 + sum(steps[v] for v in operands)
            if length <= LONGEST:
                steps[var], found[var] = length, value
                continue
        if var in read or var in results:
            steps[var] = 0
    return found
