"""The process of the exact solver: this module is run by `python -m`, with lines of JSON on stdin and stdout.

A process of its own because OR-tools and HiGHS's Python package cannot be loaded into one. `exact` says
what goes in and out; times are whole numbers of its unit of time.

The model: each kernel is an interval on one of two lanes, each copy an optional interval on one of two. A
tensor's live range on the GPU begins with its making or with a fetch for its first use in it; every use
on the GPU belongs to one of its live ranges, or the tensor is a pinned weight. Live ranges and workspaces
are intervals that share the budget: a cumulative constraint. No order of kernels is part of the model
unless it is asked for.
"""

from __future__ import annotations

import json
import select
import sys
from typing import Any

from ortools.sat.python import cp_model

# with one worker and a seed the same request has the same answer
_SEED = 1
_IDLE_S = 30.0
"""Seconds without a request after which the process ends: it holds 100 MiB, its parent may live for days."""


def main() -> None:
    """Answer requests by `solve`, a line each, until there are no more for a while."""
    while select.select([sys.stdin], [], [], _IDLE_S)[0] and (line := sys.stdin.readline()):
        print(json.dumps(solve(json.loads(line))), flush=True)


def solve(request: dict[str, Any]) -> dict[str, Any]:
    """Build the model of a request (`exact._request`), solve it, and say where everything lies in time.

    Times are whole ticks. The method is CP-SAT of OR-tools: optional intervals, no-overlap of lanes and a
    cumulative constraint of bytes. `schedule` is None if no plan was found within the effort.
    """
    model = _Model(request)
    solver = cp_model.CpSolver()
    # several workers would race, and answers depend on who wins
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = _SEED
    solver.parameters.cp_model_probing_level = 0  # probing times creeps from tick to tick
    solver.parameters.linearization_level = 0  # relaxations of big-M rows cost more than they tell
    solver.parameters.max_deterministic_time = request["effort"]
    # FEASIBLE: the effort ended before the proof did
    status = solver.solve(model.cp)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return {
        "is_optimal": status == cp_model.OPTIMAL,
        "is_infeasible": status == cp_model.INFEASIBLE,
        "bound": solver.best_objective_bound,
        "schedule": model.schedule(solver) if found else None,
    }


