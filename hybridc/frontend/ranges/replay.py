"""What a folded network makes at other sizes, without folding it again.

The network is folded at the largest sizes of a bucket. What it is at smaller ones follows from its nodes as
they were before: the shape of each result, and the elements of those that only sizes decide, are what onnx
infers and computes of the operands' own. That is asked once for each combination of a node and of what is
known of its operands: the layers of a network mostly ask the same. Where folding does more than to replace
what is known by constants, or does it at some sizes only, there is no answer: the network is to be folded.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from onnxscript.optimizer import _constant_folding as folding

from hybridc.frontend.inference import (
    MOST_READ,
    Attributes,
    Constant,
    Operand,
    Question,
    answer,
    simple_attributes,
    version_asked,
)
from hybridc.frontend.ranges.compare import Match
from hybridc.frontend.values import static_shape

_NONE = -1
"""In place of an operand that is left out."""
_EQUAL_SHAPES = frozenset({"Expand", "Reshape"})
"""Operators that folding drops where they change nothing."""
_SHAPE_ARITHMETIC = frozenset(
    {"Add", "Concat", "Div", "Gather", "Mul", "Slice", "Squeeze", "Sub", "Unsqueeze"}
)
"""Operators that make few numbers of few: to compute them at once takes less than to infer what comes of
them."""
_NOT_REPLAYED = frozenset({"CastLike", "ConcatFromSequence", "Constant", "SplitToSequence"})
"""Operators of which folding knows more than onnx's own evaluation."""


class _Fact(NamedTuple):
    """What is known of a value at some sizes."""

    dtype: ir.DataType
    shape: tuple[int, ...]
    content: bytes | None = None
    """Of a constant that is read."""
    origin: Hashable = None
    """Of a constant that is not read: what stands for its elements."""

    @property
    def is_known(self) -> bool:
        return self.content is not None or self.origin is not None

    def array(self) -> np.ndarray:
        """Requires: its content is read."""
        assert self.content is not None
        return np.frombuffer(self.content, self.dtype.numpy()).reshape(self.shape)

    def operand(self) -> Operand:
        """As inference sees it."""
        is_read = self.content is not None and math.prod(self.shape) <= MOST_READ
        known = Constant(self.dtype, self.shape, self.content or b"") if is_read else None
        return Operand(self.dtype, self.shape, known)


@dataclass(frozen=True, slots=True)
class _Kind:
    """A node, but for its values."""

    operator: tuple[str, str, int]
    attributes: Attributes
    fill: tuple[ir.DataType, bytes] | None
    """Of ConstantOfShape."""
    results: tuple[bool, ...]

    @property
    def values(self) -> dict[str, Any]:
        """Of the attributes, as an evaluation takes them."""
        return {name: [*each] if isinstance(each, tuple) else each for name, _, each in self.attributes}

    def question(self, operands: Sequence[_Fact | None]) -> Question:
        domain, name, version = self.operator
        asked = (domain, name, version_asked(domain, name, version))
        given = tuple(None if each is None else each.operand() for each in operands)
        return Question(asked, self.attributes, given, self.results)


@dataclass(frozen=True, slots=True)
class _Step:
    """A node: the numbers of its kind, of its operands and of its results."""

    kind: int
    operands: tuple[int, ...]
    results: tuple[int, ...]


