"""A batch in parts of the size that the device sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hybridc.artifact.manifest import Port
from hybridc.errors import UsageError
from hybridc.labels import check_labels


@dataclass(frozen=True, slots=True)
class Part:
    """Examples that go through the network together."""

    arrays: Mapping[str, np.ndarray]
    """By name, of the sizes that the network has; what is behind the examples are these again."""
    examples: int


def part_sizes(examples: int, parts: int) -> tuple[int, ...]:
    """Examples of each part of a batch: as many in all, or one more in the first ones."""
    each, rest = divmod(examples, parts)
    return tuple(each + (part < rest) for part in range(parts))


def check_arrays(arrays: Mapping[str, np.ndarray], ports: Sequence[Port]) -> None:
    """Raises UsageError HC551 for an array that is not asked for, HC581 for a label without a class."""
    known = [port.name for port in ports]
    for name in arrays:
        if name not in known:
            remedy = f"inputs and targets are {', '.join(map(repr, known))}"
            raise UsageError("HC551", f"unknown input {name!r}", remedy=remedy)
    for port in ports:  # all parts, before the first of them is gone through
        array = np.asarray(arrays.get(port.name, ()))
        if array.dtype.name == port.dtype:
            check_labels(port.name, array, port.labels)


def whole_parts(arrays: Mapping[str, np.ndarray], ports: Sequence[Port], count: int | None) -> list[Part]:
    """`count` parts, or as many as there are. Raises UsageError HC577 for arrays of other sizes."""
    ports = [port for port in ports if port.shape]
    counts = {len(arrays[p.name]) / max(p.shape[0], 1) for p in ports if p.name in arrays} or {1.0}
    found = min(counts)
    if len(counts) > 1 or found != int(found) or found < 1 or (count is not None and found != count):
        size = ports[0].shape[0] * (count or 1)
        many = "" if count else "a multiple of "
        what = f"a batch has {many}{size} examples, and {_told(arrays, ports)}"
        raise UsageError("HC577", what, remedy="pass whole batches, or compile for another --batch")
    rows = {port.name: port.shape[0] for port in ports}

    def part(place: int) -> Part:
        of_part = {
            name: array[place * rows[name] : (place + 1) * rows[name]] if name in rows else array
            for name, array in arrays.items()
        }
        return Part(of_part, max(rows.values(), default=1))

    return [part(place) for place in range(int(found))]


def count_examples(arrays: Mapping[str, np.ndarray], ports: Sequence[Port], most: int | None) -> int:
    """Of a batch that need not be whole. Raises UsageError HC577 if arrays differ, or there are too many."""
    ports = [port for port in ports if port.shape]
    counts = {len(arrays[p.name]) for p in ports if p.name in arrays} or {1}
    if len(counts) > 1 or min(counts) < 1 or (most is not None and min(counts) > most):
        many = "at least 1 example" if most is None else f"1 to {most} examples"
        remedy = "pass as many of each, or compile for another --batch"
        raise UsageError("HC577", f"a batch has {many}, and {_told(arrays, ports)}", remedy=remedy)
    return min(counts)


def padded_parts(arrays: Mapping[str, np.ndarray], ports: Sequence[Port], sizes: Sequence[int]) -> list[Part]:
    """Parts of these numbers of examples, none of which is 0; behind them they are repeated."""
    rows = {port.name: port.shape[0] for port in ports if port.shape}
    parts, begin = [], 0
    for size in sizes:
        of_part = {
            name: _repeated(array[begin : begin + size], rows[name]) if name in rows else array
            for name, array in arrays.items()
        }
        parts.append(Part(of_part, size))
        begin += size
    return parts


def _repeated(array: np.ndarray, count: int) -> np.ndarray:
    """So that what is computed of padding is as finite as what is of examples, and 0 times it is 0."""
    return array if len(array) == count else array[np.arange(count) % len(array)]


def _told(arrays: Mapping[str, np.ndarray], ports: Sequence[Port]) -> str:
    return ", ".join(f"{port.name!r} has {len(arrays[port.name])}" for port in ports if port.name in arrays)
