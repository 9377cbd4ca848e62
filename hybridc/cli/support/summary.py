"""What `hybridc compile` made, as text and as JSON values."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridc.cli.support.files import measured_to_json
from hybridc.ir import Device
from hybridc.options import format_bytes
from hybridc.report import report_plan, report_to_json
from hybridc.report.table import format_us, plural

if TYPE_CHECKING:
    from hybridc.ir import Graph, Plan
    from hybridc.results import Compiled
    from hybridc.training.compile import CompiledTraining

_NAMED = 4
"""Nodes of those that stayed in fp32 that the summary names; the JSON document has them all."""


def compiled_to_json(compiled: Compiled) -> dict[str, Any]:
    """What was compiled, without the tables of the plan report. The compiler went to the end.

    Figures of a plan are those of the largest budget; `plans` has them for each, the smallest first.
    """
    assert compiled.path is not None
    plans = [_plan_to_json(g, plan) for g, plan in zip(compiled.graphs, compiled.plans, strict=True)]
    buckets = [
        {
            "sizes": {name: [each.low, each.high] for name, each in bucket.sizes.items()},
            "plans": [_plan_to_json(*pair) for pair in zip(bucket.graphs, bucket.plans, strict=True)],
        }
        for bucket in compiled.buckets
    ]
    return {
        "path": str(compiled.path),
        "artifact_bytes": _folder_bytes(compiled.path),
        "cuda_image_bytes": compiled.cuda_image_bytes,
        "seconds": dict(compiled.seconds),
        "cache": None if compiled.cached is None else asdict(compiled.cached),
        "functions": len({kernel.function for graph in compiled.graphs for kernel in graph.kernels}),
        "tuned": dict(compiled.tuned),
        "measured_us": measured_to_json(compiled.measured_us),
        "precision": _precisions(compiled.graphs[-1]),
        **plans[-1],
        "plans": plans,
        **({"buckets": buckets} if buckets else {}),
    }


def _precisions(graph: Graph) -> list[dict[str, Any]]:
    """Of kernels for which another precision than fp32 was asked."""
    return [
        {"kernel": k.name, "origins": list(k.origins), "precision": k.precision, "note": k.precision_note}
        for k in graph.kernels
        if k.precision != "fp32" or k.precision_note
    ]


def _plan_to_json(graph: Graph, plan: Plan) -> dict[str, Any]:
    report = report_to_json(report_plan(graph, plan))
    return {
        "budget_bytes": report["budget_bytes"],
        "kernels": len(report["kernels"]),
        "copies": len(report["copies"]),
        "copied_bytes": sum(row["size_bytes"] for row in report["copies"]),
        "devices": report["devices"],
        "makespan_us": report["makespan_us"],
        "time_bound_us": report["time_bound_us"],
    }


def compiled_summary(compiled: Compiled, target: str) -> str:
    data = compiled_to_json(compiled)
    kernels = plural(len(compiled.graphs[-1].kernels), "kernel")
    functions = plural(data["functions"], "distinct function")
    seconds = sum(compiled.seconds.values())
    lines = [
        f"{compiled.path}: {format_bytes(data['artifact_bytes'])}, for {target}",
        f"  {kernels} ({functions}), compiled in {seconds:.1f} s{_from_cache(compiled)}",
    ]
    if compiled.cuda_image_bytes is not None:
        lines.append(f"  {format_bytes(compiled.cuda_image_bytes)} of GPU code for all architectures")
    if data["tuned"]:
        lines.append(f"  {plural(len(data['tuned']), 'function')} with a faster tile found by tuning")
    if data["measured_us"]:
        lines.append(f"  planned with {plural(len(data['measured_us']), 'measured time')}")
    lines += precision_summary(compiled.graphs[-1])
    if compiled.buckets:
        lines.append(f"{compiled.buckets[-1]}:")
    for plan in data["plans"]:
        if len(data["plans"]) > 1:
            lines.append(f"plan for {format_bytes(plan['budget_bytes'])} of GPU memory:")
        lines += _plan_summary(plan)
    for bucket in compiled.buckets[:-1]:
        plan = bucket.plans[-1]
        memory = format_bytes(plan.arena_bytes(Device.GPU) or plan.arena_bytes(Device.CPU))
        predicted = _predicted_text(plan.makespan_us, plan.time_bound_us)
        lines.append(f"{bucket}: memory {memory}, predicted run {predicted}")
    return "\n".join(lines)


def _from_cache(compiled: Compiled) -> str:
    cached = compiled.cached
    return "" if cached is None else f", {cached.found} of {cached.functions} functions from the cache"


def precision_summary(graph: Graph) -> list[str]:
    """Lines that count what multiplies in less than fp32, and name by their reasons the nodes that do not."""
    reduced = Counter(kernel.precision for kernel in graph.kernels if kernel.precision != "fp32")
    stayed: dict[str, list[str]] = {}
    for kernel in graph.kernels:
        if kernel.precision_note:
            stayed.setdefault(kernel.precision_note, []).extend(kernel.origins[:1] or (kernel.name,))
    lines = [f"  {plural(count, 'kernel')} in {precision}" for precision, count in sorted(reduced.items())]
    for note, nodes in stayed.items():
        named = ", ".join(nodes[:_NAMED]) + (
            f" and {len(nodes) - _NAMED} more" if len(nodes) > _NAMED else ""
        )
        lines.append(f"  {plural(len(nodes), 'kernel')} stayed in fp32, as {note}: {named}")
    return lines


def plan_summary(graph: Graph, plan: Plan) -> list[str]:
    """Lines about one plan."""
    return _plan_summary(_plan_to_json(graph, plan))


def _plan_summary(plan: dict[str, Any]) -> list[str]:
    lines = []
    for row in plan["devices"]:
        budget = f" of {format_bytes(row['budget_bytes'])}" if row["budget_bytes"] is not None else ""
        memory = (
            f"{format_bytes(row['peak_bytes'])}{budget}, lower bound {format_bytes(row['lower_bound_bytes'])}"
        )
        lines.append(f"  {row['device']}: {plural(row['kernels'], 'kernel')}, memory {memory}")
    if plan["copies"]:
        lines.append(f"  {plural(plan['copies'], 'copy', 'copies')} of {format_bytes(plan['copied_bytes'])}")
    return [*lines, f"  predicted run: {_predicted_text(plan['makespan_us'], plan['time_bound_us'])}"]


def _predicted_text(makespan_us: float, bound_us: float) -> str:
    """The time, and how much slower than any plan it is at most, where that is known."""
    if not bound_us:
        return format_us(makespan_us)
    gap = f"{max(makespan_us / bound_us - 1, 0.0):.1%}"  # rounding may leave it a little below
    return format_us(makespan_us) + (", at the bound" if gap == "0.0%" else f", within {gap} of the bound")


def training_to_json(made: CompiledTraining) -> dict[str, Any]:
    """What was compiled: for the step and the evaluation what `hybridc compile --json` says."""
    parts = {
        "step": made.step,
        "evaluation": made.evaluation,
        "accumulation": made.accumulation,
        "update": made.update,
    }
    described = {}
    for name, part in parts.items():
        if part is not None and part.path is not None:
            described[name] = compiled_to_json(part)
    return {"path": str(made.path), "parameters": made.parameters, "seconds": made.seconds, **described}


def training_summary(made: CompiledTraining, target: str) -> str:
    size = format_bytes(_folder_bytes(made.path))
    trained = plural(made.parameters, "trained parameter")
    lines = [f"{made.path}: {size}, for {target}, {trained}, compiled in {sum(made.seconds.values()):.1f} s"]
    parts = {
        "step": made.step,
        "accumulation": made.accumulation,
        "update": made.update,
        "evaluation": made.evaluation,
    }
    for name, part in parts.items():
        if part is not None:
            lines.append(f"{name}: {plural(len(part.graphs[-1].kernels), 'kernel')}{_from_cache(part)}")
            for graph, plan in zip(part.graphs, part.plans, strict=True):
                lines += plan_summary(graph, plan)
    return "\n".join(lines)


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
