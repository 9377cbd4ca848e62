"""Small problems for tests of the planner: by hand, and drawn at random by hypothesis."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from hybridc.passes.planner.model.contention import Contention, Shares
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import Problem
from hybridc.passes.planner.model.rematerialize import expand


@dataclass
class ProblemBuilder:
    """Builds a problem kernel by kernel. A copy of n bytes takes n microseconds, either way."""

    gpu_us: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    inputs: list[tuple[int, ...]] = field(default_factory=list)
    outputs: list[tuple[int, ...]] = field(default_factory=list)
    workspace_bytes: list[int] = field(default_factory=list)
    cpu_workspace_bytes: list[int] = field(default_factory=list)
    may_overwrite: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    size_bytes: list[int] = field(default_factory=list)
    is_weight: list[bool] = field(default_factory=list)
    h2d_us: list[float] = field(default_factory=list)
    d2h_us: list[float] = field(default_factory=list)

    def input(self, size_bytes: int, *, weight: bool = False) -> int:
        self.size_bytes.append(size_bytes)
        self.is_weight.append(weight)
        self.h2d_us.append(float(size_bytes))
        self.d2h_us.append(float(size_bytes))
        return len(self.size_bytes) - 1

    def weight(self, size_bytes: int) -> int:
        return self.input(size_bytes, weight=True)

    def kernel(
        self,
        *inputs: int,
        size: int,
        gpu_us: float,
        cpu_us: float = 1000.0,
        workspace: int = 0,
        cpu_workspace: int = 0,
        overwrites: int | None = None,
    ) -> int:
        """Append a kernel with one output of `size` bytes; returns that."""
        output = self.input(size)
        self.gpu_us.append(gpu_us)
        self.cpu_us.append(cpu_us)
        self.inputs.append(inputs)
        self.outputs.append((output,))
        self.workspace_bytes.append(workspace)
        self.cpu_workspace_bytes.append(cpu_workspace)
        self.may_overwrite.append(() if overwrites is None else ((output, overwrites),))
        return output

    def problem(self, budget_bytes: int, wanted: tuple[int, ...] = ()) -> Problem:
        tensors = range(len(self.size_bytes))
        return Problem(
            kernel_names=tuple(f"k{k}" for k in range(len(self.inputs))),
            tensor_names=tuple(f"t{t}" for t in tensors),
            gpu_us=tuple(self.gpu_us),
            cpu_us=tuple(self.cpu_us),
            inputs=tuple(self.inputs),
            outputs=tuple(self.outputs),
            workspace_bytes=tuple(self.workspace_bytes),
            cpu_workspace_bytes=tuple(self.cpu_workspace_bytes),
            may_overwrite=tuple(self.may_overwrite),
            size_bytes=tuple(self.size_bytes),
            h2d_us=tuple(self.h2d_us),
            d2h_us=tuple(self.d2h_us),
            is_weight=tuple(self.is_weight),
            wanted_on_host=tuple(t in wanted for t in tensors),
            budget_bytes=budget_bytes,
        )


@st.composite
def hosted(draw: st.DrawFn, anywhere: st.SearchStrategy[Problem]) -> Problem:
    """A problem whose host has little memory, or as much as it takes."""
    problem = draw(anywhere)
    workspace_bytes = tuple(draw(st.sampled_from([0, 2, 9])) for _ in problem.kernel_names)
    host_bytes = draw(st.sampled_from([None, 10, 25, 50]))
    return replace(problem, cpu_workspace_bytes=workspace_bytes, host_bytes=host_bytes)


@st.composite
def shared(draw: st.DrawFn, anywhere: st.SearchStrategy[Problem]) -> Problem:
    """A problem whose kernels and copies slow each other down, or some of them, or none."""
    problem = draw(anywhere)
    share = st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.25])

    def of_all() -> tuple[Shares, ...]:
        return tuple(Shares(draw(share), draw(share)) for _ in problem.kernel_names)

    return replace(problem, contention=Contention(of_all(), of_all(), draw(share)))


def all_on_gpu(problem: Problem, *, keep: bool) -> Decisions:
    """Every kernel on the GPU, and every gap kept or none; inputs of the model are fetched."""
    return Decisions(
        (False,) * problem.kernel_count,
        tuple(keep and (g.start >= 0 or problem.is_weight[g.tensor]) for g in problem.gaps),
    )


@st.composite
def problems(draw: st.DrawFn, largest: int = 10) -> Problem:
    """Branches, residuals, shared weights, overwriting, workspace, outputs wanted on the host, kernels that
    run on one device only, sizes and times of zero; budgets from too small for anything to ample."""
    build = ProblemBuilder()
    sizes = st.sampled_from([0, 1, 2, 3, 5, 8, 20])
    times = st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.3, 9.0, 25.0])
    for _ in range(draw(st.integers(1, 2))):
        build.input(draw(sizes))
    for _ in range(draw(st.integers(0, 3))):
        build.weight(draw(sizes))
    for _ in range(draw(st.integers(1, largest))):
        _draw_kernel(draw, build, sizes, times)
    for times_us in (build.h2d_us, build.d2h_us):
        times_us[:] = [draw(times) for _ in times_us]
    wanted = draw(st.sets(st.integers(0, len(build.size_bytes) - 1), max_size=3))
    return build.problem(draw(st.sampled_from([10, 20, 30, 40, 60, 100])), tuple(wanted))


def _draw_kernel(
    draw: st.DrawFn, build: ProblemBuilder, sizes: st.SearchStrategy[int], times: st.SearchStrategy[float]
) -> None:
    # the latest tensors are drawn most, which makes chains with branches and residuals
    count = len(build.size_bytes)
    recent = st.integers(max(0, count - 3), count - 1)
    inputs = draw(st.lists(recent | st.integers(0, count - 1), max_size=3, unique=True))
    size, overwrites = draw(sizes), None
    if draw(st.booleans()) and inputs:
        source = draw(st.sampled_from(inputs))
        if not build.is_weight[source]:
            overwrites, size = source, build.size_bytes[source]
    gpu_us, cpu_us = draw(times), draw(times)
    only = draw(st.sampled_from([None] * 6 + ["gpu", "cpu"]))
    build.kernel(
        *inputs,
        size=size,
        gpu_us=math.inf if only == "cpu" else gpu_us,
        cpu_us=math.inf if only == "gpu" else cpu_us,
        workspace=draw(st.sampled_from([0, 0, 0, 4])),
        overwrites=overwrites,
    )


@st.composite
def problems_with_repeats(draw: st.DrawFn) -> Problem:
    """Some of `problems`, with kernels that may run again before any later use of their results."""
    once = draw(problems())
    stands: list[tuple[int, bool]] = []
    for use, inputs in enumerate(once.inputs):
        makers = sorted({once.producer[t] for t in inputs} - {-1})
        able = [k for k in makers if not math.isinf(once.gpu_us[k])]
        stands += [(k, True) for k in able if draw(st.booleans())]
        stands.append((use, False))
    return expand(once, stands)


@st.composite
def decisions(draw: st.DrawFn, problem: Problem) -> Decisions:
    """Any decisions about a problem; most draws leave most kernels on the GPU."""
    seldom: st.SearchStrategy[bool] = st.sampled_from([False, False, False, True])
    on_cpu = draw(st.lists(seldom, min_size=problem.kernel_count, max_size=problem.kernel_count))
    keep = draw(st.lists(st.booleans(), min_size=len(problem.gaps), max_size=len(problem.gaps)))
    for index, gap in enumerate(problem.gaps):
        if gap.start < 0:
            keep[index] &= problem.is_weight[gap.tensor]
        elif problem.is_weight[gap.tensor]:
            keep[index] |= keep[problem.gaps_of[gap.tensor].start]
    return Decisions(tuple(on_cpu), tuple(keep))
