"""Parts of `training.py` that plan training steps and run nothing: memory, time, pinning, batch and depth.

The baseline is what Caffe allocates: data and diff for each blob, with ReLU, Dropout and Flatten in place,
and parameters with their diffs. The diff of the network's input, which Caffe never touches, is not counted,
nor are the copies and scratch buffers inside its layers.
"""

from __future__ import annotations

import math
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import scipy.optimize
from onnx import TensorProto

from hybridc import models
from hybridc.compiler import compile_model
from hybridc.errors import PlanError
from hybridc.frontend import read_model
from hybridc.ir import Device, Graph
from hybridc.ir.graph import Role
from hybridc.machine import Machine, load_machine
from hybridc.options import Budget, CompileOptions
from hybridc.passes.cost import kernel_us
from hybridc.passes.partition import Effort, all_gpu_peak_bytes, partition, smallest_budget_bytes
from hybridc.passes.pipeline import STAGES, Compilation, run_stages
from hybridc.passes.planner.geeps import place
from hybridc.passes.planner.pinning import Candidate, are_nested, pin, pin_nested
from hybridc.passes.program import Program
from hybridc.passes.tile import tile
from hybridc.passes.training.step import TrainingPrograms, training_programs
from hybridc.progress import Silent
from hybridc.targets import parse_target
from hybridc.training.spec import NEW, TrainingSpec, parse_loss, parse_optimizer

NETWORKS: dict[str, dict[str, Any]] = {
    "cifar_quick": {"batch": 100},
    "alexnet": {"batch": 256, "dropout": True},
    "vgg16": {"batch": 64, "dropout": True},
    "googlenet": {"batch": 128, "dropout": True},
    "resnet50": {"batch": 64},
    "resnet152": {"batch": 32},
    "resnet1517": {"batch": 16},
}
"""With the batches of Layrub (Jin et al., TACO 2018)."""
LAYRUB_REDUCTION = 0.582
CUT = 4
"""Kernels are cut up to this fraction of what is needed entirely on the GPU."""
PINNED_SHARES = (0.25, 0.5, 0.75)
IN_PLACE = ("Relu", "Dropout", "Flatten", "Reshape")
LEAST_MEAN_REDUCTION, LEAST_BEST_REDUCTION, MOST_SLOWDOWN = 0.84, 0.995, 0.1
LEAST_GRADIENT_REDUCTION = {"alexnet": 0.75, "vgg16": 0.75, "cifar_quick": 0.0}
"""Of parameter gradients' memory; 0.85 for the others."""
SMALL_DEVICE_BYTES = 512 << 20
FACTOR = 8
"""How many times the batch, or the blocks, that fit without offloading, recomputation or the CPU."""
FIRST = {"batch": 2, "blocks": 16}
"""Sizes to begin with."""


@dataclass(frozen=True)
class Step:
    """A network's training step with its kernels scheduled for both devices."""

    name: str
    programs: TrainingPrograms
    compilation: Compilation

    @property
    def graph(self) -> Graph:
        assert self.compilation.graph is not None
        return self.compilation.graph

    @property
    def machine(self) -> Machine:
        return self.compilation.machine

    @cached_property
    def states(self) -> dict[str, str]:
        """Tensor of each state before the step -> that after it."""
        old = {v.name: t for v, t in zip(self.programs.step.inputs, self.graph.inputs, strict=True)}
        new = {v.name: t for v, t in zip(self.programs.step.outputs, self.graph.outputs, strict=True)}
        return {old[s.name]: new[s.name + NEW] for s in self.programs.states if s.name + NEW in new}

    @property
    def gpu_pins(self) -> dict[str, Device]:
        return _gpu_pins(self.graph)


def build(name: str, **arguments: Any) -> onnx.ModelProto:
    """A model of `hybridc.models`; `resnetN` of any depth N."""
    if name not in models.names() and name.startswith("resnet"):
        return models.build("resnet", depth=int(name.removeprefix("resnet")), **arguments)
    return models.build(name, **arguments)


def export(name: str, path: Path, **arguments: Any) -> Path:
    """The model of `build` as a file, with its weights beside it where they are large."""
    if name not in models.names() and name.startswith("resnet"):
        return models.export("resnet", path, depth=int(name.removeprefix("resnet")), **arguments)
    return models.export(name, path, **arguments)


def programs_of(
    model: onnx.ModelProto | Path,
    *,
    loss: str = "softmax_cross_entropy",
    optimizer: str = "sgd:lr=0.1",
    accumulate: int = 1,
) -> TrainingPrograms:
    spec = TrainingSpec(parse_loss(loss), parse_optimizer(optimizer), accumulate=accumulate)
    return training_programs(read_model(model, parameters=spec.trains), spec, split_layers=True)


