"""Tensors that are 16-bit floats in memory where the arithmetic is float32.

A function that *stores* such tensors widens each element where it reads it and rounds where it writes it. On
a GPU rules schedule it as it is. For a CPU the same function with float32 tensors is scheduled, by any rule,
and what the rule made then gets 16-bit parameters: a vector load converts its vector in a register
(`vcvtph2ps`), a vector store rounds it (`vcvtps2ph`). An operand whose elements are broadcast one by one,
again and again, is widened once: a weight when it is packed, any other in front of the kernel, into scratch
memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import tvm_ffi
from tvm import ir, s_tir, te, tirx

from hybridc.schedules.conversion import converted
from hybridc.schedules.cpu.core.micro_kernel import function_of
from hybridc.schedules.mutation import mutate, renamed
from hybridc.schedules.packing import Packing
from hybridc.schedules.rule import Request, Rule, Scheduled
from hybridc.schedules.scalar_loads import addressed, scalar_loads
from hybridc.schedules.shapes import index_shape, shape_of

WIDE, NARROW = "float32", ("float16", "bfloat16")
_ROUNDED = "in_memory"
"""Name of a block that does nothing but round a result."""


def stored(function: tirx.PrimFunc, dtypes: Mapping[int, str]) -> tirx.PrimFunc:
    """A function of float32 tensors, not scheduled yet, with some parameters in 16 bits.

    `dtypes` are their types by position. Elements that are only moved are not converted. A result that the
    function reads again, such as a sum that it accumulates, is float32 until it is complete.
    """
    outputs = {p for p in written_buffers(function) if any(p.same_as(q) for q in function.params)}
    read = _read(function.body)
    new, rounded = dict[ir.Var, ir.Var](), dict[ir.Var, ir.Var]()
    for position, dtype in dtypes.items():
        parameter = function.params[position]
        narrow = _like(parameter, dtype)
        target = rounded if parameter in outputs and parameter in read else new
        target[parameter] = narrow
    body = retyped(function.body, new)
    parameters = [{**new, **rounded}.get(p, p) for p in function.params]
    blocks = [_rounding(wide, narrow) for wide, narrow in rounded.items()]
    return joined(function, parameters, [], body, blocks, [*rounded])


@dataclass(frozen=True, slots=True)
class WideFunction:
    """A function of float32 tensors in the place of one that stores some in 16 bits."""

    function: tirx.PrimFunc
    dtypes: Mapping[int, str]
    """Of the parameters that the other one stores, by position."""


def widened(function: tirx.PrimFunc) -> WideFunction | None:
    """The inverse of `stored`; None for a function that converts nothing."""
    dtypes = {i: str(p.dtype) for i, p in enumerate(function.params) if str(p.dtype) in NARROW}
    if not dtypes or not _converts(function.body):
        return None
    new = {function.params[i]: _like(function.params[i], WIDE) for i in dtypes}
    body = retyped(function.body, new)
    parameters = [new.get(p, p) for p in function.params]
    return WideFunction(_without_copies(joined(function, parameters, [], body, [], [])), dtypes)


def with_storage(
    scheduled: Scheduled, dtypes: Mapping[int, str], request: Request, elementwise: Rule
) -> Scheduled:
    """What a CPU's rule made of a function of float32 tensors, with some parameters in 16 bits.

    `request` is that of the function, `elementwise` the rule for element-wise functions.
    """
    function, params = scheduled.function, list(scheduled.function.params)
    counts, pointed, read = scalar_loads(function), addressed(function), _read(function.body)
    written = written_buffers(function)
    packings, workspace = dict(scheduled.packings), list(scheduled.workspace_bytes)
    new = dict[ir.Var, ir.Var]()
    before, after, added = list[tirx.PrimFunc](), list[tirx.PrimFunc](), list[ir.Var]()
    for position, dtype in dtypes.items():
        p = params[position]
        if str(p.dtype) != WIDE:
            continue  # packed for special instructions, of whatever the model's array has
        # a number alone stays in a register
        reused = (counts.get(p, 0) > math.prod(shape_of(p)) and shape_of(p) != ()) or p in pointed
        if position in request.constants:
            packing = packings.get(position) or _unpacked(shape_of(p))
            if reused or packing.transform is not None or packing.combined is not None:
                packings[position] = replace(packing, dtype=WIDE)
            else:
                new[p] = _like(p, dtype)
            continue
        narrow = params[position] = _like(p, dtype)
        if p in written and (p in read or p in pointed):
            after.append(_conversion(p, narrow, request, elementwise))
        elif p not in written and reused:
            before.append(_conversion(narrow, p, request, elementwise))
        else:
            new[p] = narrow
            continue
        added.append(p)
        workspace.append(4 * math.prod(shape_of(p)))
    body = retyped(function.body, new, _float32)
    params = [new.get(p, p) for p in params]
    made = joined(function, [*params, *added], before, body, after, [])
    return replace(
        scheduled, function=made, packings=tuple(packings.items()), workspace_bytes=tuple(workspace)
    )


def _unpacked(shape: tuple[int, ...]) -> Packing:
    return Packing(shape, shape, tuple(range(len(shape))))


def _like(buffer: ir.Var, dtype: str) -> ir.Var:
    return tirx.decl_buffer(list(buffer.shape), dtype, buffer.name, layout=None)


def _conversion(source: ir.Var, target: ir.Var, request: Request, elementwise: Rule) -> tirx.PrimFunc:
    """A scheduled function of these two parameters that converts all elements."""
    function = _converting(source, target)
    made = elementwise(replace(request, function=function, constants=frozenset(), choice=None))
    assert made is not None and not made.workspace_bytes
    return renamed(made.function, [source, target])


def _rounding(wide: ir.Var, narrow: ir.Var) -> tirx.PrimFunc:
    return renamed(_converting(wide, narrow), [wide, narrow])


def _converting(source: ir.Var, target: ir.Var) -> tirx.PrimFunc:
    x = te.placeholder(index_shape(shape_of(source)), str(source.dtype), "x")
    y = te.compute(x.shape, lambda *i: x(*i).astype(str(target.dtype)), name=_ROUNDED)
    return te.create_prim_func([x, y]).with_attr("tirx.noalias", True)


def joined(
    function: tirx.PrimFunc,
    parameters: Sequence[ir.Var],
    before: Sequence[tirx.PrimFunc],
    body: tirx.Stmt,
    after: Sequence[tirx.PrimFunc],
    buffers: Sequence[ir.Var],
) -> tirx.PrimFunc:
    """A function that does what these do one after the other, in one root block."""
    roots = [f.body for f in before] + [body] + [f.body for f in after]
    stages: list[tirx.Stmt] = []
    allocated = list(buffers)
    for root in roots:
        block = root.block
        stages += block.body if isinstance(block.body, tirx.SeqStmt) else [block.body]
        allocated += block.alloc_buffers
    return function_of(function, parameters, stages, allocated)


def _without_copies(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Without the blocks that `stored` added to round results: the function writes these itself."""
    root = function.body.block
    stages = root.body if isinstance(root.body, tirx.SeqStmt) else [root.body]
    new, kept = dict[ir.Var, ir.Var](), list[tirx.Stmt]()
    for stage in stages:
        block = _only_block(stage)
        if block is not None and block.name_hint == _ROUNDED and isinstance(block.body.value, ir.TensorLoad):
            new[block.body.value.source] = block.body.buffer
        else:
            kept.append(stage)
    if not new:
        return function
    stages = [tvm_ffi.structural_map(stage, (ir.Var, lambda v: new.get(v, v))) for stage in kept]
    buffers = [b for b in root.alloc_buffers if b not in new]
    return function_of(function, function.params, stages, buffers)


