"""A command that is one rank of an MPI job: no rank waits for one that failed."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from hybridc.cli.support.guardian import guarded
from hybridc.errors import DeviceError, HybridcError, UsageError, out_of_memory
from hybridc.training.ranks.exchange import Ranks

_COUNTS_OF_RANKS = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS")
"""In the environment, by MPICH, Open MPI and Slurm."""
_FORWARDING_SECONDS = 0.5
"""For mpiexec to read what a rank has written: told of MPI_Abort, it drops what is still in its pipes."""


@contextmanager
def started_ranks(timeout_seconds: float) -> Iterator[Ranks]:
    """The ranks of `mpiexec`. An error that only this rank has is told with its number, and ends all of them;
    so does a signal that kills it.

    Raises UsageError HC588 if mpi4py or an MPI library is missing.
    """
    # before MPI, which knows the process that initializes it
    is_guarded = _has_others() and "mpi4py.MPI" not in sys.modules
    tell = guarded(_FORWARDING_SECONDS) if is_guarded else None
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        what = f"mpi4py cannot be used: {next(iter(str(error).splitlines()), '')}"
        remedy = "pip install 'hybridc[mpi]', or mpi4py beside the MPI of your cluster"
        raise UsageError("HC588", what, remedy=remedy) from None
    ranks = Ranks(MPI.COMM_WORLD, timeout_seconds)
    if tell is not None:
        tell(f"rank {ranks.rank}")
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


def _has_others() -> bool:
    """Whether a launcher says that it has started several ranks."""
    return any(os.environ.get(name, "1") != "1" for name in _COUNTS_OF_RANKS)


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
