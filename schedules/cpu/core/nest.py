"""Reading a fused function: its blocks as plain expressions that can be put into another loop nest.

Relax hands over one block per operator: producers (padding), an anchor (the reduction) and an
epilogue of element-wise blocks. A micro-kernel needs them as "the value at these indices", which is
what `NestBlock.value_at` gives; the nest around them is then ours to choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, sym, tirx

from hybridc.schedules.packing import Packing
from hybridc.schedules.rule import Request, Rows, Scheduled
from hybridc.schedules.workspace import lift_workspace


def substitute(expr: ir.Expr, values: Mapping[ir.Var, ir.Expr]) -> ir.Expr:
    """Replace variables, for example a block's iterators by loop indices."""
    return tvm_ffi.structural_map(expr, (ir.Var, lambda var: values.get(var, var)))


def replace_loads(expr: ir.Expr, value_at: Callable[[ir.Var, Sequence[ir.Expr]], ir.Expr | None]) -> ir.Expr:
    """Replace every load for which `value_at(buffer, indices)` is not None.

    Raises: what `value_at` raises first; on its way through TVM an exception would lose its type.
    """
    # kept here while TVM's walk goes on
    raised: list[Exception] = []

    def replaced(load: ir.TensorLoad) -> ir.Expr:
        try:
            value = None if raised else value_at(load.source, load.indices)
        except Exception as error:
            raised.append(error)
            value = None
        return load if value is None else value

    result = tvm_ffi.structural_map(expr, (ir.TensorLoad, replaced))
    if raised:
        raise raised[0]
    return result


def loads(expr: ir.Expr) -> list[ir.TensorLoad]:
    """Every buffer load of an expression, in order."""
    found: list[ir.TensorLoad] = []

    def collect(load: ir.TensorLoad) -> None:
        found.append(load)

    tvm_ffi.structural_walk(expr, (ir.TensorLoad, collect))
    return found


def uses(expr: ir.Expr, var: ir.Var) -> bool:
    """Whether a variable stands anywhere in an expression."""
    found: list[ir.Var] = []

    def collect(v: ir.Var) -> None:
        if v.same_as(var):
            found.append(v)

    tvm_ffi.structural_walk(expr, (ir.Var, collect))
    return bool(found)


@dataclass(frozen=True, slots=True)
class NestBlock:
    """One block: `buffer[indices] = value`, or a reduction over `reduce`, at every point of its iterators."""

    name: str
    spatial: tuple[ir.Var, ...]
    reduce: tuple[ir.Var, ...]
    extents: Mapping[ir.Var, int]
    buffer: ir.Var
    indices: tuple[ir.Expr, ...]
    value: ir.Expr
    annotations: Mapping[str, Any] = field(default_factory=dict)

    @property
    def writes_identity(self) -> bool:
        """Each spatial iterator, in order, is one index of what it writes (unit axes may be constant 0)."""
        iterators = [
            v for v in self.spatial if self.extents[v] > 1 or any(i.same_as(v) for i in self.indices)
        ]
        for index, extent in zip(self.indices, self.buffer.shape, strict=True):
            if iterators and index.same_as(iterators[0]) and self.extents[iterators[0]] == int(extent):
                iterators.pop(0)
            elif int(extent) != 1:
                return False
        return not iterators

    def value_at(self, indices: Sequence[ir.Expr]) -> ir.Expr:
        """The value written at `indices`; only for a block that `writes_identity`."""
        # iterators that no index names have one value
        values: dict[ir.Var, ir.Expr] = {v: tirx.const(0, str(v.ty.dtype)) for v in self.spatial}
        values |= {
            axis: at for axis, at in zip(self.indices, indices, strict=True) if isinstance(axis, ir.Var)
        }
        return substitute(self.value, values)


