"""How often a scheduled function reads elements of its parameters one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import tvm_ffi
from tvm import ir, s_tir, tirx


def scalar_loads(function: tirx.PrimFunc) -> Mapping[ir.Var, int]:
    """Loads of single elements of a run, by buffer; of loops of unknown extent only one iteration counts.

    What is read inside of a vectorized loop at an index that does not depend on it is read once. Of two
    branches that counts which reads less: the other one is for the edges of what is read as vectors.
    """
    counter = _Counter()
    counter.statement(function.body, 1, frozenset())
    return counter.found


class _Counter:
    def __init__(self) -> None:
        self.found: Counter[ir.Var] = Counter()

    def statement(self, node: tirx.Stmt, times: int, lanes: frozenset[ir.Var]) -> None:
        """Count the loads of a statement that runs so many times; `lanes` differ between lanes."""
        match node:
            case tirx.SeqStmt():
                for inner in node.seq:
                    if isinstance(inner, tirx.Bind):
                        self.expression(inner.value, times, lanes)
                        if _variables(inner.value) & lanes:
                            lanes |= {inner.var}
                    else:
                        self.statement(inner, times, lanes)
            case tirx.For():
                if int(node.kind) == int(tirx.ForKind.VECTORIZED):
                    self.statement(node.body, times, lanes | {node.loop_var})
                else:
                    extent = int(node.extent) if isinstance(node.extent, tirx.IntImm) else 1
                    self.statement(node.body, times * extent, lanes)
            case s_tir.SBlockRealize():
                values = zip(node.block.iter_vars, node.iter_values, strict=True)
                inner_lanes = lanes | {v.var for v, value in values if _variables(value) & lanes}
                if node.block.init is not None:
                    self.statement(node.block.init, times, inner_lanes)
                self.statement(node.block.body, times, inner_lanes)
            case tirx.IfThenElse():
                self.expression(node.condition, times, lanes)
                branches = [b for b in (node.then_case, node.else_case) if b is not None]
                if len(branches) == 1:
                    self.statement(branches[0], times, lanes)
                else:
                    self._either(branches, times, lanes)
            case tirx.AttrStmt() | tirx.While():
                self.statement(node.body, times, lanes)
            case tirx.BufferStore():
                self.expression(node.value, times, lanes)
            case tirx.Bind() | tirx.Evaluate():
                self.expression(node.value, times, lanes)

    def _either(self, branches: Sequence[tirx.Stmt], times: int, lanes: frozenset[ir.Var]) -> None:
        counters = [_Counter() for _ in branches]
        for counter, branch in zip(counters, branches, strict=True):
            counter.statement(branch, times, lanes)
        first, second = (counter.found for counter in counters)
        self.found.update(
            {buffer: min(first[buffer], second[buffer]) for buffer in first.keys() | second.keys()}
        )

    def expression(self, expr: ir.Expr, times: int, lanes: frozenset[ir.Var]) -> None:
        def note(load: ir.TensorLoad) -> None:
            is_vector = "x" in str(load.ty.dtype) or any(_variables(i) & lanes for i in load.indices)
            if not is_vector:
                self.found[load.source] += times

        tvm_ffi.structural_walk(expr, (ir.TensorLoad, note))


def addressed(function: tirx.PrimFunc) -> frozenset[ir.Var]:
    """Buffers whose address is used for more than to prefetch."""
    addresses, prefetched = Counter[ir.Var](), Counter[ir.Var]()

    def note(call: ir.Call) -> None:
        if call.op.name == "tirx.address_of":
            addresses[call.args[0].source] += 1

    def prefetch(node: tirx.Evaluate) -> None:
        call = node.value
        if isinstance(call, ir.Call) and call.op.name == "tirx.call_llvm_intrin":
            for argument in call.args:
                if isinstance(argument, ir.Call) and argument.op.name == "tirx.address_of":
                    prefetched[argument.args[0].source] += 1

    tvm_ffi.structural_walk(function.body, [(ir.Call, note), (tirx.Evaluate, prefetch)])
    return frozenset(addresses - prefetched)


def _variables(expr: ir.Expr) -> set[ir.Var]:
    found: set[ir.Var] = set()
    tvm_ffi.structural_walk(expr, (ir.Var, found.add))
    return found
