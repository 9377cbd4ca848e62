"""Every distinct GPU kernel of a model by itself, beside its prediction and cuDNN or cuBLAS.

    python -m gpu.kernels MODEL.onnx --target cuda:sm_90+avx2 --machine PROFILE.json [--precision fp16]

Calls are queued up behind a kernel that only waits, so that events on the stream show the GPU's own time
and not how fast calls are issued; `issued_us` is the time of a call in a loop without that, which is what
`--profile-kernels` and `machine calibrate` measure. A call finds none of its arguments in a cache. The
library's time is that of the convolution or product alone, in float32 without TF32, or with
`--precision fp16` in float16 with channels last, and without the epilogue that our kernel has; cuDNN chooses
its fastest algorithm. Prints a JSON object a kernel, those that count most
first. With `--emulate-gpu` every kernel runs once, and nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx
from onnx import helper, shape_inference

from hybridc import emulator

CALLS = 20
ROUNDS = 7
WAIT_CYCLES = 20_000_000
"""Of the kernel in front: ten milliseconds, more than issuing the calls takes."""
CACHE_BYTES = 1 << 27
MAX_SETS = 64

Call = Callable[[int], object]
"""Takes the number of a turn, which chooses arguments."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--machine")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--emulate-gpu", type=int, metavar="BYTES")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.emulate_gpu:
        emulator.start(arguments.emulate_gpu, compute_capability=(9, 0))
    else:
        emulator.preload()
    for row in kernel_rows(arguments):
        print(json.dumps(row), flush=True)


def kernel_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    import tvm

    from hybridc.codegen.cuda import compile_fatbin
    from hybridc.codegen.library import build_gpu_functions
    from hybridc.compiler import import_model
    from hybridc.ir import Device
    from hybridc.machine import load_machine
    from hybridc.options import CompileOptions
    from hybridc.passes.pipeline import FROM_FUSED, run_stages
    from hybridc.passes.planner.model.cost import kernel_us
    from hybridc.passes.stages.channels_last import with_channels_last
    from hybridc.progress import NullProgress
    from hybridc.targets import parse_target
    from hybridc.tuning.measure import Arguments

    target = parse_target(arguments.target)
    machine = load_machine(arguments.machine) if arguments.machine else load_machine()
    options = CompileOptions(target=target, machine=machine, precision=arguments.precision)
    network = import_model(arguments.model, options)[1]
    # all that can be stored in 16 bits: times do not depend on what the measured errors would exclude
    job = replace(network.job, rounding=lambda _, functions: dict.fromkeys(functions, 0.0))
    done = run_stages(replace(network, job=job), NullProgress(), stop_after="estimate")
    # what the planner takes where the GPU has memory for all kernels
    done = with_channels_last(done, FROM_FUSED.run, NullProgress()) or done
    assert done.graph is not None and done.scheduled is not None
    kernels = {k.function: k for k in reversed(done.graph.kernels) if Device.GPU in k.devices}
    calls = Counter(kernel.function for kernel in done.graph.kernels)
    functions = {name: done.scheduled[name, Device.GPU].function for name in kernels}
    compile_cuda = partial(compile_fatbin, architectures=target.cuda_architectures)

    def compile_for_emulator(source: str) -> bytes:
        image = compile_cuda(source)
        emulator.provide_kernels(emulator.image_key(image), source)
        return image

    library = build_gpu_functions(
        functions, target, compile_for_emulator if arguments.emulate_gpu else compile_cuda
    )
    nodes, shapes = _nodes(arguments.model)
    rows = []
    for name, kernel in kernels.items():
        sets = Arguments(done.scheduled[name, Device.GPU], device=tvm.cuda(0)).sets_of(
            done.scheduled[name, Device.GPU]
        )
        function = library[name]

        def call(turn: int, function: Any = function, sets: Any = sets) -> object:
            return function(*sets[turn % len(sets)])

        row: dict[str, Any] = {
            "kernel": name,
            "rule": done.scheduled[name, Device.GPU].rule,
            "family": kernel.family,
            "calls": calls[name],
            "flops": kernel.flops,
            "bytes_moved": kernel.bytes_moved,
            "predicted_us": round(kernel_us(kernel, done.machine, Device.GPU), 2),
            "origins": list(kernel.origins)[:4],
        }
        if arguments.emulate_gpu:
            call(0)
        else:
            row |= _timed(call, row, machine.gpu.peak_gflops, machine.gpu.bandwidth_gb_s)
            own_nodes = [nodes[o] for o in kernel.origins if o in nodes]
            row |= _library(row, own_nodes, shapes, is_half=arguments.precision == "fp16")
        rows.append(row)
    return sorted(rows, key=lambda row: -row["calls"] * row.get("us", row["predicted_us"]))


