"""What a step of a recurrence computes, element by element."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from tvm import ir, tirx

from hybridc.recurrence.activations import Activation, number

RECURRENCE = "recurrence"
"""Annotation of the block that computes a recurrence: `Recurrence.to_text`."""
GATES: Mapping[str, int] = MappingProxyType({"LSTM": 4, "GRU": 3, "RNN": 1})
"""Of ONNX's operators: LSTM has them in the order i, o, f, c, GRU in the order z, r, h."""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Steps of one cell in one or two directions.

    Tensors, with T steps, B rows of the batch, D directions, G gates, H hidden units:
    `X W + b` [T, B, D, G, H]; weights [D, G, H, H]; initial states [states * D, B, H], those of the memory
    behind those of the result; peepholes of an LSTM [D, 3 H], or of a GRU with `linear_before_reset` the bias
    of its last gate's product [D, H]; lengths of the sequences [B]. Only the first two are always given, and
    the ranks, which differ, tell them apart. Results: [T, D, B, H]; the last one [D, B, H]; the memory of a
    cell that `has_memory` [D, B, H].
    """

    cell: str
    reverse: tuple[bool, ...]
    """Of each direction: from the last step to the first one."""
    activations: tuple[tuple[Activation, ...], ...]
    """Of each direction: f, g and h of ONNX's formulas."""
    clip: float | None = None
    """What activations are applied to is brought to [-clip, clip]."""
    input_forget: bool = False
    linear_before_reset: bool = False

    @property
    def gates(self) -> int:
        """Matrices of a direction."""
        return GATES[self.cell]

    @property
    def has_memory(self) -> bool:
        """Whether there is a second vector of state: an LSTM's cell, or a GRU's reset state, which is needed
        within a step only."""
        return self.cell == "LSTM" or (self.cell == "GRU" and not self.linear_before_reset)

    def to_text(self) -> str:
        """For `from_text`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Recurrence:
        """What `to_text` has written."""
        fields: dict[str, Any] = json.loads(text)
        activations = tuple(tuple(Activation(**a) for a in of) for of in fields.pop("activations"))
        return cls(reverse=tuple(fields.pop("reverse")), activations=activations, **fields)

    def phases(self) -> tuple[Phase, ...]:
        """What a step consists of: each phase needs all of the one before."""
        if self.cell == "LSTM":
            return (Phase((0, 1, 2, 3), False, self._lstm),)
        if self.cell == "RNN":
            return (Phase((0,), False, self._rnn),)
        if self.linear_before_reset:
            return (Phase((0, 1, 2), False, self._linear_gru),)
        return Phase((0, 1), False, self._gru_gates), Phase((2,), True, self._gru_result)

    def _clipped(self, x: ir.Expr) -> ir.Expr:
        return x if self.clip is None else tirx.max(tirx.min(x, number(self.clip)), number(-self.clip))

    def _lstm(self, at: Element, activations: tuple[Activation, ...]) -> list[tirx.Stmt]:
        f, g, h = activations
        old = at.memory()
        i = f.of(self._clipped(at.gate(0) + at.peephole(0, old)))
        forget = f.of(self._clipped(at.gate(2) + at.peephole(2, old)))
        if self.input_forget:
            forget = number(1.0) - i
        memory = at.set_memory(forget * old + i * g.of(self._clipped(at.gate(3))))
        # what has just been stored
        o = f.of(self._clipped(at.gate(1) + at.peephole(1, at.memory())))
        return [memory, at.set_result(o * h.of(at.memory()))]

    def _rnn(self, at: Element, activations: tuple[Activation, ...]) -> list[tirx.Stmt]:
        return [at.set_result(activations[0].of(self._clipped(at.gate(0))))]

    def _linear_gru(self, at: Element, activations: tuple[Activation, ...]) -> list[tirx.Stmt]:
        f, g = activations
        z, r = (f.of(self._clipped(at.gate(i))) for i in (0, 1))
        new = g.of(self._clipped(at.given(2) + r * (at.product(2) + at.bias())))
        return [at.set_result(new + z * (at.old - new))]

    def _gru_gates(self, at: Element, activations: tuple[Activation, ...]) -> list[tirx.Stmt]:
        f = activations[0]
        z, r = (f.of(self._clipped(at.gate(i))) for i in (0, 1))
        # the result's place holds z until the next phase
        return [at.set_memory(r * at.old), at.set_result(z)]

    def _gru_result(self, at: Element, activations: tuple[Activation, ...]) -> list[tirx.Stmt]:
        new, z = activations[1].of(self._clipped(at.gate(2))), at.result()
        return [at.set_result(new + z * (at.old - new))]


@dataclass(frozen=True, slots=True)
class Element:
    """One hidden unit of one row in one step: what it reads, and how it is written."""

    given: Callable[[int], ir.Expr]
    """`X W + b` of a gate."""
    product: Callable[[int], ir.Expr]
    """`h R` of a gate."""
    old: ir.Expr
    """The result of the step before."""
    memory: Callable[[], ir.Expr]
    set_memory: Callable[[ir.Expr], tirx.Stmt]
    result: Callable[[], ir.Expr]
    set_result: Callable[[ir.Expr], tirx.Stmt]
    extra: Callable[[int], ir.Expr] | None
    """The unit's number in the n-th vector of peepholes or biases."""

    def gate(self, gate: int) -> ir.Expr:
        """What reaches a gate."""
        return self.given(gate) + self.product(gate)

    def peephole(self, which: int, memory: ir.Expr) -> ir.Expr:
        """What reaches a gate of an LSTM from its memory."""
        return number(0.0) if self.extra is None else self.extra(which) * memory

    def bias(self) -> ir.Expr:
        """What is added to the product of a GRU's last gate."""
        return number(0.0) if self.extra is None else self.extra(0)


@dataclass(frozen=True, slots=True)
class Phase:
    """Products of some gates, and what is made of them at each element."""

    gates: tuple[int, ...]
    of_memory: bool
    """The matrices are multiplied with the memory instead of the result of the step before."""
    element: Callable[[Element, tuple[Activation, ...]], list[tirx.Stmt]]
