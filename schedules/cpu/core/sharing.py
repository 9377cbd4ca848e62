"""How the threads of a request share the tasks of a kernel.

TVM gives each thread an equal part of a parallel loop before it begins. So the kernel takes as long as a
thread with one task more than the others, and it does not pay to have fewer tasks than threads.
"""

from __future__ import annotations

from hybridc.schedules.cpu.core.micro_kernel import ceil_div

MORE_THREADS = 4
"""A session may have more threads than kernels were made for: `imbalance` looks at so many times as many,
too."""
MORE_THREADS_WEIGHT = 0.25


def task_slots(tasks: int, threads: int) -> int:
    """Tasks that all threads together could do in the time that these take: rounded up to a multiple of
    `threads`."""
    return ceil_div(tasks, threads) * threads


def imbalance(tasks: int, threads: int) -> float:
    """How many times longer equal tasks take than if threads could share them evenly; at least 1.

    Mostly for `threads`, and a little for the more that a session may have.
    """
    expected, more = (task_slots(tasks, n) / tasks for n in (threads, MORE_THREADS * threads))
    return (1 - MORE_THREADS_WEIGHT) * expected + MORE_THREADS_WEIGHT * more


def idleness(tasks: int, threads: int) -> float:
    """How many times longer tasks take because some threads have none; at least 1.

    For tasks that are many and small: it does not matter that some threads do one more than others.
    """
    return max(threads / tasks, 1.0)


def at_least_one_each(tasks: int, threads: int) -> int:
    """A usual number of tasks, or one for each thread if that is more."""
    return max(tasks, threads)
