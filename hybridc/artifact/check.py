"""Whether the parts of an artifact agree. Their values are of the right types, and nothing else is known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from hybridc.artifact.manifest import (
    WEIGHT_ALIGNMENT_BYTES,
    WEIGHTS,
    Interface,
    Manifest,
    Port,
    StoredPlan,
    StoredWeight,
    joined_axis,
)
from hybridc.ir import BufferKind, Device, Graph, Plan, Role
from hybridc.ir.graph import dtype_bits, stored_dtype
from hybridc.sizes import Interval


def check_weight_tables(manifest: Manifest) -> None:
    """Each weight has the size of its shape, and all together fill weights.bin: no gap, no overlap.

    Raises ValueError.
    """
    places: dict[tuple[int, int], tuple[str, str, int]] = {}
    for weight in _weights(manifest):
        if weight.size_bytes * 8 != math.prod(weight.shape) * dtype_bits(weight.dtype):
            raise ValueError(f"weight {weight.tensor!r} has a size that does not match its shape")
        if weight.offset_bytes % WEIGHT_ALIGNMENT_BYTES:
            raise ValueError(f"weight {weight.tensor!r} is not aligned")
        content = (weight.tensor, weight.dtype, weight.layout)
        place = (weight.offset_bytes, weight.size_bytes)
        if weight.size_bytes and places.setdefault(place, content) != content:
            raise ValueError(f"weights {places[place][0]!r} and {weight.tensor!r} share bytes")
    end = 0
    for offset_bytes, size_bytes in sorted(places):
        if offset_bytes != _aligned(end):
            raise ValueError(f"weights leave a gap or overlap at byte {offset_bytes} of {WEIGHTS}")
        end = offset_bytes + size_bytes
    file_bytes = next(f.size_bytes for f in manifest.files if f.name == WEIGHTS)
    if file_bytes not in (end, _aligned(end)):  # aligned for a weight without elements
        raise ValueError(f"weights end at byte {end} of {file_bytes} of {WEIGHTS}")


def _weights(manifest: Manifest) -> Iterator[StoredWeight]:
    for plan in manifest.plans:
        yield from (*plan.host_weights, *plan.streamed_weights, *plan.gpu_weights)


def _aligned(offset_bytes: int) -> int:
    return -(-offset_bytes // WEIGHT_ALIGNMENT_BYTES) * WEIGHT_ALIGNMENT_BYTES


def check_agreement(manifest: Manifest, graphs: tuple[Graph, ...], plans: tuple[Plan, ...]) -> None:
    """Manifest and plans have the same inputs, outputs and weights.

    Raises ValueError or KeyError, whatever is in the plans: they are not verified yet.
    """
    interfaces = manifest.interfaces
    for interface in interfaces:
        _check_cuts(interface)
    if manifest.buckets:
        _check_buckets(manifest)
    elif manifest.dimensions:
        raise ValueError("there are open dimensions, but no buckets")
    for stored, graph, plan in zip(manifest.plans, graphs, plans, strict=True):
        if stored.bucket >= len(interfaces):
            raise ValueError("a plan is for a bucket that there is not")
        _check_ports(interfaces[stored.bucket], graph)
        _check_stored_plan(stored, graph, plan)
    if not manifest.instruction_sets:
        raise ValueError("there is no instruction set")
    places = list(product(range(len(manifest.instruction_sets)), range(len(interfaces))))
    _check_budgets([(stored.instruction_set, stored.bucket) for stored in manifest.plans], plans, places)


Place = tuple[int, int]
"""Positions of an instruction set and of a bucket."""


def _check_budgets(found: Sequence[Place], plans: tuple[Plan, ...], places: Sequence[Place]) -> None:
    """Plans are listed by instruction sets, then by buckets, and those of each have the same increasing
    budgets."""
    budgets = [plan.budget_bytes or 0 for plan in plans]
    of_each = len(plans) // len(places)
    first = budgets[:of_each]
    if list(found) != [place for place in places for _ in range(of_each)]:
        raise ValueError("the plans are not listed by instruction sets and buckets")
    if not first or first != sorted(set(first)) or budgets != first * len(places):
        raise ValueError("the plans must be for increasing budgets")


def _check_buckets(manifest: Manifest) -> None:
    """Buckets differ in the extents of open axes alone, each size is there with each of other dimensions but
    those that follow it, and the last has the shapes that users see."""
    last = manifest.buckets[-1]
    if (last.inputs, last.outputs, last.counts) != (manifest.inputs, manifest.outputs, manifest.counts):
        raise ValueError("the last bucket does not have the inputs and outputs of the artifact")
    open_axes = {axis: i for i, each in enumerate(manifest.dimensions) for axis in each.axes}
    known = {(port.name, axis) for port in manifest.inputs for axis in range(len(port.shape))}
    names = [each.name for each in manifest.dimensions]
    if not names or len(set(names)) != len(names) or not open_axes.keys() <= known:
        raise ValueError("open dimensions are none, twice there, or of axes that there are not")
    columns = list(zip(*(bucket.sizes for bucket in manifest.buckets), strict=False))
    free = [each for i, each in enumerate(columns) if not any(_follows(each, other) for other in columns[:i])]
    if len({bucket.sizes for bucket in manifest.buckets}) != math.prod(len(set(each)) for each in free):
        raise ValueError("there is no bucket for some sizes that others allow")
    for bucket in manifest.buckets:
        if len(bucket.sizes) != len(names) or not all(1 <= each.low <= each.high for each in bucket.sizes):
            raise ValueError("a bucket does not have sizes for each open dimension")
        for port, largest in zip(bucket.inputs, manifest.inputs, strict=True):
            extents = tuple(
                bucket.sizes[open_axes[port.name, axis]].high if (port.name, axis) in open_axes else extent
                for axis, extent in enumerate(largest.shape)
            )
            if port != replace(largest, shape=extents):
                raise ValueError(f"input {port.name!r} is another one in a bucket")
        outputs = [
            [(p.name, p.dtype, len(p.shape)) for p in ports] for ports in (bucket.outputs, last.outputs)
        ]
        if outputs[0] != outputs[1]:
            raise ValueError("a bucket has other outputs")


def _follows(sizes: Sequence[Interval], others: Sequence[Interval]) -> bool:
    """Whether a dimension has one size in each bucket, which is that of another and always the same more."""
    pairs = list(zip(sizes, others, strict=True))
    is_exact = all(one.is_exact and other.is_exact for one, other in pairs)
    return is_exact and len({one.high - other.high for one, other in pairs}) == 1


def _check_ports(interface: Interface, graph: Graph) -> None:
    """Ports have their tensors' types, a name stands for one tensor, inputs are what must be given, once."""
    tensors: dict[str, str] = {}
    results = (*interface.outputs, *interface.counts)
    sizes = tuple(Port("", (1,), "int64") for _ in interface.sizes)
    for ports, names in (((*interface.inputs, *sizes), graph.inputs), (results, graph.outputs)):
        tensors_of_ports = graph.ports(names)
        if len(ports) != len(tensors_of_ports):
            raise ValueError("its inputs and outputs do not match the plan")
        for port, own in zip(ports, tensors_of_ports, strict=True):
            shapes, types = zip(*((graph.tensor[n].shape, graph.tensor[n].dtype) for n in own), strict=True)
            if len(own) > 1:
                joined_axis(port.shape, shapes)
            # a port may see its tensor through a reshape, so only the number of elements must agree
            elements = sum(map(math.prod, shapes))
            if elements != math.prod(port.shape) or set(types) != {stored_dtype(port.dtype)}:
                raise ValueError("its inputs and outputs do not match the plan")
            if port.name and tensors.setdefault(port.name, own[0]) != own[0]:
                raise ValueError(f"{port.name!r} names two tensors")
    given = {t.name for t in graph.tensors if t.role is not Role.WEIGHT} - graph.producer.keys()
    if sorted(given) != sorted(graph.inputs):
        raise ValueError("its inputs are not what the plan's kernels are given")


