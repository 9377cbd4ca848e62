"""LSTM and GRU layers, alone or two behind each other."""

from __future__ import annotations

import numpy as np
import onnx

from drawn.case import Case, even
from hybridc.models.builder import GraphBuilder, Value

GATES = {"LSTM": 4, "GRU": 3}


def draw_recurrent(rng: np.random.Generator) -> Case:
    """Hidden widths of 256 to 1024, 50 to 500 steps, batches of 1 and 16."""
    cell, batch = str(rng.choice(list(GATES))), int(rng.choice([1, 16]))
    hidden, steps, inputs = even(rng, 256, 1024, 8), even(rng, 50, 500), even(rng, 64, 1024, 8)
    directions, layers = int(rng.choice([1, 1, 2])), int(rng.choice([1, 1, 2]))
    name = f"{cell} batch {batch}, {steps} steps, {inputs} to {hidden}, {directions} x {layers}"
    return Case(name, lambda: network(cell, batch, steps, inputs, hidden, directions, layers))


def network(
    cell: str, batch: int, steps: int, inputs: int, hidden: int, directions: int, layers: int
) -> onnx.ModelProto:
    g = GraphBuilder("recurrent", 0)
    x = g.input("x", (steps, batch, inputs))
    for _ in range(layers):
        x = _layer(g, x, cell, hidden, directions)
    return g.model(y=x)


def _layer(g: GraphBuilder, x: Value, cell: str, hidden: int, directions: int) -> Value:
    """[steps, batch, inputs] to [steps, batch, directions * hidden], weights as torch draws them."""
    name, gates = g.fresh(cell), GATES[cell] * hidden
    std = (3 * hidden) ** -0.5
    weights = [
        g.normal(f"{name}.{kind}", (directions, gates, width), std)
        for kind, width in (("input", x.size(2)), ("state", hidden))
    ]
    bias = g.normal(f"{name}.bias", (directions, 2 * gates), std)
    further = {"linear_before_reset": 1} if cell == "GRU" else {}
    y = g.apply(
        cell,
        [x, *weights, bias],
        (x.shape[0], directions, x.shape[1], hidden),
        name=name,
        hidden_size=hidden,
        direction="bidirectional" if directions == 2 else "forward",
        **further,
    )
    rows = g.transpose(y, 0, 2, 1, 3)
    return g.reshape(rows, x.size(1), directions * hidden)
