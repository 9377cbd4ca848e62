"""From an ONNX model to the network that the stages start from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybridc.compile_cache import Cache, NoCache
from hybridc.frontend import ImportedModel, load_model, read_model
from hybridc.frontend.inputs.cache_lengths import decoder_dimensions
from hybridc.frontend.inputs.last_logits import with_last_logits
from hybridc.frontend.ranges.opening import Dimension, open_dimensions
from hybridc.options import CompileOptions
from hybridc.passes.phases import ImportedNetwork, Job
from hybridc.passes.precision.stored_caches import with_stored_caches
from hybridc.passes.precision.wide_program import NarrowTensors
from hybridc.passes.program.program import Program
from hybridc.sizes import Bucket, sizes_of

if TYPE_CHECKING:
    import onnx

    from hybridc.frontend.load import Loaded
    from hybridc.frontend.reader import Source

    Model = str | Path | bytes | onnx.ModelProto | Loaded | ImportedModel

_NEW_TOKENS = (1, 32, 256)
"""Of a run of a decoder whose context alone is given: a step, and parts in which a prompt is read. Each is a
plan of its own, which takes its time to make."""


def import_model(
    source: Model,
    options: CompileOptions,
    cache: Cache | None = None,
    dimensions: tuple[Dimension, ...] = (),
    bucket: Bucket = (),
    *,
    many_sizes: bool = False,
) -> tuple[ImportedModel, ImportedNetwork]:
    """Read a model, unless it is read already, and make the network that the stages start from.

    Its stages use `cache`. Open `dimensions` have the largest sizes of `bucket`, of which there may be others
    with `many_sizes`.

    Raises ModelError or UsageError.
    """
    if isinstance(source, ImportedModel):
        model = source
    else:
        model = read_model(
            source,
            shapes=dict(options.shapes),
            dims=dict(options.dims),
            values=dict(options.values),
            bounds=dict(options.bounds),
            dimensions=dimensions,
            bucket=bucket,
            reads_weights=options.weights,
        )
    narrow = NarrowTensors()
    if options.kv_cache is not None:
        model, narrow = with_stored_caches(model, options.kv_cache)
    sizes = {each.variable: interval.high for each, interval in zip(model.sizes, bucket, strict=False)}
    axes = _open_axes(model, dimensions, bucket)
    job = Job(options, model.loop_carried, sizes, axes, many_sizes, cache=cache or NoCache())
    program = Program(model.module, model.weights, model.origins)
    return model, ImportedNetwork(job, program, narrow=narrow)


def _open_axes(
    model: ImportedModel, dimensions: Sequence[Dimension], bucket: Bucket
) -> Mapping[str, Mapping[int, str]]:
    """By variable of an input and axis, that of the size, where there are several sizes in the bucket."""
    variables = {each.name: each.variable for each in model.inputs}
    found: dict[str, dict[int, str]] = {}
    for size, dimension, interval in zip(model.sizes, dimensions, bucket, strict=False):
        for name, axis in () if interval.is_exact else dimension.axes:
            if name in variables:
                found.setdefault(variables[name], {})[axis] = size.variable
    return found


def loaded(source: Model, options: CompileOptions) -> Loaded | ImportedModel:
    """The model as `import_model` takes it several times, for other sizes. Raises as `loaded_file`."""
    return source if isinstance(source, ImportedModel) else loaded_file(source, options)


def loaded_file(source: Source, options: CompileOptions) -> Loaded:
    """A model that is not imported yet, with the logits that are asked for.

    Raises ModelError or UsageError.
    """
    model = load_model(source)
    return with_last_logits(model) if options.last_logits else model


def sized(options: CompileOptions, model: Loaded | ImportedModel) -> CompileOptions:
    """The options with the sizes that follow from `options.context`.

    Raises UsageError HC539 if the model is no decoder whose context can be chosen.
    """
    if options.context is None or isinstance(model, ImportedModel):
        return options
    given, context = dict(options.dims), options.context
    new = sizes_of([n for n in _NEW_TOKENS if n <= context])
    assert new is not None
    found = decoder_dimensions(model).sizes(context, new, given)
    return replace(options, dims=tuple({**found, **given}.items()))


def open_dimensions_of(model: Loaded | ImportedModel, options: CompileOptions) -> tuple[Dimension, ...]:
    """The dimensions that the options leave open. Raises ModelError or UsageError."""
    if isinstance(model, ImportedModel):
        return ()
    return open_dimensions(model.proto, dict(options.shapes), dict(options.dims))