class Tape:
    """The nodes of a network before it is folded, and what has been asked of them."""

    def __init__(self, most_read: int, most_made: int) -> None:
        """Constants of at most so many elements are read, and made."""
        self.most_read, self.most_made = most_read, most_made
        self.numbers: dict[str, int] = {}
        self.inputs: dict[str, tuple[int, ir.DataType]] = {}
        self.steps: list[_Step] = []
        self.producers: dict[int, int] = {}
        self.kinds: dict[_Kind, int] = {}
        self.operators: list[_Kind] = []
        self.constants: dict[int, int] = {}
        self.facts: list[_Fact] = []
        self._known: dict[_Fact, int] = {}
        self._views: list[int] = []
        self._made: dict[tuple[int, ...], tuple[int, ...] | None] = {}

    @staticmethod
    def of(model: ir.Model, most_read: int, most_made: int) -> Tape | None:
        """Of a network that is not folded yet; None if some node cannot be replayed."""
        tape = Tape(most_read, most_made)
        graph = model.graph
        for value in graph.inputs:
            if value.name is None or value.dtype is None or value.name in tape.numbers:
                return None
            tape.inputs[value.name] = tape._number(value.name), value.dtype
        for name, value in graph.initializers.items():
            tensor = value.const_value
            if tensor is None or tensor.dtype == ir.DataType.STRING or name in tape.numbers:
                return None
            tape.constants[tape._number(name)] = tape._fact(tape._weight(name, tensor))
        return tape if all(tape._add(node, model.opset_imports) for node in graph) else None

    def _number(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))

    def _weight(self, name: str, tensor: ir.TensorProtocol) -> _Fact:
        dims = tuple(tensor.shape.numpy())
        if math.prod(dims) > self.most_read:
            return _Fact(tensor.dtype, dims, origin=name)
        return _Fact(tensor.dtype, dims, tensor.numpy().tobytes())

    def _add(self, node: ir.Node, versions: Mapping[str, int]) -> bool:
        """Note a node; whether it can be replayed."""
        values = [*node.inputs, *node.outputs]
        is_new = not any(value.name in self.numbers for value in node.outputs if value.name)
        kind = _kind(node, versions.get(node.domain, 0))
        if kind is None or not is_new or any(v is not None and v.name is None for v in values):
            return False
        if not all(v is None or not v.name or v.name in self.numbers for v in node.inputs):
            return False
        number = self.kinds.setdefault(kind, len(self.kinds))
        if number == len(self.operators):
            self.operators.append(kind)
        operands = tuple(self.numbers[v.name] if v is not None and v.name else _NONE for v in node.inputs)
        results = tuple(self._number(v.name) if v.name else _NONE for v in node.outputs)
        self.producers.update(dict.fromkeys(results, len(self.steps)))
        self.steps.append(_Step(number, operands, results))
        return True

    def _fact(self, fact: _Fact) -> int:
        """The number of a fact, once it is noted, and that of what inference sees of it."""
        if fact not in self._known:
            self._known[fact] = len(self.facts)
            self.facts.append(fact)
            self._views.append(len(self.facts) - 1)
            operand = fact.operand()
            if fact.is_known and operand.constant is None:
                self._views[self._known[fact]] = self._fact(_Fact(fact.dtype, fact.shape))
        return self._known[fact]

    def played(self, shapes: Mapping[str, Sequence[int]]) -> Mapping[int, int] | None:
        """The fact of each value where inputs have these shapes; None if some are not known."""
        found = dict(self.constants)
        found[_NONE] = _NONE
        for name, (number, dtype) in self.inputs.items():
            found[number] = self._fact(_Fact(dtype, tuple(shapes[name])))
        for step in self.steps:
            made = self._results(step.kind, tuple(found[number] for number in step.operands))
            if made is None:
                return None
            found.update(zip(step.results, made, strict=True))
        return found

    def _results(self, kind: int, operands: tuple[int, ...]) -> tuple[int, ...] | None:
        is_known = all(each == _NONE or self.facts[each].is_known for each in operands)
        own = (
            operands if is_known else tuple(each if each == _NONE else self._views[each] for each in operands)
        )
        key = (kind, is_known, *own)
        if key not in self._made:
            facts = [None if each == _NONE else self.facts[each] for each in own]
            made = self._computed(key, self.operators[kind], facts, is_known=is_known)
            # a value without elements is a constant whatever computes it
            is_told = made is not None and not any(0 in each.shape for each in made)
            self._made[key] = tuple(map(self._fact, made)) if made is not None and is_told else None
        return self._made[key]

    def _computed(
        self, key: Hashable, kind: _Kind, operands: Sequence[_Fact | None], *, is_known: bool
    ) -> list[_Fact] | None:
        if is_known and kind.operator[1] in _SHAPE_ARITHMETIC and all(map(_is_few, operands)):
            array = self._evaluated(kind, operands)
            if array is not None:
                return [_Fact(ir.DataType.from_numpy(array.dtype), array.shape, array.tobytes())]
        results = answer(kind.question(operands))
        if results is None:
            return None
        made: list[_Fact] = []
        for result, is_there in zip(results, kind.results, strict=True):
            shape = None if result is None or result[1] is None else tuple(result[1])
            if not is_there:
                made.append(_Fact(ir.DataType.UNDEFINED, ()))
            elif result is None or shape is None or not all(isinstance(dim, int) for dim in shape):
                return None
            else:
                dtype = result[0] if kind.fill is None else kind.fill[0]
                made.append(_Fact(dtype, tuple(int(dim) for dim in shape)))  # type: ignore[arg-type]
        if len(made) != 1 or not (is_known or kind.operator[:2] == ("", "Shape")):
            return made
        [fact] = made
        array = self._array(kind, operands, fact)
        if array is None:
            return [fact._replace(origin=key)]
        is_same = array.shape == fact.shape and ir.DataType.from_numpy(array.dtype) == fact.dtype
        return [fact._replace(content=array.tobytes())] if is_same else None

    def _array(self, kind: _Kind, operands: Sequence[_Fact | None], result: _Fact) -> np.ndarray | None:
        """What a node computes of constants; None if that is much, or is not known."""
        if kind.operator[:2] == ("", "Shape"):
            [source], ends = operands, kind.values
            assert source is not None
            return np.array(source.shape[ends.get("start", 0) : ends.get("end")], np.int64)
        if math.prod(result.shape) > self.most_made or any(
            o is not None and o.content is None for o in operands
        ):
            return None
        if kind.fill is not None:
            dtype, fill = kind.fill
            return np.full(result.shape, np.frombuffer(fill, dtype.numpy())[0], dtype.numpy())
        return self._evaluated(kind, operands)

    @staticmethod
    def _evaluated(kind: _Kind, operands: Sequence[_Fact | None]) -> np.ndarray | None:
        arrays = [None if each is None else each.array() for each in operands]
        with np.errstate(all="ignore"):
            made = folding._reference_evaluator.evaluate(*kind.operator, *arrays, **kind.values)
        return made if isinstance(made, np.ndarray) else None


