"""Slices of axes whose extents follow from the sizes of open dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from hybridc.frontend.counted.ledger import Count, Ledger, Samples
from hybridc.frontend.counted.rules import ALONG
from hybridc.frontend.expand.builder import Builder, Unsupported, given, operand, shape_of
from hybridc.frontend.values import constant_array

_OPERANDS = ("starts", "ends", "axes", "steps")


@dataclass(frozen=True, slots=True)
class _Part:
    """What is taken of an axis."""

    start: int
    length: int
    step: int

    @staticmethod
    def of(extent: int, start: int, end: int, step: int) -> _Part:
        places = range(*slice(start, end if step > 0 or end >= -extent else None, step).indices(extent))
        return _Part(places.start, len(places), step)


def is_sized(node: ir.Node, ledger: Ledger) -> bool:
    """Whether sizes alone decide what is taken: nothing that data determine."""
    operands = [given(node, i) for i in range(1, 5)]
    return all(value is None or constant_array(value) is not None for value in operands) and (
        any(ledger.varying(value) for value in operands) or _is_sized(operand(node, 0), ledger)
    )


def _is_sized(x: ir.Value, ledger: Ledger) -> bool:
    axes = ledger.axes(x)
    return bool(axes) and all(ledger.samples(count) for count in axes.values())


def sized_slice(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value]:
    """From a constant on the first elements count; from elsewhere on they are looked up."""
    x = operand(node, 0)
    shape, padded = shape_of(x), ledger.axes(x)
    at_bound, *at_samples = (_given(node, ledger, i) for i in range(-1, _sample_count(node, ledger)))
    result, found = x, dict(padded)
    for i, axis in enumerate(each % len(shape) for each in at_bound[2]):
        count = padded.get(axis)
        extents = ledger.samples(count) if count is not None else (shape[axis],) * len(at_samples)
        whole = _Part.of(shape[axis], *(each[i] for each in (*at_bound[:2], at_bound[3])))
        parts = [
            _Part.of(extent, *(each[i] for each in (*told[:2], told[3])))
            for extent, told in zip(extents, at_samples, strict=True)
        ]
        if count is not None and not ledger.is_prefix(count):
            if any(part != _Part(0, extent, 1) for part, extent in zip(parts, extents, strict=True)):
                raise Unsupported(ALONG)
            continue
        result = _taken(result, axis, shape[axis], whole, parts, build, ledger)
        found.pop(axis, None)
        lengths = tuple(part.length for part in parts)
        if any(length != whole.length for length in lengths):
            found[axis] = _length(whole.length, lengths, count, build, ledger)
    return [ledger.mark(result, found)]


def _sample_count(node: ir.Node, ledger: Ledger) -> int:
    counts = [len(ledger.samples(count)) for count in ledger.axes(node.inputs[0]).values()]
    return max([*counts, *(len(ledger.varying(value)) for value in node.inputs)])


def _given(node: ir.Node, ledger: Ledger, sample: int) -> list[list[int]]:
    """Starts, ends, axes and steps at the bounds (-1), or at some sizes."""
    rank = len(shape_of(operand(node, 0)))
    found = []
    for position, name in enumerate(_OPERANDS, start=1):
        value = given(node, position)
        arrays = ledger.varying(value)
        array = arrays[sample] if arrays and sample >= 0 else constant_array(value)
        told = node.attributes.get_ints(name, None) if array is None else array.reshape(-1).tolist()
        found.append([int(number) for number in told] if told is not None else [])
    count = len(found[0])
    found[2] = found[2] or list(range(min(count, rank)))
    found[3] = found[3] or [1] * count
    return found


def _taken(
    x: ir.Value,
    axis: int,
    extent: int,
    whole: _Part,
    parts: Sequence[_Part],
    build: Builder,
    ledger: Ledger,
) -> ir.Value:
    starts = tuple(part.start for part in parts)
    if all(start == whole.start for start in starts):
        end = whole.start + whole.step * whole.length
        if whole.length == extent and whole.step == 1:
            return x
        return build.slice(x, axis, whole.start, end if end >= 0 else -(extent + 1), whole.step)
    found = ledger.follows(starts)
    if found is None:
        raise Unsupported(f"{ALONG}, from an element that does not follow from its end")
    number, more = found
    offsets = build.constant(more + whole.step * np.arange(whole.length), "int64")
    places = build.op("Add", ledger.count(number, build), offsets)
    last = build.constant(np.int64(extent - 1))
    places = build.op("Min", build.op("Max", places, build.constant(np.int64(0))), last)
    return build.op("Gather", x, places, axis=axis)


def _length(bound: int, lengths: Samples, count: Count | None, build: Builder, ledger: Ledger) -> Count:
    """How many elements are taken: as many as a size says, up to a constant. Raises Unsupported."""
    found = ledger.sized(bound, lengths, build)
    if found is not None:
        return found
    known = () if count is None else ledger.samples(count)
    for more in {length - n for length, n in zip(lengths, known, strict=False)}:
        if count is not None and lengths == tuple(min(max(n + more, 0), bound) for n in known):
            part = build.op("Add", ledger.count(count, build), build.constant([more], "int64"))
            part = build.op("Max", part, build.constant([0], "int64"))
            return ledger.add(build.op("Min", part, build.constant([bound], "int64")), lengths)
    raise Unsupported(f"{ALONG}, to an element that does not follow from its extent")
