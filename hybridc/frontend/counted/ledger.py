"""Which axes of which values are padded, and the counts of their elements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from hybridc.frontend.expand.builder import Builder, bounded, dtype_of, shape_of, typed
from hybridc.frontend.values import constant_array, static_shape

Factors = tuple[tuple[int, "int | None"], ...]
"""An axis that a Reshape made of several: their extents, the outermost first, and the numbers of their
counts, None for one that is not padded."""
Count = int | Factors
"""Of a padded axis: the number of its count, or what it was made of."""
Axes = Mapping[int, Count]
"""By axis, how many elements there are."""
Extents = tuple[tuple[int, Count | None], ...]
"""Of axes: each is so long, and of its elements those count whose count is given, or all."""
Samples = tuple[int, ...]
"""A number at each of a few sizes that the open dimensions of a network may have; those come first that are
smallest. Of what data determine nothing is known: there are none."""
TRUSTED = "hybridc.counted"
"""Key of the metadata of nodes that were made with padding in mind."""


class Ledger:
    """Counts are int64 of one element. Of a value's axes those that are padded have one."""

    def __init__(self) -> None:
        self._counts: list[ir.Value] = []
        self._samples: list[Samples] = []
        self._dimensions: list[int] = []
        self._names: dict[int, str] = {}
        self._made: dict[tuple[int, int, int], int] = {}
        self._axes: dict[ir.Value, Axes] = {}
        self._shapes: dict[ir.Value, tuple[tuple[int, ...], ...]] = {}
        self._zeros: set[tuple[ir.Value, int]] = set()
        self._varying: dict[ir.Value, tuple[np.ndarray, ...]] = {}
        self._listed: dict[ir.Value, Extents] = {}
        self._chosen: dict[ir.Value, Extents] = {}

    def axes(self, value: ir.Value | None) -> Axes:
        """Of a value; empty if there is no padding in it."""
        return {} if value is None else self._axes.get(value, {})

    def is_same(self, value: ir.Value | None, other: ir.Value | None) -> bool:
        """Whether both are padded along the same axes by the same counts."""
        return self.axes(value) == self.axes(other)

    def count(self, count: Count, build: Builder) -> ir.Value:
        """The number of elements of a padded axis, [1]."""
        if isinstance(count, int):
            return self._counts[count]
        total = build.constant([math.prod(extent for extent, number in count if number is None)], "int64")
        for _, number in count:
            total = total if number is None else build.op("Mul", total, self._counts[number])
        return total

    def add(self, count: ir.Value, samples: Samples = (), name: str = "") -> int:
        """The number of a count, a new one if it is not known yet.

        `samples` are its values at a few sizes, `name` the open dimension that it is the size of.
        """
        if count not in self._counts:
            self._counts.append(count)
            self._samples.append(samples)
            if name:
                self._dimensions.append(len(self._counts) - 1)
                self._names[len(self._counts) - 1] = name
        return self._counts.index(count)

    def plus(self, number: int, more: int, build: Builder) -> int:
        """The number of the count that is by so much larger."""
        return self._following(number, more, 0, build) if more else number

    def windows(self, number: int, more: int, stride: int, build: Builder) -> int:
        """The number of the count of places in steps of `stride`, from 0 to a count and `more`."""
        return self._following(number, more, stride, build)

    def _following(self, number: int, more: int, stride: int, build: Builder) -> int:
        """Of a count and `more`; if there is a stride, of how often it fits into that, and one."""
        key = number, more, stride
        if key not in self._made:
            count = build.op("Add", self._counts[number], build.constant([more], "int64"))
            samples = tuple(n + more for n in self._samples[number])
            if stride:
                count = build.op("Div", count, build.constant([stride], "int64"))
                count = build.op("Add", count, build.constant([1], "int64"))
                samples = tuple(n // stride + 1 for n in samples)
            self._made[key] = self.add(typed(count, ir.DataType.INT64, [1]), samples)
            self._names[self._made[key]] = self._names.get(number, "")
        return self._made[key]

    def samples(self, count: Count) -> Samples:
        """How many elements there are at a few sizes; none if data determine it."""
        if isinstance(count, int):
            return self._samples[count]
        known = [self._samples[number] for _, number in count if number is not None]
        if not all(known):
            return ()
        fixed = math.prod(extent for extent, number in count if number is None)
        return tuple(fixed * math.prod(numbers) for numbers in zip(*known, strict=True))

    def least(self, count: Count) -> int:
        """The smallest number of elements; 0 if data determine it."""
        return min(self.samples(count), default=0)

    @staticmethod
    def is_prefix(count: Count) -> bool:
        """Whether the elements that count are the first ones."""
        return isinstance(count, int) or all(number is None for _, number in count[1:])

    def sized(self, extent: int, samples: Samples, build: Builder) -> Count | None:
        """The count of an axis that has so many elements at each of the sizes; None if it is not a multiple
        of an open dimension's size, or more or less by a constant."""
        for number in self._dimensions:
            sizes = self._samples[number]
            factor = samples[0] // sizes[0]
            if factor and samples == tuple(factor * size for size in sizes):
                return number if factor == 1 else ((extent // factor, number), (factor, None))
            more = samples[0] - sizes[0]
            if samples == tuple(size + more for size in sizes):
                return self.plus(number, more, build)
        return None

    def mark(self, value: ir.Value, axes: Axes) -> ir.Value:
        """The value, from now on padded along these axes."""
        if axes:
            self._axes[value] = dict(axes)
        return value

    def sample(self, value: ir.Value, shapes: Sequence[tuple[int, ...]]) -> None:
        """Note the shapes of a value at a few sizes."""
        self._shapes[value] = tuple(shapes)

    def vary(self, value: ir.Value, arrays: Sequence[np.ndarray]) -> None:
        """Note what a constant is at a few sizes, which decide it."""
        self._varying[value] = tuple(arrays)

    def varying(self, value: ir.Value | None) -> tuple[np.ndarray, ...]:
        """What a constant is at a few sizes; none if they do not decide it."""
        return () if value is None else self._varying.get(value, ())

    def list_extents(self, value: ir.Value, extents: Extents) -> ir.Value:
        """The value, of which it is noted that its elements are these extents."""
        self._listed[value] = extents
        for extent, count in extents:
            if isinstance(count, int):
                self._listed.setdefault(self._counts[count], ((extent, count),))
        return value

    def listed(self, value: ir.Value) -> Extents | None:
        """The extents that a value lists, None if they are not known."""
        return self._listed.get(value)

    def choose_by(self, mask: ir.Value, count: int) -> None:
        """Note how many elements of a mask are true."""
        self._chosen[mask] = ((math.prod(shape_of(mask)), count),)

    def chosen(self, mask: ir.Value) -> Extents | None:
        """How many elements of a mask are true, None if nothing asks for their places."""
        return self._chosen.get(mask)

    def follows(self, samples: Samples) -> tuple[int, int] | None:
        """The number of a count, and what must be added to it to get a number that has these samples."""
        for number, known in enumerate(self._samples):
            if known and len({n - count for n, count in zip(samples, known, strict=True)}) == 1:
                return number, samples[0] - known[0]
        return None

    def is_sampled(self, value: ir.Value) -> bool:
        """Whether the shapes of a value at a few sizes are known."""
        return value in self._shapes

    def extents(self, value: ir.Value, axis: int) -> Samples:
        """Of an axis at a few sizes; none if they are not known."""
        return tuple(shape[axis] for shape in self._shapes.get(value, ()))

    def unexplained(self, value: ir.Value) -> int | None:
        """An axis whose extent depends on sizes in another way than its count says; None if there is none."""
        shape, axes = static_shape(value), self.axes(value)
        if shape is None or value not in self._shapes:
            return None
        for axis, extent in enumerate(shape):
            found = self.extents(value, axis)
            told = self.samples(axes[axis]) if axis in axes else (extent,) * len(found)
            if told and told != found:
                return axis
        return None

    def zero(self, value: ir.Value, axis: int) -> ir.Value:
        """The value, of which it is known that its padding along an axis is 0."""
        self._zeros.add((value, axis))
        return value

    def choose(self, result: ir.Value, choices: Sequence[ir.Value | None]) -> None:
        """Note that a result's padding is 0, of which each element is that of one of the choices, where the
        padding of all of these is: a choice of a number, or of what is known to be so."""
        for axis in self.axes(result):
            behind = axis - len(shape_of(result))
            if all(value is not None and self._is_zero(value, behind) for value in choices):
                self.zero(result, axis)

    def _is_zero(self, value: ir.Value, axis: int) -> bool:
        """Whether the padding along an axis, counted from behind, is 0, or would be."""
        number = constant_array(value)
        if number is not None and number.size == 1:
            return not number.any()
        return (value, len(shape_of(value)) + axis) in self._zeros

    def replace(self, old: Sequence[ir.Value], new: Sequence[ir.Value | None]) -> None:
        """Other values take the places of some: they are as these were."""
        for before, after in zip(old, new, strict=False):
            if after is None:
                continue
            if before in self._axes:
                self._axes[after] = self._axes[before]
            if before in self._shapes:
                self._shapes[after] = self._shapes[before]
            for noted in (self._listed, self._chosen):
                if before in noted:
                    noted[after] = noted[before]
            self._zeros.update((after, axis) for axis in self.axes(before) if (before, axis) in self._zeros)
            self._counts = [after if count is before else count for count in self._counts]

    def is_padded(self, node: ir.Node) -> bool:
        """Whether any operand is, or is a constant that depends on sizes."""
        if not self._axes and not self._varying:
            return False
        return any(self.axes(value) or self.varying(value) for value in node.inputs)

    def deciding(self, value: ir.Value | None) -> tuple[str, ...]:
        """Open dimensions of which a constant becomes another one where nothing but their size changes."""
        arrays, found = self.varying(value), []
        for number in self._dimensions if arrays else ():
            sizes, others = self._samples[number], [n for n in self._dimensions if n != number]
            alone = [
                i
                for i, size in enumerate(sizes)
                if size != sizes[-1] and all(self._samples[n][i] == self._samples[n][-1] for n in others)
            ]
            if not all(np.array_equal(arrays[i], arrays[-1], equal_nan=True) for i in alone):
                found.append(self._names[number])
        return tuple(found)

    def names(self, node: ir.Node) -> tuple[str, ...]:
        """Open dimensions by whose sizes operands are padded."""
        found = dict.fromkeys(
            self._names.get(number, "")
            for value in node.inputs
            for count in self.axes(value).values()
            for number in ([count] if isinstance(count, int) else [n for _, n in count if n is not None])
        )
        return tuple(name for name in found if name)

    def valid(self, value: ir.Value, axes: Axes, build: Builder) -> ir.Value:
        """Booleans that broadcast to the value: which of its elements are none of the padding."""
        shape, found = shape_of(value), None
        for axis, count in axes.items():
            steps = [-1] + [1] * (len(shape) - 1 - axis)
            factors: Factors = ((shape[axis], count),) if isinstance(count, int) else count
            inner = math.prod(bounded(shape[axis]))
            for extent, number in factors:
                inner //= extent
                if number is None:
                    continue
                index = np.arange(shape[axis]) // inner % extent
                inside = build.op("Less", build.constant(index.reshape(steps), "int64"), self._counts[number])
                found = inside if found is None else build.op("And", found, inside)
        assert found is not None
        return found

    def filled(self, value: ir.Value, axes: Axes, fill: ir.Value, build: Builder) -> ir.Value:
        """The value with `fill` in place of its padding along these axes."""
        if not axes:
            return value
        made = build.op("Where", self.valid(value, axes, build), value, fill)
        return typed(made, dtype_of(value), shape_of(value))

    def zeroed(self, value: ir.Value, axes: Axes, build: Builder) -> ir.Value:
        """The value with 0 in place of its padding along these axes."""
        left = {axis: count for axis, count in axes.items() if (value, axis) not in self._zeros}
        return self.filled(value, left, build.like(value, 0), build) if left else value
