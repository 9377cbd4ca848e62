"""The CUDA C of a network's kernels as an older hybridc makes it, which has no model of their times.

    PYTHONPATH=CHECKOUT python -P checkout_kernels.py model.onnx > kernels.json

Runs in a process of its own, whose `hybridc` is the one in CHECKOUT: it follows that code's modules, as of
commit 51b395f. Prints `{"source": TEXT, "functions": [{"name", "calls", "launches": [{"name", "grid",
"block", "buffers"}]}]}`, buffers in bytes.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.tirx.build import codegen_build, split_host_device_mods

from hybridc import emulator
from hybridc.compiler import import_model
from hybridc.ir import Device
from hybridc.ir.graph import dtype_bits
from hybridc.options import CompileOptions
from hybridc.passes.lower import cuda_target
from hybridc.passes.pipeline import run_stages
from hybridc.progress import Silent
from hybridc.targets import parse_target

TARGET = "cuda+avx2"
"""That code schedules for every GPU alike."""


def main(path: Path) -> None:
    options = CompileOptions(target=parse_target(TARGET))
    done = run_stages(import_model(path, options)[1], Silent(), stop_after="graph")
    calls = Counter(k.function for k in done.graph.kernels if Device.GPU in k.devices)
    functions = {name: done.scheduled[name, Device.GPU].function for name in calls}
    emulator.preload()  # TVM prints CUDA C only where a driver can be loaded, a stub will do
    target = cuda_target(options.target)
    named = {name: f.with_attr("global_symbol", name) for name, f in functions.items()}
    bound = tirx.transform.BindTarget(target)(tvm.IRModule(named))
    pipeline, _, finalize = tirx.get_default_tir_pipeline(target)
    [module] = split_host_device_mods(pipeline(bound))[1].values()
    module = finalize()(module)
    launches: dict[str, list[dict[str, Any]]] = {name: [] for name in functions}
    for variable, function in sorted(module.functions.items(), key=lambda item: item[0].name_hint):
        name = variable.name_hint
        owner = max((f for f in functions if name.startswith(f"{f}_kernel")), key=len)
        launches[owner].append({"name": name, **launch_of(function, functions[owner])})
    found = [{"name": name, "calls": calls[name], "launches": launches[name]} for name in functions]
    print(json.dumps({"source": source_of(module), "functions": found}))


def launch_of(function: tirx.PrimFunc, owner: tirx.PrimFunc) -> dict[str, Any]:
    """Blocks, threads, and the buffers of a launch's parameters, which are named after those of `owner`."""
    sizes = {f"{p.name}_ptr": size_of(p) for p in owner.params}
    extents: dict[str, int] = {}

    def note(attribute: tirx.AttrStmt) -> None:
        if attribute.attr_key == "thread_extent":
            extents[attribute.node.thread_tag] = int(attribute.value)

    tvm_ffi.structural_walk(function.body, (tirx.AttrStmt, note))
    grid, block = ([extents.get(f"{kind}.{axis}", 1) for axis in "xyz"] for kind in ("blockIdx", "threadIdx"))
    return {"grid": grid, "block": block, "buffers": [sizes[p.name] for p in function.params]}


def size_of(parameter: Any) -> int:
    return math.prod(int(extent) for extent in parameter.shape) * dtype_bits(str(parameter.dtype)) // 8


def source_of(module: tvm.IRModule) -> str:
    sources: list[str] = []

    def note(source: str) -> bytes:
        sources.append(str(source))
        return b"\x7fELF" + bytes(60)  # a stand-in for an image

    tvm_ffi.register_global_func("tvm_callback_cuda_compile", note, override=True)
    first = next(iter(module.functions.values()))
    codegen_build(module, first.attrs["target"])
    return sources[0]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
