"""Sums of weighted values that several warps or blocks have of the same rows, to be added up at last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.cpu.core.attention import HIDES, AttentionBlocks
from hybridc.schedules.cuda.attention.weights import LOWEST, Weights
from hybridc.schedules.cuda.core.kernel import KernelBuilder, integer, loop, sequence, when

_ZERO = tirx.FloatImm("float32", 0.0)


@dataclass(frozen=True, slots=True)
class PartialSums:
    """By state, which is a row of one of those who share it: the greatest score, the sum of the weights
    relative to it, and the sums of the weighted values."""

    peaks: ir.Var
    totals: ir.Var
    sums: ir.Var
    width: int
    """Columns of the values."""

    @staticmethod
    def of(allocated: Callable[[tuple[int, ...], str, str], ir.Var], states: int, width: int) -> PartialSums:
        """In buffers that `allocated` makes of a shape, a type and a name."""
        peaks, totals = (allocated((states,), "float32", name) for name in ("peaks", "totals"))
        return PartialSums(peaks, totals, allocated((states * width,), "float32", "partial"), width)

    def noted(self, state: ir.Expr, peak: ir.Expr, total: ir.Expr) -> list[tirx.Stmt]:
        """Write what a state has beside its sums."""
        return [tirx.BufferStore(self.peaks, peak, [state]), tirx.BufferStore(self.totals, total, [state])]

    def stored(self, state: ir.Expr, column: ir.Expr, value: ir.Expr) -> tirx.Stmt:
        """Write a sum."""
        return tirx.BufferStore(self.sums, value, [state * integer(self.width) + column])


@dataclass(frozen=True, slots=True)
class Joined:
    """What a thread has of one row and column when it has added up all parts."""

    peak: ir.Var
    total: ir.Var
    result: ir.Var
    by: ir.Var

    @staticmethod
    def of(builder: KernelBuilder) -> Joined:
        names = ("best", "whole", "result", "by")
        peak, total, result, by = (builder.registers((1,), "float32", name) for name in names)
        return Joined(peak, total, result, by)

    def added_up(
        self,
        parts: PartialSums,
        exponents: Weights,
        count: int,
        state: Callable[[ir.Expr], ir.Expr],
        column: ir.Expr,
    ) -> list[tirx.Stmt]:
        """Add up `count` parts, whose states are `state(number)`, in an order that is always the same."""
        at = [integer(0)]
        peak, total, result, by = (
            tirx.BufferLoad(b, at) for b in (self.peak, self.total, self.result, self.by)
        )

        def largest(number: ir.Expr) -> tirx.Stmt:
            return tirx.BufferStore(self.peak, tirx.max(peak, parts.peaks[state(number)]), at)

        def add(number: ir.Expr) -> tirx.Stmt:
            place = state(number)
            own = parts.sums[place * integer(parts.width) + column]
            return sequence(
                [
                    tirx.BufferStore(self.by, exponents.shrunk(parts.peaks[place], peak), at),
                    tirx.BufferStore(self.total, total + parts.totals[place] * by, at),
                    tirx.BufferStore(self.result, result + own * by, at),
                ]
            )

        return [
            tirx.BufferStore(self.peak, LOWEST, at),
            tirx.BufferStore(self.total, _ZERO, at),
            tirx.BufferStore(self.result, _ZERO, at),
            loop(count, largest),
            loop(count, add),
        ]

    def weighed_unseen(
        self, found: AttentionBlocks, exponents: Weights, line: Sequence[ir.Expr], column: ir.Expr
    ) -> list[tirx.Stmt]:
        """Weigh all keys of a row that sees none, of which some were left out: by what its mask adds alone,
        beside which scores have no digits left. `line` is batch and row. Nothing without such a mask."""
        mask = found.hiding_mask
        if mask is None:
            return []
        at, (*batch, _) = [integer(0)], line
        peak, total, result, by = (
            tirx.BufferLoad(b, at) for b in (self.peak, self.total, self.result, self.by)
        )

        def score(key: ir.Expr) -> ir.Expr:
            return found.logit((*line, key), _ZERO)

        def largest(key: ir.Expr) -> tirx.Stmt:
            return tirx.BufferStore(self.peak, tirx.max(peak, score(key)), at)

        def add(key: ir.Expr) -> tirx.Stmt:
            value = found.factor("context", 1, (*batch, integer(0), column), key)
            return sequence(
                [
                    tirx.BufferStore(self.by, exponents.weight(score(key), peak), at),
                    tirx.BufferStore(self.total, total + by, at),
                    tirx.BufferStore(self.result, result + by * value, at),
                ]
            )

        weighed = [
            tirx.BufferStore(self.peak, LOWEST, at),
            tirx.BufferStore(self.total, _ZERO, at),
            tirx.BufferStore(self.result, _ZERO, at),
            loop(found.columns, largest),
            loop(found.columns, add),
        ]
        return [when(peak <= tirx.FloatImm("float32", HIDES), sequence(weighed))]
