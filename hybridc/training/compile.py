"""An ONNX model in, an artifact of its training step out."""

from __future__ import annotations

import difflib
import shutil
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx

from hybridc.artifact.manifest import MANIFEST
from hybridc.artifact.store import cannot_write, check_destination, put_in_place
from hybridc.compiler import compile_model, plan_model
from hybridc.errors import UsageError
from hybridc.frontend import ImportedModel, load_model, read_model
from hybridc.frontend.load import load
from hybridc.frontend.ranges.opening import Dimension, open_dimensions
from hybridc.options import (
    ANY_ERROR,
    BF16,
    FP32,
    ROUNDING_ERROR,
    CompileOptions,
    Shape,
    Size,
    check_bf16_training,
)
from hybridc.passes.training.spec import TrainingSpec
from hybridc.passes.training.step import TrainingPrograms, training_programs
from hybridc.progress import NullProgress, Progress
from hybridc.results import Compiled, Planned
from hybridc.scratch import scratch_folder
from hybridc.sizes import Interval, Sizes
from hybridc.training.artifact import (
    ACCUMULATE,
    EVALUATE,
    MODEL_FOLDER,
    STATES,
    STEP,
    UPDATE,
    StoredState,
    TrainingManifest,
    hash_of,
    is_training_artifact,
    program_names,
    write_training,
)

if TYPE_CHECKING:
    OnnxModel = str | Path | bytes | onnx.ModelProto

MODEL_NAME = "model.onnx"
"""In the artifact, of a model that does not come from a file."""


@dataclass(frozen=True, slots=True)
class CompiledTraining:
    """What `compile_training` made."""

    path: Path
    step: Compiled
    evaluation: Compiled
    accumulation: Compiled | None
    update: Compiled | None
    """Like the accumulation, only where batches are gone through in parts."""
    parameters: int
    """Elements that are trained."""
    import_seconds: float = 0.0
    """What reading and differentiating took."""

    def __repr__(self) -> str:
        return f"<CompiledTraining {self.path.name}: {self.parameters:,} trained parameters, {self.step!r}>"

    @property
    def seconds(self) -> dict[str, float]:
        made = (self.step, self.evaluation, self.accumulation, self.update)
        parts = [part.seconds for part in made if part is not None]
        return {name: sum(part[name] for part in parts) for name in parts[0]} | {
            "import": self.import_seconds
        }


def read_training_model(source: OnnxModel, options: CompileOptions, spec: TrainingSpec) -> ImportedModel:
    """Read a model for training, its batch dimensions fixed to what the device sees at a time, or open.

    Raises ModelError; UsageError HC575 if the model's batch is another, HC580 if nothing is frozen by a name.
    """
    options.check_fixed("training")
    shapes, dims = dict(options.shapes), dict(options.dims)
    loaded = load_model(source)
    graph = loaded.proto.graph
    _check_patterns(spec, [tensor.name for tensor in graph.initializer])
    if spec.micro_batch is not None:
        _fix_batch(graph, spec, shapes, dims)
    dimensions = open_dimensions(loaded.proto, shapes, dims)
    if spec.has_padding:
        _check_open(graph, dimensions)
    return read_model(
        loaded,
        shapes=shapes,
        dims=dims,
        values=dict(options.values),
        bounds=dict(options.bounds),
        parameters=spec.trains,
        dimensions=dimensions,
        bucket=tuple(interval for each in dimensions for interval in each.sizes.intervals),
    )


def compile_training(
    source: OnnxModel,
    output: str | Path,
    options: CompileOptions,
    spec: TrainingSpec,
    progress: Progress | None = None,
) -> CompiledTraining:
    """Compile the training step of a model to the folder `output`, whole or not at all.

    Raises HybridcError.
    """
    options = _checked(options, spec)
    progress, destination = progress or NullProgress(), Path(output)
    if not is_training_artifact(destination) or destination.is_symlink():
        check_destination(destination)
    progress.stage("import")
    start = time.perf_counter()
    model = read_training_model(source, options, spec)
    programs = training_programs(model, spec, split_layers=options.target.has_gpu)
    import_seconds = time.perf_counter() - start
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(f".{destination.name}-", destination.parent) as folder:
            made = _fill(folder, source, model, programs, options, spec, progress)
            folder.chmod(0o755)
            put_in_place(folder, destination)
    except OSError as error:
        raise cannot_write(destination, error) from None
    return replace(made, path=destination, import_seconds=import_seconds)


