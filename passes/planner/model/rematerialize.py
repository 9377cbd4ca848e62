"""Rematerialisation: kernels that may run again instead of their results being kept or fetched.

Where much happens between two uses of a tensor that is made fast, its kernel stands again right before the
second use, to run there on the GPU or not (`Problem.repeats`), and so may the kernels that make what it
reads. Which of them run is a decision as any other: checkpointing (Chen et al., arXiv 1604.06174) as well
as a choice kernel by kernel (Checkmate, Jain et al., MLSys 2020) can come of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import BEFORE_ALL, Gap, Problem

# Shorter gaps free bytes at few kernels; each repeat is one more decision for the search.
SHORTEST_GAP = 4
"""Kernels: what is used again sooner is hardly ever worth making again."""
# Longer chains make more tensors unneeded in between, and cost more runs for one use.
DEEPEST = 3
"""So many kernels in a chain may run again for one use."""


def with_repeats(once: Problem) -> Problem:
    """The problem with kernels that may run again, where that may be worth it; at most as many as it has."""
    before: dict[int, list[int]] = {}  # use -> kernels to repeat before it, in the order in which they run
    count = 0
    # cheapest bytes first, until the problem has twice as many kernels: the search slows down with them
    for _, kernel, use in sorted(_candidates(once)):
        chained = {*_chain(once, kernel, use, DEEPEST)}.difference(before.get(use, ()))
        if count + len(chained) <= once.kernel_count:
            # positions rise along a chain, so that what a repeat reads is made before it
            before[use] = sorted((*before.get(use, ()), *chained))
            count += len(chained)
    return expand(
        once,
        list(
            chain.from_iterable(
                [*((kernel, True) for kernel in before.get(use, ())), (use, False)]
                for use in range(once.kernel_count)
            )
        ),
    )


def without_repeats(problem: Problem) -> Problem:
    """The problem with each kernel once: the inverse of `with_repeats`."""
    return expand(problem, [(k, False) for k in _first_runs(problem)])


def with_recompute_slots(problem: Problem, once: Problem, decisions: Decisions) -> Decisions:
    """Decisions about a problem without its repeats, as ones about it: no repeat runs."""
    position = _first_runs(problem)
    on_cpu = [True] * problem.kernel_count
    for kernel, cpu in enumerate(decisions.on_cpu):
        on_cpu[position[kernel]] = cpu
    keep = [False] * len(problem.gaps)
    for gap, kept in zip(once.gaps, decisions.keep, strict=True):
        keep[problem.gap_at[position[gap.end], gap.tensor]] = kept
    for tensor, gaps in enumerate(problem.gaps_of):
        # repeats add gaps to a weight: a resident one is kept in all of them
        if problem.is_weight[tensor] and gaps and decisions.keep[once.gaps_of[tensor].start]:
            keep[gaps.start : gaps.stop] = [True] * len(gaps)
    return Decisions(tuple(on_cpu), tuple(keep))


def without_recompute_slots(problem: Problem, once: Problem, decisions: Decisions) -> Decisions:
    """Decisions about a problem, as ones about it without its repeats: what was made again is not kept."""
    position = _first_runs(problem)
    keep = [_is_kept(problem, position, decisions, gap) for gap in once.gaps]
    return Decisions(tuple(decisions.on_cpu[place] for place in position), tuple(keep))


def recompute_instead_of_fetch(problem: Problem, decisions: Decisions) -> Decisions:
    """Run again whatever is fetched instead, as decided, though it could be made again."""
    on_cpu, keep = list(decisions.on_cpu), list(decisions.keep)
    # from behind: a repeat that runs needs its inputs, which earlier repeats may make
    for repeat in sorted(problem.repeats, reverse=True):
        made = problem.gap_at[repeat, problem.outputs[repeat][0]]
        if on_cpu[repeat] and not keep[made + 1] and not on_cpu[problem.gaps[made + 1].end]:
            # run it instead of the fetch, and keep the result from there to its use
            on_cpu[repeat] = False
            keep[made + 1] = True
            for tensor in problem.inputs[repeat]:
                gap = problem.gap_at[repeat, tensor]
                keep[gap] = problem.gaps_of[tensor].stop > gap + 1 and keep[gap + 1]
    return Decisions(tuple(on_cpu), tuple(keep))


def _is_kept(problem: Problem, position: Sequence[int], decisions: Decisions, gap: Gap) -> bool:
    """Whether a gap of the problem without repeats is: all those that it consists of are."""
    start = BEFORE_ALL if gap.start == BEFORE_ALL else position[gap.start]
    index = problem.gap_at[position[gap.end], gap.tensor]
    kept = decisions.keep[index]
    while kept and problem.gaps[index].start != start:
        index -= 1
        repeat = problem.gaps[index].end
        if not decisions.on_cpu[repeat]:
            kept = decisions.keep[index] and gap.tensor not in problem.outputs[repeat]
    return kept


def _first_runs(problem: Problem) -> list[int]:
    return [k for k in range(problem.kernel_count) if k not in problem.repeats]


def _candidates(problem: Problem) -> Iterator[tuple[float, int, int]]:
    """(what making a tensor again costs for the bytes that it frees, its kernel, the use to make it for)."""
    for gap in problem.gaps:
        if _is_worth_it(problem, gap.tensor, gap.start, gap.end):
            kernel, length = problem.producer[gap.tensor], gap.end - gap.start
            yield problem.gpu_us[kernel] / (problem.size_bytes[gap.tensor] * length), kernel, gap.end


def _is_worth_it(problem: Problem, tensor: int, start: int, end: int) -> bool:
    """A tensor is unused for long, and made in less time than copying it to the host and back takes."""
    kernel = problem.producer[tensor]
    return (
        end - start >= SHORTEST_GAP
        and kernel != BEFORE_ALL
        # a repeat has one result, see `Problem.repeats`
        and len(problem.outputs[kernel]) == 1
        # else a copy there and back is cheaper, and busies the link instead of the GPU
        and problem.gpu_us[kernel] < problem.h2d_us[tensor] + problem.d2h_us[tensor]
        and problem.size_bytes[tensor] > 0
    )


def _chain(problem: Problem, kernel: int, use: int, depth: int) -> Iterator[int]:
    """A kernel and, behind it, those whose results it reads that are not used shortly before either."""
    yield kernel
    for tensor in problem.inputs[kernel] if depth > 1 else ():
        # what was used shortly before is still there
        last = max((k for k in problem.uses[tensor] if k < use), default=BEFORE_ALL)
        if _is_worth_it(problem, tensor, last, use):
            yield from _chain(problem, problem.producer[tensor], use, depth - 1)


def expand(once: Problem, stands: list[tuple[int, bool]]) -> Problem:
    """The problem with kernels in the given order: each once, and at will again, which is a repeat."""
    kernels = [kernel for kernel, _ in stands]
    return replace(
        once,
        kernel_names=tuple(once.kernel_names[k] for k in kernels),
        gpu_us=tuple(once.gpu_us[k] for k in kernels),
        # "on the CPU" a repeat does not run and takes no time
        cpu_us=tuple(0.0 if again else once.cpu_us[k] for k, again in stands),
        inputs=tuple(once.inputs[k] for k in kernels),
        outputs=tuple(once.outputs[k] for k in kernels),
        workspace_bytes=tuple(once.workspace_bytes[k] for k in kernels),
        cpu_workspace_bytes=tuple(once.cpu_workspace_bytes[k] for k in kernels),
        may_overwrite=tuple(once.may_overwrite[k] for k in kernels),
        contention=once.contention.reordered(kernels),
        repeats=frozenset(place for place, (_, again) in enumerate(stands) if again),
        second=frozenset(place for place, (k, again) in enumerate(stands) if k in once.second and not again),
    )
