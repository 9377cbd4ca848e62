"""The linear programme that bounds the makespan of every plan of a problem.

A plan is a trace: kernels run in time, each device in the problem's order; a tensor stays on the GPU for
intervals of time, begun by its making or a copy and ended by its last use or the end of its copy to the
host; at any time the bytes of live ranges and workspaces are at most the budget B. A copy to the GPU that
starts while the tensor is there can be left out and the live range prolonged, so no plan here does that.
From any trace the variables below get values that satisfy all rows, with T its makespan; so the least T is
a bound.

Variables (k kernel, e gap from event i to event j of a tensor t of size b, p its producer)
  x_k  1 if k runs on the GPU
  y_e  1 if one live range holds t from the last event on the GPU before j to a use on the GPU at j or later
  f_e  1 if j is on the GPU, y_e = 0, and the live range at j began with a copy; a_e if with a run of p again
  h_t  1 if t is copied to the host
  z_e  1 if h_t and e is the first gap that t is not kept in; one more z if it is kept in all
  E_k  end of k
  S_k  start of k on the GPU. For k on the CPU: the latest of the ends of GPU kernels before k, of cuts
       before k and, if k is a cut, of all kernels before k. A cut is a kernel that every other one leads
       to or follows from. So S never falls, and no kernel from k on starts on the GPU before S_k
  V_k  bytes copied to the GPU until S_k for kernels behind k: they lie there
  O_k  bytes at S_k of tensors that have left but are not yet on the host; P_k bytes copied to the host of
       tensors that have not left
  U_k  time spent until S_k on second runs whose results serve kernels behind k
  w_c  1 if the kernels between two cuts, and these, are on the devices of choice c
  q_k  number of second runs of k on the CPU; n_k on the GPU
Times of kernels and copies are g, c, up, down, the best rates of copies r.

Rows, and why every trace satisfies them
  lanes      S_(k+1) >= S_k + g x_k + second runs between; T >= sum of c (1 - x + q), and of g (x + n).
  edges      E_b >= E_a + duration of b; if their devices differ, plus the copies of all tensors between
             them, which follow one another on one lane, or a second run of a on the other device.
  cuts       E_k >= S_k + duration; S_k >= ends of what makes its inputs; S_(k+1) >= E_k; all work between
             two cuts, of each device, lies between them in time.
  segments   Between two cuts with few kernels between them the devices of all are one of several choices c:
             w_c says which, sum of w_c = 1, x_k = sum of w_c over those with k on the GPU. From the end of
             the first cut to that of the second it takes at least sum of w_c times the least time of c.
  needs      f_e + a_e + y_e >= x_j by definition. y_e <= x_i + y_(e-1): a live range goes on from a
             GPU event or from before. Inputs are not there from before; pinned weights are, for good. What
             stays has f_e = 0 and one y for all gaps: it is there throughout, or none of its users is.
             h_t + q_p >= x_p - x_j, >= x_p if the host wants t, >= f_e + x_p - 1: only a copy or a second
             run brings to the host what the GPU made.
  memory     at S_k: x_k (working set - overwritten) + sum of b y_e over gaps around k + V_k + O_k <= B. No
             byte counts twice: a kept tensor is neither in flight nor leaving, and not used by k. An
             input that stays behind k is not overwritten.
  fetches    V_k <= V_(k-1) + r (S_k - S_(k-1)) - sum of b f_e over gaps that end at k; V_k >= 0 says that
             what k needs has arrived. By time: sum of up f_e over gaps up to k <= S_k.
  offloads   O_k - P_k >= O_(k-1) - P_(k-1) + sum of b z_e that leave before k - r (S_k - S_(k-1)). P_k
             falls by at most what leaves of later gaps: a tensor whose first gap is not kept leaves when
             it is made. By time: sum of down h_t over tensors made at k or later <= T - S_k - g x_k.
  sharing    Weighted work of both lanes from the end of a cut c to the start of a later one l (`sharing.py`):
             S_l - E_c >= sum of w g x, or w c (1 - x), + v (sum of b f_e / r - V_c / r - (E_c - S_c)) over
             what lies between: V_c / r + E_c - S_c is what may have been copied for it before E_c.
  conflicts  If t does not fit beside the working set of k, i < k < j: x_k + y_e <= 1; f_e and x_k imply
             S_j >= S_k + g + up; z_e of the first gap and x_k imply S_k >= S_i + g + down.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hybridc.passes.planner.bounds.linear import LinearProgramme, Term
from hybridc.passes.planner.bounds.segments import segments
from hybridc.passes.planner.bounds.sharing import shared_windows
from hybridc.passes.planner.model.problem import BEFORE_ALL, Gap, Problem
from hybridc.passes.planner.model.structure import cuts, smallest_working_set_bytes

# A running sum costs a variable and a row at each end, a row's terms one for each kernel inside.
_LONG_GAP = 24
"""Gaps around more kernels enter a running sum of kept bytes instead of every kernel's row."""
# All pairs would make the programme quadratic in the length of gaps; any subset gives a bound.
_CONFLICTS = 6
"""So many conflicts of a gap are stated, those nearest to its end."""
# The same for the rows about time.
_TIMED_CONFLICTS = 2


