"""The table of a group, and the same as JSON."""

from __future__ import annotations

from hybridc.group import Candidate, plan_group
from hybridc.ir import Device
from hybridc.passes.planner.emit.reuse_buffers import reuse_buffers
from hybridc.passes.planner.make_plans import assemble
from hybridc.report.group import group_text, group_to_json
from tests.support.graphs import chain, machine
from tests.support.placements import steps_of


def candidate(name: str, kernels: int, weight: int, runs: int = 1) -> Candidate:
    graph = chain(kernels, size=1, weight=weight)
    placed = reuse_buffers(graph, steps_of(graph, [Device.GPU] * kernels), (Device.GPU, Device.CPU))
    return Candidate(name, (graph,), (assemble(graph, machine(), None, *placed),), machine().link, runs)


GROUP = plan_group([candidate("text", 6, 2048), candidate("unet", 5, 4096, runs=3)], 14 << 20)


def test_a_narrow_terminal_loses_only_columns() -> None:
    for width in (60, 80, None):
        lines = group_text(GROUP, width).splitlines()
        assert [line.split()[0] for line in lines[:3]] == ["member", "text", "unet"]
        assert max(len(line) for line in lines[:4]) <= (width or 1000)
    assert lines[0].split() == [
        *("member", "works", "in", "weights", "stay", "restored"),
        *("first", "run", "further", "separate"),
    ]


def test_sums_are_those_of_the_members() -> None:
    data = group_to_json(GROUP)
    members = data["members"]
    assert [(each["name"], each["runs"]) for each in members] == [("text", 1), ("unet", 3)]
    kept_bytes = sum(each["kept_bytes"] for each in members)
    shared_bytes = max(each["working_bytes"] + each["restored_bytes"] for each in members)
    assert kept_bytes + shared_bytes == data["arena_bytes"] <= data["budget_bytes"] == 14 << 20
    rounds = (each["first_us"] + (each["runs"] - 1) * each["again_us"] for each in members)
    assert abs(sum(rounds) - data["round_us"]) < 1e-6
