"""Sums of arrays over the ranks, in buckets.

Of each bucket a rank adds up one part, which it gets from all others (reduce-scatter), and gives the sum back
to them (all-gather). So a rank sends 2 (N - 1) / N of the bytes, the least for N ranks (Patarasuk and
Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009), and each addition is in the
order of the ranks: runs of the same number of ranks are equal bit for bit, and so are all ranks of a run.
Messages go from each rank to each other, N - 1 of them at once, which suits up to some dozens of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hybridc.errors import UsageError
from hybridc.training.ranks.exchange import Ranks

BUCKET_BYTES = 4 << 20
"""Large enough that latency does not count, small enough that what is packed twice is little memory."""
WIRES = ("fp32", "bf16")


@dataclass
class AllReduce:
    """Sums over `ranks`, which go over the wire as `wire` says: `fp32`, or `bf16` with error feedback.

    Error feedback (Karimireddy et al., Error feedback fixes SignSGD, 2019): what rounding loses of a bucket
    is added to the next step's, so that it is late and not lost.
    """

    ranks: Ranks
    wire: str = "fp32"
    bucket_bytes: int = BUCKET_BYTES
    _residuals: dict[tuple[str, ...], np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.wire not in WIRES:
            remedy = f"write {' or '.join(WIRES)}"
            raise UsageError("HC500", f"unknown format of gradients on the wire {self.wire!r}", remedy=remedy)

    def sums(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Of arrays that all ranks have by the same names, in the same order, types and shapes.

        The last array comes first: a backward pass has the gradient of the last layer first. Raises as
        `Ranks.exchange`.
        """
        made: dict[str, np.ndarray] = {}
        for names in buckets(arrays, self.bucket_bytes):
            flat = np.concatenate([arrays[name].reshape(-1) for name in names])
            self._sum(flat, names)
            parts = np.split(flat, np.cumsum([arrays[name].size for name in names])[:-1])
            made |= {name: part.reshape(arrays[name].shape) for name, part in zip(names, parts, strict=True)}
        return {name: made[name] for name in arrays}

    def _sum(self, flat: np.ndarray, names: tuple[str, ...]) -> None:
        """In place."""
        count, rank = self.ranks.count, self.ranks.rank
        ends = [flat.size * i // count for i in range(count + 1)]
        parts = [flat[begin:end] for begin, end in itertools.pairwise(ends)]
        if self.wire == "fp32" or flat.dtype != np.float32:
            came = [np.empty_like(parts[rank]) for _ in range(count)]
            came[rank] = parts[rank].copy()
            self.ranks.exchange(parts, came)
            parts[rank][...] = _in_order(came)
            self.ranks.exchange([parts[rank]] * count, parts)
            return
        residual = self._residuals.setdefault(names, np.zeros_like(flat))
        kept = [residual[begin:end] for begin, end in itertools.pairwise(ends)]
        packed = [np.empty(0, np.uint16) if i == rank else _rounded(parts[i], kept[i]) for i in range(count)]
        room = [np.empty(parts[rank].size, np.uint16) for _ in range(count)]
        self.ranks.exchange(packed, room)
        parts[rank][...] = _in_order(
            [parts[rank].copy() if i == rank else from_bf16(room[i]) for i in range(count)]
        )
        total = _rounded(parts[rank], kept[rank])
        sums = [np.empty(part.size, np.uint16) for part in parts]
        sums[rank] = total
        self.ranks.exchange([total] * count, sums)
        for part, value in zip(parts, sums, strict=True):
            part[...] = from_bf16(value)


def buckets(arrays: Mapping[str, np.ndarray], bucket_bytes: int) -> list[tuple[str, ...]]:
    """Names in reverse order, in groups of one type and at most so many bytes, but of at least one array."""
    found: list[list[str]] = []
    filled = 0
    for name in reversed(list(arrays)):
        array = arrays[name]
        is_full = bool(found) and filled + array.nbytes > bucket_bytes
        if not found or is_full or arrays[found[-1][0]].dtype != array.dtype:
            found.append([])
            filled = 0
        found[-1].append(name)
        filled += array.nbytes
    return [tuple(names) for names in found]


def to_bf16(values: np.ndarray) -> np.ndarray:
    """The upper halves of float32, rounded to nearest even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def from_bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.uint32) << 16).view(np.float32)


def _rounded(values: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """As bf16, with what was lost before; `residual` becomes what is lost now, which is never infinite."""
    wanted = values + residual
    packed = to_bf16(wanted)
    with np.errstate(invalid="ignore"):
        residual[...] = np.nan_to_num(wanted - from_bf16(packed), nan=0.0, posinf=0.0, neginf=0.0)
    return packed


def _in_order(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The sum from rank 0 on."""
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total
