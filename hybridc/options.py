"""Options of a compilation, and the texts they are written as."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Decimal
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hybridc.errors import UsageError
from hybridc.ir import Device
from hybridc.sizes import LARGEST_DIMENSION, Sizes, Sum, parse_sizes
from hybridc.targets import (
    Target,
    architecture_number,
    default_threads,
    is_architecture,
    oldest,
    parse_target,
)

if TYPE_CHECKING:
    import numpy as np

    from hybridc.machine import Machine

Amount = str | int
"""Memory as users give it: a text with a unit, or in Python a whole number of bytes."""
_BYTES_OF_UNIT = {"b": 1} | {
    letter + ending: base**power
    for power, letter in enumerate("kmgt", start=1)
    for ending, base in (("", 1024), ("i", 1024), ("ib", 1024), ("b", 1000))
}
"""By units in small letters. A letter alone is a power of 1024, as docker and systemd read it, and so is one
with `i`; only `MB` and its like are powers of 1000: the smaller of two common readings, as it is a limit."""
_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_AMOUNT = re.compile(r"(?P<number>\d{1,18}(?:\.\d{1,12})?)\s*(?P<unit>%|[A-Za-z]*)", re.ASCII)
_LARGEST_BYTES = 2**62
MAXIMUM_THREADS = 4096
DEFAULT_PLAN_SECONDS = 10.0
DEFAULT_NET_TIMEOUT_SECONDS = 300.0
"""A rank may be late by an evaluation, a checkpoint or the reading of its data."""
"""Time that the planner may search unless asked otherwise, in seconds of a nominal machine."""
Size = int | Sizes | Sum
"""Of a dimension: fixed, what it may be when the network runs, or what follows from others."""
Shape = tuple[int | Sizes | None, ...]
"""Of an input; None for a dimension that the model or a size by name fixes."""
FixedShape = tuple[int | None, ...]
"""Of an input none of whose dimensions stays open."""
FP32, FP16, BF16, TF32, INT8 = PRECISIONS = ("fp32", "fp16", "bf16", "tf32", "int8")
"""fp16: tensors are stored in 16 bits, on both devices; bf16: the CPU multiplies such numbers; tf32: the
GPU's tensor cores do; int8: either multiplies those of quantized models."""
KV_CACHES = (FP16, INT8)
"""Types in which the keys and values of a decoder can be stored where the model has float32; of int8 each row
has a scale of its own."""
ROUNDING_ERROR = 0.01
"""How much rounding to fp16, bf16 or tf32 may change a kernel's result unless asked otherwise, as a
fraction of it."""
ANY_ERROR = sys.float_info.max
"""Allows any: training steps are not measured for it."""


AUTO = "auto"
"""As a budget: what the GPU of this computer has free, less a reserve."""


@dataclass(frozen=True, slots=True)
class Budget:
    """GPU memory a plan may use: bytes, a percentage of what the model needs entirely on the GPU, or what the
    GPU of this computer has free.

    Exactly one of the three fields is set.
    """

    size_bytes: int | None = None
    percent: float | None = None
    is_auto: bool = False
    """Measured before planning, by `hybridc.calibrate.free_memory`."""

    def __post_init__(self) -> None:
        if (self.size_bytes is not None) + (self.percent is not None) + self.is_auto != 1:
            raise ValueError("a budget is either bytes, or a percentage, or measured")

    def resolve(self, all_gpu_peak_bytes: int) -> int:
        """Bytes of the budget, for a model that needs `all_gpu_peak_bytes` entirely on the GPU."""
        if self.size_bytes is not None:
            return self.size_bytes
        assert self.percent is not None, "what is free has to be measured first"
        return int(all_gpu_peak_bytes * Decimal(str(self.percent)) / 100)

    def __str__(self) -> str:
        if self.is_auto:
            return AUTO
        return f"{self.percent:g}%" if self.size_bytes is None else format_bytes(self.size_bytes)


