"""Operators that hybridc lowers to TensorIR itself: most of them those whose indices or divisors only a run
knows.

TVM's own take them on trust. Here each is wrapped into a marker (`hybridc/checks.py`), so that the kernel
checks it. As ONNX has it, indices from -n to -1 count from the end of an axis of n elements. RoiAlign is in
`regions.py`, GridSample in `sampling.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import tvm
from tvm import relax, te, tirx, topi
from tvm.ir.expr import GenericConst

from hybridc.checks import checked_divisor, checked_index
from hybridc.passes.program.regions import legalize_roi_align
from hybridc.passes.program.sampling import legalize_grid_sample
from hybridc.schedules.shapes import shape_of

Legalize = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]

COMBINE: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {
        "add": lambda old, new: old + new,
        "mul": lambda old, new: old * new,
        # of a NaN and another number the update, as ONNX Runtime has it
        "min": lambda old, new: tirx.Select(old < new, old, new),
        "max": lambda old, new: tirx.Select(old > new, old, new),
    }
)
"""What a scatter makes of an element and its update, where it does not replace it."""


def take(x: te.Tensor, indices: te.Tensor, axis: int) -> te.Tensor:
    """Slices of `axis`; the result's axes at its place are those of the indices."""
    first, last, extent = axis, axis + len(indices.shape), int(x.shape[axis])

    def body(*at: tirx.Var) -> tirx.Expr:
        index = checked_index(indices(*at[first:last]), extent, "Gather")
        return x(*at[:first], index, *at[last:])

    return te.compute([*x.shape[:first], *indices.shape, *x.shape[first + 1 :]], body, name="take")


def gather_elements(x: te.Tensor, indices: te.Tensor, axis: int) -> te.Tensor:
    """An element for each index, which stands in for the element's position along `axis`."""
    extent = int(x.shape[axis])

    def body(*at: tirx.Var) -> tirx.Expr:
        index = checked_index(indices(*at), extent, "GatherElements")
        return x(*at[:axis], index, *at[axis + 1 :])

    return te.compute(indices.shape, body, name="gather_elements")


def gather_nd(x: te.Tensor, indices: te.Tensor, batch_dims: int) -> te.Tensor:
    """Slices of x: the last axis of the indices says where along the axes behind those of the batch."""
    rank = len(indices.shape) - 1
    axes = range(batch_dims, batch_dims + int(indices.shape[-1]))

    def body(*at: tirx.Var) -> tirx.Expr:
        places = [
            checked_index(indices(*at[:rank], tirx.IntImm("int64", i)), int(x.shape[axis]), "GatherND")
            for i, axis in enumerate(axes)
        ]
        return x(*at[:batch_dims], *places, *at[rank:])

    return te.compute([*indices.shape[:rank], *x.shape[axes.stop :]], body, name="gather_nd")


def scatter_elements(
    x: te.Tensor, indices: te.Tensor, updates: te.Tensor, axis: int, reduction: str
) -> te.Tensor:
    """x with an update for each index, which stands in for the update's position along `axis`.

    Lines along the axis are independent; the updates of one are made in order.
    """
    extent, taken = int(x.shape[axis]), shape_of(indices)
    lines = (*taken[:axis], *taken[axis + 1 :])

    def scatter(index: tirx.Buffer, new: tirx.Buffer, out: tirx.Buffer) -> tirx.Stmt:
        def update(line: tirx.Var, k: tirx.Var) -> tirx.Stmt:
            at = _unravelled(line, lines)
            own = [*at[:axis], k, *at[axis:]]
            place = checked_index(tirx.BufferLoad(index, own), extent, "ScatterElements")
            return _combined(out, [*at[:axis], place, *at[axis:]], tirx.BufferLoad(new, own), reduction)

        return _loop(
            math.prod(lines), lambda line: _loop(taken[axis], lambda k: update(line, k)), parallel=True
        )

    return _scattered(x, indices, updates, scatter, "scatter_elements")


def scatter_nd(x: te.Tensor, indices: te.Tensor, updates: te.Tensor, reduction: str) -> te.Tensor:
    """x with slices updated: the last axis of the indices says where along the first axes of x.

    Updates are made in order.
    """
    depth, slices = int(indices.shape[-1]), shape_of(indices)[:-1]
    inner = shape_of(x)[depth:]

    def scatter(index: tirx.Buffer, new: tirx.Buffer, out: tirx.Buffer) -> tirx.Stmt:
        def update(i: tirx.Var, j: tirx.Var) -> tirx.Stmt:
            at, within = _unravelled(i, slices), _unravelled(j, inner)
            fed = [tirx.BufferLoad(index, [*at, tirx.IntImm("int64", k)]) for k in range(depth)]
            places = [checked_index(v, int(n), "ScatterND") for v, n in zip(fed, x.shape, strict=False)]
            return _combined(out, [*places, *within], tirx.BufferLoad(new, [*at, *within]), reduction)

        return _loop(
            math.prod(slices), lambda i: _loop(math.prod(inner), lambda j: update(i, j), parallel=True)
        )

    return _scattered(x, indices, updates, scatter, "scatter_nd")


