"""Kernels that stand for their families: layers of common networks, scheduled as those of any model are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx

from hybridc.ir import Device
from hybridc.models.builder import GraphBuilder, Value
from hybridc.options import CompileOptions
from hybridc.passes.import_model import import_model
from hybridc.passes.phases import GraphedNetwork
from hybridc.passes.pipeline import run_stages
from hybridc.progress import NullProgress
from hybridc.schedules.rule import Scheduled
from hybridc.targets import Target


@dataclass(frozen=True, slots=True)
class Subject:
    """A function to be timed, and what its time is predicted from."""

    name: str
    family: str
    flops: int
    bytes_moved: int
    scheduled: Mapping[Device, Scheduled]


def subjects(target: Target, threads: int) -> tuple[Subject, ...]:
    """The distinct functions of `sample_model`, scheduled for each device of the target and so many threads
    of the CPU."""
    options = CompileOptions(target=target, threads=threads)
    _, start = import_model(sample_model().SerializeToString(), options)
    done: GraphedNetwork = run_stages(start, NullProgress(), stop_after="graph")
    by_function = {kernel.function: kernel for kernel in done.graph.kernels}
    return tuple(
        Subject(
            name,
            kernel.family,
            kernel.flops,
            kernel.bytes_moved,
            {d: done.scheduled[name, d] for d in kernel.devices},
        )
        for name, kernel in by_function.items()
    )


def sample_model() -> onnx.ModelProto:
    """One layer after the other, each with an input and an output of its own, so that none is fused.

    There is none of the family `other`: what falls to it has little in common.
    """
    g = GraphBuilder("samples", 0)
    layers = [*_convolutions(g), *_products(g), *_of_memory(g)]
    return g.model(**{f"y{number}": layer for number, layer in enumerate(layers)})


def _input(g: GraphBuilder, *shape: int) -> Value:
    return g.input(g.fresh("x"), shape)


def _convolutions(g: GraphBuilder) -> Iterator[Value]:
    """Of ResNet-50 and MobileNet: pointwise, strided, 3x3, depthwise."""
    yield g.conv(_input(g, 1, 256, 56, 56), 64, 1)
    yield g.conv(_input(g, 1, 512, 7, 7), 2048, 1)
    yield g.conv(_input(g, 1, 3, 224, 224), 64, 7, stride=2, padding=3)
    yield g.conv(_input(g, 1, 128, 56, 56), 128, 3, stride=2, padding=1)
    yield g.conv(_input(g, 1, 64, 56, 56), 64, 3, padding=1)
    yield g.conv(_input(g, 1, 256, 14, 14), 256, 3, padding=1)
    yield g.conv(_input(g, 1, 96, 112, 112), 96, 3, stride=2, padding=1, groups=96)
    yield g.conv(_input(g, 1, 384, 14, 14), 384, 3, padding=1, groups=384)


def _products(g: GraphBuilder) -> Iterator[Value]:
    """Of BERT, and a classifier that reads its weights once."""
    yield g.project(_input(g, 128, 768), 3072)
    yield g.matmul(_input(g, 12, 128, 64), _input(g, 12, 64, 128))
    yield g.gemm(_input(g, 1, 2048), 1000)


def _of_memory(g: GraphBuilder) -> Iterator[Value]:
    """What computes little with each byte."""
    yield g.add(_input(g, 1, 256, 56, 56), _input(g, 1, 256, 56, 56))
    x = _input(g, 1, 96, 112, 112)
    yield g.binary("Mul", x, g.unary("Sigmoid", x))
    yield g.unary("Erf", _input(g, 128, 3072))
    yield g.transpose(_input(g, 1, 128, 12, 64), 0, 2, 1, 3)
    yield g.pool("MaxPool", _input(g, 1, 64, 112, 112), 3, stride=2, padding=1)
    yield g.pool("AveragePool", _input(g, 1, 256, 56, 56), 2, stride=2)
    yield g.layer_norm(_input(g, 128, 768), 1e-5)
    yield g.unary("Softmax", _input(g, 12, 128, 128), axis=-1)
    yield g.global_average_pool(_input(g, 1, 2048, 7, 7))
