"""How far the model of GPU times is off, and what it says of our own kernels."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from statistics import geometric_mean
from typing import Any

from hybridc.machine import GRAPH_LAUNCH_US, gpu_named
from pages.results import read

_UNKNOWN = """\
Known of the error is no more than this: products of large float32 matrices on GPUs of two generations,
each measured by somebody else, with other compilers than ours; one author notes up to 25 % from one
measurement to another, and who measured the A100 and the RTX 4090 was not kept. Fast kernels come out a
third too slow on an A100: how far the clock falls under
load was learnt on a card that its power limits, which float32 does not do there. Not validated are Turing
and Hopper, tensor cores and fp16, copies past the registers (`cp.async`), convolutions, small grids and
kernels that wait for latencies, kernels bound by memory, L2's bandwidth, launch costs, and everything
that follows warm caches or data: what is loaded counts as 0, so a gather reads one row over and over.
Differences of less than a fourth are within the error; causes and order deserve more trust than
microseconds."""


def gpu_model_tables() -> list[str]:
    """Published against estimated times, then networks."""
    ladders, suite = read("gpu_model"), read("gpu_model_suite")
    against = read("gpu_model_against")
    kernels = [row for row in ladders["rows"] if row["table"] == "kernels"]
    return [
        "## Estimated times of GPU kernels",
        "There is no GPU among the machines that measured this page. `benchmarks/gpu_model.py` estimates "
        "times from machine code instead (`hybridc/gpu_model/`), or in closed form from counts of "
        "instructions and accesses. Both were fitted to one published ladder of kernels alone, and held "
        f"against the others ({ladders['date']}); errors are of the speed, the correlation is Spearman's of "
        "the ranks:",
        _ladders([row for row in ladders["rows"] if row["table"] == "ladders"]),
        _kernels(kernels),
        _UNKNOWN,
        "Kernels of networks as hybridc compiles them (the batch stands behind a colon, else it is 1), "
        f"estimated, without launches ({suite['date']}; the share of peak is the median of the distinct "
        "kernels whose arithmetic takes longer at peak than their bytes do at the memory's bandwidth, and "
        "counts what Winograd's algorithm saves, and is of float32's peak, of fp16 of that of tensor cores "
        "with float32 sums; "
        "differences of less than 1.4 times are within the model's error):",
        _networks(suite["rows"]),
        "Networks at batch 1 as the code of commit 51b395f compiled them, in float32 and for all GPUs alike, "
        "and as this code does, under the same model, launches included "
        f"(`benchmarks/gpu_model.py --against`, {against['date']}). Kernels were launched one by one then, "
        "and are one CUDA graph now, in which the last column counts each but the first with the "
        f"{GRAPH_LAUNCH_US} us that were published of one on another GPU:",
        _against(against["rows"]),
        *_layouts(),
    ]


def _layouts() -> list[str]:
    """Networks in both forms."""
    layouts = read("gpu_model_layouts")
    lines = [
        "| network | GPU | kernels | with channels last | planes, ms | chosen, ms | times faster "
        "| by the closed form |",
        "|---" * 8 + "|",
    ]
    for row in layouts["rows"]:
        planes_us, chosen_us = row["planes_us"], row["chosen_us"]
        lines.append(
            f"| {row['network']} | {row['gpu']} | {row['kernels']} | {row['channels_last']} "
            f"| {planes_us / 1e3:.2f} | {chosen_us / 1e3:.2f} | {planes_us / chosen_us:.2f} "
            f"| {row['planes_fast_us'] / row['chosen_fast_us']:.2f} |"
        )
    return [
        "Networks entirely on a GPU, with planes alone and with channels last where the closed form, by "
        "which layouts are chosen, finds them to gain; estimated from machine code, without launches "
        f"(`benchmarks/gpu_model.py --layouts`, {layouts['date']}; differences of less than 1.4 times are "
        "within the model's error):",
        "\n".join(lines),
    ]


def mean_times_better(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], tuple[float, float]]:
    """Geometric means over networks, by GPU and precision: launched one by one, and as a CUDA graph."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        precision = row["network"].partition("@")[2] or "fp32"
        found.setdefault((row["gpu"], precision), []).append((row["times_better"], as_graph(row)))
    return {
        key: (geometric_mean(one for one, _ in times), geometric_mean(graph for _, graph in times))
        for key, times in found.items()
    }


