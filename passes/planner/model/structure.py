"""What the planner's models read off a problem."""

from __future__ import annotations

from functools import reduce
from operator import or_

from hybridc.passes.planner.model.problem import BEFORE_ALL, Problem


def cuts(problem: Problem) -> list[int]:
    """Kernels that every earlier one leads to and every later one follows from: bit sets of ancestors."""
    ancestors: list[int] = []
    for inputs in problem.inputs:
        makers = {problem.producer[t] for t in inputs} - {BEFORE_ALL}
        # one bit for each kernel: a union is one operation on Python's large integers
        ancestors.append(reduce(or_, (ancestors[maker] | 1 << maker for maker in makers), 0))
    # -1 has all bits set: of no kernels at all every one is a common ancestor
    found, common = [], -1  # ancestors of all the later kernels
    for kernel in reversed(range(problem.kernel_count)):
        # an ancestor of all later ones, and itself a descendant of all earlier ones
        if common >> kernel & 1 and ancestors[kernel] == (1 << kernel) - 1:
            found.append(kernel)
        common &= ancestors[kernel]
    return found[::-1]


def runs_again(problem: Problem) -> frozenset[int]:
    """Of the kernels of a problem, counted without its repeats, those that it lets run again."""
    repeated = {problem.outputs[k] for k in problem.repeats}
    once = [k for k in range(problem.kernel_count) if k not in problem.repeats]
    return frozenset(place for place, k in enumerate(once) if problem.outputs[k] in repeated)


def all_bytes(problem: Problem) -> int:
    """GPU bytes that no plan of the problem can make use of more than: all tensors and workspaces at once."""
    return sum(problem.size_bytes) + sum(problem.workspace_bytes)


def smallest_working_set_bytes(problem: Problem, kernel: int) -> int:
    """What a kernel needs on the GPU if every output that can takes the bytes of an input."""
    return problem.working_set_bytes[kernel] - overwritten_bytes(problem, kernel)


def overwritten_bytes(problem: Problem, kernel: int) -> int:
    """The most bytes that outputs can share with inputs: an upper bound, exact for one output.

    An output takes one input's place and an input gives its place to one output, so it is at most the
    sizes of the outputs with a partner, and at most those of the inputs with one.
    """
    pairs = problem.may_overwrite[kernel]
    outputs = {output for output, _ in pairs}
    sources = {source for _, source in pairs}
    size_bytes = problem.size_bytes
    return min(sum(size_bytes[t] for t in outputs), sum(size_bytes[t] for t in sources))
