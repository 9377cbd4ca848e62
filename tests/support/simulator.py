"""Runs a plan on symbols instead of numbers, under orders of the lanes chosen to break it.

Knows `hybridc.ir` alone: what a step may assume is that earlier steps of its lane and the steps it
waits for have ended. A step holds its written bytes from its begin to its end, and its inputs must be
right at both; so two steps that race for bytes are seen whenever an order lets them run side by side.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import permutations

from hybridc.ir import Buffer, BufferKind, Copy, Device, Graph, Kernel, Lane, Plan, Role, Run

Choose = Callable[[list[tuple[str, int]]], tuple[str, int]]
"""Picks the next event out of ("begin" or "end", step)."""


class WrongResult(Exception):
    """A step read or left a value that the graph does not define there."""


def run_adversarially(graph: Graph, plan: Plan, random_orders: int = 8, seed: int = 0) -> None:
    """Run under every priority among the lanes, eager and lazy, and some random orders.

    Raises WrongResult if any of them goes wrong.
    """
    for ranking in permutations(Lane):
        rank = {lane: i for i, lane in enumerate(ranking)}
        for eager in (True, False):
            _Machine(graph, plan).run(_by_priority(plan, rank, eager))
    for i in range(random_orders):
        _Machine(graph, plan).run(random.Random(seed + i).choice)


def _by_priority(plan: Plan, rank: dict[Lane, int], eager: bool) -> Choose:
    """Advance the lane of best rank; eager begins steps before it ends others, lazy the reverse."""
    first = "begin" if eager else "end"
    return lambda events: min(events, key=lambda e: (e[0] != first, rank[plan.steps[e[1]].lane], e[1]))


class _Machine:
    """Memory of both devices, as the value that each range of bytes holds."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.graph = graph
        self.plan = plan
        self.memory: dict[Device, dict[tuple[int, int], str]] = {device: {} for device in Device}
        self.queues = {lane: [i for i, s in enumerate(plan.steps) if s.lane is lane] for lane in Lane}
        self.running: set[int] = set()
        self.ended: set[int] = set()
        for buffer in plan.buffers:
            if buffer.first_step == -1:
                self._store(buffer, buffer.tensor)

    def run(self, choose: Choose) -> None:
        while events := self._events():
            what, step = choose(events)
            if what == "begin":
                self._begin(step)
            else:
                self._end(step)
        if len(self.ended) < len(self.plan.steps):
            raise WrongResult("the run hangs")
        ran = {s.kernel for s in self.plan.steps if isinstance(s, Run)}
        if ran != {k.name for k in self.graph.kernels}:
            raise WrongResult("not every kernel ran")
        resident = {b.tensor: b for b in self.plan.buffers if b.device is Device.GPU and b.first_step == -1}
        kept = {new: resident[old] for old, new in self.graph.loop_carried if old in resident}
        for new, place in kept.items():
            if not self._load(place) <= {new}:
                raise WrongResult(f"the next run finds {self._load(place)} instead of {new!r}")
        for name in self.graph.outputs:
            if name not in kept and self.graph.tensor[name].role is not Role.WEIGHT:
                self._expect(len(self.plan.steps), name, Device.CPU)

    def _events(self) -> list[tuple[str, int]]:
        ready = [("begin", queue[0]) for queue in self.queues.values() if queue and self._may_begin(queue[0])]
        return ready + [("end", step) for step in sorted(self.running)]

    def _may_begin(self, step: int) -> bool:
        lane = self.plan.steps[step].lane
        free = all(self.plan.steps[other].lane is not lane for other in self.running)
        return free and self.ended.issuperset(self.plan.steps[step].waits)

    def _begin(self, step: int) -> None:
        self.queues[self.plan.steps[step].lane].pop(0)
        self.running.add(step)
        self._check_reads(step, overwritten=())
        for buffer in self._written(step):
            self._store(buffer, f"{buffer.tensor} being written")

    def _end(self, step: int) -> None:
        self.running.remove(step)
        self.ended.add(step)
        for buffer in self._written(step):
            if self._load(buffer) - {f"{buffer.tensor} being written"}:
                raise WrongResult(f"step {step}: {buffer.tensor!r} was overwritten while it was written")
        self._check_reads(step, overwritten=self._written(step))
        for buffer in self._written(step):
            self._store(buffer, buffer.tensor)

    def _check_reads(self, step: int, overwritten: Sequence[Buffer]) -> None:
        s = self.plan.steps[step]
        if isinstance(s, Copy):
            if self.graph.tensor[s.tensor].role is not Role.WEIGHT:
                self._expect(step, s.tensor, s.source)
            elif s.source is not Device.CPU:
                raise WrongResult(f"step {step}: the host has the weight already")
            return
        kernel = self.graph.kernel[s.kernel]
        if s.device not in kernel.devices:
            raise WrongResult(f"step {step}: no code for the device")
        for name in kernel.inputs:
            if s.device is Device.CPU and self.graph.tensor[name].role is Role.WEIGHT:
                continue
            held = self._held(step, name, s.device)
            taken = [b for b in overwritten if _overlap(b, held)]
            if not taken:
                self._expect(step, name, s.device)
            elif not all(_in_place(kernel, b, held) for b in taken):
                raise WrongResult(f"step {step}: {name!r} is overwritten by the step that reads it")

    def _expect(self, step: int, name: str, device: Device) -> None:
        values = self._load(self._held(step, name, device))
        if not values <= {name}:
            raise WrongResult(f"step {step} reads {name!r} on the {device} and finds {values}")

    def _written(self, step: int) -> list[Buffer]:
        s = self.plan.steps[step]
        if isinstance(s, Copy):
            return [self._held(step, s.tensor, s.target)]
        kernel = self.graph.kernel[s.kernel]
        names = [*kernel.outputs, *([kernel.name] if kernel.workspace_bytes(s.device) else [])]
        return [self._held(step, name, s.device) for name in names]

    def _held(self, step: int, name: str, device: Device) -> Buffer:
        workspace = name in self.graph.kernel
        for buffer in self.plan.buffers:
            right = buffer.tensor == name and buffer.device is device
            right = right and (buffer.kind is BufferKind.WORKSPACE) == workspace
            if right and buffer.first_step <= step <= buffer.last_step:
                return buffer
        raise WrongResult(f"step {step}: no buffer for {name!r} on the {device}")

    def _store(self, buffer: Buffer, value: str) -> None:
        arena = self.memory[buffer.device]
        if not 0 <= buffer.offset_bytes <= buffer.end_bytes <= self.plan.arena_bytes(buffer.device):
            raise WrongResult(f"{buffer.tensor!r} lies outside its arena")
        start, end = buffer.offset_bytes, buffer.end_bytes
        for (low, high), old in list(arena.items()):
            if low < end and start < high:
                del arena[low, high]
                if low < start:
                    arena[low, start] = old
                if end < high:
                    arena[end, high] = old
        if start < end:
            arena[start, end] = value

    def _load(self, buffer: Buffer) -> set[str]:
        """The values found in the bytes of a buffer; none if it has no bytes."""
        start, end = buffer.offset_bytes, buffer.end_bytes
        found = {
            (max(low, start), min(high, end)): v for (low, high), v in self.memory[buffer.device].items()
        }
        inside = {span: v for span, v in found.items() if span[0] < span[1]}
        values = set(inside.values())
        if sum(high - low for low, high in inside) < end - start:
            values.add("nothing")
        return values


def _in_place(kernel: Kernel, output: Buffer, source: Buffer) -> bool:
    same_place = output.offset_bytes == source.offset_bytes and output.size_bytes <= source.size_bytes
    return same_place and (output.tensor, source.tensor) in kernel.may_overwrite


def _overlap(one: Buffer, other: Buffer) -> bool:
    return max(one.offset_bytes, other.offset_bytes) < min(one.end_bytes, other.end_bytes)
