"""An artifact -> program.json: all that the runtime of bundles must know. It verifies and binds the plans."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from hybridc.artifact import Artifact, Port
from hybridc.artifact.graphs import plans_to_json
from hybridc.artifact.manifest import StoredPlan
from hybridc.errors import UsageError
from hybridc.runtime.plan_view import bind_plan
from hybridc.runtime.session import verify_plans

FORMAT = "hybridc-program"
SCHEMA_VERSION = 3


def program_to_json(artifact: Artifact) -> dict[str, Any]:
    """What the runs of an artifact do, by each of its plans, as plain JSON values.

    Raises ArtifactError HC306 where a plan is refused or does not fit its functions, UsageError HC564 for a
    program of a training step, and for one with open dimensions.
    """
    manifest = artifact.manifest
    has_states = any(graph.loop_carried != graph.caches for graph in artifact.graphs)
    if any(port.labels for port in manifest.inputs) or has_states:
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
    for number in range(len(artifact.plans)):
        bind_plan(replace(artifact, number=number))
    planned = plans_to_json(artifact.graphs, artifact.plans)
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "hybridc": manifest.versions.hybridc,
        "tvm": manifest.versions.tvm,
        "tvm_ffi": manifest.versions.tvm_ffi,
        "source": asdict(manifest.source),
        "instruction_sets": [
            {
                "target": artifact.for_instruction_set(number).manifest.target,
                "cpu_flags": list(each.cpu_flags),
            }
            for number, each in enumerate(manifest.instruction_sets)
        ],
        "cuda_architectures": list(manifest.cuda_architectures),
        "threads": manifest.threads,
        "host_memory_bytes": manifest.host_memory_bytes,
        "inputs": [_port(port) for port in manifest.inputs],
        "outputs": [_port(port) for port in manifest.outputs],
        "counts": [_port(port) for port in manifest.counts],
        "functions": [asdict(function) for function in manifest.functions],
        "graphs": planned["graphs"],
        "plans": [
            plan | {"instruction_set": stored.instruction_set, "weights": _weights(stored)}
            for plan, stored in zip(planned["plans"], manifest.plans, strict=True)
        ],
    }


def _port(port: Port) -> dict[str, Any]:
    return {
        "name": port.name,
        "dtype": port.dtype,
        "shape": list(port.shape),
        "cuts": [{"axis": cut.axis, "count": cut.count} for cut in port.cuts],
    }


def _weights(stored: StoredPlan) -> list[dict[str, Any]]:
    """Where each weight lies in the file, as the functions of a device read it."""
    found = {
        weight.weight: weight
        for weight in (*stored.host_weights, *stored.streamed_weights, *stored.gpu_weights)
    }
    members = ("tensor", "dtype", "shape", "layout", "offset_bytes")
    return [{name: getattr(weight, name) for name in members} for weight in found.values()]
