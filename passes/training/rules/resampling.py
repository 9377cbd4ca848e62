"""Gradients of functions that treat axis by axis, as the importer makes them: padding and resizing.

Along each axis such a function is a matrix with few elements in a row. It is read off the function: which
elements a position of the result is made of, and times what, is an expression of the position alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import ir, relax, tirx

from hybridc.passes.program.program import tensor_dtype, tensor_shape
from hybridc.passes.training.gradients import Gradient, Reverse, gradient, operands
from hybridc.passes.training.kernels.resize import gathered, resize_gradient
from hybridc.schedules.cpu.core.nest import NestBlock, loads, read_nest

Terms = list[tuple[np.ndarray, np.ndarray]]
"""Factors, and the elements of the data along one axis that they multiply, for every position."""

ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    tirx.Add: operator.add,
    tirx.Sub: operator.sub,
    tirx.Mul: operator.mul,
    tirx.Div: operator.truediv,
    tirx.FloorDiv: operator.floordiv,
    tirx.FloorMod: operator.mod,
    tirx.Min: np.minimum,
    tirx.Max: np.maximum,
    tirx.LT: operator.lt,
    tirx.LE: operator.le,
    tirx.GT: operator.gt,
    tirx.GE: operator.ge,
    tirx.EQ: operator.eq,
    tirx.NE: operator.ne,
    tirx.And: np.logical_and,
    tirx.Or: np.logical_or,
}
ROUNDING: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.round,
}


@gradient("mirror_pad", "replicate_pad", "circular_pad", "resize1d")
def _axis_by_axis(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    """The axes before the first whose extent changes are not touched."""
    [data] = operands(call)
    shape, targets, dtype = tensor_shape(data), tensor_shape(y), tensor_dtype(data)
    whole = next((i for i, (a, b) in enumerate(zip(shape, targets, strict=True)) if a != b), len(shape) - 1)
    nest = read_nest(reverse.library[call.args[0].name_hint])
    assert nest is not None and len(nest.blocks) == 1, "the importer's functions have one block"
    tables: list[relax.Expr] = []
    widths: list[int] = []
    for axis in range(whole, len(shape)):
        extent, target = shape[axis], targets[axis]
        first, weights = _AxisBlock(nest.blocks[0], axis).gathered(extent, target)
        widths.append(weights.shape[1])
        tables.append(reverse.builder.weight(first, f"{y.name}_first"))
        tables.append(reverse.builder.weight(weights.astype(dtype), f"{y.name}_weights"))
    result = reverse.call(
        ("resize_gradient", shape, targets[whole:], tuple(widths)),
        lambda: resize_gradient(shape, targets[whole:], widths, dtype),
        [dy, *tables],
        relax.TensorType(shape, dtype),
    )
    return [result]


@dataclass(frozen=True, slots=True)
class _AxisBlock:
    """A TensorIR block along one axis, at the first position of the others."""

    block: NestBlock
    axis: int

    def gathered(self, extent: int, target: int) -> tuple[np.ndarray, np.ndarray]:
        places = {var: np.zeros(target, np.int64) for var in self.block.spatial}
        places[self.block.spatial[self.axis]] = np.arange(target)
        terms = self._terms(self.block.value, places)
        outputs = np.concatenate([np.arange(target)] * len(terms))
        factors, inputs = (np.concatenate(parts) for parts in zip(*terms, strict=True))
        return gathered(outputs, inputs, factors, extent, target)

    def _terms(self, expr: ir.Expr, places: Mapping[ir.Var, np.ndarray]) -> Terms:
        """A sum of loads times factors; what else is added has no gradient."""
        if isinstance(expr, ir.TensorLoad):
            index = _number(expr.indices[self.axis], places)
            return [(np.ones(len(index)), index)]
        if not loads(expr):
            return []
        if isinstance(expr, tirx.Cast):
            return self._terms(expr.value, places)
        if isinstance(expr, ir.Call):
            condition, *cases = expr.args
            chosen = _number(condition, places)
            masks = chosen, np.logical_not(chosen)
            return [
                (np.where(mask, factor, 0), np.where(mask, index, 0))
                for mask, case in zip(masks, cases, strict=True)
                for factor, index in self._terms(case, places)
            ]
        a, b = self._terms(expr.a, places), self._terms(expr.b, places)
        if isinstance(expr, tirx.Mul):
            scale = _number(expr.b if a else expr.a, places)
            return [(factor * scale, index) for factor, index in a or b]
        assert isinstance(expr, tirx.Add | tirx.Sub), f"{expr} is not a sum of elements"
        sign = 1 if isinstance(expr, tirx.Add) else -1
        return [*a, *((sign * factor, index) for factor, index in b)]


def _number(expr: ir.Expr, places: Mapping[ir.Var, np.ndarray]) -> np.ndarray:
    """The value of an expression without loads at every position, in the precision that it says."""
    if isinstance(expr, ir.Var):
        return places[expr]
    if isinstance(expr, tirx.IntImm | tirx.FloatImm):
        size = len(next(iter(places.values())))
        return np.full(size, expr.value, str(expr.ty.dtype))
    if isinstance(expr, tirx.Cast):
        return _number(expr.value, places).astype(str(expr.ty.dtype))
    if isinstance(expr, ir.Call):
        values = [_number(argument, places) for argument in expr.args]
        name = expr.op.name.rpartition(".")[2]
        return np.where(*values) if name == "if_then_else" else ROUNDING[name](*values)
    return np.asarray(ARITHMETIC[type(expr)](_number(expr.a, places), _number(expr.b, places)))
