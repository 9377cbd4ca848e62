"""The table of operators agrees with what TVM registers and how it legalises."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from hybridc.passes.program.operators import OPERATORS, Fact, has_fact, name_has_fact, names_with
from hybridc.passes.program.prim_funcs import FunctionTable
from hybridc.passes.program.program import Program
from hybridc.schedules.annotation import Pattern
from tests.support.programs import run_llvm

ELEMENTWISE = [name for name, facts in OPERATORS.items() if facts & Fact.ELEMENTWISE]
SHAPE = (2, 3)


def operand_types(name: str) -> list[str]:
    """A dtype for each tensor that an element-wise operator reads."""
    if name == "where":
        return ["bool", "float32", "float32"]
    stem = name.partition("_")[0]
    dtype = {"bitwise": "int32", "left": "int32", "right": "int32", "logical": "bool"}.get(stem, "float32")
    return [dtype] * (2 if OPERATORS[name] & Fact.BINARY else 1)


def call_of(name: str, operands: list[relax.Expr]) -> relax.Call:
    arguments: dict[str, list[Any]] = {"clip": [-1.0, 1.0], "astype": ["float64"]}
    make: Any = reduce(getattr, name.split("."), relax.op)
    return make(*operands, *arguments.get(name, []))


def binding_of(name: str, literal: bool = False) -> relax.VarBinding:
    """One operator, of variables or with a scalar constant as its last operand."""
    operands: list[relax.Expr] = [
        relax.Var(f"p{i}", relax.TensorType(SHAPE, dtype)) for i, dtype in enumerate(operand_types(name))
    ]
    if literal:
        operands[-1] = relax.const(np.ones((), operand_types(name)[-1]))
    value = relax.BlockBuilder().normalize(call_of(name, operands))
    return relax.VarBinding(relax.Var("y", value.ty), value)


def program_with(binding: relax.VarBinding) -> Program:
    return Program(tvm.IRModule(), {}, {"y": (f"node {binding.value.op.name}",)})


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_is_registered_in_relax(name: str) -> None:
    assert f"relax.{name}" in tvm.ir.Op.list_op_names()


def test_names_without_namespace_are_unique() -> None:
    assert len({name.rpartition(".")[2] for name in OPERATORS}) == len(OPERATORS)


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_of_one_kind(name: str) -> None:
    kinds = (Fact.UNARY, Fact.BINARY, Fact.TERNARY, Fact.VIEW, Fact.MOVEMENT, Fact.CONVOLUTION)
    assert sum(bool(OPERATORS[name] & kind) for kind in kinds) == 1


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_operators_are_elementwise_to_tvm(name: str) -> None:
    binding = binding_of(name)
    assert FunctionTable().facts(binding, program_with(binding)).pattern <= Pattern.BROADCAST


@pytest.mark.parametrize("name", [n for n in ELEMENTWISE if not OPERATORS[n] & Fact.UNARY])
def test_literals_are_those_that_tvm_writes_into_the_kernel(name: str) -> None:
    binding = binding_of(name, literal=True)
    variables = [a for a in binding.value.args if isinstance(a, relax.Var)]
    body = relax.SeqExpr([relax.BindingBlock([binding])], binding.var)
    main = relax.Function(variables, body, binding.var.ty).with_attr("global_symbol", "main")
    legal = relax.transform.LegalizeOps()(tvm.IRModule({"main": main}))
    [function] = [f for f in legal.functions.values() if isinstance(f, tirx.PrimFunc)]
    results = 1
    assert (len(function.params) == len(variables) + results) == bool(OPERATORS[name] & Fact.LITERAL)


def test_results_of_finite_numbers_are_finite_where_the_table_says_so() -> None:
    names = [name for name, facts in OPERATORS.items() if facts & Fact.FINITE_PADDING]
    values = np.array([-1e30, -3.0, -1.0, 0.0, 0.5, 1.0, 1e30], np.float32)
    x, y = (relax.Var(name, relax.TensorType((len(values),) * 2, "float32")) for name in "xy")
    builder = relax.BlockBuilder()
    with builder.function("main", [x, y]):
        results = [
            builder.emit(call_of(n, [x, y] if OPERATORS[n] & Fact.BINARY else [x]))
            for n in names
            if n != "multiply"  # 1e30 * 1e30; padding is multiplied by weights only
        ]
        builder.emit_func_output(relax.Tuple(results))
    found = run_llvm(builder.get(), *np.meshgrid(values, values))
    for name, result in zip([n for n in names if n != "multiply"], found, strict=True):
        assert np.isfinite(result).all(), name


def test_facts_are_those_of_the_called_operator_alone() -> None:
    add = binding_of("add")
    assert has_fact(add.value, Fact.BINARY) and has_fact(add.value, Fact.VIEW | Fact.BINARY)
    assert not has_fact(add.value, Fact.UNARY | Fact.VIEW)
    assert not has_fact(add.var, Fact.ELEMENTWISE)
    function = relax.call_tir(tvm.ir.GlobalVar("add"), [add.value.args[0]], add.var.ty)
    assert not has_fact(function, Fact.ELEMENTWISE)


def test_names_are_asked_without_namespace() -> None:
    assert name_has_fact("relu", Fact.UNARY) and not name_has_fact("nn.relu", Fact.UNARY)
    assert not name_has_fact("matmul", Fact.ELEMENTWISE)
    assert names_with(Fact.CONVOLUTION) == ("conv1d", "conv2d", "conv3d")