def _scattered(
    x: te.Tensor,
    indices: te.Tensor,
    updates: te.Tensor,
    scatter: Callable[[tirx.Buffer, tirx.Buffer, tirx.Buffer], tirx.Stmt],
    name: str,
) -> te.Tensor:
    """A copy of x, and then what `scatter` does to it."""
    shape = shape_of(x)

    def body(inputs: list[tirx.Buffer], outputs: list[tirx.Buffer]) -> tirx.Stmt:
        data, index, new, out = (*inputs, *outputs)

        def copy(i: tirx.Var) -> tirx.Stmt:
            at = _unravelled(i, shape)
            return tirx.BufferStore(out, tirx.BufferLoad(data, at), at)

        return tirx.SeqStmt([_loop(math.prod(shape), copy, parallel=True), scatter(index, new, out)])

    buffer = tirx.decl_buffer(x.shape, x.dtype, "scattered", layout=None)
    return te.extern([x.shape], [x, indices, updates], body, dtype=x.dtype, out_buffers=[buffer], name=name)


def _combined(out: tirx.Buffer, at: list[tirx.Expr], update: tirx.Expr, reduction: str) -> tirx.Stmt:
    if reduction == "update":
        return tirx.BufferStore(out, update, at)
    return tirx.BufferStore(out, COMBINE[reduction](tirx.BufferLoad(out, at), update), at)


def _loop(extent: int, body: Callable[[tirx.Var], tirx.Stmt], *, parallel: bool = False) -> tirx.Stmt:
    i, (zero, end) = tirx.Var("i", "int64"), (tirx.IntImm("int64", n) for n in (0, extent))
    return tirx.For(i, zero, end, tirx.ForKind.PARALLEL if parallel else tirx.ForKind.SERIAL, body(i))


def _unravelled(offset: tirx.Expr, shape: tuple[int, ...]) -> list[tirx.Expr]:
    """The indices of an element by its row-major offset."""
    indices: list[tirx.Expr] = []
    for axis in reversed(range(len(shape))):
        # the first index is what is left, which needs no remainder
        indices.insert(0, tirx.floormod(offset, shape[axis]) if axis else offset)
        offset = tirx.floordiv(offset, shape[axis])
    return indices


def _take(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return bb.call_te(take, *call.args, _axis(call), primfunc_name_hint="take")


def _gather_elements(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return bb.call_te(gather_elements, *call.args, _axis(call), primfunc_name_hint="gather_elements")


def _gather_nd(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return bb.call_te(gather_nd, *call.args, int(call.attrs.batch_dims), primfunc_name_hint="gather_nd")


def _scatter_elements(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    how = _axis(call), str(call.attrs.reduction)
    return bb.call_te(scatter_elements, *call.args, *how, primfunc_name_hint="scatter_elements")


def _scatter_nd(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return bb.call_te(scatter_nd, *call.args, str(call.attrs.reduction), primfunc_name_hint="scatter_nd")


def _axis(call: relax.Call) -> int:
    rank = len(call.args[0].ty.shape)
    return int(call.attrs.axis if call.attrs.axis is not None else 0) % rank


def _division(name: str, operator: str, divide: Callable[[Any, Any], te.Tensor]) -> Legalize:
    """Of floating point numbers, and of integers by a number in the kernel, TVM's own lowering."""
    tvms_own = tvm.ir.Op.get(f"relax.{name}").get_attr("FLegalize")

    def by_checked(x: te.Tensor | tirx.Expr, y: te.Tensor) -> te.Tensor:
        return divide(x, te.compute(y.shape, lambda *at: checked_divisor(y(*at), operator), name="divisor"))

    def legalize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        if not _divides_by_data(call):
            return tvms_own(bb, call)
        x, y = call.args
        if isinstance(x, GenericConst):
            x = tirx.const(x.value.numpy().item(), str(x.value.dtype))
        return bb.call_te(by_checked, x, y, primfunc_name_hint=name)

    return legalize


def _divides_by_data(call: relax.Call) -> bool:
    divisor = call.args[1]
    is_integer = str(divisor.ty.dtype).startswith(("int", "uint"))
    return is_integer and not (isinstance(divisor, GenericConst) and divisor.value.ndim == 0)


def _is_finite(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """By one comparison. TVM's own has the operand three times: where kernels are fused all that computes it,
    and of a chain of casts to integers, each of which asks this, a power of that."""

    def is_less(x: te.Tensor) -> te.Tensor:
        infinity = tirx.const(math.inf, str(x.dtype))
        return te.compute(x.shape, lambda *at: tirx.abs(x(*at)) < infinity, name="is_finite")

    return bb.call_te(is_less, call.args[0], primfunc_name_hint="isfinite")


_INDEXING: dict[str, Legalize] = {
    "relax.take": _take,
    "relax.gather_elements": _gather_elements,
    "relax.gather_nd": _gather_nd,
    "relax.scatter_elements": _scatter_elements,
    "relax.scatter_nd": _scatter_nd,
}
_DIVIDING: dict[str, Legalize] = {
    "relax.divide": _division("divide", "Div", topi.divide),
    "relax.floor_divide": _division("floor_divide", "Div", topi.floor_divide),
    "relax.mod": _division("mod", "Mod", topi.mod),
    "relax.floor_mod": _division("floor_mod", "Mod", topi.floor_mod),
}
UNMARKED: Mapping[str, Legalize] = MappingProxyType({"relax.image.grid_sample": legalize_grid_sample})
"""Ways to lower operators without markers, where TVM's own function is too large to look at."""
LEGALIZATIONS = {
    **_INDEXING,
    **_DIVIDING,
    **UNMARKED,
    "relax.isfinite": _is_finite,
    "relax.vision.roi_align": legalize_roi_align,
}
"""For `relax.transform.LegalizeOps`."""


def is_checked(call: relax.Call) -> bool:
    """Whether the kernel of an operator checks some of what it is fed."""
    if not isinstance(call.op, tvm.ir.Op):
        return False
    return call.op.name in _INDEXING or (call.op.name in _DIVIDING and _divides_by_data(call))
