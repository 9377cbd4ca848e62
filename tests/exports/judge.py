"""What became of an exported network: compiled for a target, run, and held against onnxruntime."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

import hybridc
from hybridc.errors import HybridcError
from hybridc.ir import Device, Run
from hybridc.results import Compiled
from tests.exports.export import Exported, NotExported, Variant, kept
from tests.support.machines import EAGER_GPU

TOLERANCE = 1e-4
"""Of the output's scale, in float32."""
HALF_ROUNDING = 2.0**-10
"""Of the output's scale, what float16 may differ in any case: a unit in the last place of what is largest."""
EMULATED_GPU = "256MiB"


class Outcome(StrEnum):
    AGREES = "agrees"
    REFUSED = "refused"
    """By an error that blames the model."""
    DIFFERS = "differs"
    FAILED = "failed"
    """By an error that is hybridc's own."""
    NOT_EXPORTED = "not exported"
    """By torch; or onnxruntime cannot run what torch wrote."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one network for one target."""

    name: str
    target: str
    outcome: Outcome
    opset: int
    reason: str = ""
    error: float = 0.0
    """The largest difference, of the output's scale: from onnxruntime, or in float16 from float32."""
    peer_error: float = 0.0
    """In float16, that of onnxruntime."""
    gpu_kernels: int = 0


def judge(variant: Variant, target: str, folder: Path | None = None) -> Verdict:
    """Export, compile, run and compare, in this process. `folder` has exports of earlier runs."""
    facts = (str(variant), target)
    try:
        network = kept(variant, folder)
        expected = _by_onnxruntime(network)
    except NotExported as error:
        return Verdict(*facts, Outcome.NOT_EXPORTED, variant.opset, str(error))
    except Exception as error:
        reason = f"onnxruntime: {' '.join(str(error).split())}"[:300]
        return Verdict(*facts, Outcome.NOT_EXPORTED, variant.opset, reason)
    try:
        found, gpu_kernels = _by_hybridc(network, target)
    except HybridcError as error:
        outcome = Outcome.FAILED if error.code.startswith("HC9") else Outcome.REFUSED
        return Verdict(*facts, outcome, variant.opset, f"{error.code} {error.what}"[:300])
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        return Verdict(*facts, Outcome.FAILED, variant.opset, reason)
    if variant.form == "half":
        off, peer_off = distance(found, network.exact), distance(expected, network.exact)
        agrees = off <= max(2 * peer_off, HALF_ROUNDING)
    else:
        off, peer_off = distance(found, expected), 0.0
        agrees = off <= TOLERANCE
    outcome = Outcome.AGREES if agrees else Outcome.DIFFERS
    return Verdict(*facts, outcome, variant.opset, "", off, peer_off, gpu_kernels)


def distance(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    """The largest difference of any output, of the largest number in it; infinite for another shape."""
    worst = 0.0
    for value, reference in zip(found, wanted, strict=True):
        if value.shape != reference.shape or not np.isfinite(value).all():
            return np.inf
        exact = reference.astype(np.float64)
        scale = np.abs(exact).max(initial=1e-30)
        worst = max(worst, float(np.abs(value - exact).max(initial=0.0) / scale))
    return worst


def _by_onnxruntime(network: Exported) -> list[np.ndarray]:
    """Near to how the network is written: without the optimizer, and with every result asked for.

    Else onnxruntime computes chains of operators that it has no float16 code for in float32, and rounds once
    where the network rounds ten times. It does so in part even here: a Cast to float16 in front of such an
    operator is left out. `onnx.reference` rounds every result, and is 3 times as far off for phi3 and gemma2.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    model = onnx.ModelProto()
    model.CopyFrom(network.model)
    wanted = [output.name for output in model.graph.output]
    results = {name for node in model.graph.node for name in node.output if name}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(results - set(wanted)))
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    found = dict(
        zip((o.name for o in session.get_outputs()), session.run(None, dict(network.feeds)), strict=True)
    )
    return [found[name] for name in wanted]


def _by_hybridc(network: Exported, target: str) -> tuple[Sequence[np.ndarray], int]:
    """Results, and how many kernels run on the GPU: as many as half the memory that all need allows."""
    shapes = {name: array.shape for name, array in network.feeds.items()}
    options: dict[str, Any] = {"target": target, "shapes": shapes, "plan_seconds": 0.05, "threads": 1}
    has_gpu = target.startswith("cuda")
    if has_gpu:
        options |= {"gpu_memory": "50%", "machine": EAGER_GPU}
    with tempfile.TemporaryDirectory(prefix="hybridc-exports-") as folder:
        path = Path(folder) / "network.hyb"
        compiled = hybridc.compile(network.model, path, cache=False, **options)
        with hybridc.load(path, emulate_gpu=EMULATED_GPU if has_gpu else None) as session:
            found = session.run(None, dict(network.feeds))
    return found, _gpu_kernels(compiled)


def _gpu_kernels(compiled: Compiled) -> int:
    steps = compiled.plan.steps if compiled.plan else ()
    return sum(isinstance(step, Run) and step.device is Device.GPU for step in steps)