def as_graph(row: dict[str, Any]) -> float:
    """How many times better a network is if its kernels are one CUDA graph, and were none before."""
    one_us = row["launch_us"] / row["launches"]
    launches_us = one_us + (row["launches"] - 1) * min(one_us, GRAPH_LAUNCH_US)
    return float((row["old_us"] + row["old_launch_us"]) / (row["us"] + launches_us))


def _against(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| network | GPU | kernels then, ms | launches | kernels now, ms | launches | times better "
        "| as a graph |",
        "|---" * 8 + "|",
    ]
    for row in rows:
        then, now = (f"{row[f'{when}us'] / 1e3:.2f} | {row[f'{when}launches']}" for when in ("old_", ""))
        times = f"{row['times_better']:.2f} | {as_graph(row):.2f}"
        lines.append(f"| {row['network']} | {row['gpu']} | {then} | {now} | {times} |")
    lines += [
        f"| geometric mean, {precision} | {gpu} | | | | | {one_by_one:.2f} | {graph:.2f} |"
        for (gpu, precision), (one_by_one, graph) in mean_times_better(rows).items()
    ]
    return "\n".join(lines)


def _ladders(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| kernels of | GPU | constants fitted to it | median error | worst | rank correlation "
        "| closed form: median | worst | rank correlation |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        errors = " | ".join(
            f"{e['median_error']:.0%} | {e['worst_error']:.0%} | {e['rank_correlation']:.2f}"
            for e in (row["slow"], row["fast"])
        )
        fitted = "yes" if row["fitted"] else "no"
        lines.append(f"| {row['set']}, {row['kernels']} kernels | {row['gpu']} | {fitted} | {errors} |")
    return "\n".join(lines)


def _kernels(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| kernel | GPU | measured, GFLOP/s | estimated | closed form | bound by |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        name = row["kernel"].partition("<")[0].removesuffix("If")
        speeds = " | ".join(f"{row[key]:,.0f}" for key in ("gflops", "estimated_gflops", "fast_gflops"))
        lines.append(f"| `{name}` | {row['gpu']} | {speeds} | {row['bound_by']} |")
    return "\n".join(lines)


def _share_of_peak(network: dict[str, Any], rows: list[dict[str, Any]]) -> float:
    """Median of the kernels of a network that arithmetic bounds; of fp16 of what tensor cores reach."""
    place = network["network"], network["gpu"]
    kernels = [r for r in rows if "rule" in r and (r["network"], r["gpu"]) == place]
    gpu = gpu_named(network["gpu"])
    peak_gflops = gpu.peak_gflops
    if network["network"].endswith("@fp16") and gpu.chip is not None:
        peak_gflops = gpu.chip.tensor_gflops["float16"]
    shares = [(r["share_of_peak"] * gpu.peak_gflops / peak_gflops, r["share_of_bandwidth"]) for r in kernels]
    return statistics.median(of_peak for of_peak, of_bandwidth in shares if of_peak > of_bandwidth)


def _networks(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| network | GPU | distinct kernels | share of peak | estimated, ms | closed form, ms "
        "| rank correlation |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in (row for row in rows if "rank_correlation" in row):
        lines.append(
            f"| {row['network']} | {row['gpu']} | {row['kernels']} | {_share_of_peak(row, rows):.0%} "
            f"| {row['us'] / 1e3:.2f} "
            f"| {row['fast_us'] / 1e3:.2f} | {row['rank_correlation']:.2f} |"
        )
    return "\n".join(lines)
