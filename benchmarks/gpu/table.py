"""The rows of `gpu.py` for people: `python -m gpu.table results/gpu_DEVICE.json` in `benchmarks/`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu.process import Row

TOLERANCE, HALF_TOLERANCE = 1e-4, 1e-2
"""Largest differences from ONNX Runtime in float32, or from the CPU's losses, as shares of the largest value:
of networks in float32, and of those that round tensors to float16."""


def is_failure(row: Row) -> bool:
    tolerance = HALF_TOLERANCE if "@fp16" in row.get("model", "") else TOLERANCE
    return "failed" in row or not row.get("max_rel_error", 0.0) <= tolerance or _exceeds(row)


def _exceeds(row: Row) -> bool:
    return row.get("table") == "sessions" and row["memory"]["allocated_bytes"] > row["budget_bytes"]


def table(rows: Sequence[Row]) -> str:
    """The rows for people."""
    lines = []
    for row in rows:
        format_row = TABLES.get(row["table"])
        lines.append(f"FAILED {json.dumps(row)[:400]}" if "failed" in row else "")
        if format_row and "failed" not in row and "skipped" not in row:
            lines.append(format_row(row))
    return "\n".join(filter(None, lines))


def _session_line(row: Row) -> str:
    memory, copies = row["memory"], row.get("copies", {})
    return (
        f"{row['model']:13} {row['machine']:9} {row['budget_bytes'] / 2**20:7.1f} MiB"
        f" arena {memory['allocated_bytes'] / 2**20:7.1f} outside {memory['outside_bytes'] / 2**20:5.1f}"
        f" error {row['max_rel_error']:.1e}{'' if row['repeats_equal'] else ' UNEQUAL'}"
        f" predicted {row['predicted_ms']:8.3f} ms measured {row.get('ms', 0):8.3f}"
        f" traced {row.get('traced_ms', 0):8.3f} copies {copies.get('us', 0) / 1e3:7.3f} ms"
        f" of which beside kernels {copies.get('beside_kernels', 1):.0%}"
    )


def _kernel_line(row: Row) -> str:
    return (
        f"{row['model']:9} {row['calls']:3} x {row.get('us', 0):8.2f} us"
        f" (issued {row.get('issued_us', 0):7.2f})"
        f" predicted {row['predicted_us']:8.2f} library {row.get('library_us', 0):8.2f}"
        f" peak {row.get('percent_of_peak', 0):5.1f} % bandwidth {row.get('percent_of_bandwidth', 0):5.1f} %"
        f" [{row['rule']}] {row['kernel'][:50]}"
    )


def _torch_line(row: Row) -> str:
    budget = f"{row['budget_bytes'] / 2**20:7.1f} MiB" if "budget_bytes" in row else f"{'':11}"
    time = f"{row['ms']:8.3f} ms at {row['peak_bytes'] / 2**20:7.1f} MiB" if "ms" in row else "does not fit"
    return f"{row['model']:13} torch {row['engine']:8} {budget} {time}"


TABLES: dict[str, Callable[[Row], str]] = {
    "sessions": _session_line,
    "kernels": _kernel_line,
    "torch": _torch_line,
    "cpu": lambda row: f"{row['model']:13} CPU alone {row['ms']:8.3f} ms",
    "training": lambda row: (
        f"{row['model']:13} training at {row['budget']} error {row['max_rel_error']:.1e}"
        f" {row.get('ms', 0):.3f} ms, CPU {row.get('cpu_ms', 0):.3f} ms"
    ),
    "profile": lambda row: (
        f"GPU {row['gpu']['peak_gflops']} GFLOP/s {row['gpu']['bandwidth_gb_s']} GB/s"
        f" launch {row['gpu']['launch_us']} us, CPU {row['cpu']['peak_gflops']} GFLOP/s"
        f" {row['cpu']['bandwidth_gb_s']} GB/s, link {row['link']}"
    ),
}


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())["rows"]))
