"""Networks of nested If and Loop nodes, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SIZE = 4
"""Of every tensor of floats."""
_UNARY = ("Neg", "Tanh", "Abs", "Sigmoid")
_BINARY = ("Add", "Sub", "Mul", "Max")


class _Drawer:
    """Draws nodes; every value and node of the model has a name of its own."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.count = 0
        self.loops: list[str] = []

    def name(self, stem: str) -> str:
        self.count += 1
        return f"{stem}_{self.count}"

    def constant(self, nodes: list[onnx.NodeProto], value: object, dtype: type) -> str:
        output = self.name("constant")
        array = numpy_helper.from_array(np.array(value, dtype))
        nodes.append(helper.make_node("Constant", [], [output], name=output, value=array))
        return output

    def node(self, nodes: list[onnx.NodeProto], op_type: str, *inputs: str, **attributes: Any) -> str:
        output = self.name(op_type.lower())
        nodes.append(helper.make_node(op_type, list(inputs), [output], name=output, **attributes))
        return output

    def condition(self, nodes: list[onnx.NodeProto], value: str) -> str:
        total = self.node(nodes, "ReduceSum", value, keepdims=0)
        limit = self.constant(nodes, self.dice.uniform(-2, 2), np.float32)
        return self.node(nodes, self.dice.choice(["Less", "Greater"]), total, limit)

    def values(self, nodes: list[onnx.NodeProto], known: Sequence[str], depth: int, count: int) -> list[str]:
        """What is known, and some more values."""
        found = list(known)
        for _ in range(count):
            kinds = ["unary", "binary", "if", "loop"] if depth else ["unary", "binary"]
            kind = self.dice.choice(kinds)
            if kind == "if":
                found += self.branches(nodes, found, depth)
            elif kind == "loop":
                found += self.loop(nodes, found, depth)
            elif kind == "unary":
                found.append(self.node(nodes, self.dice.choice(_UNARY), self.dice.choice(found)))
            else:
                operands = self.dice.choice(found), self.dice.choice(found)
                found.append(self.node(nodes, self.dice.choice(_BINARY), *operands))
        return found

    def branches(self, nodes: list[onnx.NodeProto], known: Sequence[str], depth: int) -> list[str]:
        condition = self.condition(nodes, self.dice.choice(known))
        count = self.dice.randrange(1, 3)
        bodies = {}
        for branch in ("then_branch", "else_branch"):
            inner: list[onnx.NodeProto] = []
            made = self.values(inner, known, depth - 1, self.dice.randrange(1, 4))[-count:]
            results = [self.node(inner, "Identity", value) for value in made]
            bodies[branch] = helper.make_graph(inner, self.name("branch"), [], [_floats(r) for r in results])
        outputs = [self.name("if") for _ in range(count)]
        nodes.append(helper.make_node("If", [condition], outputs, name=self.name("If"), **bodies))
        return outputs

    def loop(self, nodes: list[onnx.NodeProto], known: Sequence[str], depth: int) -> list[str]:
        condition = self.condition(nodes, self.dice.choice(known))
        states = [self.dice.choice(known) for _ in range(self.dice.randrange(1, 3))]
        trips = self.constant(nodes, self.dice.randrange(1, 4), np.int64)
        number, goes_on = self.name("trip"), self.name("goes_on")
        carried = [self.name("state") for _ in states]
        inner: list[onnx.NodeProto] = []
        made = self.values(inner, [*known, *carried], depth - 1, self.dice.randrange(1, 4))[-len(states) :]
        again = self.condition(inner, made[-1])
        results = [self.node(inner, "Identity", value) for value in made]
        body = helper.make_graph(
            inner,
            self.name("body"),
            [_scalar(number, TensorProto.INT64), _scalar(goes_on, TensorProto.BOOL), *map(_floats, carried)],
            [_scalar(again, TensorProto.BOOL), *map(_floats, results)],
        )
        outputs = [self.name("loop") for _ in states]
        self.loops.append(self.name("Loop"))
        operands = [trips, condition, *states]
        nodes.append(helper.make_node("Loop", operands, outputs, name=self.loops[-1], body=body))
        return outputs


def _floats(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [SIZE])


def _scalar(name: str, kind: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, [])


def drawn_network(seed: int, depth: int = 3, count: int = 5) -> onnx.ModelProto:
    """A network of inputs `x` and `z`, float[4], with branches and loops within one another."""
    drawer, nodes = _Drawer(seed), list[onnx.NodeProto]()
    found = drawer.values(nodes, ["x", "z"], depth, count)
    total = drawer.node(nodes, "Sum", *found[2:])
    last = drawer.node(nodes, "Identity", found[-1])
    inputs, outputs = [_floats("x"), _floats("z")], [_floats(total), _floats(last)]
    graph = helper.make_graph(nodes, "drawn", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    return model
