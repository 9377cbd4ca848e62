"""Write the README's measured tables anew from benchmarks/results/*.json.

python benchmarks/readme.py
"""

from __future__ import annotations

import json
import math
from typing import Any

from common import RESULTS, ROOT

BEGIN, END = "<!-- measured: written by benchmarks/readme.py -->", "<!-- end of measured -->"
MIB = 1 << 20


def main() -> None:
    path = ROOT / "README.md"
    text = path.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    path.write_text(f"{before}{BEGIN}\n{tables()}\n{END}{after}")


def tables() -> str:
    """The tables as Markdown."""
    cpu = [read(name) for name in ("cpu_avx512", "cpu_avx2") if (RESULTS / f"{name}.json").exists()]
    accuracy, memory, plans, resnet = (
        read(name) for name in ("accuracy", "memory", "plans", "resnet50_avx512")
    )
    where = f"{resnet['date']}, {resnet['cores']} cores of an {resnet['processor']}"
    [row] = resnet["rows"]
    return "\n\n".join(
        [
            f"Every network within its budget and in agreement with ONNX Runtime ({accuracy['date']}; "
            "GPU emulated, its memory capped at exactly the budget; errors relative to the output's scale):",
            accuracy_table(accuracy["rows"]),
            "Bytes of the arena over the live-bytes lower bound, the largest over all targets and budgets, "
            f"beside TVM's own planner on the same kernels ({memory['date']}):",
            memory_table(memory["rows"]),
            "Predicted plans: how much slower than a proven bound, and how much faster than the best of a "
            "split in two (as `-ngl`), offloading with prefetch (as vDNN) and the CPU alone, all simulated "
            f"({plans['date']}; profile of a laptop's GPU with 4 GB):",
            plans_table(plans["rows"]),
            f"ResNet-50 for `avx512` compiles in {row['compile_s']:.1f} s and runs in "
            f"{row['run_ms']:.0f} ms: {row['speedup_over_unscheduled']:.0f} times faster than TVM's "
            f"unscheduled pipeline ({row['tvm_unscheduled_ms']:.0f} ms), "
            f"{row['run_ms'] / row['onnxruntime_ms']:.2f} times the time of ONNX Runtime "
            f"({row['onnxruntime_ms']:.0f} ms) in the same run ({where}).",
            *(part for result in cpu for part in cpu_tables(result)),
        ]
    )


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def accuracy_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| network | needs on GPU | held at 100 % | at 50 % | at 25 % | largest error |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == name]
        gpu = [row for row in of_model if row["budget_bytes"] is not None]
        held = " | ".join(
            f"{row['allocated_bytes'] / MIB:.1f} of {row['budget_bytes'] / MIB:.1f} MiB" for row in gpu
        )
        worst = max(row["max_rel_error"] for row in of_model)
        lines.append(f"| {name} | {gpu[0]['budget_bytes'] / MIB:.1f} MiB | {held} | {worst:.1e} |")
    return "\n".join(lines)


def cpu_tables(result: dict[str, Any]) -> list[str]:
    """Networks of one instruction set against the peers, and what the kernels reach of the machine."""
    isa = result["benchmark"].removeprefix("cpu_")
    where = f"{result['date']}, {result['cores']} cores of an {result['processor']}"
    rows = [row for row in result["rows"] if row["table"] == "models"]
    ratios, *kernels = (row for row in result["rows"] if row["table"] == "summary")
    engines = list(rows[0]["ms"])
    lines = [
        f"| network | {' | '.join(f'{engine}, ms' for engine in engines)} | faster peer over hybridc |",
        "|---" * (len(engines) + 2) + "|",
    ]
    for row in rows:
        times = " | ".join(f"{row['ms'][engine]:.1f}" for engine in engines)
        lines.append(f"| {row['model']} | {times} | {row['ratio']:.2f} |")
    held = ", OpenVINO held to AVX2" if isa == "avx2" else ""
    parts = [
        f"Whole networks on the CPU for `{isa}`{held} ({where}):",
        "\n".join(lines),
        f"Geometric mean {ratios['geometric_mean']:.2f}, worst {ratios['worst']:.2f}.",
    ]
    return parts + [kernel_table(kernels)] * bool(kernels)


def kernel_table(rows: list[dict[str, Any]]) -> str:
    lines = ["| kernels by themselves, nothing in a cache | | median | least |", "|---|---|---|---|"]
    for row in rows:
        limit = "of a multiply-add peak" if row["measure"] == "percent_of_peak" else "of a copy's bandwidth"
        lines.append(f"| {row['what']} | {limit} | {row['median']:.0f} % | {row['least']:.0f} % |")
    return "\n".join(lines)


def memory_table(rows: list[dict[str, Any]]) -> str:
    lines = ["| network | hybridc | TVM StaticPlanBlockMemory |", "|---|---|---|"]
    for name in dict.fromkeys(row["model"] for row in rows):
        ours = max(row["ratio"] for row in rows if row["model"] == name and "planner" not in row)
        theirs = next(row["ratio"] for row in rows if row["model"] == name and "planner" in row)
        lines.append(f"| {name} | {ours:.3f} | {theirs:.3f} |")
    return "\n".join(lines)


def plans_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| share of the memory it needs | networks | mean gap, whole kernels | mean gap, kernels cut up "
        "| times faster, kernels cut up | worst |",
        "|---|---|---|---|---|---|",
    ]
    for share in dict.fromkeys(row["share"] for row in rows):
        whole, cut_up = (
            [r for r in rows if r["share"] == share and r["whole"] is kind] for kind in (True, False)
        )
        gaps = (sum(row["gap"] for row in group) / len(group) for group in (whole, cut_up))
        ratios = [row["best_baseline_us"] / row["time_us"] for row in cut_up]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        shown = " | ".join(f"{gap:.1%}" for gap in gaps)
        lines.append(f"| {share:.0%} | {len(whole)} | {shown} | {mean:.2f} | {min(ratios):.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