def _is_few(fact: _Fact | None) -> bool:
    return fact is None or (fact.content is not None and math.prod(fact.shape) <= MOST_READ)


def _kind(node: ir.Node, version: int) -> _Kind | None:
    """None if a node cannot be replayed."""
    if not node.inputs or node.op_type in _NOT_REPLAYED or folding._is_non_deterministic_op(node):
        return None
    fill, attributes = None, dict(node.attributes)
    if node.op_type == "ConstantOfShape":
        value = attributes.pop("value", None)
        if value is not None and (value.type != ir.AttributeType.TENSOR or value.is_ref()):
            return None
        array = np.zeros(1, np.float32) if value is None else value.as_tensor().numpy()
        fill = ir.DataType.from_numpy(array.dtype), array.tobytes()
    simple = simple_attributes(attributes)
    if simple is None:
        return None
    results = tuple(bool(value.name) for value in node.outputs)
    return _Kind((node.domain, node.op_type, version), simple, fill, results)


class Replay:
    """A folded network, and its tape as it was played at the sizes that it is folded at."""

    def __init__(
        self, tape: Tape, values: Mapping[ir.Value, int], facts: Mapping[int, int], drops: Sequence[bool]
    ) -> None:
        self._tape, self._values, self._facts, self._drops = tape, values, facts, drops

    @staticmethod
    def of(graph: ir.Graph, tape: Tape, shapes: Mapping[str, Sequence[int]]) -> Replay | None:
        """Of a network folded at the sizes at which its inputs have these shapes; None if folding made other
        nodes, or other values, than the tape has."""
        facts = tape.played(shapes)
        if facts is None:
            return None
        values: dict[ir.Value, int] = {}
        read = [value for node in graph for value in node.inputs if value is not None]
        constants = [value for value in (*read, *graph.outputs) if value.const_value is not None]
        if not all(_is_kept(node, tape) for node in graph):
            return None
        for value in (*graph.inputs, *_in_order(graph), *constants):
            if value in values or not value.name:
                continue
            number = tape.numbers.get(value.name)
            if number is None or not _is_told(value, tape.facts[facts[number]]):
                return None
            values[value] = number
        return Replay(tape, values, facts, _drops(tape, facts))

    def at(self, shapes: Mapping[str, Sequence[int]]) -> Match | None:
        """The network's values where its inputs have these shapes; None if it is to be folded."""
        facts = self._tape.played(shapes)
        if facts is None or _drops(self._tape, facts) != self._drops:
            return None
        found: dict[ir.Value, ir.Value] = {}
        for value, number in self._values.items():
            fact = self._tape.facts[facts[number]]
            if facts[number] == self._facts[number]:
                found[value] = value
            elif (value.const_value is None) != (fact.content is None):  # of a weight, or few enough here
                return None
            else:
                found[value] = _twin(fact, value.name)
        return found


def _in_order(graph: ir.Graph) -> list[ir.Value]:
    """Constants that are read, and results, as they come."""
    return [
        value
        for node in graph
        for value in (*(v for v in node.inputs if v is not None and v.const_value is not None), *node.outputs)
    ]


def _is_kept(node: ir.Node, tape: Tape) -> bool:
    """Whether a node of the folded network is one of the tape's."""
    numbers = [tape.numbers.get(value.name) for value in node.outputs if value.name]
    steps = {tape.producers.get(number) for number in numbers if number is not None}
    if len(steps) != 1 or None in numbers or None in steps:
        return False
    [step] = (tape.steps[index] for index in steps if index is not None)
    return tape.operators[step.kind].operator[:2] == (node.domain, node.op_type)


def _is_told(value: ir.Value, fact: _Fact) -> bool:
    """Whether a value of the folded network is what the tape says."""
    tensor = value.const_value
    if tensor is None:
        return static_shape(value) == fact.shape
    dims = tuple(tensor.shape.numpy())
    if not fact.is_known or dims != fact.shape or tensor.dtype != fact.dtype:
        return False
    return fact.content is None or tensor.numpy().tobytes() == fact.content


def _drops(tape: Tape, facts: Mapping[int, int]) -> list[bool]:
    """Of each node that changes nothing at some sizes, whether that is so at these."""
    return [
        tape.facts[facts[step.operands[0]]].shape == tape.facts[facts[step.results[0]]].shape
        for step in tape.steps
        if tape.operators[step.kind].operator[1] in _EQUAL_SHAPES
    ]


def _twin(fact: _Fact, name: str | None) -> ir.Value:
    tensor = ir.Tensor(fact.array(), dtype=fact.dtype) if fact.content is not None else None
    return ir.Value(name=name, type=ir.TensorType(fact.dtype), shape=ir.Shape(fact.shape), const_value=tensor)