def _timed(call: Call, row: dict[str, Any], peak_gflops: float, bandwidth_gb_s: float) -> dict[str, Any]:
    us = gpu_us(call)
    return {
        "us": round(us, 2),
        "issued_us": round(issued_us(call), 2),
        "percent_of_peak": round(row["flops"] / us / peak_gflops / 10, 1),
        "percent_of_bandwidth": round(row["bytes_moved"] / us / bandwidth_gb_s / 10, 1),
    }


def _library(
    row: dict[str, Any],
    nodes: Sequence[onnx.NodeProto],
    shapes: dict[str, tuple[int, ...]],
    *,
    is_half: bool,
) -> dict[str, Any]:
    """Time of the same convolution or product in PyTorch, if the kernel has exactly one."""
    products = [node for node in nodes if node.op_type in ("Conv", "MatMul", "Gemm")]
    if len(products) != 1 or not all(name in shapes for name in products[0].input[:2]):
        return {}
    us = gpu_us(_product(products[0], shapes, is_half=is_half))
    return {"library_us": round(us, 2), "library_over_ours": round(us / row["us"], 3)}


def _product(node: onnx.NodeProto, shapes: dict[str, tuple[int, ...]], *, is_half: bool) -> Call:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    sizes = [shapes[name] for name in node.input[:2]]
    count = -(-CACHE_BYTES // max(1 << 17, sum(4 * torch.Size(size).numel() for size in sizes)))

    def drawn(size: tuple[int, ...]) -> torch.Tensor:
        values = torch.rand(size, device="cuda") + 0.5
        if not is_half:
            return values
        return values.half().contiguous(
            memory_format=torch.channels_last if len(size) == 4 else torch.contiguous_format
        )

    sets = [[drawn(size) for size in sizes] for _ in range(min(count, MAX_SETS))]
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type == "Conv":
        rank = len(sizes[0]) - 2
        before = attributes.get("pads", [0] * 2 * rank)[:rank]
        options: dict[str, Any] = {
            "stride": attributes.get("strides", [1] * rank),
            "padding": before,
            "dilation": attributes.get("dilations", [1] * rank),
            "groups": attributes.get("group", 1),
        }

        def convolve(turn: int) -> torch.Tensor:
            data, weight = sets[turn % len(sets)]
            return torch.nn.functional.conv2d(data, weight, **options)

        return convolve
    if attributes.get("transB"):
        return lambda turn: torch.nn.functional.linear(*sets[turn % len(sets)])
    return lambda turn: torch.matmul(*sets[turn % len(sets)])


def _nodes(path: Path) -> tuple[dict[str, onnx.NodeProto], dict[str, tuple[int, ...]]]:
    """Nodes by name, and the shapes of all values."""
    graph = shape_inference.infer_shapes(onnx.load(path)).graph
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for value in [*graph.input, *graph.value_info, *graph.output]:
        shapes[value.name] = tuple(d.dim_value for d in value.type.tensor_type.shape.dim)
    return {node.name: node for node in graph.node}, shapes


def gpu_us(call: Call) -> float:
    """Microseconds that the GPU takes for a call: median of some rounds of calls that follow each other."""
    import torch

    def round_us() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(WAIT_CYCLES)
        begin.record()
        for turn in range(CALLS):
            call(turn)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / CALLS

    for turn in range(CALLS):  # algorithms are chosen, code is loaded
        call(turn)
    return statistics.median(round_us() for _ in range(ROUNDS))


def issued_us(call: Call) -> float:
    """Microseconds of a call by the host's clock, of some that follow each other."""
    import torch

    def round_us() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for turn in range(CALLS):
            call(turn)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e6 / CALLS

    return statistics.median(round_us() for _ in range(ROUNDS))


if __name__ == "__main__":
    main()
