"""Which axes of which values are padded, and the counts of their elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from hybridc.frontend.expand.builder import Builder, bounded, shape_of

Axes = Mapping[int, int]
"""By axis, the number of its count."""
TRUSTED = "hybridc.counted"
"""Key of the metadata of nodes that were made with padding in mind."""


class Ledger:
    """Counts are int64 of one element. Of a value's axes those that are padded have one."""

    def __init__(self) -> None:
        self._counts: list[ir.Value] = []
        self._axes: dict[ir.Value, Axes] = {}

    def axes(self, value: ir.Value | None) -> Axes:
        """Of a value; empty if there is no padding in it."""
        return {} if value is None else self._axes.get(value, {})

    def count(self, number: int) -> ir.Value:
        """The value that is the count."""
        return self._counts[number]

    def add(self, count: ir.Value) -> int:
        """The number of a count, a new one if it is not known yet."""
        if count not in self._counts:
            self._counts.append(count)
        return self._counts.index(count)

    def mark(self, value: ir.Value, axes: Axes) -> ir.Value:
        """The value, from now on padded along these axes."""
        if axes:
            self._axes[value] = dict(axes)
        return value

    def replace(self, old: Sequence[ir.Value], new: Sequence[ir.Value | None]) -> None:
        """Other values take the places of some: they are as these were."""
        for before, after in zip(old, new, strict=False):
            if after is None:
                continue
            if before in self._axes:
                self._axes[after] = self._axes[before]
            self._counts = [after if count is before else count for count in self._counts]

    def is_padded(self, node: ir.Node) -> bool:
        """Whether any operand is."""
        return any(self.axes(value) for value in node.inputs)

    def valid(self, value: ir.Value, axes: Axes, build: Builder) -> ir.Value:
        """Booleans that broadcast to the value: which of its elements are none of the padding."""
        shape, found = shape_of(value), None
        for axis, number in axes.items():
            steps = [-1] + [1] * (len(shape) - 1 - axis)
            index = build.constant(np.arange(*bounded(shape[axis])).reshape(steps), "int64")
            inside = build.op("Less", index, self.count(number))
            found = inside if found is None else build.op("And", found, inside)
        assert found is not None
        return found
