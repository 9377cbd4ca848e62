"""A program for several ranks: sums over them against MPI's own and float64. Rank 0 writes what it found."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
from mpi4py import MPI

from hybridc.training.ranks.allreduce import AllReduce
from hybridc.training.ranks.exchange import Ranks
from hybridc.training.ranks.measure import measure_network

SHAPES = {"a": (3, 5), "b": (), "c": (1001,), "d": (64, 9)}
BUCKETS = (("d", "c"), ("b", "a"))


def sums(all_reduce: AllReduce, own: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    made = {name: value.copy() for name, value in own.items()}
    count = all_reduce.ranks.count
    for names in BUCKETS:
        size = sum(made[name].size for name in names)
        packed, room = np.empty(size, np.float32), np.empty((count, -(-size // count)), np.float32)
        ends = [size * (rank + 1) // count for rank in range(count)]
        all_reduce.sum_into([made[name] for name in names], names, packed, room, ends)
    return made


def arrays(rank: int, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng([seed, rank])
    return {name: np.asarray(random.standard_normal(shape), np.float32) for name, shape in SHAPES.items()}


def largest_error(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(found[name] - expected[name]).max()) for name in SHAPES)


def main(output: Path) -> None:
    comm = MPI.COMM_WORLD
    ranks = Ranks(comm, 60.0)
    own = arrays(comm.rank)
    of_ranks = [arrays(rank) for rank in range(comm.size)]
    exact = {name: np.asarray(np.sum([a[name] for a in of_ranks], 0, np.float64)) for name in SHAPES}
    of_mpi = {name: np.asarray(comm.allreduce(value.astype(np.float64))) for name, value in own.items()}
    full = AllReduce(ranks)
    found = sums(full, own)
    report: dict[str, object] = {
        "parameter_bytes": sum(value.nbytes for value in own.values()),
        "sent_bytes": ranks.gather(ranks.sent_bytes),
        "names": list(found),
        "shapes_kept": all(found[name].shape == shape for name, shape in SHAPES.items()),
        "error": largest_error(found, exact),
        "error_of_mpi": largest_error(of_mpi, exact),
        "equal_on_ranks": len({b"".join(v.tobytes() for v in s.values()) for s in ranks.gather(found)}) == 1,
        "equal_again": all(np.array_equal(sums(full, own)[name], found[name]) for name in SHAPES),
    }
    half = AllReduce(ranks, "bf16")
    before = ranks.sent_bytes
    made = [sums(half, own) for _ in range(64)]
    report["sent_bytes_of_bf16"] = (ranks.sent_bytes - before) / len(made)
    report["bf16_equal_on_ranks"] = len({s["c"].tobytes() for s in ranks.gather(made[-1])}) == 1
    report["error_of_bf16"] = largest_error(made[0], exact)
    mean = {
        name: np.asarray(np.mean([each[name].astype(np.float64) for each in made], axis=0)) for name in SHAPES
    }
    report["error_of_mean_of_bf16"] = largest_error(mean, exact)
    report["network"] = asdict(measure_network(ranks))
    if comm.rank == 0:
        output.write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
