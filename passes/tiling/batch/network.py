"""Where the samples of a batch are in each tensor of a training step: along an axis, or summed over.

For operators the slice rules say it (`slice_rules`), for functions their blocks (`functions`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import tvm
from tvm import relax, tirx

from hybridc.passes.program.program import Program, is_op, tensor_dtype, tensor_shape
from hybridc.passes.tiling.batch.functions import SUM, BatchFunction, IsSummed, Label, batch_function
from hybridc.passes.tiling.slice_rules import (
    Emit,
    Operation,
    Slice,
    SliceRule,
    operation_of,
    same_call,
    slice_of,
)

Labels = dict[relax.Var, "Label | tuple[Label, ...]"]
"""Where each variable has the samples; of a tuple, where its fields have them."""


def samples_of(program: Program) -> int | None:
    """The extent of the batch; None if inputs that are no states have none in common."""
    extents = {tensor_shape(var)[0] for var in data_of(program)}
    [samples] = extents if len(extents) == 1 else [None]
    return samples if samples is not None and samples > 1 else None


def data_of(program: Program) -> list[relax.Var]:
    """Inputs that are neither single numbers nor states, which have a new value of their type among the
    outputs."""
    types = {(tensor_shape(o), tensor_dtype(o)) for o in program.outputs}
    inputs = (v for v in program.inputs if math.prod(tensor_shape(v)) > 1)
    return [v for v in inputs if (tensor_shape(v), tensor_dtype(v)) not in types]


class MicroBatches(Protocol):
    """What the rule of a binding asks about the micro-batches."""

    count: int

    def span(self, extent: int, number: int) -> tuple[int, int]:
        """Which indices of an axis belong to a micro-batch, by its number."""

    def function(
        self, found: BatchFunction, name: str, number: int
    ) -> tuple[tvm.ir.GlobalVar, tirx.PrimFunc]:
        """A function of the samples of one micro-batch."""


Make = Callable[[MicroBatches, int, Sequence[relax.Expr], Emit], relax.Expr]
"""(micro-batches, number of one, slices of the operands, emit) -> the tile of the result."""


@dataclass(frozen=True, slots=True)
class MicroBatchRule:
    """How a binding is computed for a micro-batch."""

    operands: tuple[relax.Expr, ...]
    reads: tuple[Label, ...]
    """Along which axis operands are sliced; None: they are read whole."""
    label: Label | tuple[Label, ...]
    """Where the result has samples."""
    make: Make


@dataclass
class BatchNetwork:
    """A program, and what of it depends on the batch."""

    program: Program
    samples: int
    labels: Labels = field(init=False)
    rules: dict[relax.Var, MicroBatchRule] = field(default_factory=dict)
    summed: list[relax.VarBinding] = field(default_factory=list)
    """Calls of functions that use a sum over the batch that they take themselves."""
    functions: dict[str, tirx.PrimFunc] = field(init=False)
    _found: dict[tuple[object, ...], BatchFunction | IsSummed | None] = field(default_factory=dict)
    """By name, and axes of the operands: what many layers call is read off its blocks once."""

    def __post_init__(self) -> None:
        self.labels = dict.fromkeys(data_of(self.program), 0)
        self.functions = {g.name_hint: f for g, f in self.program.functions.items()}
        for binding in self.program.bindings:
            rule = self._rule(binding)
            if rule is not None:
                self.rules[binding.var] = rule
                self.labels[binding.var] = rule.label

    def axis(self, expr: relax.Expr) -> int | None:
        """Where an operand has samples."""
        label = self.labels.get(expr) if isinstance(expr, relax.Var) else None
        return label if isinstance(label, int) and label != SUM else None

    def _rule(self, binding: relax.VarBinding) -> MicroBatchRule | None:
        value = binding.value
        if isinstance(value, relax.TupleGetItem):
            return self._item(value)
        if not isinstance(value, relax.Call):
            return None
        if is_op(value, "call_tir"):
            return self._call(binding)
        operation = operation_of(value)
        return self._operation(operation) if operation is not None else None

    def _item(self, value: relax.TupleGetItem) -> MicroBatchRule | None:
        labels = self.labels.get(value.tuple_value)
        if not isinstance(labels, tuple) or labels[value.index] is None:
            return None

        def make(_: MicroBatches, __: int, slices: Sequence[relax.Expr], ___: Emit) -> relax.Expr:
            return relax.TupleGetItem(slices[0], value.index)

        return MicroBatchRule((value.tuple_value,), (0,), labels[value.index], make)

    def _call(self, binding: relax.VarBinding) -> MicroBatchRule | None:
        name, operands = binding.value.args[0].name_hint, tuple(binding.value.args[1].fields)
        known = {i: axis for i, o in enumerate(operands) if (axis := self.axis(o)) is not None}
        if not known:
            return None
        found = self._batch_function(name, known)
        if isinstance(found, IsSummed):
            self.summed.append(binding)
            return None
        if found is None or not self._is_whole_batch(found):
            return None
        reads, results = found.labels[: len(operands)], found.labels[len(operands) :]

        def make(
            micro_batches: MicroBatches, number: int, slices: Sequence[relax.Expr], _: Emit
        ) -> relax.Expr:
            function = micro_batches.function(found, name, number)
            types = [relax.TensorType(list(p.shape), str(p.dtype)) for p in function[1].params]
            results = types[len(operands) :]
            return relax.call_tir(function[0], list(slices), results if len(results) > 1 else results[0])

        return MicroBatchRule(operands, reads, results if len(results) > 1 else results[0], make)

    def _batch_function(self, name: str, known: Mapping[int, int]) -> BatchFunction | IsSummed | None:
        key = name, *known.items()
        if key not in self._found:
            try:
                self._found[key] = batch_function(self.functions[name], known)
            except IsSummed as summed:
                self._found[key] = summed
        return self._found[key]

    def _is_whole_batch(self, found: BatchFunction) -> bool:
        return all(int(buffer.shape[axis]) == self.samples for buffer, axis in found.buffers)

    def _operation(self, op: Operation) -> MicroBatchRule | None:
        axes = [self.axis(o) for o in op.operands]
        if all(axis is None for axis in axes):
            return None
        if _is_sum(op, axes):
            return MicroBatchRule(op.operands, tuple(axes), SUM, _sum_of_slices(op))
        for axis, extent in enumerate(op.shape):
            if extent % self.samples:
                continue
            rule = _slice_rule(op, axis, extent - extent // self.samples, extent)
            if rule is not None and self._fits(op, rule, axes):
                reads = tuple(None if sliced is None else sliced.axis for sliced in rule.slices)
                return MicroBatchRule(op.operands, reads, axis, _tile_of(op, axis))
        return None

    def _fits(self, op: Operation, rule: SliceRule, axes: Sequence[Label]) -> bool:
        """Whether the last sample of the result is computed from the last sample of each operand."""
        for shape, sliced, axis in zip(op.shapes, rule.slices, axes, strict=True):
            if sliced is None or shape is None:
                if axis is not None:
                    return False
                continue
            extent = shape[sliced.axis]
            if axis not in (None, sliced.axis) or extent % self.samples:
                return False
            if sliced != Slice(sliced.axis, extent - extent // self.samples, extent):
                return False
        return True


def _slice_rule(op: Operation, axis: int, begin: int, end: int) -> SliceRule | None:
    if op.name in ("conv1d_transpose", "conv2d_transpose", "conv3d_transpose", "avg_pool3d", "max_pool3d"):
        if axis:
            return None
        others = [None] * (len(op.operands) - 1)
        return SliceRule((Slice(0, begin, end), *others), same_call(op.call))
    if op.name == "broadcast_to":
        return _repeated(op, axis, begin, end)
    return slice_of(op, axis, begin, end)


def _repeated(op: Operation, axis: int, begin: int, end: int) -> SliceRule:
    own = axis - (len(op.shape) - len(op.source()))
    sliced = Slice(own, begin, end) if own >= 0 and op.source()[own] != 1 else None

    def make(slices: Sequence[relax.Expr], _: Emit) -> relax.Expr:
        return relax.op.broadcast_to(slices[0], (*op.shape[:axis], end - begin, *op.shape[axis + 1 :]))

    return SliceRule((sliced, None), make)


def _is_sum(op: Operation, axes: Sequence[Label]) -> bool:
    """Whether an operator sums over the batch."""
    if op.name in ("sum", "mean"):
        [axis], reduced = axes, op.call.attrs.axis
        return reduced is None or axis in {int(a) % len(op.source()) for a in reduced}
    if op.name == "matmul":
        ranks = [len(op.source(0)), len(op.source(1))]
        return min(ranks) >= 2 and list(axes) == [ranks[0] - 1, ranks[1] - 2]
    return False


def _sum_of_slices(op: Operation) -> Make:
    def make(micro_batches: MicroBatches, _: int, slices: Sequence[relax.Expr], emit: Emit) -> relax.Expr:
        value = same_call(op.call)(slices, emit)
        if op.name != "mean":
            return value
        weight = relax.const(np.asarray(1 / micro_batches.count, tensor_dtype(op.operands[0])))
        return relax.op.multiply(emit(value), weight)

    return make


def _tile_of(op: Operation, axis: int) -> Make:
    def make(
        micro_batches: MicroBatches, number: int, slices: Sequence[relax.Expr], emit: Emit
    ) -> relax.Expr:
        rule = _slice_rule(op, axis, *micro_batches.span(op.shape[axis], number))
        assert rule is not None, op.call
        return rule.make(slices, emit)

    return make
