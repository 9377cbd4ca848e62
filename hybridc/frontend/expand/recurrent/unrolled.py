"""Recurrences step by step, of operators that have gradients: as they are trained.

What is kept for the backward pass are the gates of all steps. It goes from the last step to the first one
(Werbos, Backpropagation through time: what it does and how to do it, 1990).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from hybridc.frontend.expand.builder import Builder, Unsupported, dtype_of
from hybridc.recurrence.activations import Activation
from hybridc.recurrence.cell import Recurrence

MAX_STEPS = 1_000
"""One of an LSTM becomes 17 nodes, and with its gradient 18 kernels; more would take long to plan."""
Extents = tuple[int, int, int, int]
"""Steps, rows of the batch, directions, hidden units."""

_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "Elu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "LeakyRelu": ("alpha",),
    "ThresholdedRelu": ("alpha",),
}
"""Attributes of those activations that are operators of the same name."""


def unrolled(
    recurrence: Recurrence,
    operands: Sequence[ir.Value | None],
    extents: Extents,
    build: Builder,
) -> list[ir.Value]:
    """Results of the operands, both as `Recurrence` lists them, but for a GRU's memory.

    Raises Unsupported for more than `MAX_STEPS` steps.
    """
    steps, _, directions, _ = extents
    if steps > MAX_STEPS:
        raise Unsupported(f"of {steps} steps cannot be trained, of at most {MAX_STEPS} can")
    each = [_direction(recurrence, operands, extents, d, build) for d in range(directions)]
    return [
        _joined(values, axis, build) for values, axis in zip(zip(*each, strict=True), (1, 0, 0), strict=False)
    ]


@dataclass(frozen=True)
class _Cell:
    """One direction of a recurrence: what each of its steps reads."""

    recurrence: Recurrence
    build: Builder
    activations: tuple[Activation, ...]
    matrices: Sequence[ir.Value]
    """[H, G H]; of a GRU that multiplies the last one with what is reset [H, 2 H] and [H, H]."""
    extra: Sequence[ir.Value]
    """Peepholes of an LSTM, or a GRU's bias: vectors [H]."""
    hidden: int

    def of(self, which: int, x: ir.Value) -> ir.Value:
        """An activation, of what is clipped first."""
        build, clip = self.build, self.recurrence.clip
        if clip is not None:
            x = build.op("Max", build.op("Min", x, _number(clip, build)), _number(-clip, build))
        return _activated(self.activations[which], x, build)

    def plus(self, x: ir.Value, *others: ir.Value | None) -> ir.Value:
        """The sum of what is there; None is zero."""
        for other in others:
            x = x if other is None else self.build.op("Add", x, other)
        return x

    def peephole(self, which: int, memory: ir.Value | None) -> ir.Value | None:
        """What reaches a gate of an LSTM from its memory."""
        return self.build.op("Mul", self.extra[which], memory) if self.extra and memory is not None else None

    def product(self, state: ir.Value | None, which: int = 0) -> ir.Value | None:
        """Of a state [B, H] with matrices."""
        return None if state is None else self.build.op("MatMul", state, self.matrices[which])

    def gates(self, values: ir.Value, count: int) -> Sequence[ir.Value]:
        """[B, count H] in parts."""
        return self.build.split(values, 1, [self.hidden] * count)

    def towards(self, new: ir.Value, z: ir.Value, old: ir.Value | None) -> ir.Value:
        """`(1 - z) new + z old`, as GRUs write it."""
        build = self.build
        if old is None:
            return build.op("Sub", new, build.op("Mul", z, new))
        return build.op("Add", new, build.op("Mul", z, build.op("Sub", old, new)))


_Step = Callable[[_Cell, ir.Value, ir.Value | None, ir.Value | None], tuple[ir.Value, ir.Value | None]]
"""(cell, `X W + b` [B, G H], old result, old memory) -> result and memory [B, H]; None is zeros."""


