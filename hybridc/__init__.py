"""hybridc: run ONNX models on a GPU too small for them, together with the CPU beside it.

    hybridc.compile("model.onnx", "model.hyb", target="cuda+avx2", gpu_memory="64MiB")
    session = hybridc.load("model.hyb")
    outputs = session.run(None, {"x": x})

and train them there:

    hybridc.compile_training("model.onnx", "step.hyb", loss="softmax_cross_entropy", batch=64)
    session = hybridc.load_training("step.hyb")
    loss = session.step(images, labels)

Names are loaded on first use, so that `import hybridc` costs nothing and `hybridc.load` never loads the
compiler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybridc.errors import HybridcError

if TYPE_CHECKING:
    import onnx

    from hybridc.options import CompileOptions
    from hybridc.results import Compiled, Planned
    from hybridc.runtime import Session
    from hybridc.training.compile import CompiledTraining
    from hybridc.training.session import TrainingSession

__version__ = "0.1.0"
__all__ = ["HybridcError", "compile", "compile_training", "load", "load_training", "plan"]


def compile(
    model: str | Path | bytes | onnx.ModelProto,
    output: str | Path,
    *,
    target: str = "native",
    gpu_memory: str | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    dims: Mapping[str, int] | None = None,
    machine: str | Path | None = None,
    pins: Mapping[str, str] | None = None,
    plan_seconds: float = 10.0,
    host_memory: str | None = None,
    threads: int | None = None,
    winograd: bool = True,
    precision: str = "fp32",
    bf16_error: float = 0.01,
    tune_seconds: float | None = None,
    tune_record: str | Path | None = None,
    profile_kernels: bool = False,
) -> Compiled:
    """Compile an ONNX model to the folder `output`.

    `target` is `[cuda[:ARCH,...]+]ISA`, for example `cuda+avx2`. `gpu_memory` is the budget, bytes with a
    unit (`"64MiB"`) or a percentage of what the model needs entirely on the GPU (`"50%"`); without it there
    is no limit. With several, `"256MiB,1GiB"`, the artifact has a plan for each. `host_memory` limits what a
    run may hold of the host's memory. `shapes` and `dims` fix what the model leaves open: input shapes by
    name, named dimensions. `machine` names a profile, or the file of one, whose speeds the planner weighs.
    `pins` fixes where nodes run, `{"encoder/*": "gpu"}`; `plan_seconds` is the effort to search for a plan.
    `winograd=False` leaves out fast algorithms, whose rounding errors are a few times larger. With
    `precision="bf16"` the CPU rounds factors of products to bf16, where that is measured to change a kernel's
    result by no more than `bf16_error` of it; with `"int8"` it multiplies quantized numbers as integers.
    `tune_seconds` is time to measure tiles of CPU kernels on this machine, `tune_record` a file of such
    measurements. With `profile_kernels` the planner takes times of the kernels that are measured on this
    machine, instead of predictions. Raises HybridcError.
    """
    from hybridc.compiler import compile_model
    from hybridc.options import parse_bytes

    options = replace(
        _options(target, gpu_memory, shapes, dims, machine, pins, plan_seconds),
        host_memory_bytes=None if host_memory is None else parse_bytes(host_memory),
        threads=threads,
        winograd=winograd,
        precision=precision,
        bf16_error=bf16_error,
        tune_seconds=tune_seconds,
        tune_record=None if tune_record is None else Path(tune_record),
        profile_kernels=profile_kernels,
    )
    return compile_model(model, output, options)


def plan(
    model: str | Path | bytes | onnx.ModelProto,
    *,
    target: str = "cuda+avx2",
    gpu_memory: str | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    dims: Mapping[str, int] | None = None,
    machine: str | Path | None = None,
    pins: Mapping[str, str] | None = None,
    plan_seconds: float = 10.0,
) -> Planned:
    """Plan a model without compiling it; arguments as for `compile`. Needs no GPU. Raises HybridcError."""
    from hybridc.compiler import plan_model

    return plan_model(model, _options(target, gpu_memory, shapes, dims, machine, pins, plan_seconds))


def load(
    path: str | Path,
    *,
    threads: int | None = None,
    gpu_memory: str | None = None,
    host_memory: str | None = None,
) -> Session:
    """Load a compiled artifact; `threads` overrides how many cores it uses. Raises HybridcError.

    Of several plans the one of the largest budget that fits the GPU's free memory is taken, or that of the
    largest budget of at most `gpu_memory` (`"1GiB"`). `host_memory` overrides what the artifact was compiled
    with.
    """
    from hybridc.options import parse_bytes
    from hybridc.runtime import load as load_session

    return load_session(
        path,
        threads=threads,
        gpu_memory_bytes=None if gpu_memory is None else parse_bytes(gpu_memory),
        host_memory_bytes=None if host_memory is None else parse_bytes(host_memory),
    )


def compile_training(
    model: str | Path | bytes | onnx.ModelProto,
    output: str | Path,
    *,
    loss: str | None = None,
    optimizer: str = "sgd:lr=0.01",
    batch: int | None = None,
    accumulate: int = 1,
    freeze: Sequence[str] = (),
    target: str = "native",
    gpu_memory: str | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    dims: Mapping[str, int] | None = None,
    machine: str | Path | None = None,
    pins: Mapping[str, str] | None = None,
    plan_seconds: float = 10.0,
    host_memory: str | None = None,
    threads: int | None = None,
) -> CompiledTraining:
    """Compile a training step of an ONNX model to the folder `output`.

    `loss` is such as `"softmax_cross_entropy:label_smoothing=0.1"` or `"2*mse(out1)+l1(out2)"`; None where
    the model's first output is the loss. `optimizer` is such as `"sgd:lr=0.1,momentum=0.9"` or
    `"adamw:lr=1e-3,weight_decay=0.01"`. `batch` gives open batch dimensions a size; `accumulate` parts of a
    batch go through the network one after the other. `freeze` has patterns of the names of parameters that
    stay as they are. The rest is as for `compile`. Raises HybridcError.
    """
    from hybridc.options import parse_bytes
    from hybridc.passes.training.spec import TrainingSpec, parse_loss, parse_optimizer
    from hybridc.training.compile import compile_training as compile_step

    options = replace(
        _options(target, gpu_memory, shapes, dims, machine, pins, plan_seconds),
        host_memory_bytes=None if host_memory is None else parse_bytes(host_memory),
        threads=threads,
    )
    terms = () if loss is None else parse_loss(loss)
    spec = TrainingSpec(terms, parse_optimizer(optimizer), batch, accumulate, tuple(freeze))
    return compile_step(model, output, options, spec)


def load_training(
    path: str | Path,
    *,
    threads: int | None = None,
    gpu_memory: str | None = None,
    host_memory: str | None = None,
    seed: int = 0,
) -> TrainingSession:
    """Load a compiled training step; `seed` is what dropout draws from, the rest as for `load`.

    Raises HybridcError.
    """
    from hybridc.options import parse_bytes
    from hybridc.training.session import TrainingSession

    return TrainingSession(
        path,
        threads=threads,
        gpu_memory_bytes=None if gpu_memory is None else parse_bytes(gpu_memory),
        host_memory_bytes=None if host_memory is None else parse_bytes(host_memory),
        seed=seed,
    )


def _options(
    target: str,
    gpu_memory: str | None,
    shapes: Mapping[str, tuple[int, ...]] | None,
    dims: Mapping[str, int] | None,
    machine: str | Path | None,
    pins: Mapping[str, str] | None,
    plan_seconds: float,
) -> CompileOptions:
    from hybridc.machine import load_machine
    from hybridc.options import CompileOptions, parse_budgets, parse_pin
    from hybridc.targets import parse_target

    return CompileOptions(
        target=parse_target(target),
        gpu_memory=() if gpu_memory is None else parse_budgets(gpu_memory),
        shapes=tuple(
            (name, tuple(s) if isinstance(s, list) else s) for name, s in dict(shapes or {}).items()
        ),
        dims=tuple(dict(dims or {}).items()),
        machine=load_machine() if machine is None else load_machine(machine),
        pins=tuple(parse_pin(f"{name}={device}") for name, device in dict(pins or {}).items()),
        plan_seconds=plan_seconds,
    )
