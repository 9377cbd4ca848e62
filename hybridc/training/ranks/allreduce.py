"""Sums of arrays over the ranks, a bucket of them at a time.

Of each bucket a rank adds up one part, which it gets from all others (reduce-scatter), and gives the sum back
to them (all-gather). So a rank sends 2 (N - 1) / N of the bytes, the least for N ranks (Patarasuk and
Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009), and each addition is in the
order of the ranks: runs of the same number of ranks are equal bit for bit, and so are all ranks of a run.
Messages go from each rank to each other, N - 1 of them at once, which suits up to some dozens of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hybridc.errors import UsageError
from hybridc.machine import Network
from hybridc.training.ranks.exchange import Ranks

WIRES = ("fp32", "bf16")


@dataclass
class AllReduce:
    """Sums over `ranks`, which go over the wire as `wire` says: `fp32`, or `bf16` with error feedback.

    Error feedback (Karimireddy et al., Error feedback fixes SignSGD, 2019): what rounding loses of a bucket
    is added to the next step's, so that it is late and not lost.
    """

    ranks: Ranks
    wire: str = "fp32"
    network: Network | None = None
    """What buckets are chosen for, if not that of the machine which the step was compiled for."""
    _residuals: dict[tuple[str, ...], np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.wire not in WIRES:
            remedy = f"write {' or '.join(WIRES)}"
            raise UsageError("HC500", f"unknown format of gradients on the wire {self.wire!r}", remedy=remedy)

    def sum_into(
        self,
        arrays: Sequence[np.ndarray],
        names: tuple[str, ...],
        packed: np.ndarray,
        room: np.ndarray,
        ends: Sequence[int],
        *,
        gather: bool = True,
    ) -> None:
        """One bucket of arrays of one type, which all ranks have alike, in place. Raises as `Ranks.exchange`.

        Each rank adds up the elements of `packed`, which has all of them, up to its one of `ends`, in `room`,
        which has a row of so many for each rank. Without `gather` the sums stay there, and nothing else is
        changed. `names` tell what bf16 lost of which bucket.
        """
        places = np.split(packed, np.cumsum([array.size for array in arrays])[:-1])
        for place, array in zip(places, arrays, strict=True):
            place[...] = array.reshape(-1)
        self._sum(packed, names, room, (0, *ends), gather=gather)
        for place, array in zip(places, arrays, strict=True):
            array[...] = place.reshape(array.shape)

    def mean_into(self, arrays: Sequence[np.ndarray], sources: Sequence[np.ndarray]) -> None:
        """Means over the ranks of few numbers, added up in float64. Raises as `Ranks.exchange`."""
        own = np.concatenate([source.reshape(-1) for source in sources])
        room = [np.empty_like(own) for _ in range(self.ranks.count)]
        self.ranks.exchange([own] * self.ranks.count, room)
        room[self.ranks.rank] = own
        mean = np.mean(room, axis=0, dtype=np.float64)
        places = np.split(mean, np.cumsum([array.size for array in arrays])[:-1])
        for place, array in zip(places, arrays, strict=True):
            array[...] = place.reshape(array.shape)

    def _sum(
        self, flat: np.ndarray, names: tuple[str, ...], room: np.ndarray, ends: Sequence[int], *, gather: bool
    ) -> None:
        """In place."""
        count, rank = self.ranks.count, self.ranks.rank
        parts = [flat[begin:end] for begin, end in itertools.pairwise(ends)]
        if self.wire == "fp32" or flat.dtype != np.float32:
            came = [row[: parts[rank].size] for row in room]
            came[rank][...] = parts[rank]
            self.ranks.exchange(parts, came)
            parts[rank][...] = came[0]
            for part in came[1:]:
                parts[rank] += part
            if gather:
                self.ranks.exchange([parts[rank]] * count, parts)
            return
        residual = self._residuals.setdefault(names, np.zeros_like(flat))
        kept = [residual[begin:end] for begin, end in itertools.pairwise(ends)]
        packed = [np.empty(0, np.uint16) if i == rank else _rounded(parts[i], kept[i]) for i in range(count)]
        halves = [np.empty(parts[rank].size, np.uint16) for _ in range(count)]
        self.ranks.exchange(packed, halves)
        parts[rank][...] = _in_order(
            [parts[rank].copy() if i == rank else from_bf16(halves[i]) for i in range(count)]
        )
        if not gather:
            return
        total = _rounded(parts[rank], kept[rank])
        sums = [np.empty(part.size, np.uint16) for part in parts]
        sums[rank] = total
        self.ranks.exchange([total] * count, sums)
        for part, value in zip(parts, sums, strict=True):
            part[...] = from_bf16(value)


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