@dataclass(frozen=True, slots=True)
class Model:
    """The programme, in units of the given time, and where its decisions are."""

    programme: LinearProgramme
    on_gpu: list[int]
    keep: list[int]


def relax(
    problem: Problem,
    *,
    unit_us: float,
    gpu_again: Collection[int] = (),
    cpu_again: Collection[int] = (),
    shared: bool = False,
) -> Model:
    """Write down the programme; these kernels may run again on a device.

    Of `shared` runs it also says what kernels and copies lose to each other when they are replayed.

    Requires: every kernel fits some device.
    """
    rows = _Rows(problem, unit_us, gpu_again, cpu_again)
    rows.lanes()
    rows.edges()
    rows.cuts()
    rows.segments()
    for tensor in range(len(problem.tensor_names)):
        rows.needs(tensor)
        rows.leaving(tensor)
    rows.second_runs()
    rows.memory()
    rows.copies()
    rows.conflicts()
    if shared:
        rows.sharing()
    return Model(rows.lp, rows.x, rows.y)


class _Rows:
    """The variables, and rows by family. Times in units of `unit_us`, bytes in budgets."""

    def __init__(
        self, problem: Problem, unit_us: float, gpu_again: Collection[int], cpu_again: Collection[int]
    ) -> None:
        self.problem, self.unit_us = problem, unit_us
        self.lp = lp = LinearProgramme()
        count, tensors, gaps = problem.kernel_count, range(len(problem.tensor_names)), problem.gaps
        kernels = range(count)
        # in shares of the budget, so that the numbers are near one
        scale = max(problem.budget_bytes, 1)
        self.bytes = [size / scale for size in problem.size_bytes]
        self.gpu = [0.0 if us == math.inf else us / unit_us for us in problem.gpu_us]
        self.cpu = [0.0 if us == math.inf else us / unit_us for us in problem.cpu_us]
        self.up = [us / unit_us for us in problem.h2d_us]
        self.down = [us / unit_us for us in problem.d2h_us]
        self.least_bytes = [smallest_working_set_bytes(problem, k) / scale for k in kernels]
        # every variable has finite bounds, which the proof of the optimum needs: no plan of interest takes
        # longer than everything one after the other
        fetched = sum(self.up[gap.tensor] for gap in gaps)
        self.horizon = horizon = max(1.0, sum(self.gpu) + sum(self.cpu) + fetched + sum(self.down))
        on_gpu_again, on_cpu_again = (
            [float(k in again) for k in kernels] for again in (gpu_again, cpu_again)
        )
        # a second run may stand for a copy, if it is faster
        self.gpu_again_us = _times(problem.gpu_us, on_gpu_again, unit_us)
        self.cpu_again_us = _times(problem.cpu_us, on_cpu_again, unit_us)
        self.makespan = lp.variable(0, horizon, 1.0)
        self.x = [self._device(k) for k in kernels]
        self.start = [lp.variable(0, horizon) for _ in kernels] + [self.makespan]
        self.end = [lp.variable(0, horizon) for _ in kernels]
        self.in_flight = [lp.variable(0, 1) for _ in kernels]
        self.leaving_bytes = [lp.variable(0, 1) for _ in kernels]
        self.early_bytes = [lp.variable(0, sum(self.bytes)) for _ in kernels]
        self.again_early = [lp.variable(0, horizon * bool(gpu_again)) for _ in kernels]
        self.cpu_again = [lp.variable(0, again) for again in on_cpu_again]
        ranges = [sum(len(problem.gaps_of[t]) for t in outputs) for outputs in problem.outputs]
        self.gpu_again = [lp.variable(0, (ranges[k] + 1) * on_gpu_again[k]) for k in kernels]
        self.y = [
            lp.variable(0, float(gap.start != BEFORE_ALL or problem.is_weight[gap.tensor])) for gap in gaps
        ]
        self.f = [lp.variable(0, float(gap.tensor not in problem.stays)) for gap in gaps]
        makers = [problem.producer[gap.tensor] for gap in gaps]
        self.again = [lp.variable(0, 0.0 if k == BEFORE_ALL else on_gpu_again[k]) for k in makers]
        self.h = [lp.variable(0, float(problem.producer[t] != BEFORE_ALL)) for t in tensors]
        # bytes that leave before each kernel, at first gaps and at later ones
        self.leave_first: list[list[Term]] = [[] for _ in range(count + 1)]
        self.leave_later: list[list[Term]] = [[] for _ in range(count + 1)]
        self.first_leave: dict[int, int] = {}
        self.ends_at: list[list[int]] = [[] for _ in kernels]
        for index, gap in enumerate(gaps):
            self.ends_at[gap.end].append(index)

    def _device(self, kernel: int) -> int:
        fits = self.problem.gpu_us[kernel] < math.inf and self.least_bytes[kernel] <= 1
        return self.lp.variable(float(self.problem.cpu_us[kernel] == math.inf), float(fits))

    def _less_duration(self, kernel: int) -> tuple[list[Term], float]:
        """`end - start - duration >= 0` of a kernel is `end - start + terms >= constant`."""
        return [(self.x[kernel], self.cpu[kernel] - self.gpu[kernel])], self.cpu[kernel]

    def lanes(self) -> None:
        """Work of the GPU in order and of the CPU in sum."""
        lp, cpu = self.lp, self.cpu
        for k, (before, after) in enumerate(pairwise(self.start)):
            terms = [(after, 1.0), (before, -1.0), (self.x[k], -self.gpu[k])]
            if k + 1 < len(self.x):  # second runs between are the growth of what is early and what is used up
                terms += [(self.again_early[k], 1.0), (self.again_early[k + 1], -1.0)]
                terms += self._used_up(k + 1)
            lp.at_least(terms)
            lp.at_least([(self.makespan, 1.0), (self.end[k], -1.0)])
        if self.x:
            lp.at_least([(self.start[0], 1.0), (self.again_early[0], -1.0), *self._used_up(0)])
        work = [(x, cpu[k]) for k, x in enumerate(self.x)] + [
            (q, -cpu[k]) for k, q in enumerate(self.cpu_again)
        ]
        lp.at_least([(self.makespan, 1.0), *work], sum(cpu))
        both = zip(self.x, self.gpu_again, self.gpu, strict=True)
        lp.at_least([(self.makespan, 1.0), *(term for x, n, us in both for term in ((x, -us), (n, -us)))])

    def _used_up(self, kernel: int) -> list[Term]:
        return [(self.again[e], -self._run_again(self.problem.gaps[e].tensor)) for e in self.ends_at[kernel]]

    def _run_again(self, tensor: int) -> float:
        """Time of a second run on the GPU that this tensor has to bear: all the outputs may share it."""
        producer = self.problem.producer[tensor]
        return 0.0 if producer == BEFORE_ALL else self.gpu[producer] / len(self.problem.outputs[producer])

    def edges(self) -> None:
        """Results come before their uses, copies between."""
        for (maker, user), (up, down) in self._passing().items():
            less, least = self._less_duration(user)
            order = [(self.end[user], 1.0), (self.end[maker], -1.0), *less]
            self.lp.at_least([*order, (self.x[maker], -down), (self.x[user], down)], least)
            self.lp.at_least([*order, (self.x[maker], up), (self.x[user], -up)], least)
        for tensor, producer in enumerate(self.problem.producer):
            if producer != BEFORE_ALL and self.problem.wanted_on_host[tensor]:
                down = min(self.down[tensor], self.cpu_again_us[producer])
                self.lp.at_least(
                    [(self.makespan, 1.0), (self.end[producer], -1.0), (self.x[producer], -down)]
                )

    def _passing(self) -> dict[tuple[int, int], tuple[float, float]]:
        """How long results take to the GPU and to the CPU at least, by maker and user."""
        between: dict[tuple[int, int], list[int]] = {}
        for tensor, uses in enumerate(self.problem.uses):
            for use in uses if self.problem.producer[tensor] != BEFORE_ALL else ():
                between.setdefault((self.problem.producer[tensor], use), []).append(tensor)
        # the faster way to pass a result on: its copy, or its kernel once more
        return {
            (maker, user): (
                min(sum(self.up[t] for t in tensors), self.gpu_again_us[maker]),
                min(sum(self.down[t] for t in tensors), self.cpu_again_us[maker]),
            )
            for (maker, user), tensors in between.items()
        }

    def segments(self) -> None:
        """Between two cuts that few kernels lie between, a mixture of the ways to place these."""
        lp, unit_us = self.lp, self.unit_us
        passing_us = {edge: (up * unit_us, down * unit_us) for edge, (up, down) in self._passing().items()}
        fits = [lp.upper[x] > 0 for x in self.x]
        for segment in segments(self.problem, passing_us, fits):
            shares = [lp.variable(0, 1) for _ in segment.choices]
            lp.at_least([(share, 1.0) for share in shares], 1.0)
            lp.at_most([(share, 1.0) for share in shares], 1.0)
            for place, kernel in enumerate(segment.kernels):
                on_gpu = [
                    (share, -1.0)
                    for share, choice in zip(shares, segment.choices, strict=True)
                    if choice.on_gpu[place]
                ]
                lp.at_least([(self.x[kernel], 1.0), *on_gpu])
                lp.at_most([(self.x[kernel], 1.0), *on_gpu])
            end = self.makespan if segment.last is None else self.end[segment.last]
            since: list[Term] = [] if segment.first is None else [(self.end[segment.first], -1.0)]
            times = [
                (share, -choice.least_us / unit_us)
                for share, choice in zip(shares, segment.choices, strict=True)
            ]
            lp.at_least([(end, 1.0), *since, *times])

    def cuts(self) -> None:
        """Kernels that all others come before or after, and the work between two of them."""
        lp, count = self.lp, self.problem.kernel_count
        last, work_from = None, 0
        for cut in [*cuts(self.problem), count]:
            since: list[Term] = [] if last is None else [(self.end[last], -1.0)]
            inside = range(work_from, cut)
            if inside:
                # what the GPU does not run the CPU does: sum of c (1 - x)
                cpu = [(self.x[k], self.cpu[k]) for k in inside]
                lp.at_least([(self.start[cut], 1.0), *since, *cpu], sum(self.cpu[k] for k in inside))
                lp.at_least([(self.start[cut], 1.0), *since, *((self.x[k], -self.gpu[k]) for k in inside)])
            if cut == count:
                return
            less, least = self._less_duration(cut)
            lp.at_least([(self.end[cut], 1.0), (self.start[cut], -1.0), *less], least)
            lp.at_least([(self.start[cut + 1], 1.0), (self.end[cut], -1.0)])
            for maker in {self.problem.producer[t] for t in self.problem.inputs[cut]} - {BEFORE_ALL}:
                lp.at_least([(self.start[cut], 1.0), (self.end[maker], -1.0)])
            last, work_from = cut, cut + 1

    def needs(self, tensor: int) -> None:
        """Each use on the GPU has its tensor, and the host has what is used there."""
        lp, problem = self.lp, self.problem
        gaps, producer = problem.gaps_of[tensor], problem.producer[tensor]
        on_host = [] if producer == BEFORE_ALL else [(self.h[tensor], 1.0), (self.cpu_again[producer], 1.0)]
        if on_host and problem.wanted_on_host[tensor]:
            lp.at_least([*on_host, (self.x[producer], -1.0)])
        for e in gaps:
            gap = problem.gaps[e]
            lp.at_least([(self.f[e], 1.0), (self.again[e], 1.0), (self.y[e], 1.0), (self.x[gap.end], -1.0)])
            if gap.start != BEFORE_ALL:
                before = [(self.y[e - 1], 1.0)] if e > gaps.start else []
                lp.at_least([(self.x[gap.start], 1.0), *before, (self.y[e], -1.0)])
            if problem.is_weight[tensor] and e > gaps.start:
                lp.at_least([(self.y[e], 1.0), (self.y[gaps.start], -1.0)])
            if tensor in problem.stays and e > gaps.start:
                lp.at_least([(self.y[gaps.start], 1.0), (self.y[e], -1.0)])
            if on_host:
                lp.at_least([*on_host, (self.x[producer], -1.0), (self.x[gap.end], 1.0)])
                lp.at_least([*on_host, (self.x[producer], -1.0), (self.f[e], -1.0)], -1.0)
        if on_host and gaps:
            self._first_fetch(gaps.start)

    def _first_fetch(self, e: int) -> None:
        """A result that is not kept for its first use: copied there and back, after it was made."""
        gap = self.problem.gaps[e]
        maker = self.problem.producer[gap.tensor]
        up, down = self.up[gap.tensor], min(self.down[gap.tensor], self.cpu_again_us[maker])
        less, least = self._less_duration(gap.end)
        terms = [(self.end[gap.end], 1.0), (self.end[maker], -1.0), *less]
        self.lp.at_least([*terms, (self.f[e], -up - down), (self.x[maker], -down)], least - down)

    def leaving(self, tensor: int) -> None:
        """Tensors that are copied to the host hold their bytes until then."""
        lp, problem, size = self.lp, self.problem, self.bytes[tensor]
        producer = problem.producer[tensor]
        # inputs and weights are on the host already
        if producer == BEFORE_ALL or size == 0:
            return
        gaps = problem.gaps_of[tensor]
        again = (self.gpu_again[producer], 1.0)  # the copy may be of a second run's result
        left: list[Term] = []
        for e in gaps:
            z = lp.variable(0, 1)
            left.append((z, 1.0))
            lp.at_least([*left, again, (self.y[e], 1.0), (self.h[tensor], -1.0)])
            if e == gaps.start:
                self.first_leave[e] = z
            leave = self.leave_first if e == gaps.start else self.leave_later
            leave[problem.gaps[e].start + 1].append((z, size))
        if problem.wanted_on_host[tensor]:
            z = lp.variable(0, 1)
            lp.at_least([*left, (z, 1.0), again, (self.h[tensor], -1.0)])
            leave = self.leave_later if gaps else self.leave_first
            leave[(problem.uses[tensor] or (producer,))[-1] + 1].append((z, size))

    def second_runs(self) -> None:
        """A second run may begin at most one live range of each output."""
        for kernel, outputs in enumerate(self.problem.outputs):
            ranges = [(self.again[e], -1.0) for tensor in outputs for e in self.problem.gaps_of[tensor]]
            if ranges:
                self.lp.at_least([(self.gpu_again[kernel], float(len(outputs))), *ranges])

    def memory(self) -> None:
        """What lies in the GPU's memory at each kernel's start."""
        kept: list[list[Term]] = [[] for _ in self.x]
        change: list[list[Term]] = [[] for _ in range(len(self.x) + 1)]
        for e, gap in enumerate(self.problem.gaps):
            self._hold(kept, change, self.y[e], gap)
        for tensor, gaps in enumerate(self.problem.gaps_of):
            if gaps and self.problem.is_weight[tensor]:
                behind = Gap(tensor, self.problem.gaps[gaps[-1]].end, len(self.x))
                self._hold(kept, change, self.y[gaps.start], behind)
        running: int | None = None
        for k, x in enumerate(self.x):
            if change[k]:
                now = self.lp.variable(0, 1)
                before = [] if running is None else [(running, -1.0)]
                self.lp.at_least([(now, 1.0), *before, *((y, -size) for y, size in change[k])])
                running = now
            terms = [*kept[k], (self.in_flight[k], 1.0), (self.leaving_bytes[k], 1.0)]
            terms += [] if running is None else [(running, 1.0)]
            self.lp.at_most([*terms, *self._working_set(k, x)], 1.0)

    def _hold(self, kept: list[list[Term]], change: list[list[Term]], y: int, gap: Gap) -> None:
        size, inside = self.bytes[gap.tensor], range(gap.start + 1, gap.end)
        if len(inside) > _LONG_GAP:
            change[inside.start].append((y, size))
            change[inside.stop].append((y, -size))
        else:
            for k in inside:
                kept[k].append((y, size))

    def _working_set(self, kernel: int, x: int) -> list[Term]:
        """Bytes a kernel touches, less what its outputs overwrite: of inputs that do not stay behind it."""
        whole = self.problem.working_set_bytes[kernel] / max(self.problem.budget_bytes, 1)
        shared = whole - self.least_bytes[kernel]
        # bytes of inputs that may be overwritten, and the flags that say they are needed further
        ends, behind = 0.0, []
        for source in {source for _, source in self.problem.may_overwrite[kernel]}:
            gap = self.problem.gap_at[kernel, source] + 1
            ends += self.bytes[source]
            if gap < self.problem.gaps_of[source].stop:
                behind.append((self.y[gap], self.bytes[source]))
        if not behind:
            return [(x, whole - shared)]
        saved = self.lp.variable(0, shared)
        self.lp.at_least([(x, shared), (saved, -1.0)])
        self.lp.at_most([(saved, 1.0), *behind], ends)
        return [(x, whole), (saved, -1.0)]

    def copies(self) -> None:
        """Both directions of the link, by bytes where they meet memory, and by time."""
        lp, sizes = self.lp, range(len(self.bytes))
        up_rate = max((self.bytes[t] / self.up[t] for t in sizes if self.up[t] > 0), default=0.0)
        down_rate = max((self.bytes[t] / self.down[t] for t in sizes if self.down[t] > 0), default=0.0)
        instant_up = any(self.up[t] == 0 < self.bytes[t] for t in sizes)
        instant_down = any(self.down[t] == 0 < self.bytes[t] for t in sizes)
        for k in range(len(self.x)):
            since = [(self.start[k], 1.0)] + ([(self.start[k - 1], -1.0)] if k else [])
            if not instant_up:
                arriving = [(self.f[e], -self.bytes[self.problem.gaps[e].tensor]) for e in self.ends_at[k]]
                flow = self._growth(self.in_flight, k, -1.0)
                lp.at_least([*((s, c * up_rate) for s, c in since), *flow, *arriving])
            if not instant_down:
                later = self.leave_later[k]
                leaving = [(z, -size) for z, size in (*self.leave_first[k], *later)]
                flow = [*self._growth(self.leaving_bytes, k, 1.0), *self._growth(self.early_bytes, k, -1.0)]
                lp.at_least([*((s, c * down_rate) for s, c in since), *flow, *leaving])
                lp.at_least([*self._growth(self.early_bytes, k, 1.0), *later])
        self._copy_times()

    def sharing(self) -> None:
        """What kernels and copies to the GPU lose to each other."""
        sizes = range(len(self.bytes))
        if any(self.up[t] == 0 < self.bytes[t] for t in sizes):
            return
        rate = max((self.bytes[t] / self.up[t] for t in sizes if self.up[t] > 0), default=0.0)
        for window in shared_windows(self.problem):
            copies, first = window.copies, window.first
            terms, least = [(self.start[window.last], 1.0)], 0.0
            if first is not None:
                terms += [(self.end[first], copies - 1.0), (self.start[first], -copies)]
                terms.append((self.in_flight[first], copies / rate))
            for k, weight in window.weights:
                us = weight * (self.gpu[k] if window.on_gpu else self.cpu[k])
                terms.append((self.x[k], -us if window.on_gpu else us))
                least += 0.0 if window.on_gpu else us
            for k in range(0 if first is None else first + 1, min(window.last + 1, len(self.x))):
                arriving = ((e, self.bytes[self.problem.gaps[e].tensor]) for e in self.ends_at[k])
                terms += [(self.f[e], -copies * size / rate) for e, size in arriving]
            self.lp.at_least(terms, least)

    def _growth(self, stock: list[int], k: int, sign: float) -> list[Term]:
        return [(stock[k], sign)] + ([(stock[k - 1], -sign)] if k else [])

    def _copy_times(self) -> None:
        lp, count = self.lp, len(self.x)
        done: list[Term] = []
        for k in range(count):
            arriving = [(self.f[e], -self.up[self.problem.gaps[e].tensor]) for e in self.ends_at[k]]
            if arriving:
                total = lp.variable(0, self.horizon)
                lp.at_least([(total, 1.0), *done, *arriving])
                lp.at_least([(self.start[k], 1.0), (total, -1.0)])
                done = [(total, -1.0)]
        done = []
        for k in reversed(range(count)):
            made = [(self.h[t], -self.down[t]) for t in self.problem.outputs[k]]
            if made:
                total = lp.variable(0, self.horizon)
                lp.at_least([(total, 1.0), *done, *made])
                lp.at_least(
                    [(self.makespan, 1.0), (self.start[k], -1.0), (self.x[k], -self.gpu[k]), (total, -1.0)]
                )
                done = [(total, -1.0)]

    def conflicts(self) -> None:
        """Tensors that do not fit beside a kernel in their gap."""
        lp, least = self.lp, np.array(self.least_bytes)
        for e, gap in enumerate(self.problem.gaps):
            size, up, down = (of[gap.tensor] for of in (self.bytes, self.up, self.down))
            inside = least[gap.start + 1 : gap.end]
            found = gap.start + 1 + np.flatnonzero((inside <= 1) & (inside + size > 1 + 1e-9))
            # from the end of the gap: nearest to where the tensor is needed
            for rank, k in enumerate(found[::-1][:_CONFLICTS].tolist()):
                lp.at_most([(self.y[e], 1.0), (self.x[k], 1.0)], 1.0)
                if rank < _TIMED_CONFLICTS:
                    terms = [(self.start[gap.end], 1.0), (self.start[k], -1.0)]
                    lp.at_least([*terms, (self.x[k], -self.gpu[k] - up), (self.f[e], -up)], -up)
            if found.size and e in self.first_leave:
                k, i = int(found[0]), gap.start
                terms = [(self.start[k], 1.0), (self.start[i], -1.0), (self.x[i], -self.gpu[i])]
                lp.at_least([*terms, (self.x[k], -down), (self.first_leave[e], -down)], -down)


def _times(times_us: Sequence[float], is_possible: Sequence[float], unit_us: float) -> list[float]:
    return [us / unit_us if can else math.inf for us, can in zip(times_us, is_possible, strict=True)]
