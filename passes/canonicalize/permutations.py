"""Permutations of axes that cancel: networks in another order of axes than convolutions have here.

TensorFlow's activations have channels last, and its converters write a permutation in front of and behind
each operator that ONNX defines with channels first. Where operators between two of them can as well be
computed in the other order (element by element, sums along axes, padding, concatenation), they are, and both
permutations are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir.expr import GenericConst

from hybridc.ir.bind import size_bytes
from hybridc.passes.program.operators import Fact, has_fact
from hybridc.passes.program.program import (
    Program,
    ProgramBuilder,
    count_uses,
    is_op,
    substitute,
    tensor_dtype,
    tensor_shape,
    variables,
)

Order = tuple[int, ...]
"""Of axes, as `permute_dims` takes it: axis i of the result is axis `order[i]` of the operand."""

_REDUCTIONS = ("mean", "sum", "max", "min", "prod")
_MOST_ROUNDS = 4
"""What one region leaves out may let its neighbour be changed, too."""
_ALONG = ("nn.softmax", "nn.log_softmax", "quantize", "dequantize", "concat")


def cancel_permutations(program: Program) -> Program:
    """Compute what lies between permutations in the order of axes that needs fewer of them, by bytes.

    Requires: `main` normalised, straight-line.
    Ensures: the program itself if nothing is gained; a region is only changed where some permutation is left
    out and less is moved than before.
    Raises: nothing of its own.
    """
    for _ in range(_MOST_ROUNDS):
        network = _Network.of(program)
        chosen: dict[relax.Var, Order] = {}
        for region in network.regions():
            order = network.better_order(region)
            if order is not None:
                chosen.update(dict.fromkeys(region, order))
        if not chosen and all(network.undone(var) is None for var in network.values):
            break
        builder = ProgramBuilder(program.inputs)
        program = _Rewriting(program, network, chosen, builder, builder.take_parameters(program)).write()
    return program


@dataclass(frozen=True, slots=True)
class _Network:
    """A program, looked at by variable."""

    values: Mapping[relax.Var, Any]
    weights: Mapping[str, np.ndarray]
    uses: Counter[relax.Var]
    readers: Mapping[relax.Var, Sequence[relax.Var]] = field(default_factory=dict)
    """Of each variable the results that it is read for, once for each."""

    @staticmethod
    def of(program: Program) -> _Network:
        values = {binding.var: binding.value for binding in program.bindings}
        readers: dict[relax.Var, list[relax.Var]] = {}
        for var, value in values.items():
            for operand in dict.fromkeys(variables(value)):
                readers.setdefault(operand, []).append(var)
        return _Network(values, program.weights, count_uses(program), readers)

    def constant(self, operand: relax.Expr) -> np.ndarray | None:
        if isinstance(operand, GenericConst):
            return operand.value.numpy()
        return self.weights.get(operand.name) if isinstance(operand, relax.Var) else None

    def order_of(self, var: relax.Var) -> Order | None:
        """Of the permutation that makes a variable; None if another operator does."""
        value: Any = self.values.get(var)
        if not is_op(value, "permute_dims"):
            return None
        rank = len(tensor_shape(var))
        return tuple(range(rank))[::-1] if value.attrs.axes is None else tuple(map(int, value.attrs.axes))

    def undone(self, var: relax.Var) -> relax.Var | None:
        """What a permutation of a permutation restores, if it does."""
        order = self.order_of(var)
        operand = None if order is None else self.values[var].args[0]
        is_undone = order is not None and self.order_of(operand) == _inverse(order)
        return self.values[operand].args[0] if is_undone else None

    def data(self, var: relax.Var) -> list[relax.Var]:
        """The tensors that a movable operator computes with, without constants."""
        return [v for v in dict.fromkeys(variables(self.values[var])) if self.constant(v) is None]

    def regions(self) -> Iterable[list[relax.Var]]:
        """Results of operators that can be computed in any order of axes and read each other, or the same
        permutation."""
        parent = {var: var for var in self.values if self._is_movable(var)}

        def root(var: relax.Var) -> relax.Var:
            while parent[var] is not var:
                parent[var] = parent[parent[var]]
                var = parent[var]
            return var

        for var in parent:
            for operand in self.data(var):
                if self.order_of(operand) is not None:
                    others = [reader for reader in self.readers[operand] if reader in parent]
                else:
                    others = [operand] if operand in parent and not self.is_end(operand) else []
                for other in others:
                    parent[root(other)] = root(var)
        found: dict[relax.Var, list[relax.Var]] = {}
        for var in parent:
            found.setdefault(root(var), []).append(var)
        return found.values()

    def is_end(self, var: relax.Var) -> bool:
        """Whether a result of a region has fewer axes than the rest of it."""
        value = self.values[var]
        return is_op(value, *_REDUCTIONS) and not value.attrs.keepdims

    def _is_movable(self, var: relax.Var) -> bool:
        value = self.values[var]
        if not isinstance(var.ty, relax.TensorType) or not isinstance(value, relax.Call):
            return False
        if is_op(value, "concat"):
            return all(self.constant(part) is None for part in value.args[0].fields)
        if is_op(value, *_REDUCTIONS):
            return value.attrs.axis is not None
        if is_op(value, "nn.pad", *_ALONG):
            return all(self.constant(operand) is not None for operand in value.args[1:])
        if not has_fact(value, Fact.ELEMENTWISE):
            return False
        rank = len(tensor_shape(var))
        data = self.data(var)
        return len(data) > 0 and all(len(tensor_shape(operand)) == rank for operand in data)

    def better_order(self, region: Sequence[relax.Var]) -> Order | None:
        """The order that the operands of a region have before the permutations that it reads, if that is to
        be taken."""
        inside = set(region)
        candidates: Counter[Order] = Counter()
        for var in region:
            for operand in self.data(var):
                order = self.order_of(operand)
                if order is not None:
                    candidates[order] += _bytes(operand)
        for order, _ in candidates.most_common(1):
            if self._gained_bytes(inside, order) > 0:
                return order
        return None

    def _gained_bytes(self, inside: set[relax.Var], order: Order) -> int:
        """What is not moved any more; 0 if no permutation at the end of the region is left out."""
        gained, is_left_out = 0, False
        operands = dict.fromkeys(v for var in inside for v in self.data(var) if v not in inside)
        for operand in operands:
            if self.order_of(operand) != order:
                gained -= _moved_bytes(operand, order)
            elif self.uses[operand] == sum(variables(self.values[v]).count(operand) for v in inside):
                gained += _moved_bytes(operand, order)
        for var in inside:
            if self.is_end(var):
                if not _keeps_order(self.values[var], order):
                    return 0
                is_left_out = True
                continue
            outside = [reader for reader in self.readers.get(var, ()) if reader not in inside]
            undone = [reader for reader in outside if self.order_of(reader) == _inverse(order)]
            read = sum(variables(self.values[reader]).count(var) for reader in self.readers.get(var, ()))
            gained += len(undone) * _moved_bytes(var, order)
            is_left_out = is_left_out or bool(undone)
            if len(undone) < len(outside) or self.uses[var] > read:  # one of the network's outputs
                gained -= _moved_bytes(var, order)
        return gained if is_left_out else 0


@dataclass(slots=True)
class _Rewriting:
    """Writes the network again, with regions in the orders that are chosen for their results."""

    program: Program
    network: _Network
    chosen: Mapping[relax.Var, Order]
    builder: ProgramBuilder
    new: dict[relax.Var, relax.Expr]
    """Of each variable what it is now, in the order that it has in the network."""
    inner: dict[relax.Var, relax.Var] = field(default_factory=dict)
    """Results of regions in the order that is chosen."""

    def write(self) -> Program:
        for binding in self.program.bindings:
            var, value = binding.var, binding.value
            if var not in self.chosen:
                undone = self._undone(var)
                kept = self._emit(substitute(value, self._plain), var) if undone is None else undone
                self.new[var] = kept
            elif self.network.is_end(var):
                self.new[var] = self._emit(self._in_order(value, self.chosen[var]), var)
            else:
                self.inner[var] = self._emit(self._in_order(value, self.chosen[var]), var)
        outputs = [substitute(output, self._plain) for output in self.program.outputs]
        return self.builder.finish(outputs, self.program.functions)

    def _emit(self, expr: relax.Expr, var: relax.Var) -> relax.Var:
        return self.builder.emit(expr, self.program.origins.get(var.name, ()), var.name)

    def _plain(self, var: relax.Var) -> relax.Expr:
        if var in self.inner and var not in self.new:
            self.new[var] = self._emit(relax.op.permute_dims(self.inner[var], self.chosen[var]), var)
        return self.new.get(var, var)

    def _undone(self, var: relax.Var) -> relax.Expr | None:
        """What a permutation would make of another, or of a result of a region that is in that order."""
        order, restored = self.network.order_of(var), self.network.undone(var)
        if restored is not None:
            return substitute(restored, self._plain)
        if order is None:
            return None
        operand = self.network.values[var].args[0]
        is_undone = operand in self.inner and order == _inverse(self.chosen[operand])
        return self.inner[operand] if is_undone else None

    def _moved(self, operand: relax.Expr, order: Order) -> relax.Expr:
        """An operand of a region. Constants are moved now."""
        value = self.network.constant(operand)
        if value is not None and value.size > 1:
            whole = value.reshape((1,) * (len(order) - value.ndim) + value.shape)
            name = operand.name if isinstance(operand, relax.Var) else "constant"
            return self.builder.weight(whole.transpose(_inverse(order)), name)
        if value is not None or not isinstance(operand, relax.Var):
            return substitute(operand, self._plain)
        if operand in self.inner:
            return self.inner[operand]
        if self.network.order_of(operand) == order:
            return substitute(self.network.values[operand].args[0], self._plain)
        return self._emit(relax.op.permute_dims(self._plain(operand), _inverse(order)), operand)

    def _in_order(self, call: Any, order: Order) -> relax.Expr:
        """A call for operands whose axis `order[i]` is axis i of those in the network."""

        def along() -> int:
            return order[int(call.attrs.axis) % len(order)]

        name = call.op.name.removeprefix("relax.")
        if name == "concat":
            return relax.op.concat([self._moved(part, order) for part in call.args[0].fields], along())
        data = self._moved(call.args[0], order)
        if name in _REDUCTIONS:
            axes = [order[int(axis) % len(order)] for axis in call.attrs.axis]
            return getattr(relax.op, name)(data, axes, bool(call.attrs.keepdims))
        if name == "nn.pad":
            attrs, widths = call.attrs, [int(width) for width in call.attrs.pad_width]
            wide = [width for i in _inverse(order) for width in widths[2 * i : 2 * i + 2]]
            return relax.op.nn.pad(data, wide, str(attrs.pad_mode), attrs.pad_value)
        if name == "nn.softmax":
            return relax.op.nn.softmax(data, along())
        if name == "nn.log_softmax":
            return relax.op.nn.log_softmax(data, along())
        if name in ("quantize", "dequantize"):
            numbers = [substitute(number, self._plain) for number in call.args[1:]]
            function = getattr(relax.op, name)
            return function(data, *numbers, axis=along(), out_dtype=str(call.attrs.out_dtype))
        others = [self._moved(operand, order) for operand in call.args[1:]]
        return relax.Call(call.op, [data, *others], call.attrs)


def _inverse(order: Order) -> Order:
    return tuple(order.index(axis) for axis in range(len(order)))


def _keeps_order(reduction: Any, order: Order) -> bool:
    """Whether the axes that are left of a sum come in the same order either way."""
    summed = {int(axis) % len(order) for axis in reduction.attrs.axis}
    left = [order[axis] for axis in range(len(order)) if axis not in summed]
    return left == sorted(left)


def _bytes(var: relax.Var) -> int:
    return size_bytes(tensor_shape(var), tensor_dtype(var))


def _moved_bytes(var: relax.Var, order: Order) -> int:
    """Of a permutation to this order or from it; 1 if none of the axes that it moves is longer than 1, which
    costs nothing by itself, but keeps what it lies between from being one kernel."""
    longer = [axis for axis, extent in zip(order, tensor_shape(var), strict=True) if extent != 1]
    return 1 if longer == sorted(longer) else _bytes(var)
