"""Statements without blocks, rebuilt from the outside inwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import tvm_ffi
from tvm import ir, tirx
from tvm.target import codegen


def variables(node: object) -> set[ir.Var]:
    """All variables and buffers of an expression."""
    found: set[ir.Var] = set()
    tvm_ffi.structural_walk(node, (ir.Var, found.add))
    return found


def is_conditional(call: ir.Call) -> bool:
    """Whether a call is `if_then_else`, of which only one branch is computed; TVM has it in two dialects."""
    return call.op.name.rpartition(".")[2] == "if_then_else"


def is_prefetch(call: ir.Call) -> bool:
    """Whether a call only brings a cache line nearer, which does no harm wherever the address leads."""
    return call.op.name == "tirx.call_llvm_intrin" and int(call.args[0]) == _prefetch_number()


@cache
def _prefetch_number() -> int:
    return int(codegen.llvm_lookup_intrinsic_id("llvm.prefetch"))


def sequence(statements: Sequence[tirx.Stmt]) -> tirx.Stmt:
    """Statements in order, in one scope: what a `Bind` names is known to all behind it."""
    flat: list[tirx.Stmt] = []
    for statement in statements:
        flat.extend(statement.seq if isinstance(statement, tirx.SeqStmt) else [statement])
    return flat[0] if len(flat) == 1 else tirx.SeqStmt(flat)


class Rebuilder:
    """Rebuilds statements. Subclasses say what becomes of expressions, and what holds inside of a
    statement."""

    def expression(self, expr: ir.Expr) -> ir.Expr:
        """What an expression of a statement becomes."""
        return expr

    def statement(self, node: tirx.Stmt) -> tirx.Stmt:
        """What a statement becomes."""
        match node:
            case tirx.SeqStmt():
                return sequence([self.statement(inner) for inner in node.seq])
            case tirx.For():
                return self.loop(node)
            case tirx.IfThenElse():
                return self.branches(node)
            case tirx.AttrStmt():
                return self.attribute(node)
            case tirx.While():
                return tirx.While(self.expression(node.condition), self.statement(node.body), node.span)
            case tirx.Bind():
                return self.binding(node)
            case tirx.BufferStore():
                return self.store(node)
            case tirx.Evaluate():
                return tirx.Evaluate(self.expression(node.value), node.span)
            case _:
                return node

    def loop(self, node: tirx.For) -> tirx.Stmt:
        """What a loop becomes."""
        return remade(node, self.statement(node.body))

    def branches(self, node: tirx.IfThenElse) -> tirx.Stmt:
        """What a condition with its branches becomes."""
        then, other = self.statement(node.then_case), node.else_case
        return tirx.IfThenElse(
            self.expression(node.condition), then, None if other is None else self.statement(other), node.span
        )

    def attribute(self, node: tirx.AttrStmt) -> tirx.Stmt:
        """What a statement with an attribute becomes; threads are bound by such."""
        return tirx.AttrStmt(node.node, node.attr_key, node.value, self.statement(node.body), node.span)

    def binding(self, node: tirx.Bind) -> tirx.Stmt:
        """What the naming of a value becomes."""
        return tirx.Bind(node.var, self.expression(node.value), node.span)

    def store(self, node: tirx.BufferStore) -> tirx.Stmt:
        """What a store becomes."""
        indices = [self.expression(index) for index in node.indices]
        return tirx.BufferStore(node.buffer, self.expression(node.value), indices, node.span)


def remade(
    node: tirx.For,
    body: tirx.Stmt,
    kind: int | None = None,
    *,
    extent: ir.Expr | None = None,
    annotations: Mapping[str, Any] | None = None,
) -> tirx.For:
    """A loop with another body, and perhaps of another kind, extent or with other annotations."""
    return tirx.For(
        node.loop_var,
        node.min,
        node.extent if extent is None else extent,
        node.kind if kind is None else kind,
        body,
        node.thread_binding,
        node.annotations if annotations is None else annotations,
        node.step,
        node.span,
    )
