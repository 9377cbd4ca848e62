"""plan.json: plans, and the graphs they are of. Plans of one graph share it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridc.ir import Graph, Plan
from hybridc.ir.graph import graph_from_json, graph_to_json
from hybridc.ir.plan import plan_from_json, plan_to_json
from hybridc.json_values import JsonValueError, count, member, parse_elements


def plans_to_json(graphs: Sequence[Graph], plans: Sequence[Plan]) -> dict[str, Any]:
    """Plans, each of the graph at its position, as plain JSON values; `plans_from_json` is its inverse."""
    distinct = list({id(graph): graph for graph in graphs}.values())
    numbers = {id(graph): number for number, graph in enumerate(distinct)}
    return {
        "graphs": [graph_to_json(graph) for graph in distinct],
        "plans": [
            {"graph": numbers[id(graph)]} | plan_to_json(plan)
            for graph, plan in zip(graphs, plans, strict=True)
        ],
    }


def plans_from_json(data: str) -> tuple[tuple[Graph, ...], tuple[Plan, ...]]:
    """Read graphs and plans back. Raises JsonValueError with the path of the first wrong value."""
    found = parse_elements(data, {"graphs": graph_from_json, "plans": _numbered_plan})
    distinct, plans = found["graphs"], tuple(plan for _, plan in found["plans"])
    numbers = [number for number, _ in found["plans"]]
    if any(number >= len(distinct) for number in numbers):
        raise JsonValueError(f"plans refer to graphs {numbers}, but there are {len(distinct)}", "plans")
    return tuple(distinct[number] for number in numbers), plans


def _numbered_plan(data: Any) -> tuple[int, Plan]:
    return member(data, "graph", count), plan_from_json(data)
