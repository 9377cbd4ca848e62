"""Keys and values of a decoder that are stored in fewer bits than the model has them in.

Rows are rounded when they are appended; everything that is computed stays float32 (`narrow_storage.py`, and
`integer_caches.py` for 8 bits).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

from hybridc.appended_rows import SCALE_BYTES
from hybridc.errors import UsageError
from hybridc.frontend import ImportedModel, ValueInfo
from hybridc.options import FP16, INT8
from hybridc.passes.precision.wide_program import NarrowTensors
from hybridc.schedules.storage import NARROW, WIDE

_PAST, _PRESENT = "past_key_values.", "present."
CACHE_DTYPES = {FP16: "float16", INT8: "int8"}
"""Of the elements of a cache, by `--kv-cache`."""


def cache_names(inputs: Iterable[str], outputs: Container[str]) -> Mapping[str, str]:
    """The outputs of a decoder that become its caches in the next run, by the inputs that they are then."""
    pairs = {name: _PRESENT + name.removeprefix(_PAST) for name in inputs if name.startswith(_PAST)}
    return {past: present for past, present in pairs.items() if present in outputs}


def with_stored_caches(model: ImportedModel, kv_cache: str) -> tuple[ImportedModel, NarrowTensors]:
    """The model with the caches of a decoder as inputs and outputs of the type that `kv_cache` names, and
    what that makes narrow in its program, which stays float32.

    Caches are `past_key_values.N.key` and `.value`, which become `present.N.key` and `.value`, as
    onnxruntime-genai and optimum name them; with fp16 those of 16 bits stay as they are. Raises UsageError
    HC539 if there are none, or with int8 if some are not floats of 16 or 32 bits.
    """
    outputs = {value.name: position for position, value in enumerate(model.outputs)}
    pairs = cache_names([value.name for value in model.inputs], outputs)
    caches = {
        value.name: outputs[pairs[value.name]]
        for value in model.inputs
        if value.name in pairs and len(value.shape) == 4
    }
    if not caches:
        names = f"{_PAST}N.key and .value, and {_PRESENT}N.key and .value"
        raise _refused(model, kv_cache, f"has no caches, named {names}")
    dtype = CACHE_DTYPES[kv_cache]

    taken = (WIDE, *NARROW) if kv_cache == INT8 else (WIDE,)

    def stored(value: ValueInfo, *, is_cache: bool) -> ValueInfo:
        if not is_cache or value.dtype not in taken:
            return value
        *rows, depth = value.shape
        behind = SCALE_BYTES if kv_cache == INT8 else 0
        return replace(value, dtype=dtype, shape=(*rows, depth + behind))

    positions = set(caches.values())
    inputs = tuple(stored(value, is_cache=value.name in caches) for value in model.inputs)
    results = tuple(stored(value, is_cache=i in positions) for i, value in enumerate(model.outputs))
    changed = [new.variable for old, new in zip(model.inputs, inputs, strict=True) if old is not new]
    made = [i for i, (old, new) in enumerate(zip(model.outputs, results, strict=True)) if old is not new]
    if kv_cache == INT8 and len(changed) < len(caches):
        raise _refused(model, kv_cache, "has caches that are not floats of 16 or 32 bits")
    in_memory = WIDE if kv_cache == INT8 else dtype  # until they are rows of integers
    integers = frozenset(changed) if kv_cache == INT8 else frozenset[str]()
    types = dict.fromkeys(changed, in_memory), dict.fromkeys(made, in_memory)
    return replace(model, inputs=inputs, outputs=results), NarrowTensors(*types, integers=integers)


def _refused(model: ImportedModel, kv_cache: str, what: str) -> UsageError:
    return UsageError(
        "HC539",
        f"--kv-cache {kv_cache} is given, and the model {what}",
        where=model.source.name,
        remedy="remove the option: caches stay as they are in the model",
    )
