"""One engine of `conv1d.py`: python benchmarks/conv1d/engines.py ENGINE ISA THREADS

Reads requests and writes answers, a line of JSON each, until its input ends.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

CACHE_BYTES = 1 << 27
"""Arguments that calls rotate through, as for our kernels."""
LEAST_RUNS = 5
FAST = "fft_"
"""Rules of fast algorithms."""
Dimensions = tuple[int, int, int, int, int]
"""Channels, filters, filter width, dilation, outputs."""


class Engine(Protocol):
    def prepare(self, shape: Dimensions, operations: Sequence[str]) -> None: ...

    def answer(self, shape: Dimensions, operation: str, seconds: float, direct: bool) -> dict[str, Any]: ...


def main() -> None:
    name, isa, threads = sys.argv[1:]
    warnings.simplefilter("ignore")
    engine = ENGINES[name](isa, int(threads))
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        if "prepare" in request:
            engine.prepare(tuple(request["prepare"]), request["operations"])
        else:
            answer = engine.answer(
                tuple(request["shape"]), request["operation"], request["seconds"], request["direct"]
            )
        print(json.dumps(answer), flush=True)


def array_shapes(shape: Dimensions) -> tuple[tuple[int, ...], ...]:
    """Of data, weight and output."""
    channels, filters, width, dilation, outputs = shape
    return (1, channels, outputs + (width - 1) * dilation), (filters, channels, width), (1, filters, outputs)


@lru_cache(maxsize=1)  # rounds ask for the same ones
def random_sets(shapes: tuple[tuple[int, ...], ...]) -> list[list[np.ndarray]]:
    """Sets of arrays, more of them than caches hold; at most a few hundred."""
    size = sum(4 * int(np.prod(shape)) for shape in shapes)
    count = min(-(-CACHE_BYTES // max(size, 1 << 17)), 1024)
    values = np.random.default_rng(0).uniform(0.5, 1.5, 1 << 16).astype(np.float32)
    return [[np.resize(values, shape) for shape in shapes] for _ in range(count)]


def times_ms(calls: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Milliseconds of calls in turn, the first one not counted."""
    calls[0]()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < LEAST_RUNS or time.perf_counter() < end:
        call = calls[(len(times) + 1) % len(calls)]
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return times


# -------------------------------------------------------------------------------------------- hybridc