def parse_budget(amount: Amount) -> Budget:
    """Read `64MiB`, `64M`, `1.5GiB`, `500MB`, `4096B`, `50%`, `auto`, or a whole number of bytes.

    Raises UsageError HC510 for anything else.
    """
    if isinstance(amount, Integral) and not isinstance(amount, bool):
        return _sized(amount, int(amount))
    if isinstance(amount, str) and amount.strip().lower() == AUTO:
        return Budget(is_auto=True)
    match = _AMOUNT.fullmatch(amount.strip()) if isinstance(amount, str) else None
    if match is None:
        raise _refuse_amount(amount, "is not an amount of memory")
    number, unit = Decimal(match["number"]), match["unit"].lower()
    if unit == "%":
        return Budget(percent=float(number))
    if not unit:
        remedy = f"write {match[0]}B for bytes, or {match[0]}MiB for mebibytes"
        raise _refuse_amount(amount, "has no unit", remedy)
    if unit not in _BYTES_OF_UNIT:
        remedy = "units are B, K, M, G, T (or KiB, MiB, GiB, TiB: powers of 1024), kB, MB, GB, TB and %"
        raise _refuse_amount(amount, f"has the unknown unit {match['unit']!r}", remedy)
    return _sized(amount, int(number * _BYTES_OF_UNIT[unit]))


def parse_budgets(amounts: Amount | Sequence[Amount]) -> tuple[Budget, ...]:
    """Read budgets separated by commas, `256MiB,1GiB,50%`, or in a sequence. Raises UsageError HC510."""
    if isinstance(amounts, str):
        return tuple(parse_budget(part) for part in amounts.split(","))
    if isinstance(amounts, Sequence) and amounts:
        return tuple(map(parse_budget, amounts))
    return (parse_budget(cast(Amount, amounts)),)


def parse_bytes(amount: Amount) -> int:
    """Like `parse_budget`, where a percentage makes no sense. Raises UsageError HC510."""
    return exact_bytes(parse_budget(amount))


@dataclass(frozen=True, slots=True)
class EmulatedGpu:
    """What is to be emulated."""

    memory_bytes: int
    architecture: str | None = None
    """Such as `sm_75`, which decides what code it loads; None: the one there is, else the default."""


def parse_emulated_gpu(given: Amount) -> EmulatedGpu:
    """Read `64MiB` or `64MiB:sm_75`: memory, at least a byte, and architecture. Raises UsageError HC510."""
    amount, colon, name = given.partition(":") if isinstance(given, str) else (given, "", "")
    if colon and not is_architecture(name):
        what = f"{given!r} names the unknown GPU architecture {name!r}"
        raise UsageError("HC510", what, remedy="for example 64MiB:sm_75")
    memory_bytes = parse_bytes(amount)
    if memory_bytes == 0:
        raise UsageError("HC510", f"invalid GPU size {given!r}", remedy="for example 64MiB")
    return EmulatedGpu(memory_bytes, name or None)


def exact_bytes(budget: Budget) -> int:
    """The bytes of a budget where a percentage makes no sense. Raises UsageError HC510."""
    if budget.size_bytes is None:
        remedy = "write for example 64MiB, 1.5GiB or 500MB"
        raise _refuse_amount(str(budget), "must be an amount of bytes, not a percentage", remedy)
    return budget.size_bytes


def _sized(amount: object, size_bytes: int) -> Budget:
    if size_bytes < 0:
        raise _refuse_amount(amount, "is less than no memory")
    if size_bytes > _LARGEST_BYTES:
        raise _refuse_amount(amount, "is larger than any memory")
    return Budget(size_bytes=size_bytes)


def _refuse_amount(
    amount: object, what: str, remedy: str = "write for example 64MiB, 1.5GiB, 500MB or 50%"
) -> UsageError:
    return UsageError("HC510", f"{amount!r} {what}", remedy=remedy)


