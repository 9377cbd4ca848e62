"""Maxima and minima of infinities and NaN, with the semantics of IEEE 754 and ONNX.

Reductions by maximum start at minus infinity, not at the least finite number as in TVM: else the maximum of a
row of minus infinities (a fully masked row of attention) would be about -3.4e38, and its index -1.

Relu, Clip, Max and Min of NaN are NaN. x86's `maxps` returns its second operand if one is NaN, so it is
enough to make that the operand that may be NaN; if both may be, one more comparison is needed.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx

from hybridc.schedules.mutation import mutate


def with_infinite_bounds(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with infinite initial values of its maxima and minima, and valid ones of their indices."""
    renewed: list[tuple[tirx.BufferStore, tirx.BufferStore]] = []

    def note(block: s_tir.SBlock) -> None:
        if block.init is not None:
            stores = list(block.init) if isinstance(block.init, tirx.SeqStmt) else [block.init]
            renewed.extend((s, _bounded(s)) for s in stores if _is_finite_bound(s, len(stores)))

    def renew(store: tirx.BufferStore) -> tirx.BufferStore:
        return next((new for old, new in renewed if old.same_as(store)), store)

    tvm_ffi.structural_walk(function.body, (s_tir.SBlock, note))
    if not renewed:
        return function
    body = tvm_ffi.structural_map(function.body, (tirx.BufferStore, renew))
    return tirx.PrimFunc(list(function.params), body, function.ret_type, function.attrs)


def with_propagated_nan(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with maxima and minima that propagate NaN, except in reductions."""

    def keep(block: s_tir.SBlock, mutator: tvm_ffi.StructuralMutator) -> s_tir.SBlock:
        return block if block.init is not None else mutator.default_mutate(block)

    def renew(extremum: tirx.Max | tirx.Min, mutator: tvm_ffi.StructuralMutator) -> ir.Expr:
        return _propagating(mutator.default_mutate(extremum))

    callbacks = ((s_tir.SBlock, keep), ((tirx.Max, tirx.Min), renew))
    body = mutate(function.body, callbacks)
    return tirx.PrimFunc(list(function.params), body, function.ret_type, function.attrs)


def _propagating(extremum: tirx.Max | tirx.Min) -> ir.Expr:
    a, b = extremum.a, extremum.b
    if "float" not in str(extremum.ty.dtype) or isinstance(a, tirx.FloatImm):
        return extremum
    if isinstance(b, tirx.FloatImm):
        return type(extremum)(b, a)
    infinity = tirx.const(math.inf, str(a.ty.dtype))
    return tirx.Select(tirx.abs(a) <= infinity, extremum, a)  # TVM simplifies `a == a` to true


def _is_finite_bound(store: tirx.BufferStore, results: int) -> bool:
    value, dtype = store.value, str(store.buffer.dtype)
    if isinstance(value, tirx.IntImm):
        return results == 2 and int(value) == -1
    bounds = (tirx.min_value(dtype), tirx.max_value(dtype))
    return isinstance(value, tirx.FloatImm) and any(float(value.value) == float(b.value) for b in bounds)


def _bounded(store: tirx.BufferStore) -> tirx.BufferStore:
    dtype = str(store.buffer.dtype)
    if isinstance(store.value, tirx.IntImm):  # a position: of equal elements the first wins
        return tirx.BufferStore(store.buffer, tirx.max_value(dtype), store.indices)
    infinity = math.copysign(math.inf, float(store.value.value))
    return tirx.BufferStore(store.buffer, tirx.FloatImm(dtype, infinity), store.indices)


def _register_reducers() -> None:
    """Let schedules apply `rfactor` to such reductions: TVM recognises a maximum by its initial value."""
    register = tvm_ffi.get_global_func("s_tir.schedule.RegisterReducer")
    for combine, bound in ((tirx.max, -math.inf), (tirx.min, math.inf)):
        register(1, _immortal(_combiner(combine)), _immortal(_identity(bound)))


def _combiner(combine: Callable[..., ir.Expr]) -> Callable[..., list[ir.Expr]]:
    return lambda left, right: [combine(left[0], right[0])]


def _identity(bound: float) -> Callable[..., list[ir.Expr]]:
    return lambda values: [tirx.const(bound, str(values[0].ty.dtype))]


def _immortal(function: Callable[..., Any]) -> Any:
    """TVM frees its reducers after Python has ended, when a Python function can no longer be freed."""
    converted = tvm_ffi.convert(function)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(converted))
    return converted


_register_reducers()
