"""What fusion is told about operators, which is asked once for all sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from tvm import relax

from hybridc.passes.program.prim_funcs import FunctionTable, OperatorFacts
from hybridc.passes.program.program import Program
from tests.support.programs import program_of

EXTENTS = (1, 2, 3)

OPERATORS: dict[str, Callable[[relax.Var, relax.Var], relax.Expr]] = {
    "add": relax.op.add,
    "transpose": lambda x, _: relax.op.permute_dims(x, [1, 0]),
    "reshape": lambda x, _: relax.op.reshape(x, (x.ty.shape[1], x.ty.shape[0])),
    "slice": lambda x, _: relax.op.strided_slice(x, [0], [0], [2]),
    "concat": lambda x, _: relax.op.concat([x, x], 1),
    "sum": lambda x, _: relax.op.sum(x, [1], keepdims=True),
    "gelu": lambda x, _: relax.op.nn.gelu(x),
}


def program(name: str, x: tuple[int, int], y: tuple[int, int]) -> Program:
    """One operator of two tensors."""
    builder = relax.BlockBuilder()
    operands = [relax.Var(n, relax.TensorType(shape, "float32")) for n, shape in (("x", x), ("y", y))]
    with builder.function("main", operands):
        with builder.dataflow():
            result = builder.emit_output(OPERATORS[name](*operands))
        builder.emit_func_output(result)
    return program_of(builder.get())


def facts(table: FunctionTable, asked: Program) -> OperatorFacts:
    return table.facts(asked.bindings[0], asked)


@pytest.mark.parametrize("name", OPERATORS)
def test_facts_of_an_operator_are_those_of_other_sizes(name: str) -> None:
    table = FunctionTable()
    for rows, columns, other in itertools.product(EXTENTS, EXTENTS, EXTENTS):
        if other not in (1, columns):
            continue
        asked = program(name, (rows, columns), (rows, other))
        assert facts(table, asked) == facts(FunctionTable(), asked)