class Hybridc:
    """Kernels as the compiler makes them: of a convolution with constant weights, of a transposed one with
    weights known at run time, which is what training makes of the gradient of data, and of weights. In bf16
    where the instruction set has it."""

    def __init__(self, isa: str, threads: int) -> None:
        from hybridc.targets import ISAS, Target
        from hybridc.tuning.measure import use_threads

        use_threads(threads)
        self.isa, self.threads, self.target = ISAS[isa], threads, Target((), ISAS[isa])
        self._kernels: dict[tuple[Any, ...], tuple[str, list[tuple[Any, Any]]]] = {}
        self._calls = lru_cache(maxsize=2)(self._make_calls)

    def prepare(self, shape: Dimensions, operations: Sequence[str]) -> None:
        from hybridc.tuning.measure import compiled

        for operation in operations:
            for direct in (False, True):
                found = self._scheduled(shape, operation, direct)
                kernels = [(compiled(scheduled, self.isa), scheduled) for scheduled in found]
                self._kernels[shape, operation, direct] = found[-1].rule, kernels
                if not found[-1].rule.startswith(FAST):  # then both are the same
                    self._kernels[shape, operation, True] = found[-1].rule, kernels
                    break

    def answer(self, shape: Dimensions, operation: str, seconds: float, direct: bool) -> dict[str, Any]:
        from hybridc.calibrate.peaks import peak_gflops

        calls = self._calls(shape, operation, direct)
        before = peak_gflops(self.isa, self.threads)
        times = times_ms(calls, seconds)
        peak = max(before, peak_gflops(self.isa, self.threads))
        return {"times_ms": times, "rule": self._kernels[shape, operation, direct][0], "peak_gflops": peak}

    def _make_calls(self, shape: Dimensions, operation: str, direct: bool) -> list[Callable[[], None]]:
        """Each runs all kernels of an operation, on arguments of its own."""
        from hybridc.tuning.measure import Arguments

        _, kernels = self._kernels[shape, operation, direct]
        sets = [Arguments(scheduled).sets_of(scheduled) for _, scheduled in kernels]

        def call(turn: int) -> Callable[[], None]:
            def run() -> None:
                for (kernel, _), own in zip(kernels, sets, strict=True):
                    kernel(*own[turn % len(own)])

            return run

        return [call(turn) for turn in range(max(map(len, sets)))]

    def _scheduled(self, shape: Dimensions, operation: str, direct: bool) -> list[Any]:
        from hybridc.ir import Device
        from hybridc.schedules.rule import Request
        from hybridc.schedules.select import schedule

        if operation == "backward_weight":
            request = Request(_weight_gradient(shape), frozenset(), self.target, winograd=not direct)
            return [schedule(request, Device.CPU)]
        make = forward_model if operation == "forward" else backward_data_model
        return self._of_model(make(shape), direct)

    def _of_model(self, model: onnx.ModelProto, direct: bool) -> list[Any]:
        """Its scheduled kernels, in order."""
        from hybridc.ir import Device
        from hybridc.options import BF16, FP32, CompileOptions
        from hybridc.passes.import_model import import_model
        from hybridc.passes.pipeline import run_stages
        from hybridc.progress import NullProgress

        precision = BF16 if self.isa.has_bf16 else FP32
        options = CompileOptions(
            target=self.target, threads=self.threads, precision=precision, fast_algorithms=not direct
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            onnx.save(model, path)
            start = import_model(path, options)[1]
            job = replace(start.job, rounding=lambda _, found: dict.fromkeys(found, 0.0))
            start = replace(start, job=job)
            done = run_stages(start, NullProgress(), stop_after="graph")
        return [done.scheduled[kernel.function, Device.CPU] for kernel in done.graph.kernels]


def _weight_gradient(shape: Dimensions) -> Any:
    from tvm import relax

    from hybridc.passes.training.kernels.convolution import Window, convolution_weight_gradient

    data, weight, output = array_shapes(shape)
    x, dy = (relax.Var(name, relax.TensorType(s, "float32")) for name, s in (("x", data), ("dy", output)))
    return convolution_weight_gradient(x, dy, Window((1,), (0,), (0,), (shape[3],)), weight[2:])


def forward_model(shape: Dimensions) -> onnx.ModelProto:
    data, weight, output = array_shapes(shape)
    values = np.random.default_rng(0).normal(size=weight).astype(np.float32)
    return _model("Conv", [("x", data)], ("y", output), shape[3], [numpy_helper.from_array(values, "w")])


def backward_data_model(shape: Dimensions) -> onnx.ModelProto:
    data, weight, output = array_shapes(shape)
    return _model("ConvTranspose", [("dy", output), ("w", weight)], ("dx", data), shape[3], [])


def _model(
    operator: str,
    inputs: Sequence[tuple[str, tuple[int, ...]]],
    output: tuple[str, tuple[int, ...]],
    dilation: int,
    weights: Sequence[onnx.TensorProto],
) -> onnx.ModelProto:
    names = [name for name, _ in inputs] + [weight.name for weight in weights]
    graph = helper.make_graph(
        [helper.make_node(operator, names, [output[0]], dilations=[dilation])],
        operator,
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs],
        [helper.make_tensor_value_info(output[0], TensorProto.FLOAT, output[1])],
        list(weights),
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


# ---------------------------------------------------------------------------------------------- peers


def is_narrow(isa: str) -> bool:
    """Whether peers compute in bf16."""
    from hybridc.targets import ISAS

    return ISAS[isa].has_bf16


class Torch:
    def __init__(self, isa: str, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self._torch = torch
        self._dtype = torch.bfloat16 if is_narrow(isa) else torch.float32

    def prepare(self, shape: Dimensions, operations: Sequence[str]) -> None: ...

    def answer(self, shape: Dimensions, operation: str, seconds: float, direct: bool) -> dict[str, Any]:
        torch, dilation = self._torch, shape[3]
        sets = [
            [torch.from_numpy(array).to(self._dtype) for array in arrays]
            for arrays in random_sets(array_shapes(shape))
        ]
        wanted = [operation == "backward_data", operation == "backward_weight", False]

        def call(x: Any, w: Any, y: Any) -> Callable[[], object]:
            if operation == "forward":
                return lambda: torch.nn.functional.conv1d(x, w, dilation=dilation)
            backward = torch.ops.aten.convolution_backward
            return lambda: backward(y, x, w, None, [1], [0], [dilation], False, [0], 1, wanted)

        with torch.no_grad():
            return {"times_ms": times_ms([call(*arrays) for arrays in sets], seconds)}


class OpenVino:
    """Calls of an inference request whose tensors are set before the clock starts."""

    def __init__(self, isa: str, threads: int) -> None:
        import openvino

        self._openvino = openvino
        self._properties = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "bf16" if is_narrow(isa) else "f32",
            "INFERENCE_NUM_THREADS": threads,
        }
        self._request = cache(self._compile)

    def prepare(self, shape: Dimensions, operations: Sequence[str]) -> None: ...

    def _compile(self, shape: Dimensions) -> Any:
        core = self._openvino.Core()
        model = core.read_model(forward_model(shape).SerializeToString())
        return core.compile_model(model, "CPU", self._properties).create_infer_request()

    def answer(self, shape: Dimensions, operation: str, seconds: float, direct: bool) -> dict[str, Any]:
        request, (data, _, output) = self._request(shape), array_shapes(shape)
        sets = [
            [self._openvino.Tensor(array, shared_memory=True) for array in arrays]
            for arrays in random_sets((data, output))
        ]
        times: list[float] = []
        end = time.perf_counter() + seconds
        while len(times) <= LEAST_RUNS or time.perf_counter() < end:
            x, y = sets[len(times) % len(sets)]
            request.set_input_tensor(x)
            request.set_output_tensor(y)
            start = time.perf_counter()
            request.infer()
            times.append((time.perf_counter() - start) * 1e3)
        return {"times_ms": times[1:]}


ENGINES: dict[str, Callable[[str, int], Engine]] = {
    "hybridc": Hybridc,
    "torch": Torch,
    "openvino": OpenVino,
}

if __name__ == "__main__":
    main()
