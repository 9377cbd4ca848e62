"""What can be said of kernels' quality without a time: counts from machine code, against thresholds.

Each figure is of the launch that executes most instructions, and counts loops as often as they turn, so that
what a hot loop does decides.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gpu_model.suite import SuiteKernel, kernels_of_network
from hybridc.gpu_model.architecture import architecture
from hybridc.gpu_model.chip import chip_of
from hybridc.gpu_model.counters import Counters, count
from hybridc.gpu_model.kernel import Call
from hybridc.gpu_model.trace import main_loop, trace_blocks
from hybridc.machine import Processor, gpu_named

GPUS = ("rtx-2060", "a100", "rtx-3090")
"""Profiles of GPUs with tensor cores, of sm_75, sm_80 and sm_86."""
PRODUCTS = frozenset({"conv2d", "winograd", "matmul"})
"""Families whose kernels multiply matrices."""
LARGE_FLOPS = 50e6
"""Of kernels that are to keep all multiprocessors busy."""

THRESHOLDS = {
    "local_bytes": ("most", 0),
    "tensor_cores": ("least", 1.0),
    "wide_loads": ("least", 0.5),
    "bank_conflicts": ("most", 1.1),
    "sectors": ("most", 1.25),
    "multiply_adds_per_shared_load": ("least", 8.0),
    "filled": ("least", 1.0),
}
"""What `--strict` asks of each network on each GPU.

Registers spill nowhere, and every product of 16-bit floats is made by tensor cores. Products load half of
their bytes by 128 bits, and make 8 multiply-adds of what they load from shared memory at a time: a thread
that makes 8x8 sums of two vectors of 8, loaded by 128 bits, makes 16. A tenth of the shared accesses and a
quarter of the sectors may be wasted. Large kernels have a block for each multiprocessor, or are split into
several launches.
"""


def gate_rows(network: str) -> Iterator[dict[str, Any]]:
    """For each GPU a row for each kernel of a network, as `kernels_of_network` reads it, and one for all."""
    for gpu in map(gpu_named, GPUS):
        chip = chip_of(gpu)
        kernels = kernels_of_network(network, gpu)
        rows = [_kernel_row(made, gpu) for made in kernels]
        place = {"network": network, "gpu": gpu.name, "architecture": chip.architecture}
        yield from (place | row for row in rows)
        yield place | _summary(rows)


def failures(summary: dict[str, Any]) -> list[str]:
    """Sentences about the thresholds that a network on a GPU does not meet."""
    where = f"{summary['network']} on {summary['architecture']}"
    found = []
    for name, (direction, threshold) in THRESHOLDS.items():
        value = summary[name]
        if value is not None and (value < threshold if direction == "least" else value > threshold):
            found.append(f"{where}: {name} is {value:g}, asked for is at {direction} {threshold:g}")
    return found


def _kernel_row(made: SuiteKernel, gpu: Processor) -> dict[str, Any]:
    counted = [(launch, _counters(launch, gpu)) for launch in made.launches]
    launch, counters = max(counted, key=lambda pair: pair[1].instructions * pair[0].launch.blocks)
    multiplies = made.kernel.family in PRODUCTS and made.kernel.flops > 0
    tensor = any(c.tensor_flops for _, c in counted) if multiplies and _is_eligible(made, gpu) else None
    has_shared = multiplies and counters.shared_loads and not counters.tensor_flops
    blocks = launch.launch.blocks / chip_of(gpu).multiprocessors
    return {
        "kernel": made.kernel.function,
        "rule": made.rule,
        "family": made.kernel.family,
        "calls": made.calls,
        "mflops": round(made.kernel.flops / 1e6, 2),
        "launches": len(made.launches),
        "registers": max(each.kernel.resources.registers for each in made.launches),
        "local_bytes": max(each.kernel.resources.local_bytes for each in made.launches),
        "tensor_cores": tensor,
        "wide_loads": round(counters.wide_load_share, 3) if multiplies else None,
        "bank_conflicts": round(counters.bank_conflict_factor, 3) if counters.wavefronts else None,
        "sectors": round(counters.sector_ratio, 3),
        "multiply_adds_per_shared_load": (
            round(counters.multiply_adds / counters.shared_loads, 2) if has_shared else None
        ),
        "blocks_per_multiprocessor": round(blocks, 2),
        "filled": blocks >= 1 or len(made.launches) > 1 if made.kernel.flops >= LARGE_FLOPS else None,
    }


def _counters(launch: Call, gpu: Processor) -> Counters:
    """Of a block in the middle of the grid."""
    code, geometry = launch.kernel.code, launch.launch
    blocks = [geometry.block_index(geometry.blocks // 2)]
    model = architecture(chip_of(gpu).architecture)
    return count(trace_blocks(code, geometry, blocks, main_loop(code, geometry), model))


def _is_eligible(made: SuiteKernel, gpu: Processor) -> bool:
    """Whether tensor cores of the GPU multiply the first two operands: both are 16-bit floats."""
    tensor = chip_of(gpu).tensor_gflops
    types = {str(buffer.dtype) for buffer in list(made.function.params)[:2]}
    return len(types) == 1 and types <= {"float16", "bfloat16"} and types <= tensor.keys()


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def of(name: str, combine: Callable[[list[float]], float]) -> float | None:
        values = [float(row[name]) for row in rows if row[name] is not None]
        return round(combine(values), 3) if values else None

    return {
        "kernels": len(rows),
        "local_bytes": of("local_bytes", max),
        "tensor_cores": of("tensor_cores", statistics.mean),
        "wide_loads": of("wide_loads", statistics.median),
        "bank_conflicts": of("bank_conflicts", statistics.mean),
        "sectors": of("sectors", statistics.mean),
        "multiply_adds_per_shared_load": of("multiply_adds_per_shared_load", statistics.median),
        "filled": of("filled", statistics.mean),
    }
