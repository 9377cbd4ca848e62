"""Give every tensor and workspace its bytes: one arena a device, and waits where bytes are reused."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

from hybridc.ir import Arena, Buffer, BufferKind, Copy, Device, Graph, Role, Run, Step, Tensor
from hybridc.ir.plan import align, guards_of, resident_pairs
from hybridc.passes.planner.emit.offsets import MemoryBlock, live_bound, pack
from hybridc.passes.planner.emit.waits import reduce_waits

Spans = Sequence[tuple[float, float]]
"""Predicted start and end of each step, in microseconds. A step that starts when another has ended, or later,
is listed after it."""


@dataclass(frozen=True, slots=True)
class LiveRange:
    """A tensor or workspace on one device, from the begin of step `first` to the end of step `last`."""

    name: str
    kind: BufferKind
    size_bytes: int
    first: int
    last: int
    uses: tuple[int, ...]
    """The steps that touch it, in order."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Bytes of one device that a live range needs, or several of which each overwrites the one before."""

    size_bytes: int
    """Aligned."""
    first: int
    last: int
    uses: tuple[int, ...]
    """As of a live range."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """What needs bytes on a device in the course of some steps."""

    ranges: tuple[LiveRange, ...]
    """Those of one tensor one after the other, in time."""
    groups: Sequence[Sequence[int]]
    """Live ranges by number that take over one another's bytes, of each allocation."""
    allocations: tuple[Allocation, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Listing:
    """These steps of this graph: equal to itself alone, as comparing thousands of steps takes as long as
    what is to be spared."""

    graph: Graph
    steps: tuple[Step, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Listing) and self.graph is other.graph and self.steps is other.steps

    def __hash__(self) -> int:
        return hash((id(self.graph), id(self.steps)))


def reuse_buffers(
    graph: Graph,
    steps: Sequence[Step],
    devices: Sequence[Device],
    spans: Spans | None = None,
    *,
    gpu_capacity_bytes: int | None = None,
    effort: float = 1.0,
) -> tuple[tuple[Step, ...], tuple[Buffer, ...], tuple[Arena, ...]]:
    """Place all buffers in one arena a device: `(steps, buffers, arenas)`, arenas in the order of `devices`.

    Requires: each step waits, itself or through others, for those that put there what it reads.
    Ensures: buffers overlap only if every use of the one ends before any use of the other begins, along
    lanes and waits, for which the returned steps may wait more than the given ones; or if a kernel
    overwrites an input as `Kernel.may_overwrite` permits. Of a resident pair both have the same bytes, which
    nothing else has before the one or after the other.

    Steps of one lane start while those of another still run, so bytes that are free by the order of the
    list may have to be waited for. With `spans`, bytes are reused only by what starts after their last
    use is predicted to end: no wait then delays the predicted run, but the arenas may be larger. Arenas
    are packed as tightly as `effort` finds; the GPU's only until it has `gpu_capacity_bytes`, if given.
    """
    # grows by hazards: steps that used the same bytes before
    needs = [set(step.waits) for step in steps]
    buffers: list[Buffer] = []
    arenas: list[Arena] = []
    for device in devices:
        held = holdings_of(graph, steps, device)
        ranges, allocations = held.ranges, held.allocations
        offsets = [0] * len(ranges)
        blocks = _blocks(allocations, spans)
        # the host's arena has no capacity: it is packed as tightly as it gets
        capacity_bytes = gpu_capacity_bytes if device is Device.GPU else None
        for group, offset in zip(held.groups, pack(blocks, capacity_bytes, effort), strict=True):
            for member in group:
                offsets[member] = offset
        placed = [
            Buffer(s.name, s.kind, device, offset, s.size_bytes, s.first, s.last)
            for s, offset in zip(ranges, offsets, strict=True)
        ]
        for step, hazards in _hazards(ranges, placed):
            needs[step] |= hazards
        buffers += placed
        size_bytes = max((align(b.end_bytes) for b in placed), default=0)
        arenas.append(Arena(device, size_bytes, live_bound(_blocks(allocations))))
    return reduce_waits(steps, needs), tuple(buffers), tuple(arenas)


def live_bytes_bound(graph: Graph, steps: Sequence[Step], device: Device, spans: Spans | None = None) -> int:
    """Aligned bytes that any packing needs; without `spans` it is `Arena.lower_bound_bytes`.

    It is the most bytes that are held at one step, if each is over before the next one in the list begins;
    with `spans`, at one time. Stays that overwrite one another count once.
    """
    return live_bound(_blocks(holdings_of(graph, steps, device).allocations, spans))


def holdings_of(graph: Graph, steps: Sequence[Step], device: Device) -> Holdings:
    """All that needs bytes of its own on the device: live ranges, chained where one overwrites another."""
    return _holdings(_Listing(graph, tuple(steps)), device)


# A plan that is packed again and again asks about the same steps each time: of few plans at once.
@lru_cache(maxsize=8)
def _holdings(listing: _Listing, device: Device) -> Holdings:
    ranges = tuple(_live_ranges_of(listing.graph, listing.steps, device))
    groups = _share_in_place(listing.graph, listing.steps, device, ranges)
    return Holdings(ranges, groups, tuple(_allocation(ranges, group) for group in groups))


def _live_ranges_of(graph: Graph, steps: Sequence[Step], device: Device) -> Iterator[LiveRange]:
    """Everything that needs bytes on the device; those of one tensor one after the other, in time."""
    uses: dict[str, list[list[int]]] = {}
    resident = resident_pairs(graph, steps)
    if device is Device.CPU:
        # the session writes all inputs before the first step, also those that nobody reads
        uses = {t.name: [[-1]] for t in _given(graph) if t.name not in resident}
    # a weight that is copied at all is not resident
    streamed = {s.tensor for s in steps if isinstance(s, Copy) and s.target is Device.GPU}
    for position, step in enumerate(steps):
        for name, is_written in _touched(graph, step, device).items():
            found = uses.setdefault(name, [])
            # what writes a tensor begins a live range; so does the first use of what is there before
            if is_written or not found:
                found.append([])
            found[-1].append(position)
        if isinstance(step, Run) and step.device is device:
            workspace_bytes = graph.kernel[step.kernel].workspace_bytes(device)
            if workspace_bytes:
                kind = BufferKind.WORKSPACE
                yield LiveRange(step.kernel, kind, workspace_bytes, position, position, (position,))
    outlive = set(graph.outputs) | {t.name for t in graph.tensors if t.role is Role.STATE}
    renewed = set(resident.values())
    for name, found in uses.items():
        tensor = graph.tensor[name]
        kind = BufferKind.WEIGHT if tensor.role is Role.WEIGHT else BufferKind.TENSOR
        # the last one on the host lasts to the end if the tensor outlives the run
        for number, positions in enumerate(found, start=1):
            first, last = positions[0], positions[-1]
            if kind is BufferKind.WEIGHT and name not in streamed:
                first, last = -1, len(steps)
            elif name in resident:
                first = -1
            elif name in renewed or (device is Device.CPU and name in outlive and number == len(found)):
                last = len(steps)
            yield LiveRange(name, kind, tensor.size_bytes, first, last, tuple(p for p in positions if p >= 0))


def _given(graph: Graph) -> Iterable[Tensor]:
    return (t for t in graph.tensors if t.name not in graph.producer and t.role is not Role.WEIGHT)


def _touched(graph: Graph, step: Step, device: Device) -> dict[str, bool]:
    """What a step reads (False) or writes (True) there. Weights of the host are mapped from the file."""
    looked_at = guards_of(graph, step) if device is Device.CPU else ()
    conditions = dict.fromkeys((guard.tensor for guard in looked_at), False)
    if isinstance(step, Copy):
        if device is Device.CPU and graph.tensor[step.tensor].role is Role.WEIGHT:
            return conditions
        return conditions | {step.tensor: step.target is device}
    if step.device is not device:
        return conditions
    kernel = graph.kernel[step.kernel]
    read = (n for n in kernel.inputs if device is Device.GPU or graph.tensor[n].role is not Role.WEIGHT)
    return conditions | dict.fromkeys(read, False) | dict.fromkeys(kernel.outputs, True)


def _share_in_place(
    graph: Graph, steps: Sequence[Step], device: Device, ranges: Sequence[LiveRange]
) -> list[list[int]]:
    """Chains of live ranges that take over one another's bytes; most have one member.

    An output takes the bytes of an input whose last step is this very one. Only where both take the
    same aligned bytes: a smaller output would hold on to the larger input's bytes for all its life. And
    only inputs that the device never copies away, since the kernel would have to wait for that copy; one that
    has come back since is no exception, so that the planner's simulation counts the same bytes.
    """
    # by name, not by live range: the simulation does not tell them apart either
    copied = {s.tensor for s in steps if isinstance(s, Copy) and s.source is device}
    index = {(s.name, p): i for i, s in enumerate(ranges) if s.kind is BufferKind.TENSOR for p in s.uses}
    group: dict[int, list[int]] = {i: [i] for i in range(len(ranges))}
    resident = resident_pairs(graph, steps) if device is Device.GPU else {}
    at = {s.name: i for i, s in enumerate(ranges) if s.kind is BufferKind.TENSOR}
    for old, new in ((at[o], at[n]) for o, n in resident.items()):
        group[old].append(new)
        group[new] = group[old]
    # their place is decided: chained already
    settled = resident.keys() | resident.values()
    for position, step in enumerate(steps):
        if isinstance(step, Copy) or step.device is not device:
            continue
        kernel = graph.kernel[step.kernel]
        # an output takes one input's place, an input gives its place to one output
        taken: set[int] = set()
        for output, source in kernel.may_overwrite:
            if (
                source in copied
                or {output, source} & settled
                or (source, position) not in index
                or kernel.inputs.count(source) != 1
            ):
                continue  # copied away, a weight, or an input that is also read in another place
            new, old = index[output, position], index[source, position]
            fits = 0 < ranges[new].size_bytes <= ranges[old].size_bytes
            same = align(ranges[new].size_bytes) == align(ranges[old].size_bytes)
            if fits and same and ranges[old].last == position and not taken & {new, old}:
                taken |= {new, old}
                group[old].append(new)
                group[new] = group[old]
    return [members for first, members in group.items() if members[0] == first]


def _allocation(ranges: Sequence[LiveRange], group: Sequence[int]) -> Allocation:
    uses = {use for member in group for use in ranges[member].uses}
    size_bytes = align(ranges[group[0]].size_bytes)
    return Allocation(size_bytes, ranges[group[0]].first, ranges[group[-1]].last, tuple(sorted(uses)))


def _blocks(allocations: Sequence[Allocation], spans: Spans | None = None) -> list[MemoryBlock]:
    """The allocations as blocks for `pack`: in steps of the list, or, with `spans`, in steps by their starts.

    By starts a block lasts until no step starts any more before the last of its uses has ended.
    """
    if spans is None:
        return [MemoryBlock(h.size_bytes, h.first, h.last) for h in allocations]
    order = sorted(range(len(spans)), key=lambda position: spans[position][0])
    starts = [spans[position][0] for position in order]
    number = {position: i for i, position in enumerate(order)} | {-1: -1, len(spans): len(spans)}
    blocks: list[MemoryBlock] = []
    for allocation in allocations:
        last = max(number[position] for position in (allocation.last, *allocation.uses))
        # all uses, not the last listed: lanes run side by side
        end_us = max((spans[use][1] for use in allocation.uses), default=0.0)
        # a step that starts at the very end of the last use may have the bytes
        last = max(last, bisect_left(starts, end_us) - 1)
        blocks.append(MemoryBlock(allocation.size_bytes, number[allocation.first], last))
    return blocks


def _hazards(ranges: Sequence[LiveRange], placed: Sequence[Buffer]) -> Iterator[tuple[int, set[int]]]:
    """For each live range's first step, the steps that used its bytes before: `(step, steps it must follow)`.

    Keeps for each range of bytes the live range that had it last. Those before that one need no mention: it
    has already been ordered behind them.
    """
    owners: list[tuple[int, int, int]] = []  # begin, end and live range, in the order of the bytes
    for i in sorted(range(len(ranges)), key=lambda i: ranges[i].first):
        start, end = placed[i].offset_bytes, placed[i].end_bytes
        # resident weights never change hands, empty buffers have no bytes
        if start == end or (ranges[i].kind is BufferKind.WEIGHT and ranges[i].first < 0):
            continue
        # the owners that overlap, found by bisection: going through all takes quadratic time
        first = bisect_right(owners, start, key=itemgetter(1))
        after = bisect_left(owners, end, lo=first, key=itemgetter(0))
        hazards: set[int] = set()
        kept: list[tuple[int, int, int]] = [(start, end, i)]
        for low, high, owner in owners[first:after]:
            hazards.update(ranges[owner].uses)
            # what sticks out on either side keeps its owner
            if low < start:
                kept.insert(0, (low, start, owner))
            if end < high:
                kept.append((end, high, owner))
        owners[first:after] = kept
        if ranges[i].first >= 0:
            yield ranges[i].first, hazards - {ranges[i].first}
