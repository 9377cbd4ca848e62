"""Give every tensor and workspace its bytes: one arena a device, and waits where bytes are reused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hybridc.ir import Arena, Buffer, BufferKind, Copy, Device, Graph, Role, Step
from hybridc.ir.plan import align
from hybridc.passes.offsets import Block, live_bound, pack
from hybridc.passes.waits import set_waits


@dataclass(frozen=True, slots=True)
class Stay:
    """A tensor or workspace on one device, from the begin of step `first` to the end of step `last`."""

    name: str
    kind: BufferKind
    size_bytes: int
    first: int
    last: int
    uses: tuple[int, ...]
    """The steps that touch it, in order."""


def reuse_buffers(
    graph: Graph, steps: Sequence[Step], devices: Sequence[Device]
) -> tuple[tuple[Step, ...], tuple[Buffer, ...], tuple[Arena, ...]]:
    """Place all buffers in one arena a device: `(steps, buffers, arenas)`, arenas in the order of `devices`.

    Requires: steps as `insert_copies` makes them: each tensor comes to a device at most once.
    Ensures: buffers overlap only if every use of the one ends before any use of the other begins, along
    lanes and waits, for which the returned steps may wait more than the given ones; or if a kernel
    overwrites an input as `Kernel.may_overwrite` permits.
    """
    needs = [set(step.waits) for step in steps]
    buffers: list[Buffer] = []
    arenas: list[Arena] = []
    for device in devices:
        stays = list(_stays(graph, steps, device))
        groups = _share_in_place(graph, steps, device, stays)
        blocks = [_block(stays, group) for group in groups]
        offsets = [0] * len(stays)
        for group, offset in zip(groups, pack(blocks), strict=True):
            for member in group:
                offsets[member] = offset
        placed = [
            Buffer(s.name, s.kind, device, offset, s.size_bytes, s.first, s.last)
            for s, offset in zip(stays, offsets, strict=True)
        ]
        for step, hazards in _hazards(stays, placed):
            needs[step] |= hazards
        buffers += placed
        size_bytes = max((align(b.end_bytes) for b in placed), default=0)
        arenas.append(Arena(device, size_bytes, live_bound(blocks)))
    return set_waits(steps, needs), tuple(buffers), tuple(arenas)


def live_bytes_bound(graph: Graph, steps: Sequence[Step], device: Device) -> int:
    """Aligned bytes that any packing needs: `Arena.lower_bound_bytes` without the packing."""
    stays = list(_stays(graph, steps, device))
    return live_bound([_block(stays, group) for group in _share_in_place(graph, steps, device, stays)])


def _stays(graph: Graph, steps: Sequence[Step], device: Device) -> Iterator[Stay]:
    """Everything that needs bytes on the device. Weights of CPU kernels are mapped from the file: none."""
    uses: dict[str, list[int]] = {}
    if device is Device.CPU:
        # the session writes all inputs before the first step, also those that nobody reads
        uses = {t.name: [] for t in graph.tensors if t.name not in graph.producer}
    for position, step in enumerate(steps):
        for name in _touched(graph, step, device):
            uses.setdefault(name, []).append(position)
        if not isinstance(step, Copy) and step.device is device:
            workspace_bytes = graph.kernel[step.kernel].workspace_bytes(device)
            if workspace_bytes:
                kind = BufferKind.WORKSPACE
                yield Stay(step.kernel, kind, workspace_bytes, position, position, (position,))
    outlive = set(graph.outputs) | {t.name for t in graph.tensors if t.role is Role.STATE}
    for name, positions in uses.items():
        tensor = graph.tensor[name]
        if tensor.role is Role.WEIGHT:
            if device is Device.GPU:
                kind, used = BufferKind.WEIGHT, tuple(positions)
                yield Stay(name, kind, tensor.size_bytes, -1, len(steps), used)
            continue
        first = -1 if device is Device.CPU and name not in graph.producer else positions[0]
        last = positions[-1] if positions else first
        if device is Device.CPU and name in outlive:
            last = len(steps)
        yield Stay(name, BufferKind.TENSOR, tensor.size_bytes, first, last, tuple(positions))


def _touched(graph: Graph, step: Step, device: Device) -> Iterable[str]:
    if isinstance(step, Copy):
        return (step.tensor,)
    if step.device is not device:
        return ()
    kernel = graph.kernel[step.kernel]
    return dict.fromkeys((*kernel.inputs, *kernel.outputs))


def _share_in_place(
    graph: Graph, steps: Sequence[Step], device: Device, stays: Sequence[Stay]
) -> list[list[int]]:
    """Chains of stays that take over one another's bytes; most have one member.

    An output takes the bytes of an input whose last step is this very one. Only where both take the
    same aligned bytes: a smaller output would hold on to the larger input's bytes for all its life.
    """
    index = {s.name: i for i, s in enumerate(stays) if s.kind is BufferKind.TENSOR}
    group: dict[int, list[int]] = {i: [i] for i in range(len(stays))}
    for position, step in enumerate(steps):
        if isinstance(step, Copy) or step.device is not device:
            continue
        kernel = graph.kernel[step.kernel]
        taken: set[int] = set()
        for output, source in kernel.may_overwrite:
            if source not in index or kernel.inputs.count(source) != 1:
                continue  # a weight, or an input that is also read in another place
            new, old = index[output], index[source]
            fits = 0 < stays[new].size_bytes <= stays[old].size_bytes
            same = align(stays[new].size_bytes) == align(stays[old].size_bytes)
            if fits and same and stays[old].last == position and not taken & {new, old}:
                taken |= {new, old}
                group[old].append(new)
                group[new] = group[old]
    return [members for first, members in group.items() if members[0] == first]


def _block(stays: Sequence[Stay], group: Sequence[int]) -> Block:
    size_bytes = align(stays[group[0]].size_bytes)
    return Block(size_bytes, stays[group[0]].first, stays[group[-1]].last)


def _hazards(stays: Sequence[Stay], placed: Sequence[Buffer]) -> Iterator[tuple[int, set[int]]]:
    """For each stay's first step, the steps that used its bytes before: `(step, steps it must follow)`.

    Keeps for each range of bytes the stay that had it last. Those before that one need no mention: it
    has already been ordered behind them.
    """
    owners: list[tuple[int, int, int]] = []
    for i in sorted(range(len(stays)), key=lambda i: stays[i].first):
        start, end = placed[i].offset_bytes, placed[i].end_bytes
        if start == end or stays[i].kind is BufferKind.WEIGHT:
            continue
        kept: list[tuple[int, int, int]] = [(start, end, i)]
        hazards: set[int] = set()
        for low, high, owner in owners:
            if high <= start or end <= low:
                kept.append((low, high, owner))
                continue
            hazards.update(stays[owner].uses)
            if low < start:
                kept.append((low, start, owner))
            if end < high:
                kept.append((end, high, owner))
        owners = kept
        if stays[i].first >= 0:
            yield stays[i].first, hazards - {stays[i].first}
