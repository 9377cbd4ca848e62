"""What GeePS keeps in the GPU's memory: a policy to compare pinning with.

Cui, Zhang, Ganger, Gibbons and Xing, GeePS: Scalable deep learning on distributed GPUs with a GPU-specialized
parameter server, EuroSys 2016; in detail as in the authors' code (`vi_create_local_storage` and
`vi_thread_summarize` of github.com/cuihenggang/geeps):

- What is pinned has memory of its own for the whole step. All else lies in host memory, and is copied to and
  from a buffer around each access. The buffer is twice the largest access, so that the next is prefetched.
- Local data, that is, all but parameters, comes first. As long as something fits, the largest access is made
  smaller: its first piece of unpinned local data is pinned, if that fits beside twice what is the largest
  access then. If none does, all other local data is gone through once, and what fits is pinned.
- What is left then is given to parameters, in the order of their first access.

The authors' program goes through other local data in the order of a hash table; here it is the order of
first access. It reserves a second entry beside each pinned parameter, for its update; here updates are data
like any other, and a parameter is charged its own bytes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Placement:
    """Which tensors are pinned, and the buffer through which the others go."""

    pinned: tuple[bool, ...]
    buffer_bytes: int


def place(
    accesses: Sequence[Sequence[int]],
    size_bytes: Sequence[int],
    is_parameter: Sequence[bool],
    capacity_bytes: int,
) -> Placement | None:
    """The policy's choice, or None where not even the buffer fits.

    `accesses` tells for each kernel the tensors that it reads and writes, which are numbered.
    """
    return _Policy(accesses, size_bytes, is_parameter, capacity_bytes).run()


class _Policy:
    def __init__(
        self,
        accesses: Sequence[Sequence[int]],
        size_bytes: Sequence[int],
        is_parameter: Sequence[bool],
        capacity_bytes: int,
    ) -> None:
        self.accesses = [list(dict.fromkeys(access)) for access in accesses]
        self.size_bytes = size_bytes
        self.is_parameter = is_parameter
        self.capacity_bytes = capacity_bytes
        self.order = list(dict.fromkeys(t for access in self.accesses for t in access))
        self.users: list[list[int]] = [[] for _ in size_bytes]
        for kernel, access in enumerate(self.accesses):
            for tensor in access:
                self.users[tensor].append(kernel)
        self.pinned = [False] * len(size_bytes)
        self.pinned_bytes = 0
        self.buffered = np.array([sum(size_bytes[t] for t in access) for access in self.accesses], np.int64)

    def run(self) -> Placement | None:
        if 2 * _largest(self.buffered) > self.capacity_bytes:
            return None
        while self._reduce_peak() or self._pin_what_fits(parameters=False):
            pass
        buffer_bytes = 2 * _largest(self.buffered)
        self._pin_what_fits(parameters=True)  # the buffer is not made smaller for them
        return Placement(tuple(self.pinned), buffer_bytes)

    def _reduce_peak(self) -> bool:
        """Pin one piece of the largest access; False if none fits."""
        if not self.accesses:
            return False
        peak = int(self.buffered.argmax())
        second_bytes = _largest(np.delete(self.buffered, peak))
        for tensor in self.accesses[peak]:
            size = self.size_bytes[tensor]
            then_bytes = max(int(self.buffered[peak]) - size, second_bytes)
            if self._may_pin(tensor) and self.pinned_bytes + size + 2 * then_bytes <= self.capacity_bytes:
                self._pin(tensor)
                return True
        return False

    def _pin_what_fits(self, *, parameters: bool) -> bool:
        peak_bytes, before = _largest(self.buffered), self.pinned_bytes
        for tensor in self.order:
            fits = self.pinned_bytes + self.size_bytes[tensor] + 2 * peak_bytes <= self.capacity_bytes
            if fits and self._may_pin(tensor, parameters):
                self._pin(tensor)
        return self.pinned_bytes > before

    def _may_pin(self, tensor: int, parameter: bool = False) -> bool:
        return not self.pinned[tensor] and self.is_parameter[tensor] == parameter

    def _pin(self, tensor: int) -> None:
        self.pinned[tensor] = True
        self.pinned_bytes += self.size_bytes[tensor]
        self.buffered[self.users[tensor]] -= self.size_bytes[tensor]


def _largest(values: NDArray[np.int64]) -> int:
    return int(values.max(initial=0))
