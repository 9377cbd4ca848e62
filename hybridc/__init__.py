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
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from hybridc.errors import HybridcError, exhaustion_told
from hybridc.version import __version__ as __version__

if TYPE_CHECKING:
    import onnx
    from mpi4py.MPI import Comm

    from hybridc.generation import GenerationSession
    from hybridc.keywords import CompileKeywords, PlanOnlyKeywords
    from hybridc.options import Amount, EmulatedGpu
    from hybridc.progress import Callback
    from hybridc.results import Compiled, Planned
    from hybridc.runtime import Session, SessionGroup
    from hybridc.training.compile import CompiledTraining
    from hybridc.training.session import TrainingSession

__all__ = [
    "HybridcError",
    "compile",
    "compile_training",
    "load",
    "load_generation",
    "load_group",
    "load_training",
    "plan",
    "plan_training",
]


@exhaustion_told()
def compile(
    model: str | Path | bytes | onnx.ModelProto,
    output: str | Path | None = None,
    *,
    stop_after: str | None = None,
    dump_ir: str | Path | None = None,
    progress: Callback | None = None,
    **options: Unpack[CompileKeywords],
) -> Compiled:
    """Compile an ONNX model to the folder `output`.

    `hybridc.keywords.CompileKeywords` lists the options, which are those of `hybridc compile`: target,
    budgets, shapes and so on. `stop_after` names the last stage to run; without it `output` is required.
    `dump_ir` is a folder that gets the IR after every stage. `progress(stage, done, total)` is called as the
    compilation goes on, as `hybridc.progress.Callback` says; what it raises ends it, and nothing half written
    is left behind. Raises HybridcError.
    """
    from hybridc.compiler import compile_model
    from hybridc.keywords import options_of
    from hybridc.progress import listener

    folder = None if dump_ir is None else Path(dump_ir)
    known = options_of(options, stop_after=stop_after, dump_ir=folder)
    return compile_model(model, output, known, listener(progress))


@exhaustion_told()
def plan(
    model: str | Path | bytes | onnx.ModelProto,
    *,
    bound_seconds: float | None = None,
    progress: Callback | None = None,
    **options: Unpack[PlanOnlyKeywords],
) -> Planned:
    """Plan a model without compiling it, which needs no GPU.

    `bound_seconds` is effort that tightens the bound on the time of each plan, `Plan.time_bound_us`.
    `hybridc.keywords.PlanOnlyKeywords` lists the options, which are those of `hybridc plan`; the default of
    `target` is `cuda+avx2`. `progress` is as for `compile`. Raises HybridcError.
    """
    from hybridc.compiler import plan_model
    from hybridc.keywords import PlanOnlyKeywords, options_of
    from hybridc.progress import listener

    given = {**options, "target": options.get("target") or "cuda+avx2"}
    return plan_model(
        model, options_of(given, PlanOnlyKeywords), listener(progress), bound_seconds=bound_seconds
    )


@exhaustion_told()
def load(
    path: str | Path,
    *,
    threads: int | None = None,
    gpu_memory: Amount | None = None,
    host_memory: Amount | None = None,
    emulate_gpu: Amount | EmulatedGpu | None = None,
    trusted_keys: str | Path | Sequence[str | Path] | None = None,
) -> Session:
    """Load a compiled artifact; `threads` overrides how many cores it uses. Raises HybridcError.

    Of several plans the one of the largest budget that fits the GPU's free memory is taken, or that of the
    largest budget of at most `gpu_memory`, `"1GiB"` or an integer of bytes. `host_memory` overrides what the
    artifact was compiled with.

    With `emulate_gpu` (`"64MiB"`, or `"64MiB:sm_75"`) the GPU is an emulated one of so much memory and this
    architecture, for machines without one. It is the GPU of the process from then on; another size changes
    it, and DeviceError HC424 says that more is in use.

    With `trusted_keys`, a file with an ed25519 public key or several of them, an owner of one must have
    signed the artifact, with `hybridc sign`: this is checked before any of its code is loaded.
    """
    from hybridc.options import parse_bytes

    _emulate(emulate_gpu)
    from hybridc.runtime import load as load_session

    return load_session(
        path,
        threads=threads,
        gpu_memory_bytes=None if gpu_memory is None else parse_bytes(gpu_memory),
        host_memory_bytes=None if host_memory is None else parse_bytes(host_memory),
        trusted_keys=_listed(trusted_keys),
    )


