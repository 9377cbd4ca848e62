"""An artifact -> program.json: plans that were verified and bound, as flat tables for native code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybridc.artifact import Artifact, Port
from hybridc.artifact.load import promised_bytes
from hybridc.errors import UsageError
from hybridc.ir import Check, Copy, Device
from hybridc.ir.bind import BoundStep, FaultRows, Operand, View, Weight
from hybridc.runtime.places import fed_tensors, places
from hybridc.runtime.plan_view import bind_plan
from hybridc.runtime.session import verify_plans

FORMAT = "hybridc-program"
SCHEMA_VERSION = 2


def program_to_json(artifact: Artifact) -> dict[str, Any]:
    """What the runs of an artifact do, by each of its plans, as plain JSON values.

    Raises ArtifactError HC306 where a plan is refused, UsageError HC564 for a program of a training
    step, and for one with open dimensions.
    """
    manifest = artifact.manifest
    if any(port.labels for port in manifest.inputs) or any(graph.loop_carried for graph in artifact.graphs):
        what, remedy = (
            "a program of a training step cannot be bundled",
            "bundle a model compiled for inference",
        )
        raise UsageError("HC564", what, where=str(artifact.path), remedy=remedy)
    if manifest.dimensions:
        names = ", ".join(each.name for each in manifest.dimensions)
        what = f"an artifact with open dimensions ({names}) cannot be bundled"
        raise UsageError(
            "HC564", what, where=str(artifact.path), remedy="compile the model for one size of each"
        )
    verify_plans(artifact)
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "hybridc": manifest.versions.hybridc,
        "tvm_ffi": manifest.versions.tvm_ffi,
        "source": {"name": manifest.source.name, "sha256": manifest.source.sha256},
        "target": manifest.target,
        "cpu_flags": list(manifest.cpu_flags),
        "cuda_architectures": list(manifest.cuda_architectures),
        "threads": manifest.threads,
        "host_memory_bytes": manifest.host_memory_bytes,
        "inputs": [_port(port) for port in manifest.inputs],
        "outputs": [_port(port) for port in manifest.outputs],
        "counts": [_port(port) for port in manifest.counts],
        "plans": [_plan(replace(artifact, number=number)) for number in range(len(artifact.plans))],
    }


def _port(port: Port) -> dict[str, Any]:
    return {
        "name": port.name,
        "dtype": port.dtype,
        "shape": list(port.shape),
        "cuts": [{"axis": cut.axis, "count": cut.count} for cut in port.cuts],
    }


def _plan(artifact: Artifact) -> dict[str, Any]:
    """Of the artifact's chosen plan."""
    binding, stored, plan = bind_plan(artifact), artifact.stored_plan, artifact.plan
    offsets = {w.weight: w.offset_bytes for w in (*stored.host_weights, *stored.streamed_weights)}
    touched = (o for step in binding.steps for o in (*step.operands, *(view for view, _ in step.guards)))
    operands = list(dict.fromkeys(touched))
    numbers = {operand: number for number, operand in enumerate(operands)}
    ports = artifact.manifest.inputs
    tensors, _ = fed_tensors(artifact)
    found = places(artifact, Device.CPU), places(artifact, Device.GPU)
    return {
        "promised_bytes": promised_bytes(plan),
        "gpu_bytes": plan.arena_bytes(Device.GPU),
        "host_bytes": plan.arena_bytes(Device.CPU),
        "uploads": [
            {
                "offset_bytes": weight.offset_bytes,
                "arena_offset_bytes": weight.arena_offset_bytes,
                "size_bytes": weight.size_bytes,
            }
            for weight in stored.gpu_weights
        ],
        "operands": [_operand(operand, offsets) for operand in operands],
        "steps": [
            {"name": planned.tensor if isinstance(planned, Copy) else planned.kernel, "us": us}
            | _step(step, numbers)
            for planned, us, step in zip(plan.steps, plan.step_us, binding.steps, strict=True)
        ],
        "inputs": [_in_arena(tensors[port.name], *found, before=True) for port in ports],
        "outputs": [_result(name, artifact) for name in artifact.graph.outputs],
        "checks": [_check(check, artifact.graph.inputs) for check in binding.checks],
    }


def _operand(operand: Operand, offsets: Mapping[Weight, int]) -> dict[str, Any]:
    if isinstance(operand, View):
        place, device, offset = operand.device.value, operand.device, operand.offset_bytes
    elif isinstance(operand, FaultRows):
        place, device, offset = "faults", operand.device, operand.offset_bytes
    else:
        place, device, offset = "weights", Device.CPU, offsets[operand]
    dtype = "int64" if isinstance(operand, FaultRows) else operand.dtype
    shape = list(operand.shape)
    return {"in": place, "device": device.value, "offset_bytes": offset, "shape": shape, "dtype": dtype}


def _step(step: BoundStep, numbers: Mapping[Operand, int]) -> dict[str, Any]:
    return {
        "lane": step.lane.number,
        "waits": list(step.waits),
        "function": step.function,
        "operands": [numbers[operand] for operand in step.operands],
        "event": step.event,
        "guards": [{"operand": numbers[view], "value": int(value)} for view, value in step.guards],
    }


Places = Mapping[tuple[str, bool], slice]


def _in_arena(tensor: str, on_cpu: Places, on_gpu: Places, *, before: bool) -> dict[str, Any] | None:
    """Where a tensor is before the first step, or else after the last; None: in no arena."""
    for device, found in ((Device.CPU, on_cpu), (Device.GPU, on_gpu)):
        if (tensor, before) in found:
            return {"in": device.value, "offset": found[tensor, before].start}
    return None


def _result(tensor: str, artifact: Artifact) -> dict[str, Any]:
    """Where an output is: an input, whose place may be taken by now, in an arena, or a weight."""
    if tensor in artifact.graph.inputs:
        return {"in": "inputs", "offset": artifact.graph.inputs.index(tensor)}
    found = places(artifact, Device.CPU), places(artifact, Device.GPU)
    if (place := _in_arena(tensor, *found, before=False)) is not None:
        return place
    plain = (w for w in artifact.stored_plan.host_weights if w.tensor == tensor and not w.layout)
    return {"in": "weights", "offset": next(plain).offset_bytes}


def _check(check: Check, inputs: tuple[str, ...]) -> dict[str, Any]:
    return {
        "node": check.node,
        "operator": check.operator,
        "kind": check.kind.value,
        "lower": check.lower,
        "upper": check.upper,
        "input": inputs.index(check.tensor) if check.tensor in inputs else None,
    }