def _check_cuts(interface: Interface) -> None:
    """Outputs are cut along axes that they have, each once, by single numbers."""
    if any(math.prod(port.shape) != 1 or port.dtype != "int64" for port in interface.counts):
        raise ValueError("a count is not a single int64 number")
    if any(port.cuts for port in (*interface.inputs, *interface.counts)):
        raise ValueError("only outputs can be cut")
    for port in interface.outputs:
        axes = [cut.axis for cut in port.cuts]
        if len(set(axes)) < len(axes) or any(axis >= len(port.shape) for axis in axes):
            raise ValueError(f"{port.name!r} is cut along an axis that it does not have")
        if any(cut.count >= len(interface.counts) for cut in port.cuts):
            raise ValueError(f"{port.name!r} is cut by a count that there is not")


def _check_stored_plan(stored: StoredPlan, graph: Graph, plan: Plan) -> None:
    for weight in (*stored.host_weights, *stored.streamed_weights, *stored.gpu_weights):
        _check_weight(weight, graph)
    uploads = sorted((w.tensor, w.arena_offset_bytes or 0, w.size_bytes) for w in stored.gpu_weights)
    weights = [b for b in plan.buffers if b.kind is BufferKind.WEIGHT and b.device is Device.GPU]
    resident = [b for b in weights if b.first_step < 0]
    if uploads != sorted((b.tensor, b.offset_bytes, b.size_bytes) for b in resident):
        raise ValueError("its GPU weights do not match the plan")
    streamed = sorted((w.tensor, w.size_bytes) for w in stored.streamed_weights)
    if streamed != sorted({(b.tensor, b.size_bytes) for b in weights if b.first_step >= 0}):
        raise ValueError("its streamed weights do not match the plan")
    plain = {w.tensor for w in stored.host_weights if not w.layout}
    if any(graph.tensor[n].role is Role.WEIGHT and n not in plain for n in graph.outputs):
        raise ValueError("a weight that is an output is missing")
    if any(w.arena_offset_bytes is None for w in stored.gpu_weights):
        raise ValueError("a GPU weight has no place in the arena")
    if any(w.arena_offset_bytes is not None for w in (*stored.host_weights, *stored.streamed_weights)):
        raise ValueError("a weight on the host has a place in the GPU's arena")


def _check_weight(weight: StoredWeight, graph: Graph) -> None:
    """It is one of the graph's, and of its type unless it is packed: kernels may see it through a reshape."""
    tensor = graph.tensor.get(weight.tensor)
    if tensor is None or tensor.role is not Role.WEIGHT:
        raise ValueError(f"{weight.tensor!r} is no weight of the plan")
    types = [(math.prod(w.shape), w.dtype) for w in (weight, tensor)]
    if not weight.layout and types[0] != types[1]:
        raise ValueError(f"weight {weight.tensor!r} has another type in the plan")