def step_of(
    name: str, model: onnx.ModelProto | Path, machine: str, *, target: str = "cuda+avx2", **spec: Any
) -> Step:
    """The step's whole graph, nothing cut up."""
    programs = programs_of(model, **spec)
    step = programs.step
    program = Program(step.module, step.weights, step.origins)
    start = Compilation(program, parse_target(target), load_machine(machine))
    return Step(name, programs, run_stages(start, Silent(), stop_after="graph"))


@cache
def network(name: str, machine: str) -> tuple[Step, int]:
    """The step of one of `NETWORKS`, and its baseline; kept, as scheduling takes longer than the rest."""
    with tempfile.TemporaryDirectory() as folder:  # the deepest is too large for one message
        path = export(name, Path(folder) / "model.onnx", **NETWORKS[name])
        baseline = sum(caffe_bytes(onnx.load(path, load_external_data=False)))
        return step_of(name, path, machine), baseline


def cut_up(step: Step, limit_bytes: int) -> Graph:
    """The step with kernels cut up to what fits the limit, as far as that is possible."""
    whole = step.compilation
    assert whole.unfused is not None
    program = tile(whole.unfused, limit_bytes)
    if program is whole.unfused:
        return step.graph
    done = replace(whole, program=program)
    for stage in STAGES:
        if stage.name in ("fuse", "schedule", "graph"):
            done = stage.run(done, Silent())
    assert done.graph is not None
    return done.graph


def caffe_bytes(model: onnx.ModelProto) -> tuple[int, int]:
    """`(blobs, parameters)`, each with its diff."""
    graph = model.graph
    shared = {o for node in graph.node if node.op_type in IN_PLACE for o in node.output}
    inputs = {value.name for value in graph.input}
    blobs = sum(
        (1 if value.name in inputs else 2) * _value_bytes(value)
        for value in (*graph.input, *graph.value_info, *graph.output)
        if value.name not in shared
    )
    parameters = sum(
        2 * 4 * math.prod(t.dims) for t in graph.initializer if t.dims and t.data_type == TensorProto.FLOAT
    )
    return blobs, parameters


def _value_bytes(value: onnx.ValueInfoProto) -> int:
    dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    return int(math.prod(d.dim_value for d in value.type.tensor_type.shape.dim) * dtype.itemsize)


# -------------------------------------------------------------------------------------------- memory


