"""Every distinct kernel of a model by itself, against what the machine can do at most.

    python benchmarks/kernels.py MODEL.onnx --isa avx512 --threads 2

Prints one JSON object a kernel. A call finds none of its arguments in a cache; times are medians. Right
beside each kernel the peak of multiply-adds and the bandwidth of a copy that moves as many bytes are
measured. Every round goes over all kernels, and figures are medians over rounds, so a disturbance of the
machine for some seconds spoils none; ranges are the least and the greatest of a round. A kernel is bound by
what would take longer at these limits: compute, or memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm import tirx

from hybridc.calibrate.peaks import copy_gb_s, peak_gflops
from hybridc.ir import Device
from hybridc.options import CompileOptions
from hybridc.passes.import_model import import_model
from hybridc.passes.pipeline import run_stages
from hybridc.passes.read_graph import bytes_moved
from hybridc.progress import NullProgress
from hybridc.schedules.rule import Scheduled
from hybridc.targets import Isa, Target, parse_target
from hybridc.tuning.measure import Arguments, TimedKernel, call_times_ms, compiled, use_threads

_KERNEL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Subject:
    """A kernel to be measured."""

    name: str
    calls: int
    """Calls of it in a run of the model."""
    flops: int
    function: tirx.PrimFunc
    scheduled: Scheduled
    compiled: Callable[..., None]


@dataclass(frozen=True, slots=True)
class Sample:
    """Medians of one round."""

    ms: float
    peak_gflops: float
    copy_gb_s: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--isa", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    target = parse_target(arguments.isa)
    for row in kernel_rows(arguments.model, target, arguments.threads, arguments.rounds):
        print(json.dumps(row))


def kernel_rows(model: Path, target: Target, threads: int, rounds: int) -> list[dict[str, Any]]:
    """One row for each distinct kernel of the model's graph, in the order of the graph."""
    use_threads(threads)
    subjects = distinct_kernels(model, target, threads)
    samples: list[list[Sample]] = [[] for _ in subjects]
    for _ in range(rounds):
        for subject, own in zip(subjects, samples, strict=True):
            own.append(_sample(subject, target.isa, threads))
    return list(map(_row, subjects, samples))


def distinct_kernels(model: Path, target: Target, threads: int) -> list[Subject]:
    """The kernels of a model, compiled one by one."""
    options = CompileOptions(target=target, threads=threads)
    done = run_stages(import_model(model, options)[1], NullProgress(), stop_after="graph")
    flops = {kernel.function: kernel.flops for kernel in done.graph.kernels}
    subjects = []
    for name, calls in Counter(kernel.function for kernel in done.graph.kernels).items():
        scheduled = done.scheduled[name, Device.CPU]
        code = compiled(scheduled, target.isa)
        subjects.append(Subject(name, calls, flops[name], done.program.module[name], scheduled, code))
    return subjects


def _sample(subject: Subject, isa: Isa, threads: int) -> Sample:
    """Arguments are made again: those of all kernels together would be too much to keep."""
    copy = copy_gb_s(max(bytes_moved(subject.function) // 2, 1), threads)
    indices = min(_shapes(subject.function)[0], default=1)
    sets = Arguments(subject.scheduled, index_limit=indices).sets_of(subject.scheduled)
    before = peak_gflops(isa, threads)
    [times] = call_times_ms([TimedKernel(subject.compiled, sets)], _KERNEL_SECONDS)
    return Sample(statistics.median(times), max(before, peak_gflops(isa, threads)), copy)


def _row(subject: Subject, samples: Sequence[Sample]) -> dict[str, Any]:
    """Medians over the rounds; percentages are of the limits measured in the same round."""
    moved_bytes = bytes_moved(subject.function)
    ms, peak, copy = (
        statistics.median(getattr(sample, name) for sample in samples)
        for name in ("ms", "peak_gflops", "copy_gb_s")
    )
    of_peak = [100 * subject.flops / sample.ms / 1e6 / sample.peak_gflops for sample in samples]
    of_copy = [100 * moved_bytes / sample.ms / 1e6 / sample.copy_gb_s for sample in samples]
    return {
        "kernel": subject.name,
        "rule": subject.scheduled.rule,
        "shape": " ".join("x".join(map(str, shape)) for shape in _shapes(subject.function)),
        "calls": subject.calls,
        "ms": round(ms, 4),
        "ms_range": _range([sample.ms for sample in samples], 4),
        "total_ms": round(ms * subject.calls, 3),
        "bound": "compute" if subject.flops / peak > moved_bytes / copy else "memory",
        "gflops": round(subject.flops / ms / 1e6, 1),
        "percent_of_peak": round(statistics.median(of_peak), 1),
        "percent_of_peak_range": _range(of_peak, 1),
        "gb_s": round(moved_bytes / ms / 1e6, 1),
        "percent_of_copy": round(statistics.median(of_copy), 1),
        "percent_of_copy_range": _range(of_copy, 1),
        "peak_gflops": round(peak, 1),
        "copy_gb_s": round(copy, 1),
    }


def _range(values: Sequence[float], digits: int) -> list[float]:
    """Least and greatest."""
    return [round(min(values), digits), round(max(values), digits)]


def _shapes(function: tirx.PrimFunc) -> list[tuple[int, ...]]:
    return [tuple(int(e) for e in parameter.shape) for parameter in function.params]


if __name__ == "__main__":
    main()
