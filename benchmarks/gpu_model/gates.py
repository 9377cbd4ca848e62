"""What can be said of kernels' quality without a time: counts from machine code, against thresholds.

Each figure of a kernel is of the launch that executes most instructions, and counts loops as often as they
turn, so that what a hot loop does decides. Thresholds are of a rule's kernels together, on each architecture.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_model.exceptions import EXCEPTIONS
from gpu_model.suite import SuiteKernel, kernels_of_network
from hybridc.gpu_model.architecture import architecture
from hybridc.gpu_model.chip import chip_of
from hybridc.gpu_model.counters import Counters, count
from hybridc.gpu_model.kernel import Call
from hybridc.gpu_model.trace import main_loop, trace_blocks
from hybridc.machine import Processor, gpu_named

GPUS = ("rtx-2060", "a100", "rtx-3090")
"""Profiles of GPUs with tensor cores, of sm_75, sm_80 and sm_86."""
SUITE = (
    "memory",
    "few_rows",
    "products",
    "quantized@int8",
    "resnet50",
    "resnet50@fp16",
    "mobilenet_v2",
    "unet",
    "unet@fp16",
    "super_resolution",
    "bert",
    "bert@fp16",
)
"""Of `make gpu-gates`: sets of single kernels, then networks."""
PRODUCTS = frozenset({"conv2d", "winograd", "matmul"})
"""Families whose kernels multiply matrices."""
LARGE_FLOPS = 50e6
"""Of kernels that are to keep all multiprocessors busy, and to use registers well."""
WAVES = 2
"""Blocks of a large kernel for each multiprocessor, if it is not split into several launches."""


@dataclass(frozen=True, slots=True)
class Gate:
    """A threshold of a figure that kernels' rows have."""

    threshold: float
    is_most: bool
    """Whether larger figures miss it; else smaller ones do."""
    combine: Callable[[list[float]], float]
    """Of the kernels of a rule."""
    title: str

    def is_missed(self, value: float, threshold: float | None = None) -> bool:
        limit = self.threshold if threshold is None else threshold
        return value > limit if self.is_most else value < limit


GATES = {
    "local_bytes": Gate(0, True, max, "local memory"),
    "tensor_cores": Gate(1.0, False, min, "tensor cores"),
    "wide_loads": Gate(0.9, False, statistics.mean, "loads of 128 bits"),
    "bank_conflicts": Gate(1.1, True, statistics.mean, "bank conflicts"),
    "sectors": Gate(1.25, True, statistics.mean, "sectors"),
    "multiply_adds_per_shared_load": Gate(8.0, False, statistics.mean, "FFMA per shared load"),
    "filled": Gate(1.0, False, statistics.mean, "filled"),
}
"""What `make gpu-gates` asks of each rule on each GPU.

No local memory: what ptxas calls no spill may still be an array that is indexed by a variable. Every
product of two operands of 16-bit floats or 8-bit integers is made by tensor cores, where the GPU has them
for that type, unless memory bounds it without them: of a few rows or columns fragments would be padding.
Large products load 90 % of the bytes of their hot loops by 128 bits a thread, and make 8 multiply-adds of
what they load from shared memory at a time: a thread that makes 8x8 sums of two vectors of 8, loaded by 128
bits, makes 16. A tenth of the shared accesses and a quarter of the sectors may be wasted.
Large kernels have two blocks for each multiprocessor, or are split into several launches.
"""


def gate_rows(network: str, gpus: Sequence[str] = GPUS) -> Iterator[dict[str, Any]]:
    """For each GPU a row for each kernel of a network, as `kernels_of_network` reads it."""
    for gpu in map(gpu_named, gpus):
        place = {"network": network, "gpu": gpu.name, "architecture": chip_of(gpu).architecture}
        yield from (place | _kernel_row(made, gpu) for made in kernels_of_network(network, gpu))


