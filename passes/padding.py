"""Kernels that leave out what is padding in a run: those whose results nobody relies on behind the sizes.

The frontend has seen to it that no result of a network depends on padding, whatever it holds: what combines
elements along an open axis has a mask, made from the sizes. So where a kernel computes an element from one
that is padding and at the same place, nobody needs it, unless a mask decides what it is.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import product

import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx

from hybridc.ir import Device, Graph, Kernel, Role
from hybridc.schedules.padding.elements import OpenAxis, inner_extents, within_axis
from hybridc.schedules.padding.skip import with_sizes
from hybridc.schedules.rule import Scheduled
from hybridc.schedules.safety.statements import is_conditional, variables
from hybridc.schedules.shapes import shape_of

Padded = frozenset[OpenAxis]
OpenInputs = Mapping[str, Mapping[int, str]]
"""By input and axis, the input that says its size."""
_LEAST_BYTES = 1 << 14
"""Of the results of a kernel that is worth a condition: less fits a first-level cache, whatever the sizes."""
_FLOATS = frozenset({"float32", "float16", "bfloat16"})


def without_padding(
    graph: Graph,
    functions: Mapping[str, tirx.PrimFunc],
    scheduled: Mapping[tuple[str, Device], Scheduled],
    inputs: OpenInputs,
    gpu: tvm.target.Target | None = None,
) -> tuple[Graph, Mapping[tuple[str, Device], Scheduled], Mapping[str, str]]:
    """The graph, whose kernels read the sizes where they skip padding by them; the functions that these call,
    for the devices that they are scheduled for; and what each of them is made of.

    `functions` are those of the graph before they were scheduled. Kernels are left as they are that make
    integers, which may be positions; that another one's positions follow from; that keep what a later run
    reads; and whose loops write more than what is padding.
    """
    made: dict[tuple[str, Device], Scheduled] = {}
    origins: dict[str, str] = {}
    if not any(inputs.values()) or graph.loop_carried:
        return graph, made, origins
    padded = _padded_tensors(graph, functions, inputs)
    relied_on = _before_positions(graph)
    kernels, whole = [], set[str]()
    for kernel in graph.kernels:
        padding = [tuple(sorted(padded[name])) for name in kernel.outputs]
        if kernel.name in relied_on or not _is_worthwhile(graph, kernel) or not all(padding):
            kernels.append(kernel)
            continue
        sizes = sorted({each.size for axes in padding for each in axes})
        name = f"{kernel.function}_sized_{zlib.crc32(repr(padding).encode()):08x}"
        if name not in origins and name not in whole:
            found = {
                (name, device): with_sizes(
                    scheduled[kernel.function, device],
                    len(kernel.inputs),
                    padding,
                    sizes,
                    gpu if device is Device.GPU else None,
                )
                for device in kernel.devices
            }
            if any(skips for _, skips in found.values()):
                made.update({key: function for key, (function, _) in found.items()})
                origins[name] = kernel.function
            else:
                whole.add(name)
        sized = replace(kernel, function=name, inputs=(*kernel.inputs, *sizes))
        kernels.append(kernel if name in whole else sized)
    return replace(graph, kernels=tuple(kernels)), made, origins


def _is_worthwhile(graph: Graph, kernel: Kernel) -> bool:
    results = [graph.tensor[name] for name in kernel.outputs]
    if kernel.appends or kernel.choice or kernel.is_mean_of_ranks:
        return False
    return all(t.dtype in _FLOATS for t in results) and sum(t.size_bytes for t in results) >= _LEAST_BYTES


def _before_positions(graph: Graph) -> Collection[str]:
    """Kernels whose results decide positions that a kernel checks, directly or not: a position in padding
    is checked as any other."""
    pending = [
        name
        for kernel in graph.kernels
        for check in kernel.checks
        for name in ([check.tensor] if check.tensor else kernel.inputs)
    ]
    found: set[str] = set()
    while pending:
        number = graph.producer.get(pending.pop())
        if number is not None and graph.kernels[number].name not in found:
            found.add(graph.kernels[number].name)
            pending.extend(graph.kernels[number].inputs)
    return found


def _padded_tensors(
    graph: Graph, functions: Mapping[str, tirx.PrimFunc], inputs: OpenInputs
) -> Mapping[str, Padded]:
    """Of each tensor the open axes along which nobody relies on its padding."""
    padded: dict[str, Padded] = {tensor.name: frozenset() for tensor in graph.tensors}
    sizes = {size for axes in inputs.values() for size in axes.values()}
    for name, axes in inputs.items():
        shape = graph.tensor[name].shape
        inner = inner_extents(shape)
        padded[name] = frozenset(OpenAxis(inner[axis], shape[axis], size) for axis, size in axes.items())
    fixed = {tensor.name for tensor in graph.tensors if tensor.role is Role.WEIGHT}
    of_sizes = set(sizes)  # what follows from sizes alone
    known: dict[object, Sequence[Padded]] = {}
    for kernel in graph.kernels:
        if of_sizes.intersection(kernel.inputs) and of_sizes.union(fixed).issuperset(kernel.inputs):
            of_sizes.update(kernel.outputs)
            continue
        given = tuple(padded[name] for name in kernel.inputs)
        masks = tuple(name in of_sizes for name in kernel.inputs)
        constant = tuple(name in fixed for name in kernel.inputs)
        key = kernel.function, given, masks, constant
        if key not in known:
            known[key] = _padded_results(functions[kernel.function], given, masks, constant)
        padded.update(zip(kernel.outputs, known[key], strict=True))
    return padded


def _padded_results(
    function: tirx.PrimFunc, given: Sequence[Padded], masks: Sequence[bool], constant: Sequence[bool]
) -> Sequence[Padded]:
    """Open axes of a function's results, from those of its operands.

    `masks` are operands that follow from sizes: where they choose what an element is, padding is what
    somebody relies on.
    """
    count = len(given)
    operands = list(function.params)[:count]
    padded = dict(zip(operands, given, strict=True))
    of_sizes = {operand for operand, is_mask in zip(operands, masks, strict=True) if is_mask}
    fixed = {operand for operand, is_fixed in zip(operands, constant, strict=True) if is_fixed}
    blocks: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(function.body, (s_tir.SBlock, blocks.append))
    for block in blocks:
        if not block.iter_vars:
            continue
        for store in _stores(block):
            loads = _loads(store.value, *store.indices)
            sources = {load.source for load in loads}
            if sources & of_sizes and sources <= of_sizes | fixed:
                of_sizes.add(store.buffer)
            else:
                before = padded.get(store.buffer)
                found = _padded_store(store, loads, padded, of_sizes, _spatial(block))
                padded[store.buffer] = found if before is None else before & found
    if _writes_elsewhere(function, blocks):
        return [frozenset()] * (len(function.params) - count)
    return [padded.get(result, frozenset()) for result in list(function.params)[count:]]


def _padded_store(
    store: tirx.BufferStore,
    loads: Iterable[ir.TensorLoad],
    padded: Mapping[ir.Var, Padded],
    of_sizes: AbstractSet[ir.Var],
    spatial: Collection[ir.Var],
) -> Padded:
    """Open axes along which an element that is stored is computed from those at the same place."""
    if str(store.buffer.dtype) not in _FLOATS:
        return frozenset()  # conditions and positions, of which padding may be what somebody relies on
    free = set(spatial)
    for condition in _conditions(store.value):
        if of_sizes.isdisjoint(load.source for load in _loads(condition)):
            continue
        named = variables(condition) & free
        if not named:
            return frozenset()
        free -= named
    shape = shape_of(store.buffer)
    inner = inner_extents(shape)
    found: set[OpenAxis] = set()
    for load in loads:
        axes = padded.get(load.source)
        if not axes:
            continue
        known = shape_of(load.source)
        for (axis, index), (own, read) in product(enumerate(store.indices), enumerate(load.indices)):
            if not isinstance(index, ir.Var) or index not in free or not index.same_as(read):
                continue
            if known[own] != shape[axis]:
                continue
            steps = ((each, within_axis(each, known, own)) for each in axes)
            found.update(
                OpenAxis(step * inner[axis], each.extent, each.size)
                for each, step in steps
                if step is not None
            )
    return frozenset(found)


def _spatial(block: s_tir.SBlock) -> set[ir.Var]:
    return {each.var for each in block.iter_vars if int(each.iter_type) == int(tirx.IterVar.DataPar)}


def _stores(block: s_tir.SBlock) -> Sequence[tirx.BufferStore]:
    """All that a block does, if these are stores; else none."""
    statements = block.body.seq if isinstance(block.body, tirx.SeqStmt) else [block.body]
    return statements if all(isinstance(each, tirx.BufferStore) for each in statements) else ()


def _writes_elsewhere(function: tirx.PrimFunc, blocks: Iterable[s_tir.SBlock]) -> bool:
    """Whether there are stores that are not those of blocks."""
    known = sum(
        len(_stores(block)) + (0 if block.init is None else _count_stores(block.init))
        for block in blocks
        if block.iter_vars
    )
    return _count_stores(function.body) > known


def _count_stores(node: tirx.Stmt) -> int:
    found: list[tirx.BufferStore] = []
    tvm_ffi.structural_walk(node, (tirx.BufferStore, found.append))
    return len(found)


def _loads(*nodes: ir.Expr) -> list[ir.TensorLoad]:
    found: list[ir.TensorLoad] = []
    for node in nodes:
        tvm_ffi.structural_walk(node, (ir.TensorLoad, found.append))
    return found


def _conditions(value: ir.Expr) -> list[ir.Expr]:
    """Those that choose between two values."""
    found: list[ir.Expr] = []
    tvm_ffi.structural_walk(
        value,
        (
            (tirx.Select, lambda node: found.append(node.condition)),
            (ir.Call, lambda node: found.append(node.args[0]) if is_conditional(node) else None),
        ),
    )
    return found
