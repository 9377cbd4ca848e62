"""Data-parallel training over MPI: bytes on the wire, weak scaling on this machine, a projection beyond it.

    python benchmarks/ranks.py

cifar_quick, one thread a rank, and two parts of 50 examples for each rank: each does the same work. Run
nothing else meanwhile: the ratio of times is the efficiency. The projection is SIMULATED: it takes the time
of a step of one rank and constants of a network that its vendors state, and adds the all-reduce as
`allreduce.py` makes it, none of it hidden. Needs the extra `mpi`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import write_result

import hybridc
from hybridc.models import build

PART, PARTS_OF_RANK, STEPS = 50, 2, 12
LATENCY_SECONDS, BYTES_PER_SECOND = 1.5e-6, 12.5e9
"""Of a network of 100 Gb/s."""
BUCKET_BYTES = 4 << 20
PROJECTED = (2, 16, 64, 256)
MOST_BYTES = 1.02
"""Of what an all-reduce needs at least."""


def projected_seconds(compute: float, parameter_bytes: int, ranks: int) -> float:
    """Of a step: compute, then of each bucket two phases of N - 1 messages with (N - 1) / N of its bytes.

    The latencies of a phase's messages follow one another at worst.
    """
    buckets = max(1, -(-parameter_bytes // BUCKET_BYTES))
    wire = 2 * (ranks - 1) / ranks * parameter_bytes / BYTES_PER_SECOND
    return compute + wire + 2 * buckets * (ranks - 1) * LATENCY_SECONDS


def worker(artifact: Path, wire: str) -> None:
    """One rank: makes some steps; rank 0 prints the median time of one, and the bytes it sends in one."""
    from mpi4py import MPI

    with hybridc.load_training(artifact, threads=1, comm=MPI.COMM_WORLD, wire=wire) as session:
        random = np.random.default_rng(0)
        images = random.standard_normal((session.batch, *session.inputs[0].shape[1:])).astype(np.float32)
        labels = random.integers(0, 10, session.batch)
        seconds, processor_seconds, before = [], [], 0
        for _ in range(STEPS):
            before = session.ranks.sent_bytes if session.ranks else 0
            start, used = time.perf_counter(), time.process_time()
            session.step(images[session.share], labels[session.share])
            seconds.append(time.perf_counter() - start)
            processor_seconds.append(time.process_time() - used)
        sent = session.ranks.sent_bytes - before if session.ranks else 0
        if MPI.COMM_WORLD.rank == 0:
            states = session.state_dict()
            size = sum(value.nbytes for value in states.values())
            found = {
                "seconds": statistics.median(seconds[2:]),
                "processor_seconds": statistics.median(processor_seconds[2:]),
                "sent": sent,
                "parameters": size,
            }
            print(json.dumps(found))


def measured(ranks: int, artifact: Path, wire: str = "fp32") -> dict[str, Any]:
    beside = Path(sys.executable).with_name("mpiexec")
    launcher = str(beside) if beside.exists() else "mpiexec"
    command = [launcher, "-n", str(ranks), sys.executable, "-m", "mpi4py", __file__, str(artifact), wire]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        artifacts = {}
        for ranks in (1, 2, 4):
            parts = ranks * PARTS_OF_RANK
            artifacts[ranks] = Path(folder) / f"{ranks}.hyb"
            model = build("cifar_quick", batch=PART)
            loss = "softmax_cross_entropy"
            batch = PART * parts
            hybridc.compile_training(model, artifacts[ranks], loss=loss, batch=batch, accumulate=parts)
        one = measured(1, artifacts[1])
        size = one["parameters"]
        for ranks, wire in ((2, "fp32"), (2, "bf16"), (4, "fp32")):
            least = 2 * (ranks - 1) / ranks * size / (1 if wire == "fp32" else 2)
            many = measured(ranks, artifacts[ranks], wire)
            row = {"ranks": ranks, "wire": wire, "sent_over_least": many["sent"] / least}
            if ranks == 2:  # more than this machine has cores for say nothing
                row["weak_scaling"] = one["seconds"] / many["seconds"]
                row["weak_scaling_of_processor_time"] = one["processor_seconds"] / many["processor_seconds"]
            found.append(row)
        for ranks in PROJECTED:
            seconds = projected_seconds(one["seconds"], size, ranks)
            found.append({"ranks": ranks, "SIMULATED_weak_scaling": one["seconds"] / seconds})
    return found


def main() -> int:
    if len(sys.argv) == 3:
        worker(Path(sys.argv[1]), sys.argv[2])
        return 0
    made = rows()
    for row in made:
        print(
            "  ".join(
                f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}"
                for name, value in row.items()
            )
        )
    print(
        f"SIMULATED with {LATENCY_SECONDS * 1e6:g} us a message and {BYTES_PER_SECOND / 1e9:g} GB/s:"
        f" {projected_seconds.__doc__.splitlines()[0] if projected_seconds.__doc__ else ''}"
    )
    write_result("ranks", made)
    return int(any(row.get("sent_over_least", 0.0) > MOST_BYTES for row in made))


if __name__ == "__main__":
    sys.exit(main())
