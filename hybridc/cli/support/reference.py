"""ONNX Runtime's results for a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridc.cli.support.feeds import random_feeds
from hybridc.errors import UsageError
from hybridc.options import CompileOptions
from hybridc.sizes import with_sums

if TYPE_CHECKING:
    import onnxruntime


EXACT_INTEGERS = ("session.x64quantprecision", "1")
"""A setting of onnxruntime: where a processor has no VNNI, its products of uint8 and int8 saturate pairs of
them at 16 bits unless this is set (its kernels of vpmaddubsw), and it is the reference here."""


@dataclass(frozen=True, slots=True)
class FixedInput:
    """An input whose dimensions are all known."""

    name: str
    shape: tuple[int, ...]
    type: str


def reference_run(
    model: Path, options: CompileOptions, seed: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Random feeds of a model, and ONNX Runtime's outputs for them, by name.

    Inputs with values (`options.values`) are not among the feeds, but onnxruntime gets them, too. Caches have
    the type that they are to be stored in (`options.kv_cache`); onnxruntime gets the same numbers.

    Raises UsageError HC534 if onnxruntime is missing or refuses the model, HC511 if a dimension is
    unknown.
    """
    session = open_reference(model, options.threads)
    values = dict(options.values)
    open_inputs = [each for each in session.get_inputs() if each.name not in values]
    feeds = random_feeds(_fixed_inputs(open_inputs, options), seed)
    names = [output.name for output in session.get_outputs()]
    stored = _stored(feeds, names, options.kv_cache)
    widened = {name: stored[name].astype(array.dtype) for name, array in feeds.items()}
    try:
        results = dict(zip(names, session.run(names, widened | values), strict=True))
        shared = _caches_in_place(model, widened, results)
        if shared:
            results = _run_in_place(session, widened | values, shared)
    except Exception as error:  # onnxruntime's errors share no base
        raise refused(model, error) from None
    return _of_last_tokens(stored, results) if options.last_logits else (stored, results)


def _of_last_tokens(
    feeds: dict[str, np.ndarray], results: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """With the input and the logits that `--last-logits` makes, of the last tokens."""
    from hybridc.frontend.inputs.last_logits import LAST_TOKEN, LOGITS

    batch, count, _ = results[LOGITS].shape
    last = np.full(batch, count - 1, np.int64)
    return {**feeds, LAST_TOKEN: last}, {**results, LOGITS: results[LOGITS][:, -1:]}


def _caches_in_place(
    model: Path, feeds: dict[str, np.ndarray], results: dict[str, np.ndarray]
) -> dict[str, str]:
    """Caches of GroupQueryAttention in which new rows have their places, by what they become: output, input.

    Given memory for a result of its own, onnxruntime leaves zeros where nothing is counted yet.
    """
    import onnx

    nodes = onnx.load(model, load_external_data=False).graph.node
    attention = [node for node in nodes if node.op_type == "GroupQueryAttention" and len(node.output) > 2]
    # its inputs are query, key, value, past key, past value; its outputs the result, and present ones
    pairs = ((node.output[i], node.input[i + 2]) for node in attention for i in (1, 2))
    return {
        present: past
        for present, past in pairs
        if past in feeds and present in results and feeds[past].shape == results[present].shape
    }


def _run_in_place(
    session: onnxruntime.InferenceSession, feeds: dict[str, np.ndarray], shared: dict[str, str]
) -> dict[str, np.ndarray]:
    """Outputs by name, with some of them in the memory of inputs, as generators run these models."""
    import onnxruntime

    binding = session.io_binding()
    copies = {name: array.copy() for name, array in feeds.items()}  # values are views of them
    fed = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in copies.items()}
    for name, value in fed.items():
        binding.bind_ortvalue_input(name, value)
    names = [output.name for output in session.get_outputs()]
    for name in names:
        if name in shared:
            binding.bind_ortvalue_output(name, fed[shared[name]])
        else:
            binding.bind_output(name)
    session.run_with_iobinding(binding)
    return {name: value.numpy().copy() for name, value in zip(names, binding.get_outputs(), strict=True)}


def _stored(
    feeds: dict[str, np.ndarray], outputs: Sequence[str], kv_cache: str | None
) -> dict[str, np.ndarray]:
    """The feeds with caches of float32 in the type that they are stored in."""
    from hybridc.passes.precision.stored_caches import CACHE_DTYPES, cache_names

    caches = cache_names(feeds, outputs) if kv_cache is not None else {}
    return {
        name: array.astype(CACHE_DTYPES[str(kv_cache)])
        if name in caches and array.dtype == np.float32
        else array
        for name, array in feeds.items()
    }


def open_reference(model: Path, threads: int | None) -> onnxruntime.InferenceSession:
    """A session of ONNX Runtime on the CPU. Raises UsageError HC534 if it is missing or refuses the model."""
    try:
        import onnxruntime
    except ImportError:
        raise UsageError(
            "HC534",
            "onnxruntime, the reference of the comparison, is not installed",
            remedy="pip install onnxruntime",
        ) from None
    session_options = onnxruntime.SessionOptions()
    session_options.intra_op_num_threads = threads or 0
    session_options.log_severity_level = 3
    session_options.add_session_config_entry(*EXACT_INTEGERS)
    try:
        return onnxruntime.InferenceSession(str(model), session_options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise refused(model, error) from None


def refused(model: Path, error: Exception) -> UsageError:
    """HC534, for an error of ONNX Runtime's."""
    first_line = next(iter(str(error).splitlines()), "")
    what = f"onnxruntime cannot run this model: {first_line}"
    return UsageError("HC534", what, where=str(model), remedy="use `hybridc run`, which needs no reference")


def _fixed_inputs(inputs: Iterable[Any], options: CompileOptions) -> list[FixedInput]:
    inputs = list(inputs)
    names = (size for i in inputs for size in i.shape if isinstance(size, str))
    shapes, dims = dict(options.shapes), with_sums(names, dict(options.dims))
    fixed = []
    for i in inputs:
        own: list[Any] = [dims.get(size, size) for size in i.shape]
        sizes = list(shapes.get(i.name, own))
        if len(sizes) == len(own):
            sizes = [size if told is None else told for told, size in zip(sizes, own, strict=True)]
        unknown = next((size for size in sizes if not isinstance(size, int) or size < 0), 0)
        if unknown != 0:
            raise UsageError(
                "HC511",
                f"input {i.name!r} has an unknown dimension {unknown!r}",
                where=f"shape {list(i.shape)}",
                remedy=f"fix it with --dim {unknown}=1"
                if isinstance(unknown, str)
                else f"fix it with --shape {i.name}=...",
            )
        fixed.append(FixedInput(i.name, tuple(sizes), i.type))
    return fixed
