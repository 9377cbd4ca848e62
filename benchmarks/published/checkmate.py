"""Checkmate's largest batches at 16 GB (Jain et al., MLSys 2020), and ours with its costs.

A training step is a forward kernel for each Keras layer, a loss, and a gradient for each layer, as in the
authors' repository (branch `mlsys20_artifact`, `remat/tensorflow2/extraction.py`): a gradient reads the
layer's result, its readers' results and their gradients. Costs are those of `extraction_hooks.py`: of a
convolution or product its multiplications, of batch normalization 4 for each element, of an activation or
upsampling 1, of pooling, padding and what only arranges data none; a gradient costs twice as much. Results
are counted in float32, and parameters and their gradients are taken off the 16 GB beforehand. Wanted is the
largest batch that fits with at most one more forward pass of costs. There is no CPU and, for all that
matters, no link, on which a copy takes too long: results are kept or made again.
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

PUBLISHED = {"VGG19": 289}
"""Of their integer programme: `mlsys20_artifact.md` of their repository, which has no others."""
MEMORY_BYTES = 16_000_000_000
FLOAT_BYTES = 4
FORWARD_US = 1e6
"""What all forward kernels take together: costs are relative."""
COPY_US = 2 * FORWARD_US
"""Of any result: a plan with copies is too slow, but not beyond what the search tells apart."""
BLOCKS = ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512))
"""Of VGG19: convolutions and their channels, each block halving the image behind it."""
SLOWER = 1 + 1e-6
CLASSES, SEGMENTS = 1000, 19
"""Of ImageNet, and of the U-Net's Cityscapes."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Of one sample: elements of the result, and its costs."""

    elements: int
    cost: int
    parameters: int = 0
    skipped: int | None = None
    """The layer whose result it reads besides that of the layer before it."""


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
    for rows in (4096, 4096, CLASSES):
        layers.append(Layer(rows, width * rows, (width + 1) * rows))
        width = rows
    return tuple(layers)


def normalized(pixels: int, channels: int) -> tuple[Layer, Layer]:
    """Batch normalization, which has four parameters for a channel, and what follows: an activation."""
    size = pixels * channels
    return Layer(size, 4 * size, 4 * channels), Layer(size, size)


def mobilenet(edge: int = 224) -> tuple[Layer, ...]:
    """MobileNet: a convolution and 13 pairs of a depthwise and a 1x1 convolution, each normalized."""
    padded, edge, channels = 3 * (edge + 1) ** 2, edge // 2, 32
    size = edge * edge * channels
    layers = [Layer(padded, 0), Layer(size, 27 * size, 27 * channels), *normalized(edge * edge, channels)]
    for number, filters in enumerate((64, 128, 128, 256, 256, *[512] * 6, 1024, 1024)):
        if number in (1, 3, 5, 11):
            layers.append(Layer((edge + 1) ** 2 * channels, 0))
            edge //= 2
        size = edge * edge * channels
        layers += [Layer(size, 9 * size, 9 * channels), *normalized(edge * edge, channels)]
        size = edge * edge * filters
        layers += [Layer(size, channels * size, channels * filters), *normalized(edge * edge, filters)]
        channels = filters
    layers += [Layer(channels, 0)] * 3  # mean over pixels, reshape, dropout
    layers.append(Layer(CLASSES, channels * CLASSES, (channels + 1) * CLASSES))
    return (*layers, Layer(CLASSES, 0), Layer(CLASSES, CLASSES))


def unet(height: int = 416, width: int = 608) -> tuple[Layer, ...]:
    """VGG16 without its last block, and upwards again beside the results of its poolings."""
    layers: list[Layer] = []
    pooled: list[tuple[int, int]] = []  # layer, and its channels
    pixels, channels = height * width, 3
    for count, filters in ((2, 64), (2, 128), (3, 256), (3, 512)):
        for _ in range(count):
            size = pixels * filters
            layers.append(Layer(size, 9 * channels * size, (9 * channels + 1) * filters))
            channels = filters
        pixels //= 4
        layers.append(Layer(pixels * channels, 0))
        pooled.append((len(layers) - 1, channels))
    height, width = height // 16, width // 16
    for filters, beside in zip((512, 256, 128, 64), (*reversed(pooled[:3]), None), strict=True):
        layers.append(Layer((height + 2) * (width + 2) * channels, 0))
        size = height * width * filters
        layers.append(Layer(size, 9 * channels * size, (9 * channels + 1) * filters))
        layers.append(normalized(height * width, filters)[0])
        channels = filters
        if beside is not None:
            height, width = 2 * height, 2 * width
            layers.append(Layer(height * width * channels, height * width * channels))
            channels += beside[1]
            layers.append(Layer(height * width * channels, 0, skipped=beside[0]))
    size = height * width * SEGMENTS
    layers.append(Layer(size, 9 * channels * size, (9 * channels + 1) * SEGMENTS))
    return (*layers, Layer(size, 0), Layer(size, size))


def training(layers: tuple[Layer, ...], batch: int) -> tuple[Graph, dict[tuple[str, Device], float]]:
    """The step of layers for a batch, and what its kernels take on the GPU."""
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
    readers: dict[int, list[int]] = {i: [i + 1] for i in range(last)}
    for i, layer in enumerate(layers):
        size_bytes = FLOAT_BYTES * batch * layer.elements
        read = [] if layer.skipped is None else [f"f{layer.skipped}"]
        kernel(f"f{i}", [*([f"f{i - 1}"] if i else []), *read], size_bytes, unit_us * layer.cost)
        if layer.skipped is not None:
            readers[layer.skipped].append(i)
    kernel("loss", [f"f{last}"], FLOAT_BYTES * batch, 0.0)
    for i in range(last, -1, -1):
        behind = ["loss"] if i == last else [f"{kind}{reader}" for reader in readers[i] for kind in "fg"]
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
        Link(1e9, 1e9, COPY_US),
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


NETWORKS = {"VGG19": vgg19, "MobileNet": mobilenet, "U-Net": unet}


def rows(name: str, seconds: float) -> Iterator[dict[str, Any]]:
    """Their batch and ours, and ours at no extra cost: what is made again costs nothing, as pooling."""
    layers = NETWORKS[name]()
    yield {
        "experiment": f"Checkmate {name}, largest batch at 16 GB with its costs",
        "unit": "samples",
        "published": PUBLISHED.get(name),
        "ours": largest_batch(layers, 4.0, seconds),
        "ours_at_no_extra_cost": largest_batch(layers, 3.0, seconds),
        "effort": seconds,
    }