def format_bytes(size_bytes: int) -> str:
    """Bytes for people: at least three digits, in the largest binary unit that leaves one before the point.

    What is printed reads back within 0.5 % and a byte, and exactly below 1 KiB.
    """
    if size_bytes < 1024:
        return f"{size_bytes} B"
    scaled, unit = _scale(size_bytes)
    digits = 2 if round(scaled, 2) < 10 else 1
    if round(scaled, digits) >= 1024 and unit != _BINARY_UNITS[-1]:
        scaled, unit, digits = scaled / 1024, _BINARY_UNITS[_BINARY_UNITS.index(unit) + 1], 2
    return f"{scaled:.{digits}f} {unit}"


def format_budget(size_bytes: int) -> str:
    """Bytes as a value for `--gpu-memory`: rounded up in the third decimal, so never less than asked."""
    if size_bytes < 1024:
        return f"{size_bytes}B"
    scaled, unit = _scale(size_bytes)
    rounded = scaled.quantize(Decimal("0.001"), ROUND_CEILING)
    return f"{rounded.normalize():f}{unit}"


def _scale(size_bytes: int) -> tuple[Decimal, str]:
    power = min((max(size_bytes, 1).bit_length() - 1) // 10, len(_BINARY_UNITS) - 1)
    return Decimal(size_bytes) / 1024**power, _BINARY_UNITS[power]


def parse_shape(text: str) -> tuple[str, Shape]:
    """Read `NAME=1x3x224x224`, `NAME=8x_x_x_` or `NAME=scalar`; the name may hold `=` and `:`.

    Raises UsageError HC511.
    """
    name, equals, dims = text.rpartition("=")
    words = [] if dims == "scalar" else dims.split("x")
    sizes = tuple(_dimension(word) for word in words)
    if not equals or not name or any(s is None and w != "_" for w, s in zip(words, sizes, strict=True)):
        raise UsageError(
            "HC511",
            f"invalid input shape {text!r}",
            remedy="write NAME=1x3x224x224, no dimension negative, `_` for one that the model fixes, 1..8 for"
            " one that stays open, or NAME=scalar",
        )
    return name, sizes


def parse_dim(text: str) -> tuple[str, Size]:
    """Read the size of a dimension: `NAME=8`, `NAME=1..8` or `NAME=OTHER+1`. Raises UsageError HC512."""
    name, _, digits = text.rpartition("=")
    size = Sum.of(digits) or _dimension(digits)
    if not name or size is None:
        remedy = "write NAME=8, NAME=1..8 for one that stays open, or NAME=OTHER+1"
        raise UsageError("HC512", f"invalid size of a dimension {text!r}", remedy=remedy)
    return name, size


def parse_bound(text: str) -> tuple[str, int]:
    """Read `NAME=8`, the most trips of a loop. Raises UsageError HC512."""
    name, _, digits = text.rpartition("=")
    most = _dimension(digits)
    if not name or not isinstance(most, int):
        raise UsageError("HC512", f"invalid bound of a loop {text!r}", remedy="write NAME=8")
    return name, most


def _dimension(text: str) -> int | Sizes | None:
    if re.match(r"\d+(\.\.|,)", text, re.ASCII):
        return parse_sizes(text)
    is_number = re.fullmatch(r"\d{1,10}", text, re.ASCII) and int(text) <= LARGEST_DIMENSION
    return int(text) if is_number else None


def _is_dimension(size: object) -> bool:
    if isinstance(size, Sizes):
        return True
    return isinstance(size, Integral) and not isinstance(size, bool) and 0 <= int(size) <= LARGEST_DIMENSION


def check_threads(count: int) -> int:
    """Refuse an impossible number of threads. Raises UsageError HC557."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAXIMUM_THREADS:
        what = f"threads must be from 1 to {MAXIMUM_THREADS}, not {count!r}"
        raise UsageError("HC557", what, remedy="omit --threads to use every core")
    return count


def _has_wide_tensor_cores(target: Target) -> bool:
    """Whether the tensor cores of all of a target's GPUs have bf16 and tf32."""
    return target.has_gpu and architecture_number(oldest(target.cuda_architectures)) >= 80


def check_bf16_inference(options: CompileOptions) -> None:
    """Refuse bf16 for a network that is not trained where the CPU has no such instructions, as that of its
    GPU's tensor cores alone. Raises UsageError HC526."""
    if options.precision == BF16 and not options.trains_in_bf16:
        for target in options.target.of_each:
            if not target.isa.has_bf16:
                raise _lacks_bf16(target)


def check_bf16_training(target: Target) -> None:
    """Refuse bf16 for training where a GPU has none. Raises UsageError HC526."""
    if target.has_gpu and not _has_wide_tensor_cores(target):
        what = f"a training step in bf16 requires tensor cores of sm_80 or newer, and the target is {target}"
        remedy = f"compile for --target cuda:sm_80+{target.cpu} or newer, or remove --precision"
        raise UsageError("HC526", what, remedy=remedy)


def _lacks_bf16(target: Target) -> UsageError:
    isa = target.isa.name
    other = f"use fp16, or for a training step --target cuda:sm_80+{isa}" if target.has_gpu else "use fp16"
    what = f"--precision bf16 requires instructions that {isa} does not have"
    return UsageError("HC526", what, remedy=f"compile for --target avx512_bf16 or amx, or {other}")


def check_precision(precision: str, rounding_error: float, target: Target) -> None:
    """Refuse an unknown precision, or one that the target does not have. Raises UsageError HC526."""
    if precision not in PRECISIONS:
        what, remedy = f"unknown precision {precision!r}", f"choose from {', '.join(PRECISIONS)}"
        raise UsageError("HC526", what, remedy=remedy)
    # a training step may leave bf16 to the GPU alone
    if precision == BF16 and not (target.isa.has_bf16 or _has_wide_tensor_cores(target)):
        raise _lacks_bf16(target)
    if precision == TF32 and not _has_wide_tensor_cores(target):
        what = f"--precision tf32 requires tensor cores of sm_80 or newer, and the target is {target}"
        raise UsageError("HC526", what, remedy=f"compile for --target cuda:sm_80+{target.isa.name} or newer")
    if not isinstance(rounding_error, int | float) or not 0 <= rounding_error < math.inf:
        raise UsageError(
            "HC526",
            f"invalid --rounding-error {rounding_error!r}: must be a fraction of at least 0",
            remedy="for example 0.01",
        )


def check_kv_cache(kv_cache: str) -> None:
    """Refuse an unknown type of caches. Raises UsageError HC526."""
    if kv_cache not in KV_CACHES:
        what, remedy = f"unknown type of a cache {kv_cache!r}", f"choose from {', '.join(KV_CACHES)}"
        raise UsageError("HC526", what, remedy=remedy)


def check_seconds(seconds: float, purpose: str = "tuning") -> float:
    """Refuse an impossible time for tuning or planning. Raises UsageError HC518."""
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not 0 < seconds < math.inf:
        what = f"invalid {purpose} time {seconds!r}"
        raise UsageError("HC518", what, remedy="give a positive number of seconds, for example 60")
    return float(seconds)


def check_bound_seconds(seconds: float, target: Target) -> float:
    """Refuse an impossible effort for a bound. Raises UsageError HC518, or HC515 without a GPU."""
    if not target.has_gpu:
        what = f"--bound-seconds {seconds!r} is given, but the target {target} has no GPU"
        raise UsageError("HC515", what, remedy=f"plan for --target cuda+{target.isa.name}")
    return check_seconds(seconds, "bound")


def parse_seconds(text: str) -> float:
    """Read a number of seconds. Raises UsageError HC518."""
    try:
        return check_seconds(float(text))
    except ValueError:
        remedy = "write --tune=60, or put --tune after the model"
        raise UsageError("HC518", f"invalid number of seconds {text!r}", remedy=remedy) from None


def parse_pin(text: str) -> tuple[str, Device]:
    """Read `Conv_3=cpu` or `encoder/*=gpu`; the name may hold `=`. Raises UsageError HC519."""
    pattern, _, device = text.rpartition("=")
    if not pattern or device.lower() not in {d.value for d in Device}:
        remedy = "write NODE=cpu or NODE=gpu, where NODE may contain * and ?"
        raise UsageError("HC519", f"invalid pin {text!r}", remedy=remedy)
    return pattern, Device(device.lower())


def parse_effort(text: str) -> float:
    """Read a number of seconds for the planner. Raises UsageError HC518."""
    try:
        return check_seconds(float(text), "planning")
    except ValueError:
        raise UsageError("HC518", f"invalid number of seconds {text!r}", remedy="for example 60") from None


def missing_output(remedy: str) -> UsageError:
    """The error of a compilation that goes to the end, and was given no folder to write: HC522."""
    return UsageError("HC522", "missing output path", remedy=remedy)


def parse_count(text: str) -> int:
    """Read a whole number of at least 1, such as a number of threads. Raises UsageError HC513."""
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or int(text) < 1:
        raise UsageError("HC513", f"invalid count {text!r}", remedy="give a whole number of at least 1")
    return int(text)


def parse_seed(text: str) -> int:
    """Read a whole number of at least 0. Raises UsageError HC513."""
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII):
        raise UsageError("HC513", f"invalid seed {text!r}", remedy="give a whole number of at least 0")
    return int(text)


