"""Which axes of a model's inputs are open, and what their sizes may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx

from hybridc.errors import UsageError
from hybridc.options import FixedShape, Shape, Size
from hybridc.sizes import Bucket, Interval, Sizes, divided, with_sums

FEW_SIZES = 8
"""Of a dimension in a bucket: the network is folded at each of them."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """An open dimension of a model."""

    name: str
    """The model's own, or `input[axis]` of one without."""
    sizes: Sizes
    axes: tuple[tuple[str, int], ...]
    """Inputs that have it, and their axes."""


@dataclass(frozen=True, slots=True)
class Opening:
    """The open dimensions in one bucket."""

    dimensions: tuple[Dimension, ...]
    bucket: Bucket
    shapes: Callable[[Bucket], Mapping[str, Sequence[int]]]
    """Of inputs at other sizes."""
    check: Callable[[Bucket], None] = lambda sizes: None
    """The model at other sizes."""

    def samples(self) -> tuple[Bucket, ...]:
        """Sizes at which the network is compared with itself at the largest: the smallest ones first, then
        each dimension alone at every size of few, else at its smallest, at its middle and at what powers of
        two divide, and all of them one less than they can be. The largest themselves are the last ones."""
        lows = tuple(each.low for each in self.bucket)
        highs = tuple(each.high for each in self.bucket)
        alone = [
            (*highs[:i], size, *highs[i + 1 :]) for i, each in enumerate(self.bucket) for size in _alone(each)
        ]
        less = tuple(max(each.low, each.high - 1) for each in self.bucket)
        found = [sizes for sizes in dict.fromkeys((lows, *alone, less)) if sizes != highs]
        return tuple(tuple(Interval(n, n) for n in sizes) for sizes in (*found, highs))


def _alone(interval: Interval) -> Iterable[int]:
    if interval.high - interval.low < FEW_SIZES:
        return range(interval.low, interval.high)
    return interval.low, (interval.low + interval.high) // 2, _roundest(interval)


def _roundest(interval: Interval) -> int:
    """The number of an interval that the largest power of two divides."""
    size = interval.high
    while size & (size - 1) >= max(interval.low, 1):
        size &= size - 1
    return size


def open_dimensions(
    model: onnx.ModelProto, shapes: Mapping[str, Shape], dims: Mapping[str, Size]
) -> tuple[Dimension, ...]:
    """The dimensions that are given more than one size, in the order of the model's inputs.

    Raises UsageError HC512 where one is given two ranges, or is a sum of what has no sizes.
    """
    dims = with_sums(dimension_names(model), dims)
    named = {name: size for name, size in dims.items() if isinstance(size, Sizes)}
    ranged = {name: s for name, s in shapes.items() if any(isinstance(size, Sizes) for size in s)}
    if not named and not ranged:
        return ()
    inputs = {v.name: [d.dim_param for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    axes: dict[str, list[tuple[str, int]]] = {}
    for name, shape in ranged.items():
        known = inputs.get(name, [])
        for axis, size in enumerate(shape):
            if isinstance(size, Sizes):
                own = known[axis] if axis < len(known) else ""
                dimension = own or f"{name}[{axis}]"
                if named.setdefault(dimension, size) != size:
                    what = f"dimension {dimension!r} is given as {named[dimension]} and as {size}"
                    raise UsageError("HC512", what, remedy="give it once")
                if not own:
                    axes.setdefault(dimension, []).append((name, axis))
    for name, known in inputs.items():
        for axis, own in enumerate(known):
            if own in named:
                axes.setdefault(own, []).append((name, axis))
    order = [*(name for name in axes if name in named), *(name for name in named if name not in axes)]
    return tuple(Dimension(name, named[name], tuple(axes.get(name, ()))) for name in order)


def dimension_names(model: onnx.ModelProto) -> Iterable[str]:
    """Of all inputs, once."""
    dims = (dim.dim_param for value in model.graph.input for dim in value.type.tensor_type.shape.dim)
    return dict.fromkeys(filter(None, dims))


def buckets_of(dimensions: Sequence[Dimension]) -> tuple[Bucket, ...]:
    """The buckets, each size of a dimension with each of the others that are free; the largest comes last."""
    free = [each for each in dimensions if each.sizes.follows is None]
    intervals = {each.name: each.sizes.intervals for each in dimensions}

    def whole(bucket: Bucket) -> Bucket:
        chosen = {each.name: interval for each, interval in zip(free, bucket, strict=True)}
        for each in dimensions:
            if each.sizes.follows is not None:
                place = intervals[each.sizes.follows].index(chosen[each.sizes.follows])
                chosen[each.name] = each.sizes.intervals[place]
        return tuple(chosen[each.name] for each in dimensions)

    return tuple(map(whole, divided([each.sizes for each in free])))


def at_bounds(
    shapes: Mapping[str, Shape],
    dims: Mapping[str, int | Sizes],
    dimensions: Sequence[Dimension],
    bucket: Bucket,
) -> tuple[dict[str, FixedShape], dict[str, int]]:
    """Shapes and sizes by name that are fixed to the largest of a bucket."""
    highs = {each.name: interval.high for each, interval in zip(dimensions, bucket, strict=True)}
    axes = {axis: highs[each.name] for each in dimensions for axis in each.axes}
    fixed_shapes = {
        name: tuple(axes[name, axis] if isinstance(size, Sizes) else size for axis, size in enumerate(shape))
        for name, shape in shapes.items()
    }
    fixed_dims = {name: highs[name] if isinstance(size, Sizes) else size for name, size in dims.items()}
    return fixed_shapes, fixed_dims
