"""Messages between the ranks of an MPI job, with a time after which a rank that is silent is named."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hybridc.errors import DeviceError, HybridcError
from hybridc.options import DEFAULT_NET_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from mpi4py.MPI import Comm, Request

T = TypeVar("T")
_TAG = 17001
"""Of all messages: those of one rank to another arrive in the order of their sending."""
_SPIN_SECONDS, _PAUSE_SHARE, _PAUSE_SECONDS = 50e-6, 1 / 8, 0.001
"""Polling yields the core while a message may be on its way, and then sleeps for a share of the time waited,
at most so long: kernels of this rank need the core."""


@dataclass
class Ranks:
    """This rank among all of an MPI communicator. Not for several threads at once.

    Every method but the properties is collective: all ranks call it, in the same order. A rank that does not
    answer raises DeviceError HC434, which names it; the job is then to be ended, as `hybridc train` does by
    `MPI_Abort`, since other ranks may wait for this one.
    """

    comm: Comm
    timeout_seconds: float = DEFAULT_NET_TIMEOUT_SECONDS
    sent_bytes: int = 0
    """Of arrays, by this rank so far."""

    @property
    def rank(self) -> int:
        return self.comm.Get_rank()

    @property
    def count(self) -> int:
        return self.comm.Get_size()

    def exchange(self, send: Sequence[np.ndarray | None], receive: Sequence[np.ndarray | None]) -> None:
        """`send[i]` goes to rank i while `receive[i]` is filled by what comes from it: contiguous arrays.

        None, and an array's place for this rank itself, are no message.
        """
        from mpi4py import MPI

        others = [rank for rank in range(self.count) if rank != self.rank]
        try:
            pending = [
                (rank, self.comm.Irecv([_bytes(array), MPI.BYTE], rank, _TAG))
                for rank in others
                if (array := receive[rank]) is not None
            ]
            for rank in others:
                array = send[rank]
                if array is not None:
                    pending.append((rank, self.comm.Isend([_bytes(array), MPI.BYTE], rank, _TAG)))
                    self.sent_bytes += array.nbytes
            self._wait(pending)
        except MPI.Exception as error:
            what = f"rank {self.rank} lost the connection to another: {error}"
            raise DeviceError("HC434", what, remedy=_REMEDY) from None

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order. Raises as `exchange`."""
        return self._objects(value, range(self.count), range(self.count))

    def from_first(self, value: T) -> T:
        """The value of rank 0. Raises as `exchange`."""
        return self._objects(value, [0], range(self.count))[0]

    def together(self, make: Callable[[], T]) -> T:
        """What `make` returns, if it does so on all ranks.

        Otherwise the first rank's error is raised on all of them, so that none waits for a rank that failed.
        """
        error: HybridcError | None = None
        try:
            made = make()
        except HybridcError as raised:
            error = raised
        failed = [(rank, found) for rank, found in enumerate(self.gather(error)) if found is not None]
        if failed:
            rank, first = failed[0]
            what = f"rank {rank}: {first.what}"
            raise shared(type(first)(first.code, what, where=first.where, remedy=first.remedy))
        return made

    def _objects(self, value: T, sources: Sequence[int], targets: Sequence[int]) -> list[T]:
        """What the `sources` have, on the `targets`: first the sizes of the pickled values, then these.

        All ranks run one program for one user: what is unpickled comes from nobody else.
        """
        data = np.frombuffer(pickle.dumps(value, pickle.HIGHEST_PROTOCOL), np.uint8)
        sizes = [np.zeros(1, np.int64) if rank in sources else None for rank in range(self.count)]
        self._spread(np.array([data.size], np.int64), sizes, sources, targets)
        room = [None if size is None else np.empty(int(size[0]), np.uint8) for size in sizes]
        self._spread(data, room, sources, targets)
        return [
            value if rank == self.rank else pickle.loads(found.data)
            for rank, found in enumerate(room)
            if found is not None
        ]

    def _spread(
        self,
        data: np.ndarray,
        receive: Sequence[np.ndarray | None],
        sources: Sequence[int],
        targets: Sequence[int],
    ) -> None:
        is_source, before = self.rank in sources, self.sent_bytes
        self.exchange(
            [data if is_source and rank in targets else None for rank in range(self.count)], receive
        )
        self.sent_bytes = before  # arrays alone are counted

    def _wait(self, pending: list[tuple[int, Request]]) -> None:
        start = time.monotonic()
        while pending := [(rank, request) for rank, request in pending if not request.Test()]:
            waited = time.monotonic() - start
            if waited > self.timeout_seconds:
                late = ", ".join(str(rank) for rank in sorted({rank for rank, _ in pending}))
                what = f"rank {late} did not answer rank {self.rank} within {self.timeout_seconds:g} s"
                raise DeviceError("HC434", what, remedy=_REMEDY)
            if waited < _SPIN_SECONDS:
                os.sched_yield()
            else:
                time.sleep(min(_PAUSE_SHARE * waited, _PAUSE_SECONDS))


E = TypeVar("E", bound=HybridcError)


def shared(error: E) -> E:
    """An error that all ranks raise."""
    error.is_shared = True
    return error


_REMEDY = (
    "see what that rank printed; go on from the last checkpoint with --resume, or give more --net-timeout"
)


def _bytes(array: np.ndarray) -> Any:
    return array.reshape(-1).view(np.uint8)
