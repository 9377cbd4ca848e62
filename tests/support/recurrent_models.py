"""Networks of one LSTM, GRU or RNN, with any attributes, and what onnxruntime makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from hybridc.recurrence.activations import ACTIVATIONS
from hybridc.recurrence.cell import GATES

FUNCTIONS = {"LSTM": 3, "GRU": 2, "RNN": 1}


@dataclass(frozen=True)
class Recurrent:
    """One node and its operands; `weights_fed` makes weights inputs of the network."""

    cell: str
    steps: int = 5
    batch: int = 2
    inputs: int = 3
    hidden: int = 4
    direction: str = "forward"
    layout: int = 0
    bias: bool = True
    lengths: bool = False
    states: tuple[bool, ...] = ()
    """Which initial states are given."""
    peepholes: bool = False
    weights_fed: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def directions(self) -> int:
        return 2 if self.direction == "bidirectional" else 1

    def arrays(self) -> dict[str, np.ndarray]:
        """Operands by name, in the operator's order."""
        random, gates, d = np.random.default_rng(self.seed), GATES[self.cell], self.directions

        def drawn(*shape: int) -> np.ndarray:
            return random.standard_normal(shape).astype(np.float32)

        def turned(array: np.ndarray) -> np.ndarray:
            return np.ascontiguousarray(array.swapaxes(0, 1)) if self.layout else array

        rows, scale = gates * self.hidden, np.float32(1 / np.sqrt(self.hidden))
        found = {
            "X": turned(drawn(self.steps, self.batch, self.inputs)),
            "W": drawn(d, rows, self.inputs) * np.float32(1 / np.sqrt(self.inputs)),
            "R": drawn(d, rows, self.hidden) * scale,
        }
        if self.bias:
            found["B"] = drawn(d, 2 * rows)
        if self.lengths:
            lengths = random.integers(0, self.steps + 1, self.batch)
            found["sequence_lens"] = lengths.astype(np.int32)
        for name, is_given in zip(("initial_h", "initial_c"), self.states, strict=False):
            if is_given:
                found[name] = turned(drawn(d, self.batch, self.hidden))
        if self.peepholes:
            found["P"] = drawn(d, 3 * self.hidden)
        return found

    def model(self) -> onnx.ModelProto:
        """The network: data and states are inputs, weights are not unless `weights_fed`."""
        order = ["X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P"]
        order = order[: {"LSTM": 8}.get(self.cell, 6)]
        arrays = self.arrays()
        fixed = {} if self.weights_fed else {n: arrays[n] for n in ("W", "R", "B", "P") if n in arrays}
        outputs = ["Y", "Y_h", "Y_c"][: 3 if self.cell == "LSTM" else 2]
        attributes = {"hidden_size": self.hidden, "direction": self.direction, **self.attributes}
        if self.layout:
            attributes["layout"] = self.layout
        node = helper.make_node(self.cell, [n if n in arrays else "" for n in order], outputs, **attributes)
        graph = helper.make_graph(
            [node],
            "network",
            [
                helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
                for n, a in arrays.items()
                if n not in fixed
            ],
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs],
            [numpy_helper.from_array(a, n) for n, a in fixed.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)

    def feeds(self) -> dict[str, np.ndarray]:
        """Of the network's inputs."""
        names = {value.name for value in self.model().graph.input}
        return {n: a for n, a in self.arrays().items() if n in names}


def drawn(seed: int) -> Recurrent:
    """Any attributes and operands, of any small extents."""
    random = np.random.default_rng(seed)

    def perhaps() -> bool:
        return bool(random.integers(2))

    cell = str(random.choice(list(GATES)))
    direction = str(random.choice(["forward", "reverse", "bidirectional"]))
    attributes: dict[str, object] = {}
    if perhaps():
        attributes["clip"] = float(random.uniform(0.2, 2.0))
    if perhaps():
        functions = FUNCTIONS[cell] * (2 if direction == "bidirectional" else 1)
        attributes["activations"] = [str(n) for n in random.choice(sorted(ACTIVATIONS), functions)]
        # states stay small; onnxruntime's defaults of some parameters are not ONNX's
        attributes["clip"] = float(random.uniform(0.2, 2.0))
        for name in ("activation_alpha", "activation_beta"):
            attributes[name] = [float(x) for x in random.uniform(0.1, 0.9, functions)]
    if cell == "GRU":
        attributes["linear_before_reset"] = int(random.integers(2))
    if cell == "LSTM":
        attributes["input_forget"] = int(random.integers(2))
    return Recurrent(
        cell,
        steps=int(random.integers(1, 9)),
        batch=int(random.integers(1, 12)),
        inputs=int(random.integers(1, 20)),
        hidden=int(random.integers(1, 80)),
        direction=direction,
        layout=int(random.integers(2)),
        bias=perhaps(),
        lengths=perhaps(),
        states=(perhaps(), perhaps()),
        peepholes=cell == "LSTM" and perhaps(),
        weights_fed=perhaps(),
        attributes=attributes,
        seed=seed,
    )


def expected(case: Recurrent) -> list[np.ndarray]:
    """By onnxruntime, which knows only `layout` 0."""
    plain = replace(case, layout=0)
    session = onnxruntime.InferenceSession(
        plain.model().SerializeToString(), providers=["CPUExecutionProvider"]
    )
    result, *states = session.run(None, plain.feeds())
    if not case.layout:
        return [result, *states]
    return [result.transpose(2, 0, 1, 3), *(state.swapaxes(0, 1) for state in states)]
