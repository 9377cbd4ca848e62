"""Linear programmes over bounded variables, and bounds on their optimum that need no trust in the solver.

HiGHS (Huangfu and Hall, Math. Prog. Comp. 10, 2018) solves them. What is proven is the value of the
Lagrange function at the multipliers that it returns: any multipliers give a bound (Neumaier and
Shcherbina, Math. Prog. 99, 2004), good ones a good bound. So tolerances and limits of the solver may cost
tightness, never truth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import highspy
import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Term = tuple[int, float]
"""A variable and its factor."""

_MIP_TOLERANCE = 1e-6
"""Relative; HiGHS accepts integer solutions that violate rows and bounds by as much."""


@dataclass(slots=True)
class LinearProgramme:
    """Minimise the sum of cost times value, subject to rows `lower <= sum of terms <= upper`."""

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    row_start: list[int] = field(default_factory=lambda: [0])
    columns: list[int] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)

    def variable(self, lower: float, upper: float, cost: float = 0.0) -> int:
        """A new variable between finite bounds; returns its number."""
        self.lower.append(lower)
        self.upper.append(upper)
        self.cost.append(cost)
        return len(self.lower) - 1

    def at_least(self, terms: Iterable[Term], lower: float = 0.0) -> None:
        """Require the sum of terms, whose variables may repeat, to be `lower` or more."""
        self._row(terms, lower, math.inf)

    def at_most(self, terms: Iterable[Term], upper: float = 0.0) -> None:
        """Require the sum of terms, whose variables may repeat, to be `upper` or less."""
        self._row(terms, -math.inf, upper)

    def _row(self, terms: Iterable[Term], lower: float, upper: float) -> None:
        merged: dict[int, float] = {}
        for variable, factor in terms:
            # HiGHS takes each variable once in a row
            merged[variable] = merged.get(variable, 0.0) + factor
        self.columns += merged.keys()
        self.factors += merged.values()
        self.row_start.append(len(self.columns))
        self.row_lower.append(lower)
        self.row_upper.append(upper)


@dataclass(frozen=True, slots=True)
class Minimum:
    """What the solver found."""

    bound: float
    """No solution costs less: proven by the multipliers."""
    values: Vector
    """Of the variables, nearly feasible and nearly optimal, within their bounds; empty if none were found."""
    is_optimal: bool
    """The solver's own opinion."""
    multipliers: Vector
    """Of the rows, those of the relaxation: positive at a row's lower side, negative at its upper one."""


def minimise(
    programme: LinearProgramme,
    *,
    method: str = "simplex",
    iterations: int | None = None,
    integers: Sequence[int] = (),
    nodes: int = 0,
) -> Minimum:
    """Solve a programme by `simplex` or `ipm` (interior points, no crossover). Deterministic.

    With `integers`, a branch and bound over `nodes` nodes follows, in which those variables are whole; its
    bound is then HiGHS's own, less HiGHS's tolerance.
    """
    solver = _solver(programme, method, iterations)
    solver.run()
    solution = solver.getSolution()
    # zeros are multipliers, too: a weak bound, but a true one
    multipliers = np.array(solution.row_dual) if solution.dual_valid else np.zeros(len(programme.row_lower))
    bound = lagrange_bound(programme, multipliers)
    values = np.array(solution.col_value) if solution.value_valid else np.empty(0)
    is_optimal = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    if integers:
        solver = _solver(programme, "choose", None)
        solver.setOptionValue("mip_max_nodes", nodes)
        whole = np.array(integers, np.int32)
        kinds = np.full(len(whole), highspy.HighsVarType.kInteger)
        solver.changeColsIntegrality(len(whole), whole, kinds)
        solver.run()
        found = solver.getInfo().mip_dual_bound
        if math.isfinite(found):
            bound = max(bound, found - _MIP_TOLERANCE * abs(found))
    within = np.clip(values, programme.lower, programme.upper) if values.size else values
    return Minimum(bound, within, is_optimal, multipliers)


def row_values(programme: LinearProgramme, values: Vector) -> Vector:
    """The sum of terms of each row, at these values of the variables."""
    rows = np.repeat(np.arange(len(programme.row_lower)), np.diff(programme.row_start))
    products = np.array(programme.factors) * values[np.array(programme.columns, np.int64)]
    sums: Vector = np.bincount(rows, products, len(programme.row_lower)).astype(np.float64)
    return sums


def lagrange_bound(programme: LinearProgramme, multipliers: Vector) -> float:
    """The least value of cost plus multiplied violation of rows over the box of the variables.

    Less what rounding may have added. Any multipliers, one for each row, give a true lower bound.
    """
    row_lower, row_upper = np.array(programme.row_lower), np.array(programme.row_upper)
    # a multiplier against an infinite side would make the bound minus infinity
    usable = np.where(multipliers > 0, np.isfinite(row_lower), np.isfinite(row_upper))
    duals = np.where(usable & np.isfinite(multipliers), multipliers, 0.0)
    sides = np.where(duals > 0, row_lower, np.where(duals < 0, row_upper, 0.0))
    columns = np.array(programme.columns, np.int64)
    products = np.repeat(duals, np.diff(programme.row_start)) * np.array(programme.factors)
    cost, lower, upper = np.array(programme.cost), np.array(programme.lower), np.array(programme.upper)
    reduced = cost - np.bincount(columns, products, len(cost))
    # each variable at the end of its box that costs least
    terms = np.concatenate([duals * sides, reduced * np.where(reduced > 0, lower, upper)])
    # a sum of n products is wrong by at most n + 2 roundings of their absolute sum
    gross = np.abs(cost) + np.bincount(columns, np.abs(products), len(cost))
    magnitude = np.abs(duals * sides).sum() + gross @ np.maximum(np.abs(lower), np.abs(upper))
    longest = np.bincount(columns, minlength=1).max() + 4
    return math.fsum(terms.tolist()) - float(longest * np.finfo(np.float64).eps * magnitude)


def _solver(programme: LinearProgramme, method: str, iterations: int | None) -> highspy.Highs:
    solver = highspy.Highs()
    options: dict[str, bool | int | str] = {
        "output_flag": False,
        # one thread: with more the path of the solver, and so the bound, depends on timing
        "threads": 1,
        "solver": method,
        # no vertex is needed: any multipliers prove a bound
        "run_crossover": "off",
    }
    if iterations is not None:
        options |= {"simplex_iteration_limit": iterations, "ipm_iteration_limit": iterations}
    for name, value in options.items():
        solver.setOptionValue(name, value)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(programme.cost), len(programme.row_lower)
    model.col_cost_ = np.array(programme.cost)
    model.col_lower_, model.col_upper_ = np.array(programme.lower), np.array(programme.upper)
    model.row_lower_, model.row_upper_ = np.array(programme.row_lower), np.array(programme.row_upper)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.array(programme.row_start, np.int32)
    model.a_matrix_.index_ = np.array(programme.columns, np.int32)
    model.a_matrix_.value_ = np.array(programme.factors, np.float64)
    solver.passModel(model)
    return solver