def _lstm(
    cell: _Cell, x: ir.Value, h: ir.Value | None, memory: ir.Value | None
) -> tuple[ir.Value, ir.Value | None]:
    build = cell.build
    x_i, x_o, x_f, x_c = cell.gates(cell.plus(x, cell.product(h)), 4)
    i = cell.of(0, cell.plus(x_i, cell.peephole(0, memory)))
    new = build.op("Mul", i, cell.of(1, x_c))
    if memory is not None:
        if cell.recurrence.input_forget:
            forget = build.op("Sub", _number(1.0, build), i)
        else:
            forget = cell.of(0, cell.plus(x_f, cell.peephole(2, memory)))
        new = build.op("Add", build.op("Mul", forget, memory), new)
    o = cell.of(0, cell.plus(x_o, cell.peephole(1, new)))
    return build.op("Mul", o, _activated(cell.activations[2], new, build)), new


def _gru(
    cell: _Cell, x: ir.Value, h: ir.Value | None, memory: ir.Value | None
) -> tuple[ir.Value, ir.Value | None]:
    build = cell.build
    x_zr, x_n = build.split(x, 1, [2 * cell.hidden, cell.hidden])
    z, r = cell.gates(cell.of(0, cell.plus(x_zr, cell.product(h))), 2)
    reset = None if h is None else build.op("Mul", r, h)
    return cell.towards(cell.of(1, cell.plus(x_n, cell.product(reset, 1))), z, h), None


def _linear_gru(
    cell: _Cell, x: ir.Value, h: ir.Value | None, memory: ir.Value | None
) -> tuple[ir.Value, ir.Value | None]:
    """The product is made before it is reset."""
    build = cell.build
    x_zr, x_n = build.split(x, 1, [2 * cell.hidden, cell.hidden])
    bias = cell.extra[0] if cell.extra else None
    h_zr = h_n = None
    product = cell.product(h)
    if product is not None:
        h_zr, h_n = build.split(product, 1, [2 * cell.hidden, cell.hidden])
    z, r = cell.gates(cell.of(0, cell.plus(x_zr, h_zr)), 2)
    given = bias if h_n is None else cell.plus(h_n, bias)
    new = cell.of(1, cell.plus(x_n, None if given is None else build.op("Mul", r, given)))
    return cell.towards(new, z, h), None


def _rnn(
    cell: _Cell, x: ir.Value, h: ir.Value | None, memory: ir.Value | None
) -> tuple[ir.Value, ir.Value | None]:
    return cell.of(0, cell.plus(x, cell.product(h))), None


def _step_of(recurrence: Recurrence) -> _Step:
    if recurrence.cell == "GRU" and recurrence.linear_before_reset:
        return _linear_gru
    return {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}[recurrence.cell]


def _direction(
    recurrence: Recurrence,
    operands: Sequence[ir.Value | None],
    extents: Extents,
    d: int,
    build: Builder,
) -> list[ir.Value]:
    """Results of all steps [T, 1, B, H], the last one [1, B, H], and an LSTM's memory then."""
    steps, batch, _, hidden = extents
    cell = _cell(recurrence, operands, extents, d, build)
    given, lengths = _given(operands[0], extents, d, build), operands[4]
    h, memory = _initial(recurrence, operands[2], lengths, extents, d, build)
    step = _step_of(recurrence)
    results: list[ir.Value] = []
    for t in reversed(range(steps)) if recurrence.reverse[d] else range(steps):
        new, new_memory = step(cell, given[t], h, memory)
        result = new
        if lengths is not None:
            is_there, zero = _is_there(lengths, t, build), _number(0.0, build)
            result = build.op("Where", is_there, new, zero)
            new = result if h is None else build.op("Where", is_there, new, h)
            if new_memory is not None:
                new_memory = build.op("Where", is_there, new_memory, zero if memory is None else memory)
        h, memory = new, new_memory
        results.append(build.reshape(result, (1, 1, batch, hidden)))
    if recurrence.reverse[d]:
        results.reverse()
    states = [build.reshape(state, (1, batch, hidden)) for state in (h, memory) if state is not None]
    return [_joined(results, 0, build), *states]