class _Model:
    """Variables and constraints. Kernels k, tensors t; `p` makes t."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.cp = cp = cp_model.CpModel()
        self.horizon: int = request["horizon"]
        self.inputs, self.outputs = request["inputs"], request["outputs"]
        self.producer = {t: k for k, outputs in enumerate(self.outputs) for t in outputs}
        self.uses = {
            t: [k for k, read in enumerate(self.inputs) if t in read] for t in range(len(request["size"]))
        }
        kernels = range(len(self.inputs))
        self.on_gpu = [cp.new_bool_var("") for _ in kernels]
        self.start = [self.time() for _ in kernels]
        self.end = [self.time() for _ in kernels]
        self.makespan = self.time()
        self.holders: list[tuple[cp_model.IntVar, cp_model.IntVar, cp_model.IntVar, int]] = []
        self.up_lane: list[cp_model.IntervalVar] = []
        self.down_lane: list[cp_model.IntervalVar] = []
        self.offloads: dict[int, tuple[cp_model.IntVar, cp_model.IntVar, cp_model.IntVar]] = {}
        self.made_until: dict[int, cp_model.IntVar] = {}
        self.made_from: dict[int, cp_model.IntVar] = {}
        # (t, first use) -> (fetched, start of fetch, end of the live range)
        self.fetches: dict[tuple[int, int], tuple[cp_model.IntVar, cp_model.IntVar, cp_model.IntVar]] = {}
        # (t, first use of the live range or None if made there, use) -> whether the use is in it
        self.member: dict[tuple[int, int | None, int], cp_model.IntVar] = {}
        self.live_ranges: dict[int, list[cp_model.IntervalVar]] = {}
        self.pinned: dict[int, cp_model.IntVar] = {}
        self.taken: dict[tuple[int, int, int], cp_model.IntVar] = {}
        self.kernels()
        for t in self.uses:
            self.tensor(t)
        for k in kernels:
            self.overwriting(k)
        self.share()

    def time(self) -> cp_model.IntVar:
        return self.cp.new_int_var(0, self.horizon, "")

    def kernels(self) -> None:
        """Two lanes, and results before uses."""
        cp, gpu, cpu = self.cp, self.request["gpu"], self.request["cpu"]
        gpu_lane, cpu_lane, gpu_work, cpu_work = [], [], [], []
        for k, (start, end, on_gpu) in enumerate(zip(self.start, self.end, self.on_gpu, strict=True)):
            cp.add(self.makespan >= end)
            if gpu[k] is None:
                cp.add(on_gpu == 0)
            else:
                gpu_lane.append(cp.new_optional_interval_var(start, gpu[k], end, on_gpu, ""))
                gpu_work.append(gpu[k] * on_gpu)
                self.hold(start, end, on_gpu, self.request["workspace"][k])
            if cpu[k] is None:
                cp.add(on_gpu == 1)
            else:
                cpu_lane.append(cp.new_optional_interval_var(start, cpu[k], end, on_gpu.negated(), ""))
                cpu_work.append(cpu[k] * (1 - on_gpu))
            for t in self.inputs[k]:
                if t in self.producer:
                    cp.add(start >= self.end[self.producer[t]])
        cp.add_no_overlap(gpu_lane)
        cp.add_no_overlap(cpu_lane)
        # redundant with the lanes: a bound that the solver need not derive
        cp.add(self.makespan >= sum(gpu_work))
        cp.add(self.makespan >= sum(cpu_work))
        cp.add(self.makespan >= self.request["least"])
        if self.request["keep_order"]:
            for k in range(len(self.start)):
                for j in range(k + 1, len(self.start)):
                    for both in (
                        (self.on_gpu[k], self.on_gpu[j]),
                        (self.on_gpu[k].negated(), self.on_gpu[j].negated()),
                    ):
                        cp.add(self.start[j] >= self.end[k]).only_enforce_if(both)

    def hold(self, start: Any, end: Any, present: cp_model.IntVar, size: int) -> cp_model.IntervalVar:
        """Bytes taken from start to end."""
        if size:
            self.holders.append((start, end, present, size))
        return self.cp.new_optional_interval_var(start, self.time(), end, present, "")

    def tensor(self, t: int) -> None:
        """Live ranges of a tensor, its copies, and where each use finds it."""
        cp, request, uses = self.cp, self.request, self.uses[t]
        if t in self.producer:
            self.made(t)
        elif request["is_weight"][t] and uses:
            self.pinned[t] = cp.new_bool_var("")
        for j in uses:
            self.fetch(t, j)
        for j in uses:
            homes = [self.fetches[t, j][0]]
            for first in uses:
                if first != j and not (request["keep_order"] and first > j):
                    homes.append(self.goes_on(t, first, j))
            if t in self.producer:
                homes.append(self.kept_since_made(t, j))
            if t in self.pinned:
                homes.append(self.pinned[t])
                cp.add(sum(homes[:-1]) <= self.on_gpu[j])
                cp.add(sum(homes[:-1]) <= 1 - self.pinned[t])
                cp.add(sum(homes) >= self.on_gpu[j])
            else:
                cp.add(sum(homes) == self.on_gpu[j])

    def made(self, t: int) -> None:
        """The live range since its making, and the copy to the host that holds it."""
        cp, p = self.cp, self.producer[t]
        on_gpu, until, since = self.on_gpu[p], self.time(), self.time()
        self.made_until[t], self.made_from[t] = until, since
        cp.add(until >= self.end[p])
        self.live_ranges.setdefault(t, []).append(self.hold(since, until, on_gpu, self.request["size"][t]))
        copied, start, end = cp.new_bool_var(""), self.time(), self.time()
        self.offloads[t] = copied, start, end
        self.down_lane.append(cp.new_optional_interval_var(start, self.request["down"][t], end, copied, ""))
        cp.add_implication(copied, on_gpu)
        cp.add(start >= self.end[p]).only_enforce_if(copied)
        cp.add(until >= end).only_enforce_if(copied)
        cp.add(self.makespan >= end).only_enforce_if(copied)
        if self.request["wanted"][t]:
            cp.add_implication(on_gpu, copied)
        for j in self.uses[t]:
            on_cpu = self.on_gpu[j].negated()
            cp.add_bool_or(on_gpu.negated(), self.on_gpu[j], copied)
            cp.add(self.start[j] >= end).only_enforce_if(copied, on_cpu)

    def fetch(self, t: int, j: int) -> None:
        """A copy to the GPU whose first use is j, and the live range that begins with it."""
        cp, fetched, start, arrived, until = (
            self.cp,
            self.cp.new_bool_var(""),
            self.time(),
            self.time(),
            self.time(),
        )
        self.fetches[t, j] = fetched, start, until
        self.up_lane.append(cp.new_optional_interval_var(start, self.request["up"][t], arrived, fetched, ""))
        self.live_ranges.setdefault(t, []).append(self.hold(start, until, fetched, self.request["size"][t]))
        cp.add(self.start[j] >= arrived).only_enforce_if(fetched)
        cp.add(until >= self.end[j]).only_enforce_if(fetched)
        if t in self.producer:
            p, (copied, _, on_host) = self.producer[t], self.offloads[t]
            cp.add_bool_or(fetched.negated(), self.on_gpu[p].negated(), copied)
            cp.add(start >= on_host).only_enforce_if(fetched, copied)
            cp.add(start >= self.end[p]).only_enforce_if(fetched)

    def goes_on(self, t: int, first: int, j: int) -> cp_model.IntVar:
        """Use j is a later one of the live range that was fetched for `first`."""
        member = self.member[t, first, j] = self.cp.new_bool_var("")
        fetched, _, until = self.fetches[t, first]
        self.cp.add_implication(member, fetched)
        self.cp.add(until >= self.end[j]).only_enforce_if(member)
        self.cp.add(self.start[j] >= self.end[first]).only_enforce_if(member)
        return member

    def kept_since_made(self, t: int, j: int) -> cp_model.IntVar:
        member = self.member[t, None, j] = self.cp.new_bool_var("")
        self.cp.add_implication(member, self.on_gpu[self.producer[t]])
        self.cp.add(self.made_until[t] >= self.end[j]).only_enforce_if(member)
        return member

    def overwriting(self, k: int) -> None:
        """An output's live range may begin where that of an input ends, if the input is not copied."""
        cp, pairs = self.cp, self.request["may_overwrite"][k]
        for output, source in pairs:
            taken = self.taken[k, output, source] = cp.new_bool_var("")
            cp.add_implication(taken, self.on_gpu[k])
            for (t, first, j), member in self.member.items():
                if (t, j) == (source, k):
                    until = self.made_until[t] if first is None else self.fetches[t, first][2]
                    cp.add(until <= self.end[k]).only_enforce_if(taken, member)
                    if first is None:
                        cp.add_bool_or(taken.negated(), member.negated(), self.offloads[t][0].negated())
            fetched, _, until = self.fetches[source, k]
            cp.add(until <= self.end[k]).only_enforce_if(taken, fetched)
        for place in (0, 1):
            for t in {pair[place] for pair in pairs}:
                cp.add_at_most_one(self.taken[k, *pair] for pair in pairs if pair[place] == t)
        for output in self.outputs[k]:
            takes = [self.taken[k, *pair] for pair in pairs if pair[0] == output]
            since = self.made_from[output]
            for literal in takes:
                cp.add(since == self.end[k]).only_enforce_if(literal)
            cp.add(since == self.start[k]).only_enforce_if([literal.negated() for literal in takes])

    def share(self) -> None:
        """What all have in common: the link's lanes, the budget, and the aim."""
        cp, budget = self.cp, self.request["budget"]
        cp.add_no_overlap(self.up_lane)
        cp.add_no_overlap(self.down_lane)
        for ranges in self.live_ranges.values():
            cp.add_no_overlap(ranges)  # a copy to the GPU while the tensor is there can be left out
        always = [(self.request["size"][t], pinned) for t, pinned in self.pinned.items()]
        takers = [(start, on_gpu) for start, on_gpu in zip(self.start, self.on_gpu, strict=True)]
        takers += [(start, fetched) for fetched, start, _ in self.fetches.values()]
        for time, taking in takers:
            held = [size * pinned for size, pinned in always]
            for start, end, holding, size in self.holders:
                if start.index == time.index:
                    held.append(size * holding)
                    continue
                # a holder counts at this time unless it has ended before or begins later
                before, behind, counts = (cp.new_bool_var("") for _ in range(3))
                cp.add(end <= time).only_enforce_if(before)
                cp.add(start >= time + 1).only_enforce_if(behind)
                cp.add_bool_or(counts, before, behind, holding.negated(), taking.negated())
                held.append(size * counts)
            cp.add(sum(held) <= budget)
        cp.minimize(self.makespan)

    def schedule(self, solver: cp_model.CpSolver) -> dict[str, Any]:
        """The solution: when what starts, and which uses each live range serves."""
        value = solver.value
        on_gpu = [bool(value(x)) for x in self.on_gpu]
        intervals = [
            {"tensor": t, "fetched": None, "uses": self._members(solver, t, None)}
            for t, p in self.producer.items()
            if on_gpu[p]
        ]
        intervals += [
            {"tensor": t, "fetched": value(start), "uses": [j, *self._members(solver, t, j)]}
            for (t, j), (fetched, start, _) in self.fetches.items()
            if value(fetched)
        ]
        return {
            "on_gpu": on_gpu,
            "start": [value(start) for start in self.start],
            "end": [value(end) for end in self.end],
            "offloads": [
                [t, value(start)] for t, (copied, start, _) in self.offloads.items() if value(copied)
            ],
            "intervals": intervals,
            "pinned": [t for t, pinned in self.pinned.items() if value(pinned)],
            "overwritten": [list(key) for key, taken in self.taken.items() if value(taken)],
        }

    def _members(self, solver: cp_model.CpSolver, t: int, first: int | None) -> list[int]:
        return [
            j for (s, f, j), member in self.member.items() if (s, f) == (t, first) and solver.value(member)
        ]


if __name__ == "__main__":
    main()