@dataclass(frozen=True, slots=True)
class Nest:
    """A function whose body is a sequence of perfect loop nests, one block each."""

    function: tirx.PrimFunc
    blocks: tuple[NestBlock, ...]

    @property
    def reductions(self) -> tuple[NestBlock, ...]:
        """The blocks that reduce, in order."""
        return tuple(block for block in self.blocks if block.reduce)

    def producer(self, buffer: ir.Var) -> NestBlock | None:
        """The block that writes a buffer, None for an input."""
        return next((block for block in self.blocks if block.buffer.same_as(buffer)), None)

    def parameter(self, buffer: ir.Var) -> int | None:
        """Position of a parameter, None for an intermediate."""
        return next((i for i, p in enumerate(self.function.params) if p.same_as(buffer)), None)

    def inlined(self, expr: ir.Expr, stop: NestBlock | None = None) -> ir.Expr:
        """`expr` with spatial intermediates replaced by what computes them, except the buffer of `stop`."""

        def value_at(buffer: ir.Var, indices: Sequence[ir.Expr]) -> ir.Expr | None:
            block = self.producer(buffer)
            if block is None or block is stop or block.reduce:
                return None
            return self.inlined(block.value_at(indices), stop)

        return replace_loads(expr, value_at)


# Every rule that is offered a function reads it: for both devices some ten times one after the other.
_remembers_last = lru_cache(maxsize=4)


@_remembers_last
def read_nest(function: tirx.PrimFunc) -> Nest | None:
    """Read a function; None if a block is opaque, nested or writes more than its own point."""
    schedule = s_tir.Schedule(function)
    root = schedule.get_sblock("root")
    blocks = []
    for rv in schedule.get_child_blocks(root):
        block = read_block(schedule.get(rv))
        if block is None or not block.writes_identity:
            return None
        blocks.append(block)
    return Nest(function, tuple(blocks)) if blocks else None


def read_block(block: s_tir.SBlock) -> NestBlock | None:
    """A block that stores one value at each of its points; None for others."""
    store = block.body
    # matched buffers are views of others, which an expression cannot name
    if not isinstance(store, tirx.BufferStore) or block.match_buffers:
        return None
    kinds = {int(v.iter_type) for v in block.iter_vars}
    if not kinds <= {tirx.IterVar.DataPar, tirx.IterVar.CommReduce}:
        return None
    if not all(isinstance(v.dom.extent, tirx.IntImm) for v in block.iter_vars):
        return None
    return NestBlock(
        block.name_hint,
        tuple(v.var for v in block.iter_vars if int(v.iter_type) == tirx.IterVar.DataPar),
        tuple(v.var for v in block.iter_vars if int(v.iter_type) == tirx.IterVar.CommReduce),
        {v.var: int(v.dom.extent) for v in block.iter_vars},
        store.buffer,
        tuple(store.indices),
        store.value,
        dict(block.annotations),
    )


@dataclass(frozen=True, slots=True)
class Contraction:
    """A sum of products and what follows it: `out = epilogue(sum over reduce of left * right)`."""

    nest: Nest
    anchor: NestBlock
    left: ir.TensorLoad
    right: ir.TensorLoad

    def store(self, at: Mapping[ir.Var, ir.Expr], accumulated: ir.Expr) -> tirx.BufferStore:
        """Write the output element of the anchor's point `at`, whose sum is `accumulated`."""
        return store_at(self.nest, self.anchor, at, accumulated)


def store_at(
    nest: Nest, anchor: NestBlock, at: Mapping[ir.Var, ir.Expr], accumulated: ir.Expr
) -> tirx.BufferStore:
    """Write the output element of the anchor's point `at`, which it reduces to `accumulated`."""
    # without an epilogue the sum is the output's element itself
    last = nest.blocks[-1]
    point = [substitute(index, at) for index in anchor.indices]
    if last is anchor:
        return tirx.BufferStore(last.buffer, accumulated, point)

    def sum_at(buffer: ir.Var, indices: Sequence[ir.Expr]) -> ir.Expr | None:
        return accumulated if buffer.same_as(anchor.buffer) else None

    value = replace_loads(nest.inlined(last.value_at(point), anchor), sum_at)
    return tirx.BufferStore(last.buffer, value, point)


@_remembers_last
def read_contraction(function: tirx.PrimFunc) -> Contraction | None:
    """A float32 function with one multiply-accumulate anchor and a point-wise epilogue, else None."""
    return _contraction(function, "float32", lambda factor: factor)


