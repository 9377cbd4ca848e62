"""Every distinct kernel of a network as hybridc compiles it for a GPU: estimate and closed form side by
side."""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import tvm
import tvm_ffi
from tvm import tirx
from tvm.tirx.build import codegen_build, split_host_device_mods

from gpu_model.ladders import rank_correlation
from gpu_model.single_kernels import SINGLE_KERNELS
from hybridc import emulator, models
from hybridc.codegen.cuda import compile_cubin
from hybridc.codegen.cuda_callback import cuda_compiler
from hybridc.codegen.cuda_functions import corrected, printable
from hybridc.gpu_model.chip import chip_of
from hybridc.gpu_model.estimate import estimate
from hybridc.gpu_model.fast import estimate_fast
from hybridc.gpu_model.kernel import Buffer, Call, Kernel, call, kernels_of
from hybridc.gpu_model.tir import work_of_function
from hybridc.ir import Device
from hybridc.ir import Kernel as IrKernel
from hybridc.ir.graph import dtype_bits
from hybridc.machine import Processor, load_machine
from hybridc.options import FP32, CompileOptions
from hybridc.passes.import_model import import_model
from hybridc.passes.lower.lower import cuda_target
from hybridc.passes.pipeline import FROM_FUSED, run_stages
from hybridc.passes.stages.channels_last import with_channels_last
from hybridc.progress import NullProgress
from hybridc.schedules.cuda.core.launch import lowered_for_gpu
from hybridc.targets import Target, parse_target

PARAMETERS: dict[str, dict[str, Any]] = {"unet": {"size": 256}, "bert": {"tokens": 128}}


@dataclass(frozen=True, slots=True)
class SuiteKernel:
    """A distinct kernel of a network, compiled for a GPU."""

    kernel: IrKernel
    calls: int
    """In a run of the network."""
    rule: str
    function: tirx.PrimFunc
    """As its rule scheduled it."""
    launches: Sequence[Call]


def kernels_of_network(network: str, processor: Processor) -> list[SuiteKernel]:
    """`network` is one of `SINGLE_KERNELS` or a model: `resnet50:16` with a batch, `bert@fp16` stored
    in 16-bit floats, `quantized@int8` multiplied in integers."""
    return kernels_of_model(model_of(network), processor, network.partition("@")[2])


def kernels_of_model(
    model: onnx.ModelProto, processor: Processor, precision: str = "", *, layouts: bool = True
) -> list[SuiteKernel]:
    """The same of a model; without `layouts` all tensors keep those that they have in the model."""
    target, machine = target_of(processor), replace(load_machine(), gpu=processor)
    options = CompileOptions(target=target, precision=precision or FP32, machine=machine)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(model, path, save_as_external_data=True)
        imported = import_model(path, options)[1]
        # all that can be stored in 16 bits: times do not depend on what the measured errors would exclude
        job = replace(imported.job, rounding=lambda _, functions: dict.fromkeys(functions, 0.0))
        done = run_stages(replace(imported, job=job), NullProgress(), stop_after="graph")
        if layouts:  # what the planner takes where the GPU has memory for all kernels
            done = with_channels_last(done, FROM_FUSED.run, NullProgress()) or done
    assert done.graph is not None and done.scheduled is not None
    kernels = {k.function: k for k in done.graph.kernels if Device.GPU in k.devices}
    calls = Counter(kernel.function for kernel in done.graph.kernels)
    scheduled = {f: done.scheduled[f, Device.GPU] for f in kernels}
    launches = launches_of({f: made.function for f, made in scheduled.items()}, target)
    return [
        SuiteKernel(kernel, calls[f], scheduled[f].rule, scheduled[f].function, launches[f])
        for f, kernel in kernels.items()
    ]


def model_of(network: str) -> onnx.ModelProto:
    """Of a name as `kernels_of_network` takes it, whatever its precision."""
    name, _, batch = network.partition("@")[0].partition(":")
    parameters = PARAMETERS.get(name, {}) | ({"batch": int(batch)} if batch else {})
    return SINGLE_KERNELS.get(name, lambda: models.build(name, **parameters))()


def save_network(network: str, path: Path) -> None:
    """The ONNX model of a name as `kernels_of_network` takes it, whatever its precision."""
    onnx.save(model_of(network), path, save_as_external_data=True)


def target_of(processor: Processor) -> Target:
    """Of this GPU alone."""
    return parse_target(f"cuda:{chip_of(processor).architecture}+avx2")