def _only_block(stage: tirx.Stmt) -> s_tir.SBlock | None:
    while isinstance(stage, tirx.For):
        stage = stage.body
    return stage.block if isinstance(stage, s_tir.SBlockRealize) else None


# ------------------------------------------------------------------------------------ types of accesses


def _cast(value: ir.Expr, dtype: str) -> ir.Expr:
    return tirx.Cast(dtype, value)


def _float32(value: ir.Expr, dtype: str) -> ir.Expr:
    """A 16-bit float, or a vector of them, as float32: where a name stands for a bfloat16 that is cast, TVM's
    lowering forgets the cast (0.27)."""
    lanes = dtype.removeprefix(WIDE)
    if str(value.ty.dtype) != f"bfloat16{lanes}":
        return tirx.Cast(dtype, value)
    bits = tirx.Cast(f"uint32{lanes}", tirx.reinterpret(f"uint16{lanes}", value))
    return tirx.reinterpret(dtype, bits << tirx.const(16, f"uint32{lanes}"))


def retyped(
    body: tirx.Stmt, new: Mapping[ir.Var, ir.Var], convert: Callable[[ir.Expr, str], ir.Expr] = _cast
) -> tirx.Stmt:
    """A statement with other buffers in the place of some, of another floating point type: what is read is
    converted to the old type by `convert`, and what is written is cast to the new one."""

    def load(node: ir.TensorLoad, mutator: tvm_ffi.StructuralMutator) -> ir.Expr:
        buffer = new.get(node.source)
        if buffer is None:
            return mutator.default_mutate(node)
        value = tirx.BufferLoad(buffer, [mutator.mutate(i) for i in node.indices])
        return convert(value, str(node.ty.dtype))

    def store(node: tirx.BufferStore, mutator: tvm_ffi.StructuralMutator) -> tirx.Stmt:
        buffer = new.get(node.buffer)
        if buffer is None:
            return mutator.default_mutate(node)
        indices = [mutator.mutate(i) for i in node.indices]
        value = converted(mutator.mutate(node.value), str(buffer.dtype))
        return tirx.BufferStore(buffer, value, indices, node.span)

    def cast(node: tirx.Cast, mutator: tvm_ffi.StructuralMutator) -> ir.Expr:
        # of a buffer that has the type now that it was converted to
        inner = mutator.mutate(node.value)
        is_load = isinstance(inner, tirx.Cast) and isinstance(inner.value, ir.TensorLoad)
        if is_load and inner.value.source in kept and inner.value.ty.dtype == node.ty.dtype:
            return inner.value
        return tirx.Cast(str(node.ty.dtype), inner)

    def call(node: ir.Call, mutator: tvm_ffi.StructuralMutator) -> ir.Expr:
        if node.op.name != "tirx.address_of" or node.args[0].source not in new:
            return mutator.default_mutate(node)
        at = [mutator.mutate(i) for i in node.args[0].indices]
        return tirx.address_of(tirx.BufferLoad(new[node.args[0].source], at))

    if not new:
        return body
    kept = set(new.values())
    callbacks = [
        (ir.TensorLoad, load),
        (tirx.BufferStore, store),
        (tirx.Cast, cast),
        (ir.Call, call),
        (ir.Var, lambda v, _: new.get(v, v)),
    ]
    return mutate(body, callbacks)