def _native_target() -> Target:
    return parse_target("native")


def _default_machine() -> Machine:
    from hybridc.machine import load_machine

    return load_machine()


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """How a model is compiled."""

    target: Target = field(default_factory=_native_target)
    gpu_memory: tuple[Budget, ...] = ()
    """Budgets that the artifact has a plan for, in any order; empty: one plan without a limit."""
    host_memory_bytes: int | None = None
    """What a run may hold of the host's memory, arena and staging; None: what there is."""
    shapes: tuple[tuple[str, Shape], ...] = ()
    """Shapes of inputs whose dimensions the model leaves open."""
    dims: tuple[tuple[str, Size], ...] = ()
    """Sizes of named dimensions, in every input that has them."""
    values: tuple[tuple[str, np.ndarray], ...] = field(default=(), compare=False)
    """Inputs that are constants of these values. Not compared: arrays have no single truth."""
    bounds: tuple[tuple[str, int], ...] = ()
    """The most trips of loops of which only a run knows how many they make, by name of the node."""
    machine: Machine = field(default_factory=_default_machine)
    """Speeds that the planner weighs against each other."""
    pins: tuple[tuple[str, Device], ...] = ()
    """Where kernels must run: names of ONNX nodes, with `*` and `?`, and a device."""
    plan_seconds: float = DEFAULT_PLAN_SECONDS
    """Time that the planner may search, in seconds of a nominal machine: the effort is counted, not timed."""
    plan_timeout: float | None = None
    """Seconds of the clock after which the best plans so far are taken; None: the effort alone counts."""
    robust: bool = False
    """Whether plans are searched for a few machines around the profile, and chosen by their times on many."""
    threads: int | None = None
    """CPU threads that kernels are scheduled for, and that a session then uses unless it is loaded with
    others; None: see `cpu_threads`."""
    fast_algorithms: bool = True
    """Whether kernels may use Winograd's, Strassen's and FFT algorithms, whose rounding errors are a few
    times larger."""
    int8_activations: bool = True
    """Whether the CPU rounds the left factor of MatMulNBits to 8 bits where its `accuracy_level` is 4."""
    precision: str = FP32
    """Of PRECISIONS; where errors stay within the tolerance."""
    rounding_error: float = ROUNDING_ERROR
    """How much rounding to fp16 or bf16 may change a kernel's result, as a fraction of it."""
    context: int | None = None
    """Positions that a decoder's cache has room for, of which the sizes of its dimensions follow; None: these
    are given."""
    kv_cache: str | None = None
    """Of KV_CACHES, in which the keys and values of a decoder are stored; None: as in the model."""
    last_logits: bool = False
    """Whether a decoder gives the logits of one token of each sequence, which an input names, and not of
    all."""
    tune_seconds: float | None = None
    """Time for a measured choice among the tiles of CPU kernels; None: none is measured."""
    tune_record: Path | None = None
    """File with such measurements, which are used and added to; None: a file in the user's cache if there is
    time to tune, else none."""
    profile_kernels: bool = False
    """Whether each function's time is measured on this computer, for the planner to take instead of the
    prediction."""
    weights: bool = True
    """Whether weights that are external data of the model are read; planning needs their shapes alone."""
    cache: bool = True
    """Whether what earlier compilations left in the user's cache is used, and added to."""
    stop_after: str | None = None
    """Name of the last stage to run."""
    dump_ir: Path | None = None
    """Folder that gets the IR after every stage."""

    @property
    def trains_in_bf16(self) -> bool:
        """Whether it is a training step that is to be in bf16: those are not measured."""
        return self.precision == BF16 and self.rounding_error == ANY_ERROR

    @property
    def cpu_threads(self) -> int:
        """CPU threads that the schedules of kernels count on: as many as given, else as many cores as the
        process may use, or `targets.DEFAULT_THREADS` if the processor cannot run the target's code."""
        return self.threads or default_threads(self.target.isa)

    def check_fixed(self, purpose: str) -> None:
        """Raise UsageError HC512 if a dimension stays open, where `purpose` needs fixed ones."""
        shapes = (size for _, shape in self.shapes for size in shape)
        found = next((size for size in (*shapes, *dict(self.dims).values()) if isinstance(size, Sizes)), None)
        if found is not None:
            what = f"{purpose} needs sizes that are fixed, not {found}"
            raise UsageError("HC512", what, remedy=f"give one size, for example {found.high}")

    def __post_init__(self) -> None:
        for option, pairs in (
            ("--shape", self.shapes),
            ("--dim", self.dims),
            ("--value", self.values),
            ("--bound", self.bounds),
        ):
            names = [pair[0] for pair in pairs]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise UsageError(
                    "HC514", f"{option} specifies {twice!r} more than once", remedy="specify it once"
                )
        for name, shape in self.shapes:
            if not isinstance(shape, tuple) or not all(s is None or _is_dimension(s) for s in shape):
                raise UsageError(
                    "HC511",
                    f"invalid shape {shape!r} for input {name!r}",
                    remedy="for example (1, 3, 224, 224)",
                )
        for name, size in self.dims:
            if not isinstance(size, Sum) and not _is_dimension(size):
                raise UsageError(
                    "HC512",
                    f"invalid size {size!r} for dimension {name!r}",
                    remedy="give 0, or more",
                )
        for name, most in self.bounds:
            if not _is_dimension(most) or isinstance(most, Sizes) or not most:
                what = f"invalid bound {most!r} of loop {name!r}"
                raise UsageError("HC512", what, remedy="give 1 trip, or more")
        if self.context is not None and (
            not _is_dimension(self.context) or isinstance(self.context, Sizes) or not self.context
        ):
            what = f"invalid context {self.context!r}"
            raise UsageError("HC512", what, remedy="give 1 position, or more")
        if self.threads is not None:
            check_threads(self.threads)
        for target in self.target.of_each:
            check_precision(self.precision, self.rounding_error, target)
            if self.kv_cache is not None:
                check_kv_cache(self.kv_cache)
        if not self.weights and self.precision in (FP16, BF16, TF32):
            what = f"--precision {self.precision} measures errors with the values of weights"
            raise UsageError("HC500", what, remedy="remove --no-weights")
        if self.tune_seconds is not None:
            check_seconds(self.tune_seconds)
        check_seconds(self.plan_seconds, "planning")
        if self.plan_timeout is not None:
            check_seconds(self.plan_timeout, "planning")
        if self.pins and not self.target.has_gpu:
            raise UsageError(
                "HC515",
                f"--pin is given, but the target {self.target} has no GPU",
                remedy=f"compile for --target cuda+{self.target.cpu}",
            )
        if self.gpu_memory and not self.target.has_gpu:
            budgets = ",".join(map(str, self.gpu_memory))
            raise UsageError(
                "HC515",
                f"--gpu-memory {budgets} is given, but the target {self.target} has no GPU",
                remedy=f"compile for --target cuda+{self.target.cpu}",
            )
