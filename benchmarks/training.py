"""Training steps: correct, small and fast.

    python benchmarks/training.py gradients [--models resnet50,encoder] [--target avx512]
    python benchmarks/training.py curves|speed|bf16|memory|pinning|gradient_bytes|states|batch|deep

gradients       of all parameters, against PyTorch in float64: relative errors
curves          the loss of fifty steps against PyTorch's, on emulated GPUs of 100 to 10 % of the memory
speed           digits to 98 % on held-out data, epochs fixed before; times of a step against PyTorch's
bf16            steps of bf16 products: times against float32 and against PyTorch's bf16, losses
memory          the smallest budget against what Caffe allocates; predicted time at Layrub's reduction
pinning         the dynamic programme against an exact solver; pinned bytes against GeePS's policy
gradient_bytes  parameter gradients held at once, against all of them
states          predicted time of a step with its states on the GPU between steps, against on the host
batch           the largest batch and depth on a small device, against everything in its memory
deep            ResNet-1517 from the model to the library

Several parts may be named; each writes `results/training_PART.json`. With `--merge` rows that are there
already for other models stay, so that models can be taken one after the other. Exits with 1 if a part misses
its figure. `memory`, `pinning`, `gradient_bytes`, `states`,
`batch` and `deep` run nothing. Needs the extra `oracle`.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from common import rows_with_origin, write_result
from training import bf16, limits, memory, pinning, runs, states
from training.steps import NETWORKS

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a result, one after the other, and whether they are good enough."""

    rows: Callable[[argparse.Namespace, list[str]], Iterator[dict[str, Any]]]
    passed: Callable[[Rows], bool]
    models: Sequence[str] = ()
    """What there is without `--models`."""


def _planned(rows: Callable[[Sequence[str], str, float], Iterator[dict[str, Any]]]) -> Callable[..., Any]:
    return lambda arguments, names: rows(names, arguments.machine, arguments.seconds)


def _run(rows: Callable[[Sequence[str], str], Iterator[dict[str, Any]]]) -> Callable[..., Any]:
    return lambda arguments, names: rows(names, arguments.target)


NETWORKS = tuple(NETWORKS)
PARTS: dict[str, Part] = {
    "gradients": Part(_run(runs.gradients), runs.gradients_passed, tuple(runs.CASES)),
    "curves": Part(_run(runs.curves), runs.curves_passed, tuple(runs.CURVES)),
    "speed": Part(_run(runs.speed), runs.speed_passed),
    "bf16": Part(_run(bf16.bf16), bf16.bf16_passed, (*bf16.NETWORKS, bf16.DIGITS)),
    "memory": Part(_planned(memory.memory), memory.memory_passed, NETWORKS),
    "pinning": Part(_planned(pinning.pinning), pinning.pinning_passed, NETWORKS),
    "gradient_bytes": Part(_planned(pinning.gradient_bytes), pinning.gradient_bytes_passed, NETWORKS),
    "states": Part(_planned(states.states), states.states_passed, tuple(states.BATCHES)),
    "batch": Part(_planned(limits.batch), limits.batch_passed, ("batch", "blocks")),
    "deep": Part(_planned(limits.deep), limits.deep_passed),
}


def main() -> int:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--models", default="", help="comma-separated; default: all of the part")
    parser.add_argument("--target", default=runs.default_target(), help="of gradients, speed, bf16 (several)")
    parser.add_argument("--machine", default="k40", help="profile that plans are made for")
    parser.add_argument("--seconds", type=float, default=2.0, help="of search, on the nominal machine")
    parser.add_argument("--merge", action="store_true", help="keep the rows of other models in the result")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        kind, *rest = arguments.worker
        print(json.dumps(runs.WORKERS[kind](*rest)))
        return 0
    return 0 if all([run_part(name, arguments) for name in arguments.parts or PARTS]) else 1


def run_part(name: str, arguments: argparse.Namespace) -> bool:
    part, rows = PARTS[name], []
    for row in part.rows(arguments, arguments.models.split(",") if arguments.models else list(part.models)):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if arguments.merge:
        rows = merged(rows, rows_with_origin(f"training_{name}"))
    print("written to", write_result(f"training_{name}", rows))
    return part.passed(rows)


def merged(rows: Rows, known: Rows) -> list[dict[str, Any]]:
    """The rows, in the place of those of the same models and targets, or of none, among the known ones."""
    measured = {(row.get("model"), row.get("target")) for row in rows}
    return [*(row for row in known if (row.get("model"), row.get("target")) not in measured), *rows]


if __name__ == "__main__":
    sys.exit(main())