def plan_training(
    source: OnnxModel,
    options: CompileOptions,
    spec: TrainingSpec,
    progress: Progress | None = None,
    *,
    wanted: Collection[str] = (STEP, EVALUATE, ACCUMULATE, UPDATE),
    bound_seconds: float | None = None,
) -> dict[str, Planned]:
    """Plan the `wanted` programs of a training step without generating code, as `plan_model` does.

    By their names, in this order; there are an accumulation and an update only where batches are gone through
    in parts. Raises HybridcError.
    """
    options = _checked(options, spec)
    model = read_training_model(source, options, spec)
    made = training_programs(model, spec, split_layers=options.target.has_gpu)
    programs = {
        STEP: made.step,
        EVALUATE: made.evaluation,
        ACCUMULATE: made.accumulation,
        UPDATE: made.update,
    }
    return {
        name: plan_model(program, options, progress, bound_seconds=bound_seconds)
        for name, program in programs.items()
        if program is not None and name in wanted
    }


def _checked(options: CompileOptions, spec: TrainingSpec) -> CompileOptions:
    """The options of its programs: no kernel is measured for what rounding does to it.

    What a step computes is an estimate anyway, from one batch, and its parameters keep all bits of an update.
    Raises UsageError HC525 for options that a training step cannot have.
    """
    if options.stop_after is not None or options.dump_ir is not None:
        what = "--stop-after and --dump-ir cannot be used with --train"
        raise UsageError("HC525", what, remedy="remove them")
    if options.kv_cache is not None:
        what = "--kv-cache is not supported for training"
        raise UsageError("HC525", what, remedy="remove it: a training step has no cache of keys and values")
    if options.context is not None:
        what = "--context is not supported for training"
        raise UsageError("HC525", what, remedy="remove it: a training step has no cache of keys and values")
    if options.last_logits:
        what = "--last-logits is not supported for training"
        raise UsageError("HC525", what, remedy="remove it: a loss is of the logits of all tokens")
    if options.precision not in (FP32, BF16):
        what = f"--precision {options.precision} is not supported for training"
        raise UsageError("HC525", what, remedy="use --precision bf16, or remove it to compute in fp32")
    if options.precision == BF16:
        check_bf16_training(options.target)
    if not options.weights:
        what = "--no-weights is not supported for training"
        raise UsageError("HC525", what, remedy="remove it: what is trained begins with the model's weights")
    if spec.synchronized_parts > 1 and options.target.has_gpu:
        what = "--sync-batchnorm is not supported on a GPU"
        raise UsageError("HC525", what, remedy="use a target of a CPU alone, such as avx2, or remove it")
    if options.rounding_error != ROUNDING_ERROR:
        what = "--rounding-error is not supported for training"
        remedy = "remove it: all that has a bf16 kernel is rounded, and sums and updates stay in fp32"
        raise UsageError("HC525", what, remedy=remedy)
    return replace(options, rounding_error=ANY_ERROR)


def _fill(
    folder: Path,
    source: OnnxModel,
    model: ImportedModel,
    programs: TrainingPrograms,
    options: CompileOptions,
    spec: TrainingSpec,
    progress: Progress,
) -> CompiledTraining:
    def compiled(program: ImportedModel, name: str) -> Compiled:
        return compile_model(program, folder / name, options, progress)

    step, evaluation = compiled(programs.step, STEP), compiled(programs.evaluation, EVALUATE)
    accumulation = update = None
    if programs.accumulation is not None and programs.update is not None:
        accumulation, update = compiled(programs.accumulation, ACCUMULATE), compiled(programs.update, UPDATE)
    kinds = program_names(spec)
    states = tuple(StoredState(s.name, s.kind, s.shape, s.dtype) for s in programs.states)
    own = [state for state in states if state.is_of_model]
    _write_states(folder / STATES, (programs.step.parameters[state.name] for state in own))
    model_name = _copy_model(source, folder / MODEL_FOLDER)
    target_names = {target.name for target in programs.targets}
    manifest = TrainingManifest(
        spec=spec,
        model=model_name,
        model_sha256=hash_of(folder / MODEL_FOLDER / model_name),
        states_sha256=hash_of(folder / STATES),
        inputs=tuple(v.name for v in model.inputs if v.name not in model.parameters),
        targets=tuple(v.name for v in programs.step.inputs if v.name in target_names),
        loss=programs.loss,
        scalars=programs.scalars,
        seed=programs.seed,
        states=states,
        splits=programs.splits,
        sizes=programs.sizes,
        share=programs.share,
        cuts=programs.cuts,
        programs={kind: hash_of(folder / kind / MANIFEST) for kind in kinds},
    )
    write_training(folder, manifest)
    trained = sum(int(np.prod(state.shape)) for state in own if state.kind == "parameter")
    return CompiledTraining(folder, step, evaluation, accumulation, update, trained)


