"""plan.json: plans, and the graphs they are of. Plans of one graph share it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridc.ir import Graph, Plan
from hybridc.ir.graph import graph_from_json, graph_to_json
from hybridc.ir.json_values import as_count, as_list, as_object
from hybridc.ir.plan import plan_from_json, plan_to_json


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


def plans_from_json(data: dict[str, Any]) -> tuple[tuple[Graph, ...], tuple[Plan, ...]]:
    """Read graphs and plans back. Raises KeyError, TypeError or ValueError on anything else."""
    data = as_object(data)
    distinct = [graph_from_json(graph) for graph in as_list(data["graphs"])]
    plans = tuple(plan_from_json(plan) for plan in as_list(data["plans"]))
    numbers = [as_count(plan["graph"]) for plan in data["plans"]]
    if any(number >= len(distinct) for number in numbers):
        raise ValueError(f"plans refer to graphs {numbers}, but there are {len(distinct)}")
    return tuple(distinct[number] for number in numbers), plans
