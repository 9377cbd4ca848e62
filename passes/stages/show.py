"""What the record of a phase shows of it: the suffix of a file, and its text."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from hybridc.ir.plan import plan_to_json
from hybridc.passes.phases import (
    GraphedNetwork,
    ImportedNetwork,
    LoweredNetwork,
    PlannedNetwork,
    ScheduledNetwork,
    TiledNetwork,
    Times,
)


def show_program(c: ImportedNetwork) -> tuple[str, str]:
    """The Relax program as TVMScript."""
    return ".py", c.program.module.script()


def show_scheduled(c: ScheduledNetwork) -> tuple[str, str]:
    """The scheduled functions as TVMScript, each below its rule, packings and workspace."""
    functions = [
        f"# {name} on {device}: rule {s.rule}, packed {dict(s.packings)}, "
        f"workspace {list(s.workspace_bytes)} bytes\n"
        f"{s.function.script()}\n"
        for (name, device), s in c.scheduled.items()
    ]
    return ".py", "\n".join(functions)


def show_graph(c: GraphedNetwork) -> tuple[str, str]:
    """The graph as JSON."""
    return ".json", _json(asdict(c.graph))


def show_times(c: GraphedNetwork) -> tuple[str, str]:
    """The measured times in microseconds as JSON."""
    return ".json", _json(_listed(c.library.measured_us))


def show_estimates(c: GraphedNetwork) -> tuple[str, str]:
    """The estimated times in microseconds as JSON."""
    return ".json", _json(_listed(c.library.estimated_us))


def _listed(times: Times) -> list[dict[str, Any]]:
    return [{"function": name, "device": device.value, "us": us} for (name, device), us in times.items()]


def show_tilings(c: TiledNetwork) -> tuple[str, str]:
    """The tilings that are planned, the whole network first, as JSON."""
    return ".json", _json([asdict(tiling) for tiling in c.tilings])


def show_plans(c: PlannedNetwork) -> tuple[str, str]:
    """The plans as JSON."""
    return ".json", _json([plan_to_json(plan) for plan in c.plans])


def show_verdict(c: PlannedNetwork) -> tuple[str, str]:
    """A line for each plan that was accepted."""
    lines = [f"accepted: {len(plan.steps)} steps, {len(plan.buffers)} buffers\n" for plan in c.plans]
    return ".txt", "".join(lines)


def show_lowered(c: LoweredNetwork) -> tuple[str, str]:
    """What each lane does step by step, and the functions as TVMScript."""
    return ".py", str(c.lowered)


def _json(value: object) -> str:
    return json.dumps(value, indent=1, default=sorted) + "\n"  # sets of names
