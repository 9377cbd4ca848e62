"""LSTM, GRU and RNN: the product with the inputs for all steps at once, and the steps: one kernel or many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from hybridc.frontend.expand.builder import (
    Builder,
    Expansion,
    Unsupported,
    bounded,
    constant_of,
    dtype_of,
    given,
    kept,
    operand,
    shape_of,
)
from hybridc.frontend.expand.recurrent.unrolled import unrolled
from hybridc.frontend.values import constant_array
from hybridc.recurrence.activations import ACTIVATIONS, Activation
from hybridc.recurrence.cell import GATES, Recurrence

RECURRENCE_OPERATOR = "Recurrence"
"""An operator that no file can have; its operands and results are what `Recurrence` lists."""
_DEFAULTS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
_ATTRIBUTES = (
    *("activation_alpha", "activation_beta", "activations", "clip"),
    *("direction", "hidden_size", "input_forget"),
)
"""Of an LSTM without a layout."""
_SAME_ELEMENTS = ("Cast", "Expand", "Reshape", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze")
"""Operators whose result has no elements that their first operand has not, but for types."""
_NAMES = {name.lower(): name for name in ACTIVATIONS}


def _expand(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """Requires: shapes of all operands. Computes in float32, whatever the type."""
    dtype = dtype_of(operand(node, 0))
    if dtype == ir.DataType.DOUBLE:
        raise Unsupported("of float64 is not supported")
    is_batch_first = bool(node.attributes.get_int("layout", 0))
    recurrence = _recurrence(node)
    operands = _operands(node, recurrence, build, is_batch_first)
    made = unrolled if build.for_training else _steps
    result, *states = made(recurrence, operands, _extents(node, is_batch_first), build)
    if is_batch_first:
        result = build.transpose(result, (2, 0, 1, 3))
        states = [build.transpose(state, (1, 0, 2)) for state in states]
    # a GRU's memory is not a result
    results = [result, *states][: 3 if node.op_type == "LSTM" else 2]
    return [build.cast(value, dtype) for value in results[: len(node.outputs)]]


def _recurrence(node: ir.Node) -> Recurrence:
    attributes = node.attributes
    direction = attributes.get_string("direction", "forward")
    reverse = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}.get(direction or "")
    if reverse is None:
        raise Unsupported(f"with direction {direction} is not supported")
    clip = attributes.get_float("clip", 0.0) or 0.0
    return Recurrence(
        cell=node.op_type,
        reverse=reverse,
        activations=_activations(node, len(reverse)),
        clip=clip if clip > 0 else None,
        input_forget=bool(attributes.get_int("input_forget", 0)),
        linear_before_reset=bool(attributes.get_int("linear_before_reset", 0)),
    )


def _activations(node: ir.Node, directions: int) -> tuple[tuple[Activation, ...], ...]:
    """Parameters are listed in the order of the functions that take any."""
    own = _DEFAULTS[node.op_type]
    names = list(node.attributes.get_strings("activations", ())) or [*own] * directions
    if len(names) != len(own) * directions:
        raise Unsupported(f"with {len(names)} activations is not supported")
    listed = [list(node.attributes.get_floats(f"activation_{name}", ())) for name in ("alpha", "beta")]
    found = []
    for name in names:
        known = _NAMES.get(name.lower())
        if known is None:
            raise Unsupported(f"with activation {name} is not supported")
        defaults = ACTIVATIONS[known][1]
        values = [of.pop(0) if of else default for of, default in zip(listed, defaults, strict=False)]
        found.append(Activation(known, *values))
    return tuple(tuple(found[i : i + len(own)]) for i in range(0, len(found), len(own)))


def _extents(node: ir.Node, is_batch_first: bool) -> tuple[int, int, int, int]:
    """Steps, rows of the batch, directions, hidden units."""
    first, second, _ = shape_of(operand(node, 0))
    directions, _, hidden = shape_of(operand(node, 2))
    steps, batch = (second, first) if is_batch_first else (first, second)
    return steps, batch, directions, hidden


def _operands(
    node: ir.Node, recurrence: Recurrence, build: Builder, is_batch_first: bool
) -> list[ir.Value | None]:
    """What `Recurrence` lists, None for what is not given."""
    weights, recurrent, bias, lengths = (given(node, i) for i in range(1, 5))
    x = build.cast(operand(node, 0), ir.DataType.FLOAT)
    if is_batch_first:
        x = build.transpose(x, (1, 0, 2))
    steps, batch, directions, hidden = _extents(node, is_batch_first)
    inputs, gates = shape_of(operand(node, 0))[2], recurrence.gates
    rows = gates * hidden
    shapes = [shape_of(operand(node, i)) for i in (1, 2)]
    wanted = [(len(recurrence.reverse), rows, inputs), (directions, rows, hidden)]
    if shapes != wanted or 0 in (steps, batch, hidden, inputs):
        raise Unsupported(f"of {steps} steps, {batch} rows and weights {shapes} is not supported")
    assert weights is not None and recurrent is not None
    flat = build.cast(build.reshape(weights, (directions * rows, inputs)), ir.DataType.FLOAT)
    product = build.op("MatMul", build.reshape(x, (steps * batch, inputs)), build.transpose(flat, (1, 0)))
    extra = given(node, 7)
    if bias is not None:
        added, extra_bias = _biases(recurrence, build.cast(bias, ir.DataType.FLOAT), hidden, build)
        product = build.op("Add", product, build.reshape(added, (directions * rows,)))
        extra = extra or extra_bias
    return [
        build.reshape(product, (steps, batch, directions, gates, hidden)),
        build.cast(build.reshape(recurrent, (directions, gates, hidden, hidden)), ir.DataType.FLOAT),
        _states(node, (directions, batch, hidden), build, is_batch_first),
        None if extra is None else build.cast(extra, ir.DataType.FLOAT),
        _lengths(lengths, steps),
    ]


def _biases(
    recurrence: Recurrence, bias: ir.Value, hidden: int, build: Builder
) -> tuple[ir.Value, ir.Value | None]:
    """What is added to `X W`, [D, G H]; and the part [D, H] that is added to a product of a GRU, if it is."""
    rows, is_apart = recurrence.gates * hidden, recurrence.cell == "GRU" and recurrence.linear_before_reset
    known = constant_array(bias)
    if known is not None:  # at once: folding leaves large constants as they are
        of_inputs, of_states = np.split(known.astype(np.float32), 2, axis=1)
        added = of_inputs.copy()
        added[:, : 2 * hidden if is_apart else rows] += of_states[:, : 2 * hidden if is_apart else rows]
        return build.constant(added), build.constant(of_states[:, 2 * hidden :]) if is_apart else None
    of_x, of_h = build.split(bias, 1, [rows, rows])
    if not is_apart:
        return build.op("Add", of_x, of_h), None
    gates, last = build.split(of_h, 1, [2 * hidden, hidden])
    zeros = build.constant(np.zeros((len(recurrence.reverse), hidden), np.float32))
    return build.op("Add", of_x, build.op("Concat", gates, zeros, axis=1)), last


def _states(
    node: ir.Node, shape: tuple[int, int, int], build: Builder, is_batch_first: bool
) -> ir.Value | None:
    """Initial results, and an LSTM's initial memory behind them."""
    states = [given(node, position) for position in (5, 6)[: 2 if node.op_type == "LSTM" else 1]]
    if all(state is None or _is_zero(state) for state in states):
        return None
    parts = []
    for state in states:
        if state is None:
            parts.append(build.constant(np.zeros(bounded(*shape), np.float32)))
            continue
        state = build.cast(state, ir.DataType.FLOAT)
        parts.append(build.transpose(state, (1, 0, 2)) if is_batch_first else state)
    return parts[0] if len(parts) == 1 else build.op("Concat", *parts, axis=0)


