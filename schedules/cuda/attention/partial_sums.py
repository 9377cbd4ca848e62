"""Sums of weighted values that several warps or blocks have of the same rows, to be added up at last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.cuda.attention.weights import LOWEST, Weights
from hybridc.schedules.cuda.core.kernel import KernelBuilder, integer, loop, sequence

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
