"""One plan of an artifact, run on the GPU in a process of its own: errors, memory, times, copies.

    python -m gpu.session MODEL.hyb FOLDER PARTS [--budget BYTES] [--emulate-gpu BYTES]

FOLDER has `feeds.npz` and `expected.npz`, outputs of ONNX Runtime. PARTS are of `gpu.py`, joined by commas.
Prints a JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from engines import Feeds, times_ms

import hybridc
from hybridc.artifact.load import Artifact
from hybridc.ir import Copy, Device, Lane, Plan, Step
from hybridc.runtime import Session
from hybridc.runtime.libraries import CUDA_RUNTIME, load_runtime

REPEATS = 20
"""Runs whose results have to be the same bits, and whose memory is watched."""
TRACES = 9
Span = tuple[float, float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", type=lambda text: text.split(","))
    parser.add_argument("--budget", type=int)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--emulate-gpu", type=int, metavar="BYTES")
    arguments = parser.parse_args()
    if arguments.emulate_gpu:
        from hybridc import emulator

        emulator.start(arguments.emulate_gpu, compute_capability=(9, 0))
    feeds, expected = _arrays(arguments.folder / "feeds.npz"), _arrays(arguments.folder / "expected.npz")
    memory = Memory()
    budget = None if arguments.budget is None else f"{arguments.budget}B"
    with hybridc.load(arguments.artifact, gpu_memory=budget) as session:
        memory.note("loaded_bytes")
        first = session.run(None, feeds)
        memory.note("first_run_bytes")
        repeated = [session.run(None, feeds) for _ in range(REPEATS if not arguments.emulate_gpu else 1)]
        memory.note("later_runs_bytes")
        row: dict[str, Any] = plan_row(session.artifact)
        row["repeats_equal"] = all(
            np.array_equal(one, again) for run in repeated for one, again in zip(first, run, strict=True)
        )
        row["max_rel_error"] = scaled_error(first, list(expected.values()))
        row["memory"] = memory.row(session)
        if "networks" in arguments.parts and not arguments.emulate_gpu:
            times = times_ms(lambda: session.run(None, feeds), arguments.seconds)
            row["ms"] = round(statistics.median(times), 4)
            row["fastest_ms"] = round(min(times), 4)
        if "copies" in arguments.parts and not arguments.emulate_gpu:
            row |= trace_row(session, feeds)
    print(json.dumps(row))


def _arrays(path: Path) -> Feeds:
    with np.load(path) as stored:
        return dict(stored)


def scaled_error(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Largest difference as a share of the output's largest value; NaN where one of them has a NaN."""
    pairs = zip(found, expected, strict=True)
    return float(np.max([np.abs(f - e).max() / max(np.abs(e).max(), 1e-30) for f, e in pairs]))


def plan_row(artifact: Artifact) -> dict[str, Any]:
    """What the planner promises."""
    plan, graph = artifact.plan, artifact.graph
    copies = [step for step in plan.steps if isinstance(step, Copy)]
    return {
        "budget_bytes": plan.budget_bytes,
        "arena_bytes": plan.arena_bytes(Device.GPU),
        "kernels": len(plan.steps) - len(copies),
        "gpu_kernels": sum(step.lane is Lane.GPU for step in plan.steps),
        "copied_bytes": sum(graph.tensor[step.tensor].size_bytes for step in copies),
        "predicted_ms": round(plan.makespan_us / 1e3, 4),
        "bound_ms": round(plan.time_bound_us / 1e3, 4),
    }


# ---------------------------------------------------------------------------------------------- memory


