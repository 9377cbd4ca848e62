"""Rebuilding expressions by callbacks, beside TVM's own function for it."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm_ffi import StructuralMutator

from hybridc.schedules.mutation import mutate

K, N = tirx.Var("k", "int64"), tirx.Var("n", "int64")
EXPRESSIONS = (
    K * 8 + 3,
    tirx.floordiv(K + N, 4) * tirx.floormod(K, N),
    tirx.if_then_else(K < N, tirx.floormod(K, 3), N),
    tirx.Let(N, K + 1, N * N),
    tirx.IntImm("int64", 7),
)


def _doubled(node: Any, mutator: StructuralMutator) -> Any:
    return mutator.default_mutate(node) * 2


def _kept(node: Any, mutator: StructuralMutator) -> Any:
    return node


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=str)
def test_it_makes_what_tvm_makes(expression: ir.Expr) -> None:
    callbacks = (((tirx.FloorDiv, tirx.FloorMod), _doubled), (tirx.Let, _kept), (ir.Var, _doubled))
    expected = tvm_ffi.structural_mutate(expression, callbacks)
    tvm.ir.assert_structural_equal(mutate(expression, callbacks), expected)


def test_the_first_kind_that_fits_decides() -> None:
    tvm.ir.assert_structural_equal(mutate(K, ((ir.Var, _kept), (ir.Var, _doubled))), K)
