"""Parts of `training.py` that plan training steps: pinned data, and bytes of parameter gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import scipy.optimize
from baselines.geeps import place
from baselines.pinning import Candidate, are_nested, pin, pin_nested

from hybridc.ir.graph import Role
from training.steps import Step, network

PINNED_SHARES = (0.25, 0.5, 0.75)
LEAST_GRADIENT_REDUCTION = {"alexnet": 0.75, "vgg16": 0.75, "cifar_quick": 0.0}
"""Of parameter gradients' memory; 0.85 for the others."""


@dataclass(frozen=True, slots=True)
class Data:
    """What a step's kernels read and write; a state before and after the step is one piece of data."""

    size_bytes: tuple[int, ...]
    is_parameter: tuple[bool, ...]
    accesses: tuple[tuple[int, ...], ...]
    """Data of each kernel."""


def data_of(step: Step) -> Data:
    graph = step.graph
    old = {new: old for old, new in step.states.items()}
    names = [t.name for t in graph.tensors if t.name not in old]
    number = {name: i for i, name in enumerate(names)}
    parameters = {*step.states, *(t.name for t in graph.tensors if t.role is Role.WEIGHT)}
    return Data(
        tuple(graph.tensor[name].size_bytes for name in names),
        tuple(name in parameters for name in names),
        tuple(
            tuple(dict.fromkeys(number[old.get(name, name)] for name in (*k.inputs, *k.outputs)))
            for k in graph.kernels
        ),
    )


def candidates_of(data: Data) -> dict[int, Candidate]:
    """Data that would be copied if it is not pinned, with the kernels at which pinning it takes room.

    At each kernel its own data and that of the next are in the GPU's memory anyway. What is needed by
    neighbouring kernels alone is handed on and never copied.
    """
    kernels = len(data.accesses)
    held = [set(a) | set(b) for a, b in zip(data.accesses, (*data.accesses[1:], ()), strict=True)]
    steps: dict[int, list[int]] = {}
    for kernel, access in enumerate(data.accesses):
        for datum in access:
            steps.setdefault(datum, []).append(kernel)
    found: dict[int, Candidate] = {}
    for datum, used in steps.items():
        size = data.size_bytes[datum]
        if data.is_parameter[datum]:
            found[datum] = Candidate(0, kernels - 1, size, float(size))
            continue
        free = [k for k in range(used[0], used[-1]) if datum not in held[k]]
        if free:
            found[datum] = Candidate(free[0], free[-1], size, float(size))
    return found


def pinning(names: Sequence[str], machine: str, seconds: float) -> Iterator[dict[str, Any]]:
    """The dynamic programme against an exact solver, then bytes that are pinned against GeePS's policy."""
    yield exactness(500)
    for name in names:
        data = data_of(network(name, machine)[0])
        candidates = candidates_of(data)
        for share in PINNED_SHARES:
            yield {"model": name, "share": share} | pinned_bytes(data, candidates, share)


def pinned_bytes(data: Data, candidates: dict[int, Candidate], share: float) -> dict[str, Any]:
    """Bytes that stay on the GPU throughout, of data that would be copied else.

    The budget is the smallest that GeePS's policy runs with, and this share of the data's bytes.
    """
    sizes = data.size_bytes
    buffer_bytes = 2 * max(sum(sizes[d] for d in access) for access in data.accesses)
    budget_bytes = buffer_bytes + int(share * sum(c.size_bytes for c in candidates.values()))
    pairs = zip(data.accesses, (*data.accesses[1:], ()), strict=True)
    capacity = [budget_bytes - sum(sizes[d] for d in {*a, *b}) for a, b in pairs]
    ours = pin(list(candidates.values()), capacity).value
    placement = place(data.accesses, sizes, data.is_parameter, budget_bytes)
    assert placement is not None
    theirs = sum(sizes[d] for d in candidates if placement.pinned[d])
    return {
        "budget_bytes": budget_bytes,
        "candidates": len(candidates),
        "candidate_bytes": sum(c.size_bytes for c in candidates.values()),
        "pinned_bytes": ours,
        "geeps_bytes": theirs,
        "more": ours / theirs - 1,
    }


