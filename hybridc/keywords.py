"""Options of a compilation as keyword arguments of the Python API.

Every option is named once, here. `hybridc.compile`, `plan` and the like take them as `**options`;
the command line stores its own under the same names. An option that is not given has the default of
`CompileOptions`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from hybridc.errors import UsageError
from hybridc.ir import Device
from hybridc.machine import load_machine
from hybridc.options import Amount, CompileOptions, Size, parse_budgets, parse_bytes, parse_pin
from hybridc.sizes import sizes_of
from hybridc.targets import parse_target

if TYPE_CHECKING:
    import numpy as np


GivenSize = Size | str | range | Sequence[int]
"""Of a dimension: a number, or what it may be when the network runs."""


class PlanKeywords(TypedDict, total=False):
    """What a plan depends on. None stands for the default, as if the keyword were left out."""

    target: str | None
    """`[cuda[:ARCH,...]+]ISA`, for example `"cuda+avx2"`."""
    gpu_memory: Amount | Sequence[Amount] | None
    """Budget: bytes, `64 << 20` or `"64MiB"`, or a percentage of what the model needs entirely on the GPU,
    `"50%"`. There is a plan for each of several, `"256MiB,1GiB"` or a sequence. None: one plan without a
    limit."""
    host_memory: Amount | None
    """What a run may hold of the host's memory, `"8GiB"` or an integer of bytes."""
    shapes: Mapping[str, Sequence[GivenSize | None]] | None
    """Shapes of inputs whose dimensions the model leaves open, by name; None for one that it fixes."""
    dims: Mapping[str, GivenSize] | None
    """Sizes of named dimensions. What stays open has several, here as in shapes: `"1..32"`, with bounds of
    buckets `"1..32:8,32"`, or the sizes that there are, `[64, 128]`."""
    context: int | None
    """Positions that a decoder's cache has room for, which decides the sizes of its open dimensions: one
    sequence, and 1, 32 or 256 new tokens of a run, unless `dims` says otherwise."""
    values: Mapping[str, np.ndarray] | None
    """Inputs that become constants: what shapes, axes or paddings are computed from. The artifact has no such
    inputs."""
    bounds: Mapping[str, int] | None
    """The most trips of loops of which only a run knows how many they make, by name of the node. A run that
    asks for more is refused."""
    machine: str | Path | None
    """Name of a machine profile, or its file, whose speeds the planner weighs."""
    pins: Mapping[str, str] | None
    """Devices that nodes must run on, `{"encoder/*": "gpu"}`."""
    plan_seconds: float | None
    """Effort of the search for a plan."""
    plan_timeout: float | None
    """Seconds of the clock after which the best plan so far is taken: it depends on the computer."""
    robust: bool | None
    """True: take the plan that is fastest on average on machines drawn around the profile."""
    threads: int | None
    """CPU threads of a run."""
    fast_algorithms: bool | None
    """False: no Winograd, Strassen or FFT kernels, whose rounding errors are a few times larger."""
    int8_activations: bool | None
    """False: no rounding of the left factor of MatMulNBits to 8 bits, which its `accuracy_level` 4 allows."""
    precision: str | None
    """`"fp16"`: tensors are stored in 16 bits where `rounding_error` allows it; `"bf16"`: the CPU rounds
    operands of products to bf16 where that allows it, and a training step stores activations so;
    `"int8"`: it multiplies quantized numbers as integers."""
    rounding_error: float | None
    """How much rounding to 16 bits may change a kernel's result, as a fraction of it, measured on random
    inputs."""
    kv_cache: str | None
    """The keys and values of a decoder are stored in 16 bits, `"fp16"`, or in 8 bits with a scale for each
    row, `"int8"`, where the model has float32."""
    last_logits: bool | None
    """Whether a decoder gives the logits of one token of each sequence alone, that which a new input,
    `last_token`, says: int64 [batch]."""
    profile_kernels: bool | None
    """Whether the planner takes times of kernels measured on this machine instead of predictions."""
    cache: bool | None
    """False: take nothing from the user's cache of earlier compilations, and leave nothing there."""


class PlanOnlyKeywords(PlanKeywords, total=False):
    """What a plan can do without, but code cannot."""

    weights: bool | None
    """False: do not read weights that are external data; their files need not be there."""


class CompileKeywords(PlanKeywords, total=False):
    """What generated code depends on, too."""

    tune_seconds: float | None
    """Time to measure tiles of CPU kernels on this machine."""
    tune_record: str | Path | None
    """File of such measurements, which are used and added to."""


_MAPPINGS = {
    "shapes": '{"x": (1, 3)}',
    "dims": '{"batch": 8}',
    "values": '{"axes": numpy.array([0])}',
    "bounds": '{"Loop_3": 64}',
    "pins": '{"Conv_1*": "cpu"}',
}
"""Keywords that are dictionaries, and how they are written."""


def options_of(
    keywords: Mapping[str, Any], known: type[PlanKeywords] = CompileKeywords, **more: Any
) -> CompileOptions:
    """The options that keyword arguments stand for; `more` are fields of `CompileOptions`.

    Raises TypeError for a keyword that is not one of `known`, and HybridcError for an invalid value.
    """
    unknown = next((name for name in keywords if name not in known.__annotations__), None)
    if unknown is not None:
        close = difflib.get_close_matches(unknown, known.__annotations__, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise TypeError(f"got an unexpected keyword argument {unknown!r}{hint}")
    for name in _MAPPINGS.keys() & keywords.keys():
        if not isinstance(keywords[name], Mapping | None):
            what = f"{name} must be a dictionary, not {keywords[name]!r}"
            raise UsageError("HC500", what, remedy="write for example " + _MAPPINGS[name])
    fields = {}
    for name, value in keywords.items():
        if value is not None:
            field, read = _READERS.get(name, (name, _as_given))
            fields[field] = read(value)
    return CompileOptions(**fields, **more)


def _as_given(value: Any) -> Any:
    return value


def _read_shapes(shapes: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (name, tuple(map(_size, s)) if isinstance(s, list | tuple) else s) for name, s in shapes.items()
    )


def _size(given: Any) -> Any:
    """What may be a size, for `CompileOptions` to check."""
    sizes = None if isinstance(given, int | None) else sizes_of(given)
    return given if sizes is None else sizes


def _read_dims(dims: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, _size(size)) for name, size in dims.items())


def _read_values(values: Mapping[str, Any]) -> tuple[tuple[str, np.ndarray], ...]:
    import numpy as np

    return tuple((name, np.asarray(value)) for name, value in values.items())


def _read_bounds(bounds: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(bounds.items())


def _read_pins(pins: Mapping[str, str]) -> tuple[tuple[str, Device], ...]:
    return tuple(parse_pin(f"{name}={device}") for name, device in dict(pins).items())


_READERS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "target": ("target", parse_target),
    "gpu_memory": ("gpu_memory", parse_budgets),
    "host_memory": ("host_memory_bytes", parse_bytes),
    "shapes": ("shapes", _read_shapes),
    "dims": ("dims", _read_dims),
    "values": ("values", _read_values),
    "bounds": ("bounds", _read_bounds),
    "machine": ("machine", load_machine),
    "pins": ("pins", _read_pins),
    "tune_record": ("tune_record", Path),
}
"""The field of `CompileOptions` that a keyword sets, and how its value is read. Others set the field of their
own name to the value itself."""
