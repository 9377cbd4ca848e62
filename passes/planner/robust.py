"""Plans that stand a machine which is not as its profile says.

The profile's figures are predictions. A few scenarios change them, each in one way; the network is planned
for each of them, and what is found, beside the ways that others use, is run in all of them
(`emit/replay.py`). Taken is the plan whose worst scenario is the least bad: where it is slower by the
smallest factor than the fastest of the candidates there. That is minimax regret (Savage, JASA 46, 1951)
over finite sets, as in robust scheduling (Kouvelis and Yu, Robust Discrete Optimization, 1997)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hybridc.ir import Device, Graph, Plan
from hybridc.machine import Machine
from hybridc.machines.scaled import Scenario, scaled
from hybridc.passes.planner.choose_tilings import Tiling
from hybridc.passes.planner.emit.materialize import materialize, repacked
from hybridc.passes.planner.emit.replay import demands_of, replay
from hybridc.passes.planner.emit.timeline import timeline
from hybridc.passes.planner.make_plans import Report, assemble, make_plans
from hybridc.passes.planner.model.context import Effort
from hybridc.passes.planner.model.core import Core
from hybridc.passes.planner.search.partition import time_bound_us
from hybridc.passes.planner.search.policies import BASELINES
from hybridc.passes.planner.watch import Watch

# Round numbers, near the worse end of what benchmarks/regret.py draws: how far profiles are off is not known.
# On machines drawn at random such plans lose less in the median and the tail, but not by much, and a baseline
# is no less often faster: no default, as each scenario costs a search.
SCENARIOS = (
    Scenario(),
    Scenario(gpu=0.4),
    Scenario(cpu=0.6),
    Scenario(link=0.65, kept=0.7),
)
"""As predicted; a slow GPU; a slow CPU; a slow link, and memories that reach little for several at once."""

_Candidate = tuple[Tiling, Plan]


def make_robust_plans(
    tilings: Sequence[Tiling],
    machine: Machine,
    budgets: Sequence[int],
    devices: Sequence[Device],
    *,
    effort: Effort | None = None,
    host_bytes: int | None = None,
    report: Report = lambda done, total: None,
    watch: Watch | None = None,
) -> tuple[_Candidate, ...]:
    """As `make_plans`, for a machine of which little is certain; searches take as long for each scenario.

    Predicted times are those of the machine as its profile says. Ensures: of the budgets that are asked for,
    none has a plan whose worst scenario is worse than that of a smaller one's.
    """
    if Device.GPU not in devices or not budgets:
        return make_plans(
            tilings,
            machine,
            budgets,
            devices,
            effort=effort,
            host_bytes=host_bytes,
            report=report,
            watch=watch,
        )
    machines = [scaled(machine, scenario) for scenario in SCENARIOS]
    found: list[tuple[_Candidate, ...]] = []
    for number, one in enumerate(machines):
        report(number, len(machines))
        if watch is not None:
            watch.check()
        # it hears of plans for the machine as its profile says, which comes first
        heard = None if number else watch
        found.append(
            make_plans(tilings, one, budgets, devices, effort=effort, host_bytes=host_bytes, watch=heard)
        )
    chosen: dict[int, _Candidate] = {}
    smaller: list[_Candidate] = []
    for budget_bytes, *candidates in sorted(zip(budgets, *found, strict=True), key=lambda row: row[0]):
        # what a smaller budget has room for has it here, too
        others = _baselines(tilings[0], machine, budget_bytes, effort or Effort(), host_bytes)
        smaller = [_least_bad([*candidates, *others, *smaller], machines)]
        chosen[budget_bytes] = smaller[0]
    return tuple(_as_predicted(chosen[b], machine, b, host_bytes) for b in budgets)


def _baselines(
    whole: Tiling, machine: Machine, budget_bytes: int, effort: Effort, host_bytes: int | None
) -> Iterator[_Candidate]:
    """The ways that others use to place the whole network, where they fit."""
    context = whole.context(machine, effort, host_bytes)
    problem = replace(context.problem, budget_bytes=budget_bytes, host_bytes=host_bytes)
    core = Core(problem)
    for policy in BASELINES.values():
        decisions = core.repaired(policy(problem, core.makespan_us))
        if decisions is None:
            continue
        placed = repacked(context, materialize(context, problem, decisions), effort.tightening)
        if placed.fits(budget_bytes, host_bytes):
            yield (
                whole,
                assemble(whole.graph, machine, budget_bytes, placed.steps, placed.buffers, placed.arenas),
            )


def _least_bad(candidates: Sequence[_Candidate], machines: Sequence[Machine]) -> _Candidate:
    """The one of the least regret in its worst scenario; of several the first."""
    times_us = [[replayed_us(tiling.graph, plan, one) for one in machines] for tiling, plan in candidates]
    least_us = [min(column) for column in zip(*times_us, strict=True)]

    def worst(number: int) -> float:
        pairs = zip(times_us[number], least_us, strict=True)
        return max((us / least if least else 1.0 for us, least in pairs), default=1.0)

    return candidates[min(range(len(candidates)), key=worst)]


def replayed_us(graph: Graph, plan: Plan, machine: Machine) -> float:
    """What a plan takes on a machine, whatever machine it was made for."""
    return replay(plan.steps, demands_of(graph, plan.steps, machine), machine)[0]


def _as_predicted(
    candidate: _Candidate, machine: Machine, budget_bytes: int, host_bytes: int | None
) -> _Candidate:
    """With the budget that it was chosen for, the times of the machine as its profile says, and a bound."""
    tiling, plan = candidate
    _, spans = replay(plan.steps, demands_of(tiling.graph, plan.steps, machine), machine)
    step_us = tuple(end_us - start_us for start_us, end_us in spans)
    makespan_us, _ = timeline(plan.steps, step_us)
    context = tiling.context(machine, Effort(), host_bytes)
    return tiling, replace(
        plan,
        budget_bytes=budget_bytes,
        step_us=step_us,
        makespan_us=makespan_us,
        time_bound_us=min(time_bound_us(context, budget_bytes), makespan_us),
    )