@exhaustion_told()
def load_generation(
    path: str | Path,
    *,
    threads: int | None = None,
    gpu_memory: Amount | None = None,
    host_memory: Amount | None = None,
    emulate_gpu: Amount | EmulatedGpu | None = None,
    trusted_keys: str | Path | Sequence[str | Path] | None = None,
) -> GenerationSession:
    """Load a compiled decoder, to generate tokens with; the arguments are those of `load`.

    Raises HybridcError, HC590 if the artifact is not a decoder with a cache of keys and values.
    """
    from hybridc.options import parse_bytes

    _emulate(emulate_gpu)
    from hybridc.generation import GenerationSession

    return GenerationSession(
        path,
        threads=threads,
        gpu_memory_bytes=None if gpu_memory is None else parse_bytes(gpu_memory),
        host_memory_bytes=None if host_memory is None else parse_bytes(host_memory),
        trusted_keys=_listed(trusted_keys),
    )


@exhaustion_told()
def load_group(
    paths: Mapping[str, str | Path] | Sequence[str | Path],
    *,
    gpu_memory: Amount,
    runs: Mapping[str, int] | None = None,
    threads: int | None = None,
    host_memory: Amount | None = None,
    emulate_gpu: Amount | EmulatedGpu | None = None,
    trusted_keys: str | Path | Sequence[str | Path] | None = None,
) -> SessionGroup:
    """Load artifacts that take turns in `gpu_memory`, by the names of members or those of their folders.

    `runs` says how often a member runs in a turn, if more than once; `host_memory` is for each of them, the
    rest as for `load`. Raises HybridcError.
    """
    from hybridc.options import parse_bytes

    _emulate(emulate_gpu)
    from hybridc.runtime import SessionGroup

    return SessionGroup(
        paths,
        gpu_memory_bytes=parse_bytes(gpu_memory),
        runs=runs,
        threads=threads,
        host_memory_bytes=None if host_memory is None else parse_bytes(host_memory),
        trusted_keys=_listed(trusted_keys),
    )


def _listed(keys: str | Path | Sequence[str | Path] | None) -> Sequence[str | Path] | None:
    return [keys] if isinstance(keys, str | Path) else keys


@exhaustion_told()
def compile_training(
    model: str | Path | bytes | onnx.ModelProto,
    output: str | Path,
    *,
    loss: str | None = None,
    optimizer: str = "sgd:lr=0.01",
    batch: int | str | range | None = None,
    accumulate: int = 1,
    freeze: Sequence[str] = (),
    clip_norm: float | None = None,
    ema: float | None = None,
    sync_batchnorm: bool = False,
    progress: Callback | None = None,
    **options: Unpack[CompileKeywords],
) -> CompiledTraining:
    """Compile a training step of an ONNX model to the folder `output`.

    `loss` is such as `"softmax_cross_entropy:label_smoothing=0.1"` or `"2*mse(out1)+l1(out2)"`; None where
    the model's first output is the loss. `optimizer` is such as `"sgd:lr=0.1,momentum=0.9"` or
    `"adamw:lr=1e-3,weight_decay=0.01"`. `batch` gives open batch dimensions a size, or with `"1..64"` the
    largest: steps may then have fewer examples, as the last one of an epoch has. `accumulate` parts of a
    batch go through the network one after the other. `freeze` has patterns of the names of parameters that
    stay as they are. `clip_norm` is the largest norm that the gradient of a batch may have, of all parameters
    together; `ema`, such as 0.999, the decay of a moving average of each parameter, which evaluation and
    export use. With `sync_batchnorm` BatchNorm takes the statistics of all parts of a batch, each of which is
    then on a rank of its own. `progress` and the other options are those of `compile`. Raises HybridcError.
    """
    from hybridc.keywords import options_of
    from hybridc.passes.training.spec import read_spec
    from hybridc.progress import listener
    from hybridc.training.compile import compile_training as compile_step

    spec = read_spec(loss, optimizer, batch, accumulate, freeze, clip_norm, ema, sync_batchnorm)
    return compile_step(model, output, options_of(options), spec, listener(progress))


