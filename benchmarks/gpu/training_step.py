"""Losses of some steps of training on the GPU, beside those of the same steps on the CPU.

    python -m gpu.training_step MODEL BATCH [--cuda cuda:sm_90] [--isa native] [--budgets 100%,50%]
                                      [--steps 5] [--emulate-gpu BYTES]

Prints a JSON object for each budget.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

import hybridc
from hybridc import models

LOSS, OPTIMIZER = "softmax_cross_entropy", "sgd:lr=0.01,momentum=0.9"
TIMED_STEPS = 10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("batch", type=int)
    parser.add_argument("--cuda", default="cuda")
    parser.add_argument("--isa", default="native")
    parser.add_argument("--machine")
    parser.add_argument("--budgets", type=lambda text: text.split(","), default=["100%", "50%"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--emulate-gpu", type=int, metavar="BYTES")
    arguments = parser.parse_args()
    if arguments.emulate_gpu:
        from hybridc import emulator

        emulator.start(arguments.emulate_gpu, compute_capability=(9, 0))
    model = models.build(arguments.model, batch=arguments.batch)
    expected, cpu_ms, _ = losses(model.SerializeToString(), arguments.isa, None, arguments)
    for budget in arguments.budgets:
        target = f"{arguments.cuda}+{arguments.isa}"
        found, ms, budget_bytes = losses(model.SerializeToString(), target, budget, arguments)
        row = {
            "table": "training",
            "model": f"{arguments.model}:{arguments.batch}",
            "budget": budget,
            "budget_bytes": budget_bytes,
            "losses": found,
            "cpu_losses": expected,
            "max_rel_error": float(np.max(np.abs(np.subtract(found, expected)) / np.abs(expected))),
        }
        print(json.dumps(row if arguments.emulate_gpu else row | {"ms": ms, "cpu_ms": cpu_ms}), flush=True)


def losses(
    model: bytes, target: str, budget: str | None, arguments: argparse.Namespace
) -> tuple[list[float], float, int | None]:
    """Losses of the first steps, milliseconds of later ones (median), and the budget in bytes."""
    with tempfile.TemporaryDirectory(prefix="hybridc-bench-") as folder:
        path = Path(folder) / "step.hyb"
        done = hybridc.compile_training(
            model,
            path,
            loss=LOSS,
            optimizer=OPTIMIZER,
            target=target,
            gpu_memory=budget,
            machine=arguments.machine,
        )
        session = hybridc.load_training(path)
        random = np.random.default_rng(0)
        [images], [labels] = session.inputs, session.targets
        batches = [
            (
                random.standard_normal(images.shape, dtype=np.float32),
                random.integers(0, 10, labels.shape).astype(labels.dtype),
            )
            for _ in range(arguments.steps)
        ]
        found = [session.step(*batch) for batch in batches]
        times = []
        for _ in range(0 if arguments.emulate_gpu else TIMED_STEPS):
            start = time.perf_counter()
            session.step(*batches[0])
            times.append((time.perf_counter() - start) * 1e3)
        session.close()
        budget_bytes = done.step.plan.budget_bytes if done.step.plan else None
        return found, round(statistics.median(times or [0.0]), 3), budget_bytes


if __name__ == "__main__":
    main()
