"""Data-parallel training over MPI: bytes on the wire, what is hidden of a slow link, scaling, a projection.

    python benchmarks/ranks.py

cifar_quick, one thread a rank, and two parts of 50 examples for each rank: each does the same work. Run
nothing else meanwhile: the ratio of times is the efficiency (weak scaling; of one rank that goes through all
parts of two, strong scaling). AtacWorks in the same way, with one track of 60,000 a part. Runs of one rank
and of two take turns in several rounds, whose medians count. `apart` is the weak scaling of two runs of one
rank side by side that know nothing of each other: what the machine gives two processes at best. For the slow
link, messages of two ranks are held back until a link would have carried them on which the sums take 60 % of
the backward pass, and each rank has one part; steps with and without it take turns, and of the least time of
each turn the median counts. The projection is SIMULATED: it takes the plan of one part of a
rank, scaled to the time that it was measured to take, adds the sums over the ranks with constants of a
network that its vendors state, and replays it; of cifar_quick, and of AtacWorks with four tracks of 60,000 a
part. (Chaudhary et al., Efficient and generic 1D dilated convolution layer for deep learning, 2021, train
that on 16 sockets, 1.41 times as fast in fp32 and 2.27 times in bf16 as eight V100.) Needs the extra `mpi`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from common import write_result

import hybridc
from hybridc.artifact import open_artifact
from hybridc.artifact.manifest import Port
from hybridc.machine import Network
from hybridc.models import build
from hybridc.training.ranks.allreduce import AllReduce
from hybridc.training.ranks.collectives import Summing, choose_buckets, scaled, with_collectives
from hybridc.training.ranks.exchange import Ranks
from hybridc.training.session import TrainingSession

PART, PARTS_OF_RANK, STEPS, ROUNDS = 50, 2, 12, 3
NETWORK = Network()
"""Of 100 Gb/s."""
SLOW_SHARE, BACKWARD_SHARE = 0.6, 2 / 3
"""What the sums take of the backward pass on the slow link; what that is taken to be of a step."""
PROJECTED = (2, 16, 64, 256)
ATACWORKS_PART, TWO_LOSSES = 4, "mse(track)+0.5*mse(peaks)"
CIFAR_QUICK = ("cifar_quick", PART, "softmax_cross_entropy")
ATACWORKS = ("atacworks", 1, TWO_LOSSES)
"""Model, examples of a part, loss."""
SLOW = "slow"
MOST_BYTES, LEAST_HIDDEN = 1.02, 0.85
"""Of what an all-reduce needs at least; of the slow link's time."""


class SlowLink(Ranks):
    """Ranks whose messages take as long as on a link of so many bytes a second, both ways at once."""

    bytes_per_second = float("inf")

    def exchange(self, send: Sequence[np.ndarray | None], receive: Sequence[np.ndarray | None]) -> None:
        start = time.perf_counter()
        before = self.sent_bytes
        super().exchange(send, receive)
        due = start + (self.sent_bytes - before) / self.bytes_per_second
        time.sleep(max(0.0, due - time.perf_counter()))


def projected_efficiency(artifact: Path, part_seconds: float, step_seconds: float, ranks: int) -> float:
    """Of a step of t seconds: t / (t + end of the plan with sums - end without), as nothing else waits."""
    accumulation = open_artifact(artifact / "accumulate")
    graph, plan = accumulation.graph, accumulation.plan
    factor = part_seconds * 1e6 / plan.makespan_us
    alone = scaled(plan, factor)
    sums = list(graph.outputs[1:])
    summing = Summing(ranks, NETWORK)
    _, made = with_collectives(graph, alone, choose_buckets(graph, alone, sums, summing), summing)
    return step_seconds / (step_seconds + (made.makespan_us - alone.makespan_us) * 1e-6)


def random_batch(session: TrainingSession) -> list[dict[str, np.ndarray]]:
    """Inputs and targets of this rank's share of a batch."""
    random = np.random.default_rng(0)
    share = session.share.stop - session.share.start

    def drawn(port: Port) -> np.ndarray:
        shape = (share, *port.shape[1:])
        floats = port.dtype == "float32"
        return random.standard_normal(shape).astype(np.float32) if floats else random.integers(0, 10, shape)

    return [{port.name: drawn(port) for port in ports} for ports in (session.inputs, session.targets)]


def slow_worker(artifact: Path) -> None:
    """One of two ranks with one part each: rank 0 prints the share of the link's time that is hidden."""
    from mpi4py import MPI

    ranks = SlowLink(MPI.COMM_WORLD)

    def step_seconds(network: Network, bytes_per_second: float) -> float:
        """The least of many steps, with buckets that are chosen for this network."""
        ranks.bytes_per_second = bytes_per_second
        with TrainingSession(artifact, threads=1, all_reduce=AllReduce(ranks, network=network)) as session:
            batch, times = random_batch(session), []
            for _ in range(STEPS):
                start = time.perf_counter()
                session.step(*batch)
                times.append(time.perf_counter() - start)
        return ranks.from_first(min(times[1:]))

    first = step_seconds(NETWORK, float("inf"))
    rate = ranks.sent_bytes / STEPS / (SLOW_SHARE * BACKWARD_SHARE * first)
    times = [
        (step_seconds(NETWORK, float("inf")), step_seconds(Network(gb_s=rate / 1e9), rate))
        for _ in range(ROUNDS)
    ]
    fast, slow = (statistics.median(each) for each in zip(*times, strict=True))
    link = SLOW_SHARE * BACKWARD_SHARE * first
    if MPI.COMM_WORLD.rank == 0:
        hidden = 1 - max(0.0, slow - fast) / link
        print(json.dumps({"hidden": hidden, "link_seconds": link, "seconds": fast, "slow_seconds": slow}))


