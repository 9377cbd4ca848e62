"""The search's inner loop, in C++ where there is a compiler: makespans, repair, annealing, fewer copies."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from hybridc.native import build_library
from hybridc.passes.planner.model.contention import ALONE
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import Problem
from hybridc.passes.planner.model.residency import Residency, residency_of
from hybridc.passes.planner.model.simulate import simulate

_SOURCE = Path(__file__).parent / "native" / "planner.cpp"
# the largest int64: the core compares what the host holds with it, and nothing exceeds it
_UNLIMITED = 2**63 - 1


class _ProblemData(ctypes.Structure):
    """`ProblemData` of the source."""

    _fields_ = (
        # in the order of the struct in native/problem.h: nothing compares the two
        ("kernels", ctypes.c_int),
        ("tensors", ctypes.c_int),
        ("budget_bytes", ctypes.c_int64),
        ("host_bytes", ctypes.c_int64),
        *((name, ctypes.POINTER(ctypes.c_double)) for name in ("gpu_us", "cpu_us", "h2d_us", "d2h_us")),
        # shares of kernels, two of each, or none
        *((name, ctypes.POINTER(ctypes.c_double)) for name in ("gpu_shares", "cpu_shares")),
        ("link_share", ctypes.c_double),
        ("is_shared", ctypes.c_uint8),
        *(
            (name, ctypes.POINTER(ctypes.c_int64))
            for name in ("workspace_bytes", "cpu_workspace_bytes", "size_bytes")
        ),
        *((name, ctypes.POINTER(ctypes.c_uint8)) for name in ("is_weight", "wanted_on_host", "is_repeat")),
        *(
            (name, ctypes.POINTER(ctypes.c_int))
            for array in ("input", "output", "overwrite")
            for name in (f"{array}_starts", f"{array}s")
        ),
    )


class Core:
    """Evaluates decisions about one problem, fast. Not for several threads at once; each makes its own.

    Without a compiler the reference evaluates, and annealing ends where it starts.
    """

    def __init__(self, problem: Problem, like: Core | None = None) -> None:
        """`like` is of a problem that differs in times of kernels alone: all else is taken from it."""
        self.problem = problem
        self._library = _library()
        self._search = None
        self._data: _ProblemData
        if self._library is not None:
            self._data = _data_of(problem) if like is None else like._data
            data = self._data if like is None else _with_kernel_times(self._data, problem)
            self._search = self._library.planner_new(data)

    def __del__(self) -> None:
        # the attribute is missing where __init__ failed
        if getattr(self, "_search", None) is not None:
            self._library.planner_free(self._search)
            self._search = None

    def makespan_us(self, decisions: Decisions) -> float:
        """Makespan of `simulate` in microseconds, to the last bit; infinite if infeasible."""
        return self.measure(decisions)[0]

    def measure(self, decisions: Decisions) -> tuple[float, int]:
        """Makespan in microseconds and peak bytes of `simulate`; if infeasible, infinity and needed bytes."""
        if self._search is None:
            outcome = simulate(self.problem, decisions)
            return outcome.makespan_us, outcome.peak_gpu_bytes
        peak_bytes = ctypes.c_int64(0)
        arrays = self._arrays(decisions)
        makespan_us = self._library.planner_makespan_us(self._search, *arrays, ctypes.byref(peak_bytes))
        return makespan_us, peak_bytes.value

    def repaired(self, decisions: Decisions, seed: int = 1) -> Decisions | None:
        """Feasible decisions near the given ones: gaps not kept, then kernels moved to the CPU.

        None if even that does not fit. Feasible decisions come back with the same outcome. What is too much
        for the host goes to the GPU by random moves, which may fail, and without a compiler does.
        """
        if self._search is None:
            repaired = _repaired(self.problem, decisions)
            # `_repaired` looks at the GPU alone: the simulation knows the host, too
            return repaired if repaired and simulate(self.problem, repaired).feasible else None
        on_cpu, keep = self._arrays(decisions)
        feasible = self._library.planner_repair(self._search, on_cpu, keep, seed)
        return _decisions_of(self.problem, on_cpu, keep) if feasible else None

    def anneal(
        self,
        start: Decisions,
        evaluations: int,
        seed: int,
        *,
        enough_us: float = 0.0,
        least_us: float = 0.0,
    ) -> tuple[Decisions, float]:
        """The best decisions that simulated annealing finds (Kirkpatrick et al., Science 220, 1983), and
        their makespan in microseconds, after `evaluations` simulations.

        Starts from `start`, repaired; the result is feasible and no slower. Ends early once a makespan of
        at most `enough_us` is found: at a proven bound nothing better is left to find. Runs that take less
        than `least_us` are passed over. The same arguments give the same result, on every machine. Raises
        ValueError if nothing fits.
        """
        if self._search is None:
            repaired = _repaired(self.problem, start)
            makespan_us = math.inf if repaired is None else simulate(self.problem, repaired).makespan_us
        else:
            on_cpu, keep = self._arrays(start)
            makespan_us = self._library.planner_anneal(
                self._search, on_cpu, keep, evaluations, seed, enough_us, least_us
            )
            repaired = _decisions_of(self.problem, on_cpu, keep)
        # infinite if nothing fits, or what was repaired still exceeds the host's memory
        if repaired is None or math.isinf(makespan_us):
            raise ValueError("no decisions fit the budget")
        return repaired, makespan_us

    def tidied(self, decisions: Decisions, limit_us: float) -> tuple[Decisions, float]:
        """Feasible decisions that run fewer kernels again and copy fewer bytes, and their makespan.

        Requires: the given decisions are feasible. Ensures: at most the limit, if the given ones were. A
        descent, one change at a time: the largest tensors are kept first.
        """
        if self._search is None:
            return decisions, simulate(self.problem, decisions).makespan_us
        on_cpu, keep = self._arrays(decisions)
        makespan_us = self._library.planner_tidy(self._search, on_cpu, keep, limit_us)
        return _decisions_of(self.problem, on_cpu, keep), makespan_us

    def _arrays(self, decisions: Decisions) -> tuple[Any, Any]:
        if (len(decisions.on_cpu), len(decisions.keep)) != (
            self.problem.kernel_count,
            len(self.problem.gaps),
        ):
            raise ValueError("these decisions are about another problem")
        return _flags(decisions.on_cpu), _flags(decisions.keep)


def _library() -> Any:
    """The library with the types of its functions, or None."""
    library = build_library(_SOURCE, "planner")
    if library is None:
        return None
    decisions = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint8), ctypes.POINTER(ctypes.c_uint8))
    # pointers are 64 bits wide: by default ctypes would cut them to an int
    library.planner_new.argtypes = (ctypes.POINTER(_ProblemData),)
    library.planner_new.restype = ctypes.c_void_p
    library.planner_free.argtypes = (ctypes.c_void_p,)
    library.planner_free.restype = None
    library.planner_makespan_us.argtypes = (*decisions, ctypes.POINTER(ctypes.c_int64))
    library.planner_makespan_us.restype = ctypes.c_double
    library.planner_repair.argtypes = (*decisions, ctypes.c_uint64)
    library.planner_repair.restype = ctypes.c_int
    numbers = (ctypes.c_int64, ctypes.c_uint64, ctypes.c_double, ctypes.c_double)
    library.planner_anneal.argtypes = (*decisions, *numbers)
    library.planner_anneal.restype = ctypes.c_double
    library.planner_tidy.argtypes = (*decisions, ctypes.c_double)
    library.planner_tidy.restype = ctypes.c_double
    return library


def _data_of(problem: Problem) -> _ProblemData:
    # pairs one after the other: (output, input, output, input, ...)
    overwrites = [tuple(chain.from_iterable(pairs)) for pairs in problem.may_overwrite]
    return _ProblemData(
        problem.kernel_count,
        len(problem.tensor_names),
        problem.budget_bytes,
        _UNLIMITED if problem.host_bytes is None else problem.host_bytes,
        *(
            _array(ctypes.c_double, values)
            for values in (problem.gpu_us, problem.cpu_us, problem.h2d_us, problem.d2h_us)
        ),
        *(
            _array(ctypes.c_double, [share for of in shares for share in (of.h2d, of.d2h)])
            for shares in (
                problem.contention.gpu or (ALONE,) * problem.kernel_count,
                problem.contention.cpu or (ALONE,) * problem.kernel_count,
            )
        ),
        problem.contention.link,
        problem.contention.matters,
        *(
            _array(ctypes.c_int64, values)
            for values in (problem.workspace_bytes, problem.cpu_workspace_bytes, problem.size_bytes)
        ),
        *(
            _array(ctypes.c_uint8, values)
            for values in (
                problem.is_weight,
                problem.wanted_on_host,
                [k in problem.repeats for k in range(problem.kernel_count)],
            )
        ),
        *(
            _array(ctypes.c_int, values)
            for rows in (problem.inputs, problem.outputs, overwrites)
            # compressed rows: where each row begins, then all entries one after the other
            for values in (tuple(accumulate(map(len, rows), initial=0)), tuple(chain.from_iterable(rows)))
        ),
    )


def _with_kernel_times(data: _ProblemData, problem: Problem) -> _ProblemData:
    changed = _ProblemData.from_buffer_copy(data)
    changed.gpu_us, changed.cpu_us = (
        _array(ctypes.c_double, values) for values in (problem.gpu_us, problem.cpu_us)
    )
    return changed


def _array(kind: Any, values: Sequence[Any]) -> Any:
    """At least one entry, since ctypes has no pointer to an empty array."""
    made = array(kind._type_, values) or array(kind._type_, (0,))
    return (kind * len(made)).from_buffer_copy(made)  # ctypes itself takes its entries one by one


def _flags(values: Sequence[bool]) -> Any:
    """`_array` of truth values, ten times faster: it is called for every evaluation."""
    return (ctypes.c_uint8 * max(1, len(values))).from_buffer_copy(bytes(values) or b"\0")


def _decisions_of(problem: Problem, on_cpu: Any, keep: Any) -> Decisions:
    return Decisions(
        tuple(map(bool, on_cpu[: problem.kernel_count])), tuple(map(bool, keep[: len(problem.gaps)]))
    )


def _repaired(problem: Problem, decisions: Decisions) -> Decisions | None:
    """Give up the longest kept gap at the fullest slot, or move its kernel to the CPU, until all fits."""
    on_cpu, keep = list(decisions.on_cpu), list(decisions.keep)
    while True:
        now = Decisions(tuple(on_cpu), tuple(keep))
        residency = residency_of(problem, now)
        slot = max(range(problem.kernel_count), key=lambda k: residency.held_bytes[k], default=-1)
        # the decisions as they take effect, so that the same run has one spelling
        if slot < 0 or residency.held_bytes[slot] <= problem.budget_bytes:
            return Decisions(residency.on_cpu, residency.held)
        candidates = _held_beside(problem, residency, now, slot)
        if candidates:
            # the longest gap frees its bytes at the most slots for one fetch more
            tensor, gap = max(candidates, key=lambda c: problem.gaps[c[1]].end - problem.gaps[c[1]].start)
            # a weight is resident in all its gaps or in none
            for index in problem.gaps_of[tensor] if problem.is_weight[tensor] else (gap,):
                keep[index] = False
        elif problem.cpu_us[slot] < math.inf:
            on_cpu[slot] = True
        else:
            return None


def _held_beside(
    problem: Problem, residency: Residency, decisions: Decisions, slot: int
) -> list[tuple[int, int]]:
    """Tensors that are held at a slot but not used by its kernel, each with a gap that is kept."""
    found = []
    for tensor, gaps in enumerate(problem.gaps_of):
        held = [gap for gap in gaps if residency.held[gap]]
        if held and problem.is_weight[tensor] and decisions.keep[gaps[0]]:
            if slot not in problem.uses[tensor]:
                found.append((tensor, gaps[0]))
        else:
            # strictly inside: at its ends the tensor is part of a working set and cannot be given up
            gaps_here = (g for g in held if problem.gaps[g].start < slot < problem.gaps[g].end)
            found += [(tensor, _decider(problem, residency, gap)) for gap in gaps_here]
    return found


def _decider(problem: Problem, residency: Residency, gap: int) -> int:
    """The gap that decides for one that ends at a repeat that does not run."""
    while problem.gaps[gap].end in problem.repeats and residency.on_cpu[problem.gaps[gap].end]:
        gap += 1
    return gap