def _is_zero(value: ir.Value) -> bool:
    """Whether a state is zeros for each size of a batch, as exporters write it where none is given."""
    array, node = constant_array(value), value.producer()
    if array is not None or node is None:
        return array is not None and not array.any()
    if node.op_type == "ConstantOfShape":
        filling = node.attributes.get_tensor("value")
        return filling is None or not filling.numpy().any()
    return node.op_type in _SAME_ELEMENTS and _is_zero(operand(node, 0))


def _lengths(lengths: ir.Value | None, steps: int) -> ir.Value | None:
    """None if all sequences are as long as they can be."""
    known = constant_array(lengths)
    return None if known is not None and (known == steps).all() else lengths


def _steps(
    recurrence: Recurrence,
    operands: Sequence[ir.Value | None],
    extents: tuple[int, int, int, int],
    build: Builder,
) -> Sequence[ir.Value]:
    """The node, with the shapes that nothing infers for it."""
    results = 3 if recurrence.has_memory else 2
    made = build.ops(RECURRENCE_OPERATOR, operands, {"recurrence": recurrence.to_text()}, results=results)
    steps, batch, directions, hidden = extents
    for value, leading in zip(made, [(steps, directions), (directions,), (directions,)], strict=False):
        value.shape = ir.Shape((*leading, batch, hidden))
        value.dtype = ir.DataType.FLOAT
    return made


def _dynamic_quantize_lstm(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """An LSTM whose weights [D, I, 4 H] and [D, H, 4 H] are quantized constants; their scales and zero points
    (8 to 11) are one number for a direction or one for each column. Inputs and states stay float32.
    """
    operands = list(node.inputs[:8])
    for position, parameters in ((1, 8), (2, 10)):
        codes, scale, zero = (
            constant_of(operand(node, i), "weights") for i in (position, parameters, parameters + 1)
        )
        scale, zero = (each.reshape(len(each), 1, -1) for each in (scale, zero))
        weight = scale * (codes.astype(np.float32) - zero.astype(np.float32))
        operands[position] = build.constant(np.ascontiguousarray(weight.transpose(0, 2, 1)), "float32")
    return build.ops("LSTM", operands, kept(node, _ATTRIBUTES), results=len(node.outputs))


STANDARD: Mapping[str, Expansion] = dict.fromkeys(GATES, _expand)
MICROSOFT: Mapping[str, Expansion] = {"DynamicQuantizeLSTM": _dynamic_quantize_lstm}