def worker(artifact: Path, wire: str) -> None:
    """One rank: makes some steps; rank 0 prints the median time of one, and the bytes it sends in one."""
    from mpi4py import MPI

    with hybridc.load_training(artifact, threads=1, comm=MPI.COMM_WORLD, wire=wire) as session:
        batch = random_batch(session)
        seconds, processor_seconds, before = [], [], 0
        for _ in range(STEPS):
            before = session.ranks.sent_bytes if session.ranks else 0
            start, used = time.perf_counter(), time.process_time()
            session.step(*batch)
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


def measured_apart(artifact: Path) -> float:
    """Seconds of a step of one rank beside another one that it knows nothing of; of the slower of the two."""
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: measured(1, artifact), range(2)))
    return max(one["seconds"] for one in both)


def scaling(artifacts: Mapping[int, Path], wire: str = "fp32") -> dict[str, Any]:
    """Of two ranks over one, from rounds in which they take turns; and what a rank of two sends in a step."""
    seconds: dict[str, list[float]] = {"one": [], "two": [], "all": [], "apart": []}
    processor: dict[str, list[float]] = {"one": [], "two": []}
    for _ in range(ROUNDS):
        one, two = measured(1, artifacts[1]), measured(2, artifacts[2], wire)
        for name, found in (("one", one), ("two", two)):
            seconds[name].append(found["seconds"])
            processor[name].append(found["processor_seconds"])
        seconds["all"].append(measured(1, artifacts[2])["seconds"])
        seconds["apart"].append(measured_apart(artifacts[1]))
    median = {name: statistics.median(each) for name, each in seconds.items()}
    used = {name: statistics.median(each) for name, each in processor.items()}
    return {
        "sent": two["sent"],
        "parameters": two["parameters"],
        "seconds": median,
        "strong_scaling": median["all"] / (2 * median["two"]),
        "weak_scaling": median["one"] / median["two"],
        "weak_scaling_of_processor_time": used["one"] / used["two"],
        "apart": median["one"] / median["apart"],
    }


def compiled(name: str, batch: int, loss: str, folder: Path, ranks: int) -> Path:
    """Its step for so many ranks, with `batch` examples in each of a rank's parts."""
    artifact, parts = folder / f"{name}_{batch}_{ranks}.hyb", ranks * PARTS_OF_RANK
    model = build(name, batch=batch)
    hybridc.compile_training(model, artifact, loss=loss, batch=batch * parts, accumulate=parts, threads=1)
    return artifact


def rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        artifacts = {ranks: compiled(*CIFAR_QUICK, folder, ranks) for ranks in (1, 2, 4)}
        tracks = {ranks: compiled(*ATACWORKS, folder, ranks) for ranks in (1, 2)}
        for model, made, wire in (
            ("cifar_quick", artifacts, "fp32"),
            ("cifar_quick", artifacts, "bf16"),
            ("atacworks", tracks, "fp32"),
        ):
            row = scaling(made, wire)
            least = row.pop("parameters") / (1 if wire == "fp32" else 2)
            found.append(
                {"model": model, "ranks": 2, "wire": wire, "sent_over_least": row.pop("sent") / least} | row
            )
        # four ranks are more than this machine may have cores for: their times say nothing
        many = measured(4, artifacts[4])
        least = 2 * 3 / 4 * many["parameters"]
        found.append(
            {"model": "cifar_quick", "ranks": 4, "wire": "fp32", "sent_over_least": many["sent"] / least}
        )
        of_two = folder / "two_parts.hyb"
        model = build("cifar_quick", batch=PART)
        hybridc.compile_training(
            model, of_two, loss="softmax_cross_entropy", batch=2 * PART, accumulate=2, threads=1
        )
        found.append({"ranks": 2} | measured(2, of_two, SLOW))
        paper = compiled("atacworks", ATACWORKS_PART, TWO_LOSSES, folder, 1)
        seconds = {
            "cifar_quick": (artifacts[1], found[0]["seconds"]["one"]),
            "atacworks": (paper, measured(1, paper)["seconds"]),
        }
        for name, (path, taken) in seconds.items():
            for ranks in PROJECTED:
                share = projected_efficiency(path, taken / PARTS_OF_RANK, taken, ranks)
                found.append({"model": name, "ranks": ranks, "SIMULATED_weak_scaling": share})
    return found


def main() -> int:
    if len(sys.argv) == 3 and sys.argv[2] == SLOW:
        slow_worker(Path(sys.argv[1]))
        return 0
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
    formulas = (projected_efficiency, Network.all_reduce_us)
    print(
        f"SIMULATED with {NETWORK.latency_us:g} us a message and {NETWORK.gb_s:g} GB/s."
        f" {' '.join(' '.join((formula.__doc__ or '').split()) for formula in formulas)}"
    )
    write_result("ranks", made)
    are_bytes_few = all(row.get("sent_over_least", 0.0) <= MOST_BYTES for row in made)
    return 0 if are_bytes_few and all(row.get("hidden", 1.0) >= LEAST_HIDDEN for row in made) else 1


if __name__ == "__main__":
    sys.exit(main())