def _write_states(path: Path, values: Iterable[np.ndarray]) -> None:
    with path.open("wb") as stream:
        for value in values:
            stream.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)


def _copy_model(source: OnnxModel, folder: Path) -> str:
    """The model as it came, with the files of its external data; returns its name."""
    folder.mkdir()
    if isinstance(source, onnx.ModelProto | bytes):
        data = source if isinstance(source, bytes) else source.SerializeToString()
        (folder / MODEL_NAME).write_bytes(data)
        return MODEL_NAME
    path = Path(source)
    shutil.copyfile(path, folder / path.name)
    for location in _data_files(path):
        copy = folder / location
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path.parent / location, copy)
    return path.name


def _data_files(path: Path) -> set[str]:
    """Names of external data, relative to the model. The model was read, so they lie in its folder."""
    tensors = load(path).proto.graph.initializer
    entries = (entry for tensor in tensors for entry in tensor.external_data)
    return {entry.value for entry in entries if entry.key == "location"}


def _check_patterns(spec: TrainingSpec, names: list[str]) -> None:
    """A pattern that freezes nothing is a slip."""
    for pattern in spec.freeze:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
            remedy = f"use names from the model, which may contain * and ?, such as {', '.join(near)}"
            raise UsageError("HC580", f"no parameter matches {pattern!r}", remedy=remedy)


def _fix_batch(
    graph: onnx.GraphProto, spec: TrainingSpec, shapes: dict[str, Shape], dims: dict[str, Size]
) -> None:
    """Add to `shapes` and `dims` what gives every open first dimension the size of a part of a batch, or all
    sizes up to it."""
    batch = spec.micro_batch
    assert batch is not None
    size = Sizes((Interval(1, batch),), is_divided=False) if spec.has_padding else batch
    weights = {tensor.name for tensor in graph.initializer}
    first_sizes = []
    for value in graph.input:
        sizes = value.type.tensor_type.shape.dim
        if value.name in weights or value.name in shapes or not sizes:
            continue
        if sizes[0].dim_param:
            dims.setdefault(sizes[0].dim_param, size)
        elif sizes[0].dim_value < 1:
            shapes[value.name] = (size, *(dims.get(d.dim_param, d.dim_value) for d in sizes[1:]))
        first_sizes.append(sizes[0].dim_value if sizes[0].dim_value > 0 else batch)
    if first_sizes and batch not in first_sizes:
        raise UsageError(
            "HC575",
            f"the model is exported for a batch of {first_sizes[0]}, not of {batch}",
            remedy="export it with a dynamic batch dimension, or remove --batch",
        )


def _check_open(graph: onnx.GraphProto, dimensions: Sequence[Dimension]) -> None:
    """Examples of a batch that need not be whole are along the first axis of every input, and no other."""
    weights = {tensor.name for tensor in graph.initializer}
    found = {axis for each in dimensions for axis in each.axes}
    ranks = {v.name: len(v.type.tensor_type.shape.dim) for v in graph.input if v.name not in weights}
    wrong = {(name, 0) for name, rank in ranks.items() if rank} ^ found
    if wrong:
        name, axis = min(wrong)
        what = f"axis {axis} of input {name!r} has {'one size' if axis == 0 else 'a batch'}"
        remedy = "export all inputs with a dynamic first dimension alone, or give --batch one number"
        raise UsageError("HC575", f"{what}, and batches need not be whole", remedy=remedy)