@_remembers_last
def read_integer_contraction(function: tirx.PrimFunc) -> Contraction | None:
    """The same with int32 sums of products of 8-bit numbers, the right ones signed; `adds_128` tells whether
    the left ones are made unsigned."""
    return _contraction(function, "int32", _eight_bits)


def _contraction(
    function: tirx.PrimFunc, dtype: str, factor_of: Callable[[ir.Expr], ir.Expr]
) -> Contraction | None:
    nest = read_nest(function)
    # with two reductions there is no single sum that an epilogue could follow
    if nest is None or len(nest.reductions) != 1:
        return None
    anchor = nest.reductions[0]
    last = nest.blocks[-1]
    if str(anchor.buffer.dtype) != dtype or nest.parameter(last.buffer) is None:
        return None
    product = _summand(anchor)
    if product is None or not is_pointwise(nest, anchor):
        return None
    left, right = factor_of(product.a), factor_of(product.b)
    if not isinstance(left, ir.TensorLoad) or not isinstance(right, ir.TensorLoad):
        return None
    types = [str(load.source.dtype) for load in (left, right)]
    if (
        types != ["float32", "float32"]
        if dtype == "float32"
        else types not in (["uint8", "int8"], ["int8"] * 2)
    ):
        return None
    return Contraction(nest, anchor, left, right)


def _eight_bits(factor: ir.Expr) -> ir.Expr:
    """What is extended to 32 bits, perhaps after 128 was added; for anything else the factor itself."""
    # signed numbers are made unsigned by 128, as `vpdpbusd` wants its left operand
    if isinstance(factor, tirx.Add) and isinstance(factor.b, tirx.IntImm) and int(factor.b) == 128:
        factor = factor.a
    return factor.value if isinstance(factor, tirx.Cast) else factor


def adds_128(contraction: Contraction) -> bool:
    """Whether 128 is added to the left numbers of an integer contraction: signed ones become unsigned."""
    return isinstance(contraction.anchor.value.b.a, tirx.Add)


def _summand(anchor: NestBlock) -> tirx.Mul | None:
    value = anchor.value
    if not isinstance(value, tirx.Add) or not isinstance(value.b, tirx.Mul):
        return None
    # `buffer[...] = buffer[...] + a * b`, as TVM writes a sum
    own = isinstance(value.a, ir.TensorLoad) and value.a.source.same_as(anchor.buffer)
    return value.b if own else None


def is_pointwise(nest: Nest, anchor: NestBlock) -> bool:
    """Everything after the anchor maps its element at a point to the output's element at that point."""
    start = nest.blocks.index(anchor)
    shape = [int(e) for e in anchor.buffer.shape]
    outputs = [b for b in nest.blocks if nest.parameter(b.buffer) is not None]
    if len(outputs) != 1 or outputs[0] is not nest.blocks[-1]:
        return False
    # reads of inputs may be at any index; those of results have to be at the point itself
    inner = [anchor.buffer, *(b.buffer for b in nest.blocks[start + 1 :])]
    for block in nest.blocks[start + 1 :]:
        if [int(e) for e in block.buffer.shape] != shape:
            return False
        # indices may be spelled differently, such as after a reshape
        analyzer = sym.Analyzer()
        for load in loads(block.value):
            if any(load.source.same_as(buffer) for buffer in inner):
                same = zip(load.indices, block.indices, strict=True)
                if not all(analyzer.can_prove_equal(a, b) for a, b in same):
                    return False
    return True


def finish(
    function: tirx.PrimFunc,
    rule: str,
    packings: Sequence[tuple[int, Packing]] = (),
    choices: Iterable[str] = (),
    rows: Rows = (),
) -> Scheduled:
    """The result of a rule: what is left at the root becomes workspace parameters."""
    lifted, workspace_bytes = lift_workspace(function)
    return Scheduled(lifted, rule, tuple(packings), workspace_bytes, tuple(choices), rows)


def result(request: Request, schedule: s_tir.Schedule, rule: str) -> Scheduled:
    """`finish` for a rule that scheduled the function in place."""
    # the schedule's module has this one function; Relax's attributes are put back
    name = next(iter(schedule.mod.get_global_vars()))
    return finish(schedule.mod[name].with_attrs(dict(request.function.attrs or {})), rule)