def summaries(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each rule and architecture of kernels' rows: figures, and by `missed` what misses a threshold
    and has no exception that allows it."""
    places = sorted({(row["rule"], row["architecture"]) for row in rows})
    return [
        _summary(rule, arch, [r for r in rows if (r["rule"], r["architecture"]) == (rule, arch)])
        for rule, arch in places
    ]


def failures(summary: dict[str, Any]) -> list[str]:
    """Sentences about the thresholds that a rule's kernels miss."""
    found = []
    for name in summary["missed"]:
        gate = GATES[name]
        limit, known = EXCEPTIONS.get((summary["rule"], name), (gate.threshold, ""))
        asked = f"{'at most' if gate.is_most else 'at least'} {limit:g}{' (an exception)' if known else ''}"
        found.append(
            f"{summary['rule']} on {summary['architecture']}: {gate.title} {summary[name]:g}, {asked}"
        )
    return found


def needless_exceptions(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Exceptions of rules that meet the threshold on each architecture there is a row of."""
    return [
        (rule, name)
        for rule, name in EXCEPTIONS
        if (own := [r[name] for r in rows if r["rule"] == rule and r[name] is not None])
        and not any(map(GATES[name].is_missed, own))
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """`summaries` in columns: `!` behind what misses a threshold, `*` where an exception allows that, a dash
    where there is nothing to judge."""
    lines = [["rule", "architecture", "kernels", *(gate.title for gate in GATES.values())]]
    for row in rows:
        values = [_shown(row, name) for name in GATES]
        lines.append([row["rule"], row["architecture"], str(row["kernels"]), *values])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(w) for text, w in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _shown(row: dict[str, Any], name: str) -> str:
    if row[name] is None:
        return "-"
    mark = "!" if name in row["missed"] else "*" if GATES[name].is_missed(row[name]) else ""
    return f"{row[name]:g}{mark}"


def _summary(rule: str, arch: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    figures: dict[str, float | None] = {}
    for name, gate in GATES.items():
        values = [float(row[name]) for row in rows if row[name] is not None]
        figures[name] = round(gate.combine(values), 3) if values else None
    missed = [
        name
        for name, value in figures.items()
        if value is not None and GATES[name].is_missed(value, EXCEPTIONS.get((rule, name), (None, ""))[0])
    ]
    return {"rule": rule, "architecture": arch, "kernels": len(rows), **figures, "missed": missed}


def _kernel_row(made: SuiteKernel, gpu: Processor) -> dict[str, Any]:
    counted = [(launch, *_counters(launch, gpu)) for launch in made.launches]
    launch, counters, hot = max(counted, key=lambda item: item[1].instructions * item[0].launch.blocks)
    is_product = made.kernel.family in PRODUCTS and made.kernel.flops > 0
    is_large = made.kernel.flops >= LARGE_FLOPS
    tensor = (
        any(c.tensor_operations for _, c, _ in counted) if is_product and _is_eligible(made, gpu) else None
    )
    has_shared = is_product and is_large and counters.shared_loads and not counters.tensor_operations
    blocks = launch.launch.blocks / chip_of(gpu).multiprocessors
    # LDL and STL tell of local memory that the resources do not
    local = max(int(c.local_accesses > 0) for _, c, _ in counted)
    return {
        "kernel": made.kernel.function,
        "rule": made.rule,
        "family": made.kernel.family,
        "calls": made.calls,
        "mflops": round(made.kernel.flops / 1e6, 2),
        "launches": len(made.launches),
        "registers": max(each.kernel.resources.registers for each in made.launches),
        "local_bytes": max(local, *(each.kernel.resources.local_bytes for each in made.launches)),
        "tensor_cores": tensor,
        "wide_loads": round(hot.wide_load_share, 3) if is_product and is_large else None,
        "bank_conflicts": round(counters.bank_conflict_factor, 3) if counters.wavefronts else None,
        "sectors": round(counters.sector_ratio, 3),
        "multiply_adds_per_shared_load": (
            round(counters.multiply_adds / counters.shared_loads, 2) if has_shared else None
        ),
        "blocks_per_multiprocessor": round(blocks, 2),
        "filled": blocks >= WAVES or len(made.launches) > 1 if is_large else None,
    }


def _counters(launch: Call, gpu: Processor) -> tuple[Counters, Counters]:
    """Of a block in the middle of the grid, and of its main loop alone."""
    code, geometry = launch.kernel.code, launch.launch
    blocks = [geometry.block_index(geometry.blocks // 2)]
    model = architecture(chip_of(gpu).architecture)
    trace = trace_blocks(code, geometry, blocks, main_loop(code, geometry), model)
    return count(trace), count(trace.of_main_loop())


def _is_eligible(made: SuiteKernel, gpu: Processor) -> bool:
    """Whether tensor cores of the GPU multiply the first two operands, floats of 16 bits or integers of 8, of
    a kernel that takes longer for its arithmetic without them than for its bytes."""
    arithmetic_us, memory_us = (
        made.kernel.flops / gpu.peak_gflops / 1e3,
        made.kernel.bytes_moved / gpu.bandwidth_gb_s / 1e3,
    )
    if arithmetic_us < memory_us:
        return False
    kinds = {str(buffer.dtype).removeprefix("u") for buffer in list(made.function.params)[:2]}
    return kinds <= {"float16", "bfloat16", "int8"} & chip_of(gpu).tensor_gflops.keys() and len(kinds) == 1