@exhaustion_told()
def plan_training(
    model: str | Path | bytes | onnx.ModelProto,
    *,
    loss: str | None = None,
    optimizer: str = "sgd:lr=0.01",
    batch: int | str | range | None = None,
    accumulate: int = 1,
    freeze: Sequence[str] = (),
    clip_norm: float | None = None,
    ema: float | None = None,
    sync_batchnorm: bool = False,
    bound_seconds: float | None = None,
    progress: Callback | None = None,
    **options: Unpack[PlanOnlyKeywords],
) -> dict[str, Planned]:
    """Plan a training step of an ONNX model without compiling it, which needs no GPU.

    Returns the plans of its programs by name: `step`, `evaluate` and, if there are parts to `accumulate`,
    `accumulate`. What to train is told as for `compile_training`, everything else as for `plan`. Raises
    HybridcError.
    """
    from hybridc.keywords import PlanOnlyKeywords, options_of
    from hybridc.passes.training.spec import read_spec
    from hybridc.progress import listener
    from hybridc.training.compile import plan_training as plan_step

    given = {**options, "target": options.get("target") or "cuda+avx2"}
    spec = read_spec(loss, optimizer, batch, accumulate, freeze, clip_norm, ema, sync_batchnorm)
    known = options_of(given, PlanOnlyKeywords)
    return plan_step(model, known, spec, listener(progress), bound_seconds=bound_seconds)


@exhaustion_told()
def load_training(
    path: str | Path,
    *,
    threads: int | None = None,
    gpu_memory: Amount | None = None,
    host_memory: Amount | None = None,
    emulate_gpu: Amount | EmulatedGpu | None = None,
    seed: int = 0,
    comm: Comm | None = None,
    net_timeout: float | None = None,
    wire: str = "fp32",
    shard_states: bool = False,
) -> TrainingSession:
    """Load a compiled training step; `seed` is what dropout draws from, the rest as for `load`.

    With a communicator of mpi4py, such as `MPI.COMM_WORLD`, all its ranks train together: each passes `step`
    the `share` of the batch that is its own. A rank that does not answer within `net_timeout` seconds, or
    300, is named by DeviceError HC434; run scripts by `python -m mpi4py`, which ends all ranks if one raises.
    With `wire="bf16"` gradients are sent in half the bytes. With `shard_states` each rank has the optimizer's
    states of some parameters alone. Raises HybridcError.
    """
    from hybridc.options import DEFAULT_NET_TIMEOUT_SECONDS, parse_bytes

    _emulate(emulate_gpu)
    from hybridc.training.ranks.allreduce import AllReduce
    from hybridc.training.ranks.exchange import Ranks
    from hybridc.training.session import TrainingSession

    return TrainingSession(
        path,
        threads=threads,
        gpu_memory_bytes=None if gpu_memory is None else parse_bytes(gpu_memory),
        host_memory_bytes=None if host_memory is None else parse_bytes(host_memory),
        seed=seed,
        all_reduce=None
        if comm is None
        else AllReduce(Ranks(comm, net_timeout or DEFAULT_NET_TIMEOUT_SECONDS), wire),
        shard_states=shard_states,
    )


def _emulate(given: Amount | EmulatedGpu | None) -> None:
    """Give the process an emulated GPU, before anything loads TVM, which looks for the GPU's libraries."""
    if given is None:
        return
    from hybridc import emulator
    from hybridc.options import EmulatedGpu, parse_emulated_gpu
    from hybridc.targets import capability_of

    wanted = given if isinstance(given, EmulatedGpu) else parse_emulated_gpu(given)
    if wanted.architecture is not None:
        emulator.start(wanted.memory_bytes, compute_capability=capability_of(wanted.architecture))
    elif not emulator.is_active() or emulator.statistics().capacity_bytes != wanted.memory_bytes:
        emulator.start(wanted.memory_bytes)
