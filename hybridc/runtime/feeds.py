"""What is fed to a run: known, of the right types, and of sizes that there is a plan for."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from hybridc.artifact.manifest import Manifest, Port
from hybridc.errors import UsageError
from hybridc.sizes import Interval, union, union_text


class Shapes:
    """Shapes of an artifact's inputs, some of whose dimensions may be open."""

    def __init__(self, manifest: Manifest) -> None:
        self._dimensions = manifest.dimensions
        self._interfaces = manifest.interfaces
        self._buckets = [each.sizes for each in manifest.interfaces]
        self._axes = {axis: i for i, each in enumerate(manifest.dimensions) for axis in each.axes}
        self._open = {
            port.name: tuple((axis, i) for (name, axis), i in self._axes.items() if name == port.name)
            for port in manifest.inputs
        }
        """By input, its open axes and the number of each one's dimension."""
        self._fixed = {
            port.name: tuple((i, n) for i, n in enumerate(port.shape) if (port.name, i) not in self._axes)
            for port in manifest.inputs
        }
        """By input, its other axes and their extents."""
        self._sizes = [union(bucket[i] for bucket in self._buckets) for i in range(len(manifest.dimensions))]

    def sizes(self, arrays: Mapping[str, np.ndarray], ports: Mapping[str, Port]) -> tuple[int, ...]:
        """The size of each open dimension. Raises UsageError HC554 for another shape, or if sizes differ."""
        found: dict[int, tuple[int, str]] = {}
        for name, array in arrays.items():
            shape, port = array.shape, ports[name]
            if len(shape) != len(port.shape) or not _has_extents(shape, self._fixed[name]):
                raise _wrong_shape(name, shape, self.type_of(port))
            for axis, number in self._open[name]:
                extent = shape[axis]
                size, other = found.get(number, (None, name))
                if size == extent:
                    continue
                if not any(extent in interval for interval in self._sizes[number]):
                    raise _wrong_shape(name, shape, self.type_of(port))
                if size is not None:
                    dimension = self._dimensions[number].name
                    what = f"{dimension} is {extent} in input {name!r}, but {size} in input {other!r}"
                    raise UsageError("HC554", what, remedy=f"feed {self.type_of(port)}")
                found[number] = extent, name
        return tuple(found[i][0] for i in range(len(self._dimensions)))

    def checked(self, port: Port, feed: np.ndarray) -> np.ndarray:
        """The feed as an array of the port's type, in the machine's byte order. Raises UsageError HC553."""
        try:
            array = np.asarray(feed)
        except ValueError:
            raise self._wrong_feed(port, "is not an array") from None
        if _dtype_name(array.dtype) != port.dtype:
            raise self._wrong_feed(port, f"has dtype {array.dtype.name}")
        return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))

    def bucket(self, sizes: Sequence[int]) -> int:
        """The number of the smallest bucket that has these sizes. Raises UsageError HC554 if none has."""
        for i, bucket in enumerate(self._buckets):
            if all(map(Interval.__contains__, bucket, sizes)):
                return i
        what = f"there is no plan for {self._text(sizes)} together"
        raise UsageError("HC554", what, remedy=f"feed {' or '.join(map(self._text, self._buckets))}")

    def open_axes(self, port: Port) -> dict[int, str]:
        """Names of the open dimensions of an input, by axis."""
        return {axis: self._dimensions[i].name for (name, axis), i in self._axes.items() if name == port.name}

    def open_results(self, position: int) -> dict[int, str]:
        """Names of open dimensions whose sizes are those of axes of an output, by axis."""
        ports = [each.outputs[position] for each in self._interfaces]
        found = {}
        for axis in range(len(ports[-1].shape)):
            bounds = [port.shape[axis] for port in ports]
            is_cut = any(cut.axis == axis for port in ports for cut in port.cuts)
            names = [
                each.name
                for i, each in enumerate(self._dimensions)
                if (is_cut or len(set(bounds)) > 1) and bounds == [bucket[i].high for bucket in self._buckets]
            ]
            if len(names) == 1:
                found[axis] = names[0]
        return found

    def type_of(self, port: Port) -> str:
        """What to feed, such as `float32[batch=1..32, 3, 224, 224]`."""
        extents = [self._extent(port, axis) for axis in range(len(port.shape))]
        return f"{port.dtype}[{', '.join(extents)}]"

    def _extent(self, port: Port, axis: int) -> str:
        number = self._axes.get((port.name, axis))
        if number is None:
            return str(port.shape[axis])
        return f"{self._dimensions[number].name}={union_text(self._sizes[number])}"

    def _text(self, sizes: Sequence[object]) -> str:
        return ", ".join(f"{each.name}={size}" for each, size in zip(self._dimensions, sizes, strict=True))

    def _wrong_feed(self, port: Port, what: str) -> UsageError:
        return UsageError("HC553", f"input {port.name!r} {what}", remedy=f"feed {self.type_of(port)}")


@functools.lru_cache(maxsize=64)
def _dtype_name(dtype: np.dtype) -> str:
    """Which numpy puts together each time it is asked."""
    return dtype.name


def _has_extents(shape: Sequence[int], extents: Iterable[tuple[int, int]]) -> bool:
    """By axis."""
    for axis, extent in extents:  # noqa: SIM110 - a generator takes longer than a loop of few turns
        if shape[axis] != extent:
            return False
    return True


def _wrong_shape(name: str, shape: Sequence[int], type_: str) -> UsageError:
    return UsageError("HC554", f"input {name!r} has shape {list(shape)}", remedy=f"feed {type_}")
