"""A command that is one rank of an MPI job: no rank waits for one that failed."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from hybridc.cli.support.guardian import go_on_in_a_child
from hybridc.errors import DeviceError, HybridcError, UsageError, out_of_memory
from hybridc.training.ranks.exchange import Ranks

_VARIABLES = (
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
"""In the environment the rank of a process, and how many there are: by MPICH, Open MPI and Slurm."""
_FORWARDING_SECONDS = 0.5
"""For mpiexec to read what a rank has written: told of MPI_Abort, it drops what is still in its pipes."""


@contextmanager
def started_ranks(timeout_seconds: float) -> Iterator[Ranks]:
    """The ranks of `mpiexec`. An error that only this rank has is told with its number, and ends all of them;
    so does a signal that kills it.

    Raises UsageError HC588 if mpi4py or an MPI library is missing.
    """
    started = _started_rank()
    if started is not None and "mpi4py.MPI" not in sys.modules:  # MPI knows the process that initializes it
        go_on_in_a_child(f"rank {started}", _FORWARDING_SECONDS)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        what = f"mpi4py cannot be used: {next(iter(str(error).splitlines()), '')}"
        remedy = "pip install 'hybridc[mpi]', or mpi4py beside the MPI of your cluster"
        raise UsageError("HC588", what, remedy=remedy) from None
    ranks = Ranks(MPI.COMM_WORLD, timeout_seconds)
    _tell_processes(ranks)
    try:
        yield ranks
    except BaseException as error:
        if ranks.count == 1:
            raise
        if isinstance(error, HybridcError) and error.is_shared:
            if ranks.rank == 0:
                raise
            raise SystemExit(error.exit_code) from None  # rank 0 tells it
        _end_all(ranks, error)


def _started_rank() -> str | None:
    """The rank that a launcher says this process is, if it has started several."""
    given = os.environ
    found = (given.get(rank) for rank, count in _VARIABLES if given.get(count, "1") != "1")
    return next((rank for rank in found if rank is not None), None)


def _tell_processes(ranks: Ranks) -> None:
    """Which process each rank is."""
    found = ranks.gather((os.getpid(), socket.gethostname()))
    if ranks.rank == 0:
        listed = ", ".join(f"{rank} is {pid} on {host}" for rank, (pid, host) in enumerate(found))
        print(f"processes of the ranks: {listed}", file=sys.stderr, flush=True)


def _end_all(ranks: Ranks, error: BaseException) -> NoReturn:
    """MPI_Abort: the others may wait for this rank, and so would the end of the process."""
    shown = error if isinstance(error, HybridcError) else out_of_memory(error)
    code = 130 if isinstance(error, KeyboardInterrupt) else 1
    if shown is None:
        print(f"rank {ranks.rank} ended: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    else:
        code = shown.exit_code
        where = f"rank {ranks.rank}" + (f", {shown.where}" if shown.where else "")
        told = DeviceError(shown.code, shown.what, where=where, remedy=shown.remedy)
        print(told, file=sys.stderr, flush=True)
    time.sleep(_FORWARDING_SECONDS)
    ranks.comm.Abort(code)
    os._exit(code)