def memory(names: Sequence[str], machine: str, seconds: float) -> Iterator[dict[str, Any]]:
    """The smallest budget with every kernel on the GPU, and the time at Layrub's reduction."""
    for name in names:
        start = time.perf_counter()
        step, baseline = network(name, machine)
        budget = int((1 - LAYRUB_REDUCTION) * baseline)
        all_gpu = all_gpu_peak_bytes(step.graph, step.machine)
        graphs = dict.fromkeys((step.graph, cut_up(step, all_gpu // CUT)))
        smallest = [smallest_on_gpu(step, graph) for graph in graphs]
        free = sum(kernel_us(kernel, step.machine, Device.GPU) for kernel in step.graph.kernels)
        limited = min(_time_us(graph, step.machine, budget, seconds) for graph in graphs)
        yield {
            "model": name,
            "batch": NETWORKS[name]["batch"],
            "machine": machine,
            "kernels": len(step.graph.kernels),
            "baseline_bytes": baseline,
            "all_gpu_bytes": all_gpu,
            "smallest_bytes": min(smallest),
            "smallest_whole_bytes": smallest[0],
            "reduction": 1 - min(smallest) / baseline,
            "budget_bytes": budget,
            "all_gpu_us": free,
            "time_us": limited,
            "slowdown": limited / free - 1,
            "seconds": time.perf_counter() - start,
        }


def smallest_on_gpu(step: Step, graph: Graph) -> int:
    """The smallest budget of the step, or of a way to cut it up, with every kernel on the GPU."""
    return smallest_budget_bytes(graph, step.machine, _gpu_pins(graph))


def _time_us(graph: Graph, machine: Machine, budget_bytes: int, seconds: float) -> float:
    """Of a plan for one budget, searched for at that budget alone; infinite if there is none."""
    try:
        [draft] = partition(graph, machine, [budget_bytes], effort=Effort(seconds), first_bytes=budget_bytes)
    except PlanError:
        return math.inf
    return draft.makespan_us


def memory_passed(rows: Sequence[dict[str, Any]]) -> bool:
    reductions = [row["reduction"] for row in rows]
    slowdown = sum(row["slowdown"] for row in rows) / len(rows)
    print(f"mean reduction {np.mean(reductions):.1%}, best {max(reductions):.2%}, slowdown {slowdown:.1%}")
    return (
        float(np.mean(reductions)) >= LEAST_MEAN_REDUCTION
        and max(reductions) >= LEAST_BEST_REDUCTION
        and slowdown <= MOST_SLOWDOWN
    )


def _gpu_pins(graph: Graph) -> dict[str, Device]:
    return {kernel.name: Device.GPU for kernel in graph.kernels if Device.GPU in kernel.devices}


# ------------------------------------------------------------------------------------------- pinning


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


# ----------------------------------------------------------------------------------- gradients' bytes


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


# ------------------------------------------------------------------------------------ batch and depth


def batch(names: Sequence[str], machine: str, seconds: float) -> Iterator[dict[str, Any]]:
    """The largest batch of ResNet-50, and depth of a bottleneck ResNet, that a small device can train.

    Without offloading, recomputation or kernels on the CPU: the largest that fits. With a plan: whether
    `FACTOR` times as much fits with every kernel on the GPU.
    """
    makers: dict[str, Callable[[int], onnx.ModelProto]] = {
        "batch": lambda n: build("resnet50", batch=n),
        "blocks": lambda n: build(f"resnet{3 * n + 2}", batch=1),
    }
    for what in names:
        make = makers[what]

        def plain_bytes(size: int, make: Callable[[int], onnx.ModelProto] = make) -> int:
            return _plain_bytes(step_of("", make(size), machine))

        plain = largest(FIRST[what], plain_bytes)
        planned = _planned_bytes(step_of("", make(FACTOR * plain), machine))
        yield {
            "model": what,
            "plain": plain,
            "planned": FACTOR * plain,
            "planned_bytes": planned,
            "device_bytes": SMALL_DEVICE_BYTES,
            "fits": planned <= SMALL_DEVICE_BYTES,
        }


def largest(first: int, needed_bytes: Callable[[int], int]) -> int:
    """The largest size that fits the small device, where bytes grow with the size almost linearly.

    Interpolates between sizes that fit and sizes that do not; 0 if not even the first fits.
    """
    known = {size: needed_bytes(size) for size in (first, 2 * first)}
    while True:
        (low, low_bytes), (high, high_bytes) = sorted(known.items())[-2:]
        slope = (high_bytes - low_bytes) / (high - low)
        guess = int(low + (SMALL_DEVICE_BYTES - low_bytes) / slope)
        fitting = max((size for size, needed in known.items() if needed <= SMALL_DEVICE_BYTES), default=0)
        failing = min((size for size, needed in known.items() if needed > SMALL_DEVICE_BYTES), default=2**30)
        if failing - fitting == 1:
            return fitting
        guess = min(max(guess, fitting + 1), failing - 1)
        known[guess] = needed_bytes(guess)


def _plain_bytes(step: Step) -> int:
    """Everything on the GPU, nothing copied twice."""
    return all_gpu_peak_bytes(step.graph, step.machine)


def _planned_bytes(step: Step) -> int:
    """Every kernel still on the GPU, cut up if it must be."""
    whole = smallest_on_gpu(step, step.graph)
    if whole <= SMALL_DEVICE_BYTES:
        return whole
    return smallest_on_gpu(step, cut_up(step, SMALL_DEVICE_BYTES // 2))


def batch_passed(rows: Sequence[dict[str, Any]]) -> bool:
    return all(row["fits"] for row in rows)


# ---------------------------------------------------------------------------------------------- deep

MOST_DEEP_SECONDS = 180.0


def deep(names: Sequence[str], machine: str, seconds: float) -> Iterator[dict[str, Any]]:
    """ResNet-1517 at full width, from the model's file to the library of its step."""
    with tempfile.TemporaryDirectory() as folder:
        path = models.export("resnet", Path(folder) / "resnet1517.onnx", depth=1517, batch=16)
        start = time.perf_counter()
        options = CompileOptions(
            target=parse_target("cuda+avx2"),
            gpu_memory=(Budget(size_bytes=12 << 30),),
            machine=load_machine(machine),
            plan_seconds=seconds,
        )
        programs = programs_of(path)
        imported = time.perf_counter()
        done = compile_model(programs.step, Path(folder) / "step.hyb", options)
        assert done.plan is not None
        yield {
            "model": "resnet1517",
            "kernels": len(done.graphs[-1].kernels),
            "import_seconds": imported - start,
            **{f"{part}_seconds": value for part, value in done.seconds.items()},
            "seconds": time.perf_counter() - start,
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }


def deep_passed(rows: Sequence[dict[str, Any]]) -> bool:
    return all(row["seconds"] <= MOST_DEEP_SECONDS for row in rows)
