"""Networks at sizes for tests of training: their losses, batches and gradients, compiled and by PyTorch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor

from hybridc.compiler import compile_model
from hybridc.frontend import read_model
from hybridc.options import CompileOptions
from hybridc.passes.training.spec import NEW, TrainingSpec, parse_loss
from hybridc.passes.training.step import training_programs
from hybridc.runtime import Session
from hybridc.targets import parse_target
from tests.support.light_models import random_feeds
from tests.support.torch_reference import TorchReference

DISTINCT_BATCHES = 5
CANDIDATES = 20
"""Batches of which gradients are compared on the one that rounding matters least for."""

TORCH_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax_cross_entropy": torch.nn.functional.cross_entropy,
    "mse": torch.nn.functional.mse_loss,
}


@dataclass(frozen=True, slots=True)
class Case:
    """A network at a size, and its loss: for each output a kind and a weight."""

    arguments: Mapping[str, Any]
    losses: Mapping[str, tuple[str, float]] = field(
        default_factory=lambda: {"logits": ("softmax_cross_entropy", 1.0)}
    )

    @property
    def loss(self) -> str:
        if len(self.losses) == 1:
            return next(iter(self.losses.values()))[0]
        return "+".join(f"{weight}*{kind}({output})" for output, (kind, weight) in self.losses.items())

    def torch_loss(self, outputs: Mapping[str, Tensor], targets: Mapping[str, np.ndarray]) -> Tensor:
        """`targets` have the names of the compiled step's inputs."""
        total = torch.zeros(())
        for output, (kind, weight) in self.losses.items():
            target = torch.from_numpy(targets[self.target(output)])
            target = target.to(outputs[output].dtype) if target.is_floating_point() else target
            total = total + weight * TORCH_LOSSES[kind](outputs[output], target)
        return total

    def target(self, output: str) -> str:
        return "target" if len(self.losses) == 1 else f"target_{output}"

    def targets(self, model: onnx.ModelProto, seed: int) -> dict[str, np.ndarray]:
        """Random classes, or normal numbers shaped like the output."""
        random = np.random.default_rng(seed)
        found: dict[str, np.ndarray] = {}
        shapes = {o.name: [d.dim_value for d in o.type.tensor_type.shape.dim] for o in model.graph.output}
        for output, (kind, _) in self.losses.items():
            shape = shapes[output]
            if kind == "softmax_cross_entropy":
                found[self.target(output)] = random.integers(0, shape[1], (shape[0], *shape[2:]))
            else:
                found[self.target(output)] = random.standard_normal(shape, np.float32)
        return found


TWO_OUTPUTS = {"track": ("mse", 1.0), "peaks": ("mse", 0.5)}
CASES: dict[str, Case] = {
    "mlp": Case({"batch": 16, "inputs": 64, "hidden": 128}),
    "cifar_quick": Case({"batch": 8}),
    "alexnet": Case({"batch": 4, "size": 99, "width": 24, "hidden": 128, "classes": 20}),
    "vgg11": Case({"batch": 4, "size": 32, "width": 16, "hidden": 128, "classes": 20}),
    "googlenet": Case({"batch": 4, "size": 64, "width": 16, "classes": 20}),
    "resnet18": Case({"batch": 8, "size": 64, "width": 16, "classes": 20}),
    "resnet50": Case({"batch": 8, "size": 64, "width": 16, "classes": 20}),
    "unet": Case({"batch": 2, "size": 32, "width": 8, "levels": 3, "batch_norm": True}),
    "atacworks": Case({"batch": 2, "length": 600, "kernel": 25, "dilation": 4}, TWO_OUTPUTS),
    "encoder": Case({"batch": 4, "tokens": 16, "layers": 2, "hidden": 64, "heads": 4, "vocabulary": 100}),
}


def batches(model: onnx.ModelProto, case: Case) -> list[dict[str, np.ndarray]]:
    return [random_feeds(model, i) | case.targets(model, i) for i in range(DISTINCT_BATCHES)]


def smooth_feeds(model: onnx.ModelProto, case: Case) -> dict[str, np.ndarray]:
    """The batch, of several, whose ReLUs get nothing that rounding could make positive or negative.

    In a small network such an element is a good part of a gradient. They are told by PyTorch alone: how near
    to zero its float64 numbers come, as a multiple of what its float32 numbers differ from them by.
    """

    def margin(feeds: dict[str, np.ndarray]) -> float:
        true, single = (_relu_inputs(model, feeds, dtype) for dtype in (torch.float64, torch.float32))
        return min(
            float(x.abs().min() / (x - y).abs().max().clamp_min(1e-30))
            for x, y in zip(true, single, strict=True)
        )

    candidates = [random_feeds(model, i) | case.targets(model, i) for i in range(CANDIDATES)]
    return max(candidates, key=margin) if _has_relus(model) else candidates[0]


def _has_relus(model: onnx.ModelProto) -> bool:
    return any(node.op_type == "Relu" for node in model.graph.node)


def _relu_inputs(model: onnx.ModelProto, feeds: dict[str, np.ndarray], dtype: torch.dtype) -> list[Tensor]:
    reference = TorchReference(model, dtype=dtype)
    reference({i.name: feeds[i.name] for i in model.graph.input})
    return [x.double() for x in reference.relu_inputs]


def compiled_gradients(
    model: onnx.ModelProto, case: Case, feeds: Mapping[str, np.ndarray], target: str
) -> tuple[float, dict[str, np.ndarray]]:
    """The loss and its gradients: sums of gradient accumulation that begin with zero."""
    spec = TrainingSpec(parse_loss(case.loss), accumulate=2)
    programs = training_programs(read_model(model, parameters=spec.trains), spec)
    assert programs.accumulation is not None
    initial = programs.accumulation.parameters
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gradients.hyb"
        compile_model(programs.accumulation, path, CompileOptions(target=parse_target(target)))
        with Session(path) as session:
            ports = session.artifact.manifest
            given = {**feeds, **initial}
            values = {
                p.name: given[p.name] if p.name in given else np.zeros(p.shape, p.dtype) for p in ports.inputs
            }
            results = dict(zip([p.name for p in ports.outputs], session.run(None, values), strict=True))
    end = f"#sum{NEW}"
    sums = {name.removesuffix(end): value for name, value in results.items() if name.endswith(end)}
    return float(results[programs.loss].reshape(())), sums


def torch_gradients(
    model: onnx.ModelProto, case: Case, feeds: Mapping[str, np.ndarray], dtype: torch.dtype
) -> tuple[float, dict[str, np.ndarray]]:
    """The loss and its gradients, of autograd."""
    reference = TorchReference(model, dtype=dtype)
    inputs = {i.name: feeds[i.name] for i in model.graph.input}
    loss = case.torch_loss(reference(inputs), feeds)
    return loss.item(), reference.gradients(loss)


def relative_errors(ours: Mapping[str, np.ndarray], truth: Mapping[str, np.ndarray]) -> dict[str, float]:
    """`|g - g*| / |g*|` of each parameter, in the Euclidean norm.

    Some gradients are zero but for rounding, as that of the bias of attention's keys, which softmax takes
    away again: they are compared with the largest.
    """
    norms = {name: float(np.linalg.norm(g)) for name, g in truth.items()}
    largest = max(norms.values())
    return {
        name: float(np.linalg.norm(ours[name] - g))
        / (norms[name] if norms[name] > 1e-9 * largest else largest)
        for name, g in truth.items()
    }
