"""Plan a group: for each member which of its plans runs, and which of its weights stay on the GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from hybridc.errors import PlanError
from hybridc.group.choose import Option, choose, needed_bytes
from hybridc.group.place import (
    Region,
    Turn,
    place,
    resident_weights,
    upload_us,
    with_copies,
)
from hybridc.ir import Buffer, Device, Graph, Plan
from hybridc.ir.residents import held_bytes
from hybridc.machine import Link
from hybridc.options import format_budget

_COMBINATIONS = 100_000
"""Of ways to run all members but one, or two of three, that are looked at: some tenths of a second."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What may run in a group."""

    name: str
    graphs: tuple[Graph, ...]
    plans: tuple[Plan, ...]
    """Of the graphs, for one budget each."""
    link: Link
    runs: int = 1
    """In each of its turns."""
    where: str = ""
    """For messages."""


@dataclass(frozen=True, slots=True)
class Member:
    """A candidate, and what it runs in a group."""

    name: str
    runs: int
    """In each of its turns."""
    number: int
    """Which of the member's plans was chosen."""
    graph: Graph
    turn: Turn
    """That plan, moved to where the group has room for it."""
    kept_bytes: int
    """Weights that always stay, in aligned bytes, as all these."""
    restored_bytes: int
    """Weights that are copied to the GPU in each turn."""
    working_bytes: int
    """Activations, workspace and what is streamed in every run."""
    separate_us: float
    """Predicted time of a turn by a session of its own, with the best plan for the whole budget: its weights
    are uploaded, then it runs."""

    @property
    def shared_bytes(self) -> int:
        """What its turn needs beside the weights that stay."""
        return self.restored_bytes + self.working_bytes

    @property
    def first_us(self) -> float:
        """Predicted time of the first run of a turn."""
        return self.turn.first.makespan_us

    @property
    def again_us(self) -> float:
        """Predicted time of further runs in a turn."""
        return self.turn.again.makespan_us

    @property
    def turn_us(self) -> float:
        return self.first_us + (self.runs - 1) * self.again_us


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Members that take turns in one arena on the GPU."""

    members: tuple[Member, ...]
    budget_bytes: int
    arena_bytes: int

    @property
    def round_us(self) -> float:
        """Predicted time in which each member has one turn."""
        return math.fsum(member.turn_us for member in self.members)

    @property
    def separate_us(self) -> float:
        """Predicted time of sessions that load, run and unload one after the other."""
        return math.fsum(member.separate_us for member in self.members)


@dataclass(frozen=True, slots=True)
class _Way:
    """One of a member's plans, and how many of its resident weights, in the order of first use, stay."""

    number: int
    stay: int
    option: Option


def plan_group(candidates: Sequence[Candidate], budget_bytes: int) -> GroupPlan:
    """Plan a group whose members take turns in this order within the budget.

    Of each member's plans one is chosen, together with how many of its resident weights stay on the GPU in
    the turns of others, so that the predicted time of a round is least. Those that are read first stay: the
    others are copied while kernels that do not need them run. For up to three members about 300 cuts between
    staying and restored weights are weighed for each, for more members fewer; among those the choice is
    exact, and with a larger budget a round never takes longer.

    Requires: verified plans without states on the GPU. Raises PlanError HC208 where the budget is too small
    for a member.
    """
    _check_budget(candidates, budget_bytes)
    cuts = _cuts(candidates)
    ways = [_ways(each, cuts) for each in candidates]
    chosen = choose([[way.option for way in each] for each in ways], budget_bytes)
    assert chosen is not None  # the smallest plans with nothing that stays fit
    taken = [each[position] for each, position in zip(ways, chosen, strict=True)]
    options = [way.option for way in taken]
    arena_bytes = needed_bytes(options)
    starts = list(accumulate((option.kept_bytes for option in options), initial=0))
    region = Region(starts[-1], arena_bytes, budget_bytes)
    members = tuple(
        _member(candidate, way, start, region)
        for candidate, way, start in zip(candidates, taken, starts, strict=False)
    )
    return GroupPlan(members, budget_bytes, arena_bytes)


