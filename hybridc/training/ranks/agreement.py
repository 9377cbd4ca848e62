"""Ranks that must have the same step, data and options: found out before the first step."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from hybridc.errors import UsageError
from hybridc.passes.training.spec import TrainingSpec
from hybridc.training.ranks.exchange import Ranks, shared


def check_agreement(ranks: Ranks, own: Mapping[str, object]) -> None:
    """Raises UsageError HC589 on all ranks if one has another value than rank 0; it names the rank."""
    first, *others = ranks.gather(dict(own))
    for rank, found in enumerate(others, 1):
        for name, value in first.items():
            if found.get(name) != value:
                what = f"rank {rank} has another {name} than rank 0: {found.get(name)!r}, not {value!r}"
                remedy = "start all ranks with the same artifact, data and options"
                raise shared(UsageError("HC589", what, remedy=remedy))


def parts_of_rank(ranks: Ranks, parts: int) -> range:
    """The parts of a batch that this rank goes through. Raises UsageError HC587 on all ranks."""
    if parts % ranks.count:
        what = f"{ranks.count} ranks cannot share a batch of {parts} part{'s' * (parts > 1)}"
        remedy = f"compile with --accumulate {ranks.count}, or another multiple of the number of ranks"
        raise shared(UsageError("HC587", what, remedy=remedy))
    share = parts // ranks.count
    return range(ranks.rank * share, (ranks.rank + 1) * share)


def check_whole_batch(spec: TrainingSpec, ranks: Ranks | None) -> None:
    """Raises UsageError HC587, on all ranks, if BatchNorm's statistics are of parts that no rank has now."""
    if spec.synchronized_parts > 1 and (ranks is None or ranks.count != spec.accumulate):
        parts, found = spec.accumulate, 1 if ranks is None else ranks.count
        what = f"--sync-batchnorm needs a rank for each of the {parts} parts of a batch, not {found}"
        remedy = f"train on as many ranks, mpiexec -n {parts}, or compile for another --accumulate"
        raise shared(UsageError("HC587", what, remedy=remedy))


def threads_of_rank(ranks: Ranks) -> int:
    """Cores that this process may use, divided by the ranks that may use them, too."""
    own = socket.gethostname(), os.sched_getaffinity(0)
    sharing = sum(host == own[0] and not cores.isdisjoint(own[1]) for host, cores in ranks.gather(own))
    return max(1, len(own[1]) // sharing)