class Memory:
    """The driver's view of what this process takes of the GPU's memory, stage by stage."""

    def __init__(self) -> None:
        load_runtime(cuda=True)
        before = used_mib()
        self._runtime = ctypes.CDLL(CUDA_RUNTIME)
        self._free = self._free_bytes()  # makes the context
        after = used_mib()
        self._stages: dict[str, int | None] = {
            "context_bytes": None if before is None or after is None else (after - before) << 20
        }

    def note(self, stage: str) -> None:
        """What was taken since the stage before."""
        free = self._free_bytes()
        self._stages[stage] = self._free - free
        self._free = free

    def row(self, session: Session) -> dict[str, Any]:
        """Beside the arena there are the kernels' code, and what the driver keeps for them."""
        own, stages = session.memory(), self._stages
        taken = sum(stages[name] or 0 for name in stages if name != "context_bytes")
        return {
            **stages,
            "allocated_bytes": own[Device.GPU].allocated_bytes,
            "outside_bytes": taken - own[Device.GPU].allocated_bytes,
            "host_bytes": own[Device.CPU].allocated_bytes + own[Device.CPU].staging_bytes,
        }

    def _free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        assert self._runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == 0
        return free.value


def used_mib() -> int | None:
    """What all programs hold of the GPU's memory; None where nothing can tell."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return int(subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True).stdout)
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None


# ---------------------------------------------------------------------------------------------- traces


def trace_row(session: Session, feeds: Feeds) -> dict[str, Any]:
    """Predicted and measured times of each lane, and how much of the copies ran beside kernels.

    Of several traced runs, the one of median length.
    """
    traces = sorted((session.measure(feeds) for _ in range(TRACES)), key=_end)
    spans, plan = traces[TRACES // 2], session.artifact.plan
    return {
        "traced_ms": round(_end(spans) / 1e3, 4),
        "lanes": _lanes(plan, spans),
        "families": _families(session.artifact, spans),
        "copies": _copies(plan.steps, spans),
    }


def _end(spans: Sequence[Span]) -> float:
    return max(end for _, end in spans)


def _lanes(plan: Plan, spans: Sequence[Span]) -> dict[str, dict[str, float]]:
    """Sums over the steps of each lane."""
    rows = {}
    for lane in Lane:
        own = [n for n, step in enumerate(plan.steps) if step.lane is lane]
        if own:
            predicted, measured = sum(plan.step_us[n] for n in own), sum(_length(spans[n]) for n in own)
            rows[lane.value] = {
                "steps": len(own),
                "predicted_us": round(predicted, 1),
                "measured_us": round(measured, 1),
            }
    return rows


def _families(artifact: Artifact, spans: Sequence[Span]) -> dict[str, dict[str, float]]:
    """Sums over the kernels of each family on each device."""
    plan, kernels = artifact.plan, artifact.graph.kernel
    rows: dict[str, dict[str, float]] = {}
    for step, us, span in zip(plan.steps, plan.step_us, spans, strict=True):
        if not isinstance(step, Copy):
            name = f"{step.device.value} {kernels[step.kernel].family}"
            row = rows.setdefault(name, {"steps": 0, "predicted_us": 0.0, "measured_us": 0.0})
            row["steps"] += 1
            row["predicted_us"] = round(row["predicted_us"] + us, 1)
            row["measured_us"] = round(row["measured_us"] + _length(span), 1)
    return rows


def _copies(steps: Sequence[Step], spans: Sequence[Span]) -> dict[str, float]:
    """Time of copies, and the shares of it during which kernels ran."""
    every = list(zip(steps, spans, strict=True))
    copies = [span for step, span in every if isinstance(step, Copy)]
    gpu = [span for step, span in every if step.lane is Lane.GPU]
    cpu = [span for step, span in every if step.lane is Lane.CPU]
    total = sum(map(_length, copies))
    if not total:
        return {"us": 0.0}

    def share(kernels: Sequence[Span]) -> float:
        return round(sum(_overlap(copy, kernels) for copy in copies) / total, 3)

    return {
        "us": round(total, 1),
        "beside_gpu_kernels": share(_union(gpu)),
        "beside_kernels": share(_union([*gpu, *cpu])),
    }


def _length(span: Span) -> float:
    return span[1] - span[0]


def _overlap(span: Span, disjoint: Sequence[Span]) -> float:
    return sum(max(0.0, min(span[1], end) - max(span[0], begin)) for begin, end in disjoint)


def _union(spans: Sequence[Span]) -> list[Span]:
    """The same times as disjoint spans."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


if __name__ == "__main__":
    main()
