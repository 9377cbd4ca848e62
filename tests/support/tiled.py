"""Tiled networks: written by hand, checked against themselves, or compiled through all stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
from tvm import relax

from hybridc.passes import pipeline
from hybridc.passes.phases import ImportedNetwork
from hybridc.passes.program.program import Program, ProgramBuilder, tensor_shape
from hybridc.passes.sequence import Stage
from hybridc.passes.stages.show import show_program
from hybridc.passes.tiling.tile import tile
from hybridc.progress import Progress
from tests.support.programs import drawn, run_llvm
from tests.support.stages import stages_with


class Network:
    """Writes a program with weights drawn as they are asked for."""

    def __init__(self, *shape: int) -> None:
        self.x = relax.Var("x", relax.TensorType(shape, "float32"))
        self.builder = ProgramBuilder([self.x])

    def emit(self, expr: relax.Expr, name: str = "v") -> relax.Var:
        return self.builder.emit(expr, (f"node_{name}",), name)

    def weight(self, *shape: int) -> relax.Var:
        return self.builder.weight(drawn(len(self.builder.weights), *shape) / 8, "w")

    def conv(
        self, x: relax.Var, outputs: int, taps: int = 3, name: str = "conv", **options: int
    ) -> relax.Var:
        """A convolution with bias and ReLU; the size is kept unless there is a stride."""
        weight = self.weight(outputs, tensor_shape(x)[1] // options.get("groups", 1), taps, taps)
        pad = taps // 2
        value = self.emit(relax.op.nn.conv2d(x, weight, padding=(pad, pad), **options), name)
        biased = self.emit(relax.op.add(value, self.weight(1, outputs, 1, 1)), f"{name}_bias")
        return self.emit(relax.op.nn.relu(biased), f"{name}_relu")

    def enlarged(self, x: relax.Var, size: int) -> relax.Expr:
        """Square images, each pixel repeated."""
        how = {"method": "nearest_neighbor", "rounding_method": "floor"}
        return relax.op.image.resize2d(x, (size, size), coordinate_transformation_mode="asymmetric", **how)

    def program(self, *outputs: relax.Var) -> Program:
        return self.builder.finish(list(outputs))


def held_bytes(arrays: Iterable[np.ndarray]) -> int:
    """What arrays hold of memory, of which several may be views."""
    whole = {}
    for array in arrays:
        while isinstance(array.base, np.ndarray):
            array = array.base
        whole[id(array)] = array.nbytes
    return sum(whole.values())


def assert_same_results(after: Program, before: Program) -> None:
    """Both compute the same of a seeded input."""
    [x] = [v for v in before.main.params if v.name not in before.weights]
    value = drawn(99, *tensor_shape(x))
    got = run_llvm(after.module, value, *after.weights.values())
    for result, wanted in zip(got, run_llvm(before.module, value, *before.weights.values()), strict=True):
        scale = max(np.abs(wanted).max(initial=0.0), 1e-3)
        np.testing.assert_allclose(result, wanted, rtol=0, atol=1e-5 * scale)


@contextmanager
def tiled_to(limit_bytes: int) -> Iterator[None]:
    """Within it the compiler cuts up kernels that need more than this, whatever it does otherwise."""

    def run(network: ImportedNetwork, _: Progress) -> ImportedNetwork:
        return replace(network, program=tile(network.program, limit_bytes))

    stages = stages_with(Stage("tiled", run, show_program), after="canonicalize")
    with mock.patch.object(pipeline, "STAGES", stages):
        yield