def _cell(
    recurrence: Recurrence,
    operands: Sequence[ir.Value | None],
    extents: Extents,
    d: int,
    build: Builder,
) -> _Cell:
    *_, directions, hidden = extents
    _, weights, _, extra, _ = operands
    assert weights is not None
    own = build.reshape(_part(weights, 0, d, directions, build), (recurrence.gates * hidden, hidden))
    is_apart = recurrence.cell == "GRU" and not recurrence.linear_before_reset
    matrices = build.split(own, 0, [2 * hidden, hidden]) if is_apart else [own]
    vectors: Sequence[ir.Value] = ()
    if extra is not None:
        count = 3 if recurrence.cell == "LSTM" else 1
        flat = build.reshape(_part(extra, 0, d, directions, build), (count * hidden,))
        vectors = build.split(flat, 0, [hidden] * count) if count > 1 else (flat,)
    transposed = [build.transpose(each, (1, 0)) for each in matrices]
    return _Cell(recurrence, build, recurrence.activations[d], transposed, vectors, hidden)


def _given(value: ir.Value | None, extents: Extents, d: int, build: Builder) -> list[ir.Value]:
    """`X W + b` of each step, [B, G H]."""
    steps, batch, directions, _ = extents
    assert value is not None
    own = _part(build.reshape(value, (steps, batch, directions, -1)), 2, d, directions, build)
    parts = build.split(own, 0, [1] * steps) if steps > 1 else [own]
    return [build.reshape(part, (batch, -1)) for part in parts]


def _initial(
    recurrence: Recurrence,
    states: ir.Value | None,
    lengths: ir.Value | None,
    extents: Extents,
    d: int,
    build: Builder,
) -> list[ir.Value | None]:
    """Result and memory before the first step, [B, H]; None is zeros.

    Zero where a sequence has no step: ONNX does not say what its last result is, onnxruntime gives zero.
    """
    _, batch, directions, hidden = extents
    count = 2 if recurrence.cell == "LSTM" else 1
    if states is None:
        return [None, None]
    parts = build.split(states, 0, [1] * (count * directions)) if count * directions > 1 else [states]
    own: list[ir.Value | None] = [None, None]
    for which in range(count):
        value = build.reshape(parts[which * directions + d], (batch, hidden))
        if lengths is not None:
            value = build.op("Where", _is_there(lengths, 0, build), value, _number(0.0, build))
        own[which] = value
    return own


def _is_there(lengths: ir.Value, t: int, build: Builder) -> ir.Value:
    """[B, 1]: whether a sequence has a step t. Backwards, too: what is not there comes first."""
    longer = build.op("Greater", lengths, build.constant(t, dtype_of(lengths)))
    return build.unsqueeze(longer, (1,))


def _part(value: ir.Value, axis: int, which: int, of: int, build: Builder) -> ir.Value:
    """One of the slices along an axis, whose extent becomes 1."""
    return value if of == 1 else build.split(value, axis, [1] * of)[which]


def _joined(values: Sequence[ir.Value], axis: int, build: Builder) -> ir.Value:
    return values[0] if len(values) == 1 else build.op("Concat", *values, axis=axis)


def _activated(activation: Activation, x: ir.Value, build: Builder) -> ir.Value:
    name, alpha, beta = activation.name, activation.alpha, activation.beta
    if name == "Affine":
        return build.op("Add", build.op("Mul", x, _number(alpha, build)), _number(beta, build))
    if name == "ScaledTanh":
        return build.op(
            "Mul", build.op("Tanh", build.op("Mul", x, _number(beta, build))), _number(alpha, build)
        )
    values = {"alpha": alpha, "beta": beta}
    return build.op(name, x, **{parameter: values[parameter] for parameter in _PARAMETERS.get(name, ())})


def _number(value: float, build: Builder) -> ir.Value:
    return build.constant(value, "float32")
