"""Regions: which bindings are computed tile by tile, and along which axis.

A kernel whose working set exceeds the limit is a *seed*. From the seeds regions grow: a neighbour joins where
the whole tensor between the two would itself be too large to be put together or cut up by one kernel, and
where it lies between two that are tiled. All tensors of a region have the same number of tiles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tvm import relax

from hybridc.passes.fuse.attention import Suits, any_attention
from hybridc.passes.program.program import Program, is_op, operator_name
from hybridc.passes.tiling.limits import UNREACHABLE_LIMIT_SLACK
from hybridc.passes.tiling.slice_rules import slice_of
from hybridc.passes.tiling.tile_sizes import (
    Axes,
    TensorFacts,
    TiledTensor,
    choose_tile_sizes,
    concats_in_readers,
    try_tile_sizes,
)
from hybridc.passes.tiling.working_set import KernelGroup, kernel_groups

GATHERS = ("halo", "concat")
"""Inside a tiled kernel these may stay whole; they are then kernels of their own."""


def choose_tiled_tensors(
    program: Program, limit_bytes: int, suits: Suits = any_attention, *, again: bool = False
) -> dict[relax.Var, TiledTensor]:
    """The tiles of every binding that is not left whole; empty where no kernel exceeds `limit_bytes`.

    Requires: `program` canonical. With `again` it is tiled already, and kernels that only move data are no
    seeds: what concatenates tiles at the end of a region is as large as it must be.
    Ensures: every tile can be computed (`slice_rules.slice_of`).
    """
    groups = kernel_groups(program, suits)
    worth_bytes = limit_bytes * UNREACHABLE_LIMIT_SLACK if again else limit_bytes
    large = [g for g in groups if g.size_bytes > worth_bytes and not (again and g.only_moves)]
    if not large:
        return {}
    growth = _Growth(TensorFacts(program), groups, limit_bytes)
    for group in large:
        for seed in growth.computing(group):
            growth.plant(seed)
    growth.settle()
    unwritten = concats_in_readers(program, growth.axes)
    chosen: dict[relax.Var, TiledTensor] = {}
    for region in growth.regions():
        kernels = [group for group in region if group.result not in unwritten]
        chosen.update(choose_tile_sizes(growth.facts, kernels, region, growth.axes, limit_bytes))
    return chosen


@dataclass
class _Growth:
    facts: TensorFacts
    groups: list[KernelGroup]
    limit_bytes: int
    axes: dict[relax.Var, int] = field(default_factory=dict)
    """Of the tensors that are tiled so far."""
    producer: dict[relax.Var, KernelGroup] = field(init=False)
    readers: dict[relax.Var, list[KernelGroup]] = field(init=False)

    def __post_init__(self) -> None:
        self.producer = {group.result: group for group in self.groups}
        self.readers = {}
        for group in self.groups:
            for var in group.inputs:
                self.readers.setdefault(var, []).append(group)

    # ------------------------------------------------------------------------------------- seeds

    def computing(self, group: KernelGroup) -> list[KernelGroup]:
        """The kernel; where it only moves data, the next ones after it that compute, or else before it."""
        for follow in (self._after, self._before):
            found: dict[relax.Var, KernelGroup] = {}
            queue = deque([group])
            while queue:
                own = queue.popleft()
                if own.only_moves:
                    queue.extend(follow(own))
                else:
                    found[own.result] = own
            if found:
                return list(found.values())
        return []

    def _after(self, group: KernelGroup) -> list[KernelGroup]:
        return self.readers.get(group.result, [])

    def _before(self, group: KernelGroup) -> list[KernelGroup]:
        return [self.producer[var] for var in group.inputs if var in self.producer]

    def plant(self, seed: KernelGroup) -> None:
        """Tile a kernel along the axis that brings it under the limit with the fewest tiles.

        If none does, along the one that comes closest, unless it gains little. The first of equal axes wins.
        """
        if seed.result in self.axes:
            return
        found: list[tuple[int, int, int, Axes]] = []
        for axis in self._axes_to_try(seed):
            along = self._axes_along(seed, axis)
            if along is not None:
                for count, (_, [needed]) in enumerate(try_tile_sizes(self.facts, [seed], [seed], along)):
                    if needed is not None:
                        found.append((max(needed, self.limit_bytes), count, len(found), along))
        if found:
            smallest, _, _, best = min(found, key=lambda choice: choice[:3])
            if smallest == self.limit_bytes or smallest * UNREACHABLE_LIMIT_SLACK < seed.size_bytes:
                self._add(seed, best)

    def _axes_to_try(self, group: KernelGroup) -> list[int]:
        """The cheapest first: batches, then rows of images or of matrices, then the others.

        Channels come last: all of the input is read for each of them.
        """
        rank = self._rank(group)
        images = rank == 4 or any(is_op(m.value, "nn.conv1d", "nn.conv3d") for m in group.members)
        last = 1 if images else rank - 1
        return [axis for axis in range(rank) if axis != last] + [last] * (rank > 0)

    def _rank(self, group: KernelGroup) -> int:
        operation = self.facts.operations[group.result]
        return len(operation.shape) if operation is not None else 0

    # ------------------------------------------------------------------------------------ growth

    def settle(self) -> None:
        """Tile what lies between tiled kernels, and next to them views and movements that are too large."""
        for group in [*reversed(self.groups), *self.groups]:
            if group.result in self.axes:
                continue
            wanted = self._axes_read(group)
            if not wanted and not any(var in self.axes for var in group.inputs):
                continue
            moves = group.is_view or (group.only_moves and group.size_bytes > self.limit_bytes)
            for axis in wanted or range(self._rank(group)):
                axes = self._axes_along(group, axis)
                if axes is not None and self._is_beside(group, axes) + bool(wanted) + moves >= 2:
                    self._add(group, axes)
                    break

    def _axes_read(self, group: KernelGroup) -> list[int]:
        """The axes along which tiled kernels read the result of a kernel."""
        readers = (r for r in self.readers.get(group.result, ()) if r.result in self.axes)
        return sorted({axis for r in readers for axis in self._demands(r, self.axes).get(group.result, ())})

    def _is_beside(self, group: KernelGroup, axes: Axes) -> bool:
        """Whether a kernel that is tiled along these axes reads tiles of others."""
        demands = self._demands(group, axes)
        return any(self.axes[var] in wanted for var, wanted in demands.items() if var in self.axes)

    def _add(self, group: KernelGroup, axes: Axes) -> None:
        queue = deque([(group, axes)])
        while queue:
            group, axes = queue.popleft()
            if group.result not in self.axes:
                self.axes.update(axes)
                queue.extend(self._neighbours(group, axes))

    def _neighbours(self, group: KernelGroup, axes: Axes) -> Iterator[tuple[KernelGroup, Axes]]:
        """Kernels that must be tiled too, since the tensor between is too large to be whole.

        A kernel that copies half of a tensor holds 3/2 of its bytes, one that concatenates its tiles twice.
        """
        for var, wanted in self._demands(group, axes).items():
            producer = self.producer.get(var)
            if producer is None or var in self.axes or 3 * self.facts.size_bytes(var) <= 2 * self.limit_bytes:
                continue
            producing = self._axes_along(producer, min(wanted))
            if producing is not None:
                yield producer, producing
        result = group.result
        if 2 * self.facts.size_bytes(result) > self.limit_bytes:
            for reader in self.readers.get(result, ()):
                if reader.result not in self.axes:
                    reading = self._axes_reading(reader, result, axes[result])
                    if reading is not None:
                        yield reader, reading

    def _axes_reading(self, group: KernelGroup, var: relax.Var, axis: int) -> Axes | None:
        """The axes of a kernel's tensors that make it read `var` along this axis."""
        for own in range(self._rank(group)):
            axes = self._axes_along(group, own)
            if axes is not None and axis in self._demands(group, axes).get(var, ()):
                return axes
        return None

    # ------------------------------------------------------------------------- one tiled kernel

    def _axes_along(self, group: KernelGroup, axis: int) -> dict[relax.Var, int] | None:
        """The axes of the tensors inside a kernel whose result is tiled along `axis`, if it can be."""
        if axis >= self._rank(group) or self.facts.extent(group.result, axis) < 2:
            return None
        inside = {member.var: member.value for member in group.members}
        axes = {group.result: axis}
        for member in reversed(group.members):
            if member.var not in axes:
                continue
            operation, own = self.facts.operations[member.var], axes[member.var]
            rule = slice_of(operation, own, 0, self.facts.extent(member.var, own))
            if rule is None or operation is None:
                return None
            for operand, sliced in zip(operation.operands, rule.slices, strict=True):
                if operand not in inside or (sliced is None and operator_name(inside[operand]) in GATHERS):
                    continue
                if sliced is None or axes.setdefault(operand, sliced.axis) != sliced.axis:
                    return None
        return axes

    def _demands(self, group: KernelGroup, axes: Axes) -> dict[relax.Var, set[int]]:
        """The axes along which a tiled kernel reads slices of what others compute."""
        found: dict[relax.Var, set[int]] = {}
        inside = {member.var for member in group.members}
        for var in (member.var for member in group.members if member.var in axes):
            operation, axis = self.facts.operations[var], axes[var]
            rule = slice_of(operation, axis, 0, self.facts.extent(var, axis))
            assert operation is not None and rule is not None
            for operand, sliced in zip(operation.operands, rule.slices, strict=True):
                if sliced is not None and isinstance(operand, relax.Var) and operand not in inside:
                    found.setdefault(operand, set()).add(sliced.axis)
        return found

    def regions(self) -> list[list[KernelGroup]]:
        """Tiled kernels, each list with all that exchange tiles with one another."""
        region_of: dict[relax.Var, list[KernelGroup]] = {}
        for group in self.groups:
            if group.result not in self.axes:
                continue
            own = region_of[group.result] = [group]
            for var, wanted in self._demands(group, self.axes).items():
                other = region_of.get(var)
                if other is not None and other is not own and self.axes[var] in wanted:
                    larger, smaller = (other, own) if len(other) >= len(own) else (own, other)
                    larger.extend(smaller)
                    region_of.update((member.result, larger) for member in smaller)
                    own = larger
        return list({id(region): region for region in region_of.values()}.values())