def pinning_passed(rows: Sequence[dict[str, Any]]) -> bool:
    [exact] = [row for row in rows if "instances" in row]
    more = [row["more"] for row in rows if "more" in row]
    print(f"pinned bytes above GeePS's: {np.mean(more):.1%} on the mean")
    return exact["equal"] == exact["instances"] and float(np.mean(more)) >= 0.2


def exactness(instances: int) -> dict[str, Any]:
    """How often `pin_nested` finds what HiGHS proves to be the optimum of the integer programme."""
    equal = 0
    for seed in range(instances):
        random = Random(seed)
        candidates, steps = _nested(random), 16
        capacity = [random.randrange(10, 60) for _ in range(steps)]
        equal += pin_nested(candidates, capacity).value == exact_value(candidates, capacity)
    return {"instances": instances, "equal": equal}


def exact_value(candidates: Sequence[Candidate], capacity: Sequence[int]) -> float:
    """The most that can be pinned; values are whole numbers."""
    rows = [[c.size_bytes * (c.first <= s <= c.last) for c in candidates] for s in range(len(capacity))]
    solved = scipy.optimize.milp(
        [-c.value for c in candidates],
        integrality=np.ones(len(candidates)),
        bounds=scipy.optimize.Bounds(0, 1),
        constraints=scipy.optimize.LinearConstraint(np.array(rows), -np.inf, capacity),
        options={"mip_rel_gap": 0},
    )
    return float(round(-solved.fun))


def _nested(random: Random, steps: int = 16) -> list[Candidate]:
    """Up to 14 candidates with lifetimes within or apart from each other."""
    chosen: list[Candidate] = []
    for _ in range(40):
        first = random.randrange(steps)
        size, value = random.randrange(1, 25), float(random.randrange(1, 100))
        new = Candidate(first, random.randrange(first, steps), size, value)
        if len(chosen) < 14 and are_nested([*chosen, new]):
            chosen.append(new)
    return chosen


def gradient_bytes(names: Sequence[str], machine: str, seconds: float) -> Iterator[dict[str, Any]]:
    """Bytes of parameter gradients that are held at once, against all of them, as Caffe has."""
    for name in names:
        step, _ = network(name, machine)
        total = sum(step.graph.tensor[old].size_bytes for old in step.states if _is_parameter(step, old))
        held = most_gradient_bytes(step)
        yield {
            "model": name,
            "gradient_bytes": total,
            "held_bytes": held,
            "reduction": 1 - held / total,
        }


def _is_parameter(step: Step, tensor: str) -> bool:
    name = dict(zip(step.graph.inputs, (v.name for v in step.programs.step.inputs), strict=True))[tensor]
    return next(s.kind for s in step.programs.states if s.name == name) == "parameter"


def most_gradient_bytes(step: Step) -> int:
    """The peak, over kernels, of tensors that only the kernel that updates their parameter reads."""
    graph = step.graph
    change = [0] * (len(graph.kernels) + 1)
    for old, new in step.states.items():
        if not _is_parameter(step, old):
            continue
        update = graph.producer[new]
        for name in graph.kernels[update].inputs:
            made = graph.producer.get(name)
            if made is not None and graph.tensor[name].size_bytes == graph.tensor[old].size_bytes:
                change[made] += graph.tensor[name].size_bytes
                change[update + 1] -= graph.tensor[name].size_bytes
    return int(np.cumsum(change).max())


def gradient_bytes_passed(rows: Sequence[dict[str, Any]]) -> bool:
    return all(row["reduction"] >= LEAST_GRADIENT_REDUCTION.get(row["model"], 0.85) for row in rows)
