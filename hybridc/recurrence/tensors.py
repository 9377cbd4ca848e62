"""The buffers of a recurrence, and the function that has one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, s_tir, tirx

from hybridc.recurrence.activations import Activation, number
from hybridc.recurrence.cell import RECURRENCE, Element, Recurrence


@dataclass(frozen=True, slots=True)
class Tensors:
    """The buffers of a recurrence (`Recurrence`)."""

    projected: ir.Var
    weights: ir.Var
    states: ir.Var | None
    extras: ir.Var | None
    lengths: ir.Var | None
    result: ir.Var
    last: ir.Var
    memory: ir.Var | None

    @classmethod
    def of(cls, recurrence: Recurrence, inputs: list[ir.Var], outputs: list[ir.Var]) -> Tensors:
        """Inputs in any order."""
        by_rank = {len(buffer.shape): buffer for buffer in inputs}
        states, extras, lengths = (by_rank.get(rank) for rank in (3, 2, 1))
        memory = outputs[2] if recurrence.has_memory else None
        result, last = outputs[:2]
        return cls(by_rank[5], by_rank[4], states, extras, lengths, result, last, memory)

    @property
    def extents(self) -> tuple[int, int, int, int, int]:
        """T, B, D, G, H."""
        steps, batch, directions, gates, hidden = (int(extent) for extent in self.projected.shape)
        return steps, batch, directions, gates, hidden

    def initial(self, which: int, d: ir.Expr, b: ir.Expr, j: ir.Expr) -> ir.Expr:
        """Of the result (0) or the memory (1), before the first step.

        Zero where a sequence has no step: ONNX does not say what its last result is, onnxruntime gives zero.
        """
        if self.states is None or which * self.extents[2] >= int(self.states.shape[0]):
            return number(0.0)
        value = tirx.BufferLoad(self.states, [d + which * self.extents[2], b, j])
        if self.lengths is None:
            return value
        return tirx.Select(tirx.BufferLoad(self.lengths, [b]) > 0, value, number(0.0))

    def given(self, place: tuple[ir.Expr, ir.Expr, ir.Expr, ir.Expr], gate: int) -> ir.Expr:
        """`X W + b` of a gate, of the step, direction, row and unit `place`."""
        t, d, b, j = place
        return tirx.BufferLoad(self.projected, [t, b, d, tirx.IntImm("int64", gate), j])

    def element(
        self,
        place: tuple[ir.Expr, ir.Expr, ir.Expr, ir.Expr],
        product: Callable[[int], ir.Expr],
        old: ir.Expr,
    ) -> Element:
        """Of the step, direction, row and unit `place`."""
        t, d, b, j = place
        hidden = self.extents[4]

        def extra(which: int) -> ir.Expr:
            return tirx.BufferLoad(self.extras, [d, j + which * hidden])

        return Element(
            given=lambda gate: self.given(place, gate),
            product=product,
            old=old,
            memory=lambda: tirx.BufferLoad(self.memory, [d, b, j]),
            set_memory=lambda value: tirx.BufferStore(self.memory, value, [d, b, j]),
            result=lambda: tirx.BufferLoad(self.result, [t, d, b, j]),
            set_result=lambda value: tirx.BufferStore(self.result, value, [t, d, b, j]),
            extra=None if self.extras is None else extra,
        )


def by_direction(
    recurrence: Recurrence, d: ir.Expr, body: Callable[[tuple[Activation, ...]], tirx.Stmt]
) -> tirx.Stmt:
    """`body` with the activations of direction d."""
    first, *others = recurrence.activations
    if all(of == first for of in others):
        return body(first)
    return tirx.IfThenElse(d == 0, body(first), body(others[0]))


def step_of(recurrence: Recurrence, steps: int, s: ir.Expr, d: ir.Expr) -> ir.Expr:
    """Which step direction d makes as its s-th."""
    if len(set(recurrence.reverse)) == 1:
        return steps - 1 - s if recurrence.reverse[0] else s
    # forward first, as ONNX has it
    return s + d * (steps - 1 - 2 * s)


def recurrence_of(body: tirx.Stmt) -> Recurrence | None:
    """What a function's body computes if it is a recurrence."""
    found: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(body, (s_tir.SBlock, found.append))
    texts = [str(block.annotations[RECURRENCE]) for block in found if RECURRENCE in block.annotations]
    return Recurrence.from_text(texts[0]) if texts else None