def suite_rows(network: str, processor: Processor) -> Iterator[dict[str, Any]]:
    """A row for each distinct kernel of a network (`kernels_of_network`), then one for all."""
    rows = []
    for made in kernels_of_network(network, processor):
        kernel, launches = made.kernel, made.launches
        found = [estimate(launch, processor) for launch in launches]
        begin = time.perf_counter()
        works = work_of_function(lowered_for_gpu(made.function, cuda_target(target_of(processor))))
        fast = [estimate_fast(work, processor) for work in works]
        us = sum(e.us for e in found)
        rows.append(
            {
                "network": network,
                "gpu": processor.name,
                "kernel": kernel.function,
                "rule": made.rule,
                "calls": made.calls,
                "launches": len(found),
                "us": round(us, 2),
                "fast_us": round(sum(e.us for e in fast), 2),
                "fast_ms": round((time.perf_counter() - begin) * 1e3, 1),
                "bound_by": max(found, key=lambda e: e.us).bound_by,
                "share_of_peak": round(kernel.flops / us / processor.peak_gflops / 1e3, 3),
                "share_of_bandwidth": round(kernel.bytes_moved / us / processor.bandwidth_gb_s / 1e3, 3),
                "waves": round(max(e.waves for e in found), 2),
                "registers": max(launch.kernel.resources.registers for launch in launches),
                "local_bytes": max(launch.kernel.resources.local_bytes for launch in launches),
                "sector_ratio": round(max(e.counters.sector_ratio for e in found), 2),
                "bank_conflict_factor": round(max(e.counters.bank_conflict_factor for e in found), 2),
            }
        )
        yield rows[-1]
    yield summary(network, processor, rows)


def summary(network: str, processor: Processor, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "network": network,
        "gpu": processor.name,
        "kernels": len(rows),
        "us": round(sum(row["calls"] * row["us"] for row in rows), 1),
        "fast_us": round(sum(row["calls"] * row["fast_us"] for row in rows), 1),
        "launch_us": round(sum(row["calls"] * row["launches"] for row in rows) * processor.launch_us, 1),
        "rank_correlation": round(rank_correlation([r["us"] for r in rows], [r["fast_us"] for r in rows]), 3),
    }


def launches_of(functions: Mapping[str, tirx.PrimFunc], target: Target) -> dict[str, list[Call]]:
    """The launches of scheduled functions, compiled for the target's first architecture."""
    emulator.preload()  # TVM prints CUDA C only where a driver can be loaded, a stub will do
    device = _device_module(functions, target)
    kernels = kernels_of(compile_cubin(_source(device), target.cuda_architectures[0]))
    found: dict[str, list[Call]] = {name: [] for name in functions}
    for variable, function in sorted(device.functions.items(), key=lambda item: item[0].name_hint):
        name = variable.name_hint
        owner = max((f for f in functions if name.startswith(f"{f}_kernel")), key=len)
        found[owner].append(_call(kernels[name], function, functions[owner]))
    return found


def _device_module(functions: Mapping[str, tirx.PrimFunc], target: Target) -> tvm.IRModule:
    """What TVM makes CUDA C of: a function for each launch."""
    named = {name: f.with_attr("global_symbol", name) for name, f in functions.items()}
    bound = tirx.transform.BindTarget(cuda_target(target))(tvm.IRModule(printable(named)))
    pipeline, _, finalize = tirx.get_default_tir_pipeline(cuda_target(target))
    _, devices = split_host_device_mods(pipeline(bound))
    [module] = devices.values()
    return finalize()(module)


def _source(module: tvm.IRModule) -> str:
    sources: list[str] = []

    def note(source: str) -> bytes:
        sources.append(corrected(str(source)))
        return b"\x7fELF" + bytes(60)  # a stand-in for an image

    with cuda_compiler(note):
        first = next(iter(module.functions.values()))
        codegen_build(module, first.attrs["target"])
    return sources[0]


def _call(kernel: Kernel, function: tirx.PrimFunc, owner: tirx.PrimFunc) -> Call:
    """A launch of one of the kernels of `owner`, after whose buffers the kernel's parameters are named."""
    sizes = {
        f"{p.name}_ptr": math.prod(int(extent) for extent in p.shape) * dtype_bits(str(p.dtype)) // 8
        for p in owner.params
    }
    extents: dict[str, int] = {}

    def note(attribute: tirx.AttrStmt) -> None:
        if attribute.attr_key == "thread_extent":
            extents[attribute.node.thread_tag] = int(attribute.value)

    tvm_ffi.structural_walk(function.body, (tirx.AttrStmt, note))
    grid, block = (
        tuple(extents.get(f"{kind}.{axis}", 1) for axis in "xyz") for kind in ("blockIdx", "threadIdx")
    )
    return call(kernel, grid, block, [Buffer(sizes[parameter.name]) for parameter in function.params])
