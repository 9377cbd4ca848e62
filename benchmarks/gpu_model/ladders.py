"""The model against published times of kernels: `ladders.json`.

The kernels are not part of hybridc. Get them with

    git clone https://github.com/siboehm/SGEMM_CUDA DIR/sgemm_cuda
    git clone https://github.com/leimao/CUDA-GEMM-Optimization DIR/cuda_gemm_optimization

The times are those of the authors' READMEs, and of READMEs of others who measured the same kernels on other
GPUs, for products of two matrices of 4096 x 4096.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpu_model.compile import cubin_of
from hybridc.errors import UsageError
from hybridc.gpu_model.architecture import architecture
from hybridc.gpu_model.chip import chip_of
from hybridc.gpu_model.estimate import Estimate, estimate
from hybridc.gpu_model.fast import estimate_fast
from hybridc.gpu_model.kernel import Buffer, Call, call, find_kernel, kernels_of
from hybridc.gpu_model.work import work_of_call
from hybridc.machine import load_machine

LADDERS = Path(__file__).parent / "ladders.json"


def ladders(names: Sequence[str]) -> list[dict[str, Any]]:
    """Those whose name has one of the given names in it; all if none is given."""
    found = json.loads(LADDERS.read_text())
    return [ladder for ladder in found if not names or any(name in ladder["set"] for name in names)]


def validate(folder: Path, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each kernel, then one for each ladder. Raises UsageError HC530 where the kernels are
    missing."""
    for ladder in ladders(names):
        rows = []
        for kernel in ladder["kernels"]:
            rows.append(_row(ladder, kernel, folder / ladder["folder"]))
            yield rows[-1]
        yield {
            "table": "ladders",
            "set": ladder["set"],
            "gpu": rows[0]["gpu"],
            "fitted": ladder["fitted"],
        } | {
            "kernels": len(rows),
            "slow": errors([r["gflops"] for r in rows], [r["estimated_gflops"] for r in rows]),
            "fast": errors([r["gflops"] for r in rows], [r["fast_gflops"] for r in rows]),
            "fitted_clock": fitted_clock(rows) if ladder["fitted"] else None,
        }


def errors(measured: Sequence[float], estimated: Sequence[float]) -> dict[str, float]:
    """Relative errors of estimated speeds, and Spearman's rank correlation."""
    wrong = [abs(e / m - 1) for e, m in zip(estimated, measured, strict=True)]
    return {
        "median_error": round(statistics.median(wrong), 4),
        "worst_error": round(max(wrong), 4),
        "rank_correlation": round(rank_correlation(measured, estimated), 4),
    }


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's, with average ranks for equal values."""

    def ranks(values: Sequence[float]) -> np.ndarray[Any, Any]:
        array = np.array(values)
        return np.array([(array < v).sum() + ((array == v).sum() - 1) / 2 for v in array])

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def fitted_clock(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The constants of `SustainedClock` that a ladder's kernels give: a straight line through (share of
    peak at the boost clock, clock that explains the measured time), by least absolute differences."""
    shares = [row["peak_cycles"] / row["cycles"] for row in rows]
    clocks = [row["boost_us"] / row["measured_us"] for row in rows]
    choices = [
        (sum(abs(idle - fall * s - c) / c for s, c in zip(shares, clocks, strict=True)), idle, fall)
        for idle in np.arange(0.9, 1.2, 0.01)
        for fall in np.arange(0.0, 0.8, 0.01)
    ]
    _, idle, fall = min(choices)
    return {"idle": round(float(idle), 2), "fall": round(float(fall), 2)}


def _row(ladder: dict[str, Any], kernel: dict[str, Any], folder: Path) -> dict[str, Any]:
    processor = load_machine(ladder["gpu"]).gpu
    chip = chip_of(processor)
    launch = _call(ladder, kernel, folder, chip.architecture)
    found = estimate(launch, processor)
    fast = estimate_fast(work_of_call(launch, architecture(chip.architecture)), processor)
    flops = 2 * ladder["size"] ** 3
    return {
        "table": "kernels",
        "set": ladder["set"],
        "gpu": processor.name,
        "kernel": kernel["kernel"],
        "gflops": kernel["gflops"],
        "estimated_gflops": round(flops / found.us / 1e3, 1),
        "fast_gflops": round(flops / fast.us / 1e3, 1),
        "measured_us": round(flops / kernel["gflops"] / 1e3, 1),
        "boost_us": round(found.cycles / chip.clock_ghz / 1e3, 1),
        "cycles": round(found.cycles),
        "peak_cycles": round(found.peak_cycles),
        **_facts(launch, found),
    }


def _call(ladder: dict[str, Any], kernel: dict[str, Any], folder: Path, arch: str) -> Call:
    path = (folder / kernel["source"]).resolve()
    if not path.is_file():
        remedy = (
            f"git clone {ladder['repository']} {folder}, or name the folder of the checkouts by --kernels"
        )
        raise UsageError("HC530", "the kernels to compare with are missing", where=str(path), remedy=remedy)
    source = f'#include "{path}"\n'
    name, template, _ = kernel["kernel"].partition("<")
    if template:  # a template is compiled where it is used
        source += f"auto *used = &{kernel['kernel']};\n"
    found = find_kernel(kernels_of(cubin_of(source, arch, [folder / ladder["include"]])), name)
    size = ladder["size"]
    meaning = {"n": size, "buffer": Buffer(4 * size * size)}
    arguments = [meaning.get(a, a) if isinstance(a, str) else a for a in ladder["arguments"]]
    return call(found, tuple(kernel["grid"]), tuple(kernel["block"]), arguments)


def _facts(launch: Call, found: Estimate) -> dict[str, Any]:
    return {
        "bound_by": found.bound_by,
        "registers": launch.kernel.resources.registers,
        "blocks_per_multiprocessor": found.blocks_per_multiprocessor,
        "waves": round(found.waves, 2),
        "sector_ratio": round(found.counters.sector_ratio, 2),
        "bank_conflict_factor": round(found.counters.bank_conflict_factor, 2),
    }
