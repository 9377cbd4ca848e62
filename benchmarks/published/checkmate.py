"""Checkmate's largest batch of VGG19 at 16 GB (Jain et al., MLSys 2020), and ours with its costs.

A training step is a forward kernel for each Keras layer, a loss, and a gradient for each layer, as in the
authors' repository (`checkmate/tf2_keras/extraction.py`): a gradient reads the layer's result, its readers'
results and their gradients. A layer costs its multiplications, its gradient twice as many, pooling nothing;
results are counted in float32, and parameters and their gradients are taken off the 16 GB beforehand. Wanted
is the largest batch that fits with at most one more forward pass of costs. There is no CPU and, for all that
matters, no link: results are kept or made again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hybridc.errors import PlanError
from hybridc.ir import Device, Graph, Kernel, Role, Tensor
from hybridc.machine import Link, Machine, Processor
from hybridc.passes.planner.make_plans import make_plan
from hybridc.passes.planner.model.context import Effort

PUBLISHED_BATCH = 289
"""Of their integer programme."""
MEMORY_BYTES = 16_000_000_000
FLOAT_BYTES = 4
FORWARD_US = 1e6
"""What all forward kernels take together: costs are relative."""
BLOCKS = ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512))
"""Of VGG19: convolutions and their channels, each block halving the image behind it."""
SLOWER = 1 + 1e-6


@dataclass(frozen=True, slots=True)
class Layer:
    """Of one sample: elements of the result, and multiplications."""

    elements: int
    cost: int
    parameters: int = 0


def vgg19(edge: int = 224, channels: int = 3) -> tuple[Layer, ...]:
    """The Keras layers behind the input; a convolution's activation is part of it."""
    layers = []
    for count, filters in BLOCKS:
        for _ in range(count):
            elements = edge * edge * filters
            layers.append(Layer(elements, 9 * channels * elements, (9 * channels + 1) * filters))
            channels = filters
        edge //= 2
        layers.append(Layer(edge * edge * filters, 0))
    width = edge * edge * channels
    layers.append(Layer(width, 0))
    for rows in (4096, 4096, 1000):
        layers.append(Layer(rows, width * rows, (width + 1) * rows))
        width = rows
    return tuple(layers)


def training(layers: tuple[Layer, ...], batch: int) -> tuple[Graph, dict[tuple[str, Device], float]]:
    """The step of a chain of layers for a batch, and what its kernels take on the GPU."""
    unit_us = FORWARD_US / sum(layer.cost for layer in layers)
    tensors: list[Tensor] = []
    kernels: list[Kernel] = []
    times_us: dict[tuple[str, Device], float] = {}

    def kernel(
        name: str, inputs: list[str], size_bytes: int, us: float, role: Role = Role.ACTIVATION
    ) -> None:
        tensors.append(Tensor(name, (size_bytes,), "uint8", role))
        kernels.append(
            Kernel(name, name, tuple(inputs), (name,), (), 0, size_bytes, 0, 0, (Device.GPU,), (name,))
        )
        times_us[name, Device.GPU] = us

    last = len(layers) - 1
    for i, layer in enumerate(layers):
        size_bytes = FLOAT_BYTES * batch * layer.elements
        kernel(f"f{i}", [f"f{i - 1}"] if i else [], size_bytes, unit_us * layer.cost)
    kernel("loss", [f"f{last}"], FLOAT_BYTES * batch, 0.0)
    for i in range(last, -1, -1):
        behind = ["loss"] if i == last else [f"f{i + 1}", f"g{i + 1}"]
        size_bytes = FLOAT_BYTES * batch * layers[i].elements
        kernel(f"g{i}", [f"f{i}", *behind], size_bytes, 2 * unit_us * layers[i].cost)
    # the host asks for something, which costs nothing to copy
    kernel("end", ["g0"], 0, 0.0, Role.OUTPUT)
    return Graph(tuple(kernels), tuple(tensors), (), ("end",)), times_us


def step_us(layers: tuple[Layer, ...], batch: int, seconds: float) -> float:
    """Predicted time of our plan; infinite where none fits."""
    graph, times_us = training(layers, batch)
    fixed_bytes = 2 * FLOAT_BYTES * sum(layer.parameters for layer in layers)
    machine = Machine(
        "v100",
        Processor("gpu", 1, 1e9, 0, MEMORY_BYTES),
        Processor("cpu", 1, 1e9, 0, MEMORY_BYTES),
        Link(1e-6, 1e-6, 0),
        measured_us=times_us,
    )
    try:
        plan = make_plan(
            graph, machine, MEMORY_BYTES - fixed_bytes, (Device.GPU, Device.CPU), effort=Effort(seconds)
        )
    except PlanError:
        return math.inf
    return plan.makespan_us


def largest_batch(layers: tuple[Layer, ...], forward_passes: float, seconds: float) -> int:
    """The largest batch whose step costs at most so many forward passes, by bisection; 0 if there is none."""
    fits, too_large = 0, 1
    while step_us(layers, too_large, seconds) <= forward_passes * FORWARD_US * SLOWER:
        fits, too_large = too_large, 2 * too_large
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        if step_us(layers, middle, seconds) <= forward_passes * FORWARD_US * SLOWER:
            fits = middle
        else:
            too_large = middle
    return fits


def rows(seconds: float) -> Iterator[dict[str, Any]]:
    """Their batch and ours, and ours at no extra cost: what is made again costs nothing, as pooling."""
    layers = vgg19()
    yield {
        "experiment": "Checkmate VGG19, largest batch at 16 GB with its costs",
        "unit": "samples",
        "published": PUBLISHED_BATCH,
        "ours": largest_batch(layers, 4.0, seconds),
        "ours_at_no_extra_cost": largest_batch(layers, 3.0, seconds),
    }
