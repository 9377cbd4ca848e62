"""A program for several ranks: steps with states that they share, and that each has. Rank 0 reports."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

from hybridc.cli.support.imports import lasting_imports

with lasting_imports():  # as of the command, without PyTorch
    import hybridc
    from hybridc.training.ranks.exchange import Ranks
    from tests.training.conftest import examples

STEPS = 5


def trained(artifact: Path, *, shard_states: bool) -> dict[str, object]:
    """What this rank has in the end; of states a hash."""
    comm = MPI.COMM_WORLD
    with hybridc.load_training(artifact, threads=1, comm=comm, shard_states=shard_states) as session:
        images, labels = examples(STEPS * session.batch)
        batches = [slice(i * session.batch, (i + 1) * session.batch) for i in range(STEPS)]
        losses = [session.step(images[b][session.share], labels[b][session.share]) for b in batches]
        sent_bytes = session.ranks.sent_bytes if session.ranks else 0
        moments = session.optimizer_state_dict()
        return {
            "losses": losses,
            "parameters": _bytes(session.state_dict()),
            "moments": _bytes(moments),
            "names": sorted(moments),
            "state_bytes": session.optimizer_state_bytes,
            "sent_bytes": sent_bytes,
        }


def _bytes(states: dict[str, np.ndarray]) -> str:
    return "".join(states[name].tobytes().hex() for name in sorted(states))


def main(artifact: Path, output: Path) -> None:
    ranks = Ranks(MPI.COMM_WORLD, 60.0)
    found = {
        kind: ranks.gather(trained(artifact, shard_states=kind == "shared")) for kind in ("shared", "whole")
    }
    if ranks.rank == 0:
        output.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