def _check_budget(candidates: Sequence[Candidate], budget_bytes: int) -> None:
    """Raise PlanError HC208 if the smallest plan of a member exceeds the budget."""
    least, largest = max(
        ((min(p.arena_bytes(Device.GPU) for p in each.plans), each) for each in candidates),
        key=lambda pair: pair[0],
    )
    if least > budget_bytes:
        name = largest.name
        what = f"member {name!r} alone needs {least:,} bytes of GPU memory, but {budget_bytes:,} are allowed"
        enough = format_budget(least)
        remedy = f"give the group --gpu-memory {enough}, which is enough, or compile {name!r} for less"
        raise PlanError("HC208", what, where=largest.where, remedy=remedy, smallest_budget_bytes=least)


def _cuts(candidates: Sequence[Candidate]) -> int:
    """How many cuts of each plan are weighed; does not depend on the budget."""
    plans = max(len(each.plans) for each in candidates)
    return max(2, int(_COMBINATIONS ** (1 / max(len(candidates) - 1, 2))) // plans)


def _ways(candidate: Candidate, cuts: int) -> list[_Way]:
    """Each plan with each number of weights that stay, thinned to `cuts` that are evenly spaced in bytes."""
    found = []
    for number, (graph, plan) in enumerate(zip(candidate.graphs, candidate.plans, strict=True)):
        residents = resident_weights(graph, plan)
        arena_bytes = plan.arena_bytes(Device.GPU)
        for stay in _thinned(residents, cuts):
            kept_bytes = held_bytes(residents[:stay])
            first = with_copies(graph, plan, [b.tensor for b in residents[stay:]], candidate.link)
            us = first.makespan_us + (candidate.runs - 1) * plan.makespan_us
            restored_bytes = held_bytes(residents[stay:])
            option = Option(kept_bytes, arena_bytes - kept_bytes, us, restored_bytes)
            found.append(_Way(number, stay, option))
    return found


def _thinned(residents: Sequence[Buffer], cuts: int) -> list[int]:
    """Numbers of weights: none, all, and of those between as many as there may be."""
    sizes = list(accumulate((held_bytes([buffer]) for buffer in residents), initial=0))
    last = {size * (cuts - 1) // max(sizes[-1], 1): stay for stay, size in enumerate(sizes)}
    return sorted({0, *last.values()})


def _member(candidate: Candidate, way: _Way, kept_offset_bytes: int, region: Region) -> Member:
    graph, plan = candidate.graphs[way.number], candidate.plans[way.number]
    residents = resident_weights(graph, plan)
    kept = frozenset(buffer.tensor for buffer in residents[: way.stay])
    return Member(
        name=candidate.name,
        runs=candidate.runs,
        number=way.number,
        graph=graph,
        turn=place(graph, plan, kept, kept_offset_bytes, region, candidate.link),
        kept_bytes=way.option.kept_bytes,
        restored_bytes=way.option.copied_bytes,
        working_bytes=way.option.shared_bytes - way.option.copied_bytes,
        separate_us=_separate_us(candidate, region.budget_bytes),
    )


def _separate_us(candidate: Candidate, budget_bytes: int) -> float:
    """The best of the plans that fit: each resident weight is uploaded, then it runs."""
    return min(
        _upload_all_us(graph, plan, candidate.link) + candidate.runs * plan.makespan_us
        for graph, plan in zip(candidate.graphs, candidate.plans, strict=True)
        if plan.arena_bytes(Device.GPU) <= budget_bytes
    )


def _upload_all_us(graph: Graph, plan: Plan, link: Link) -> float:
    return math.fsum(upload_us(buffer.size_bytes, link) for buffer in resident_weights(graph, plan))
