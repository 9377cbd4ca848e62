"""Tensors of rows of 8-bit integers with a scale behind each, where the arithmetic is float32.

A row of `depth` numbers is `depth` int8 and then the four bytes of a float32, by which they are multiplied:
the keys and values of a decoder may be stored so. A function that reads such tensors multiplies each element
where it reads it. For a CPU the same function with float32 tensors is scheduled, by any rule, and what the
rule made then gets these parameters, as `storage.py` does for 16-bit floats. Rules of a GPU are those of
attention alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, tirx

from hybridc.appended_rows import SCALE_BYTES
from hybridc.schedules.mutation import mutate

ROWS, _WIDE = "int8", "float32"
"""Types in memory, of the integers of a row, and of the arithmetic."""


@dataclass(frozen=True, slots=True)
class WideRows:
    """A function of float32 tensors in the place of one that reads rows of integers."""

    function: tirx.PrimFunc
    positions: tuple[int, ...]
    """Of the parameters that the other one has so."""


def with_rows(function: tirx.PrimFunc, positions: Collection[int]) -> tirx.PrimFunc:
    """A function of float32 tensors, scheduled or not, that only reads some parameters, with rows of integers
    for these."""
    new = {function.params[i]: _packed(function.params[i]) for i in positions}
    return _with_parameters(function, new, loads_of_rows(function.body, new))


def wide_rows(function: tirx.PrimFunc) -> WideRows | None:
    """The inverse of `with_rows` for a function that is not scheduled; None if it reads no such rows."""
    packed = {load.source for product in _products(function.body) for load in (product.a.value,)}
    positions = tuple(i for i, p in enumerate(function.params) if p in packed)
    if not positions:
        return None
    new = {function.params[i]: _unpacked(function.params[i]) for i in positions}

    def product(node: tirx.Mul, mutator: tvm_ffi.StructuralMutator) -> ir.Expr:
        if not _is_product(node) or node.a.value.source not in new:
            return mutator.default_mutate(node)
        load = node.a.value
        return tirx.BufferLoad(new[load.source], [mutator.mutate(i) for i in load.indices])

    body = mutate(function.body, [(tirx.Mul, product), (ir.Var, lambda v, _: new.get(v, v))])
    return WideRows(_with_parameters(function, new, body), positions)


def _with_parameters(function: tirx.PrimFunc, new: Mapping[ir.Var, ir.Var], body: tirx.Stmt) -> tirx.PrimFunc:
    params = [new.get(p, p) for p in function.params]
    return tirx.PrimFunc(params, body, function.ret_type, function.attrs)


def _packed(buffer: ir.Var) -> ir.Var:
    *rows, depth = buffer.shape
    return tirx.decl_buffer([*rows, depth + SCALE_BYTES], ROWS, buffer.name, layout=None)


def _unpacked(buffer: ir.Var) -> ir.Var:
    *rows, depth = buffer.shape
    return tirx.decl_buffer([*rows, depth - SCALE_BYTES], _WIDE, buffer.name, layout=None)


def loads_of_rows(body: tirx.Stmt, new: Mapping[ir.Var, ir.Var]) -> tirx.Stmt:
    """A statement that reads buffers of rows in the place of float32 ones, whose elements have the same
    indices."""

    def load(node: ir.TensorLoad, mutator: tvm_ffi.StructuralMutator) -> ir.Expr:
        buffer = new.get(node.source)
        if buffer is None:
            return mutator.default_mutate(node)
        return element_of_row(buffer, [mutator.mutate(i) for i in node.indices])

    def call(node: ir.Call, mutator: tvm_ffi.StructuralMutator) -> ir.Expr:
        if node.op.name != "tirx.address_of" or node.args[0].source not in new:
            return mutator.default_mutate(node)
        at = [mutator.mutate(i) for i in node.args[0].indices]
        return tirx.address_of(tirx.BufferLoad(new[node.args[0].source], at))

    callbacks = [(ir.TensorLoad, load), (ir.Call, call), (ir.Var, lambda v, _: new.get(v, v))]
    return mutate(body, callbacks)


def element_of_row(buffer: ir.Var, indices: Sequence[ir.Expr]) -> ir.Expr:
    """An element, or a vector along a row."""
    codes = tirx.BufferLoad(buffer, list(indices))
    lanes = str(codes.ty.dtype).removeprefix(ROWS)
    scale = scale_of_row(buffer, indices)
    if lanes:
        scale = tirx.Broadcast(scale, int(lanes[1:]))
    return tirx.Mul(tirx.Cast(_WIDE + lanes, codes), scale)


def scale_of_row(buffer: ir.Var, indices: Sequence[ir.Expr]) -> ir.Expr:
    """By which the codes of a row are multiplied: float32, four bytes that are loaded at once."""
    depth = int(buffer.shape[-1]) - SCALE_BYTES
    bytes_ = tirx.BufferLoad(buffer, [*indices[:-1], _scale_place(depth)])
    return tirx.reinterpret(_WIDE, bytes_)


def _scale_place(depth: int) -> tirx.Ramp:
    """The bytes of a scale in its row."""
    return tirx.Ramp(tirx.IntImm("int64", depth), tirx.IntImm("int64", 1), SCALE_BYTES)


def _products(body: tirx.Stmt) -> list[tirx.Mul]:
    found: list[tirx.Mul] = []
    tvm_ffi.structural_walk(body, (tirx.Mul, lambda node: found.append(node) if _is_product(node) else None))
    return found


def _is_product(node: tirx.Mul) -> bool:
    """Whether it is what `element_of_row` makes of one element."""
    is_cast = isinstance(node.a, tirx.Cast) and isinstance(node.a.value, ir.TensorLoad)
    if not is_cast or str(node.a.value.source.dtype) != ROWS or not isinstance(node.b, ir.Call):
        return False
    read = node.b.args[0] if node.b.op.name == "tirx.reinterpret" else None
    return isinstance(read, ir.TensorLoad) and read.source.same_as(node.a.value.source)
