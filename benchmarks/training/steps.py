"""Training steps of the networks that the parts of `training.py` plan or run.

The baseline is what Caffe allocates: data and diff for each blob, with ReLU, Dropout and Flatten in place,
and parameters with their diffs. The diff of the network's input, which Caffe never touches, is not counted,
nor are the copies and scratch buffers inside its layers.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto

from hybridc import models
from hybridc.frontend import read_model
from hybridc.ir import Device, Graph
from hybridc.machine import Machine, load_machine
from hybridc.options import CompileOptions
from hybridc.passes.phases import GraphedNetwork, ImportedNetwork, Job
from hybridc.passes.pipeline import TO_GRAPH, run_stages
from hybridc.passes.planner.search.partition import smallest_budget_bytes
from hybridc.passes.program.program import Program
from hybridc.passes.tiling.tile import tile
from hybridc.passes.training.spec import NEW, TrainingSpec, parse_loss, parse_optimizer
from hybridc.passes.training.step import TrainingPrograms, training_programs
from hybridc.progress import NullProgress
from hybridc.targets import parse_target

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
IN_PLACE = ("Relu", "Dropout", "Flatten", "Reshape")


@dataclass(frozen=True)
class Step:
    """A network's training step with its kernels scheduled for both devices."""

    name: str
    programs: TrainingPrograms
    network: GraphedNetwork

    @property
    def graph(self) -> Graph:
        return self.network.graph

    @property
    def machine(self) -> Machine:
        return self.network.machine

    @cached_property
    def states(self) -> dict[str, str]:
        """Tensor of each state before the step -> that after it."""
        old = {v.name: t for v, t in zip(self.programs.step.inputs, self.graph.inputs, strict=True)}
        new = {v.name: t for v, t in zip(self.programs.step.outputs, self.graph.outputs, strict=True)}
        return {old[s.name]: new[s.name + NEW] for s in self.programs.states if s.name + NEW in new}


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
    options = CompileOptions(target=parse_target(target), machine=load_machine(machine))
    start = ImportedNetwork(Job(options), program)
    return Step(name, programs, run_stages(start, NullProgress(), stop_after="graph"))


@cache
def network(name: str, machine: str) -> tuple[Step, int]:
    """The step of one of `NETWORKS`, and its baseline; kept, as scheduling takes longer than the rest."""
    with tempfile.TemporaryDirectory() as folder:  # the deepest is too large for one message
        path = export(name, Path(folder) / "model.onnx", **NETWORKS[name])
        baseline = sum(caffe_bytes(onnx.load(path, load_external_data=False)))
        return step_of(name, path, machine), baseline


def cut_up(step: Step, limit_bytes: int) -> Graph:
    """The step with kernels cut up to what fits the limit, as far as that is possible."""
    whole = step.network
    program = tile(whole.unfused, limit_bytes)
    if program is whole.unfused:
        return step.graph
    return TO_GRAPH.run(ImportedNetwork(whole.job, program, whole.library), NullProgress()).graph


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


def smallest_on_gpu(step: Step, graph: Graph) -> int:
    """The smallest budget of the step, or of a way to cut it up, with every kernel on the GPU."""
    return smallest_budget_bytes(graph, step.machine, _gpu_pins(graph))


def _gpu_pins(graph: Graph) -> dict[str, Device]:
    return {kernel.name: Device.GPU for kernel in graph.kernels if Device.GPU in kernel.devices}