def _converts(body: tirx.Stmt) -> bool:
    """Whether a statement converts between 16 bits and float32."""
    found: list[tirx.Cast] = []

    def note(cast: tirx.Cast) -> None:
        types = {str(cast.ty.dtype).partition("x")[0], str(cast.value.ty.dtype).partition("x")[0]}
        if WIDE in types and types & set(NARROW):
            found.append(cast)

    tvm_ffi.structural_walk(body, (tirx.Cast, note))
    return bool(found)


def _read(body: tirx.Stmt) -> Collection[ir.Var]:
    """What is loaded, and not only prefetched: where an address is taken TVM has a load, too."""
    loads, addresses = Counter[ir.Var](), Counter[ir.Var]()

    def address(call: ir.Call) -> None:
        if call.op.name == "tirx.address_of":
            addresses[call.args[0].source] += 1

    tvm_ffi.structural_walk(
        body, [(ir.TensorLoad, lambda load: loads.update([load.source])), (ir.Call, address)]
    )
    return set(loads - addresses)


def written_buffers(function: tirx.PrimFunc) -> Collection[ir.Var]:
    """Those that a function stores to, intermediates among them."""
    found: set[ir.Var] = set()
    tvm_ffi.structural_walk(function.body, (tirx.BufferStore, lambda store: found.add(store.buffer)))
    return found
