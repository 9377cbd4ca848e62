"""Loss, optimizer and batch of a training step, and how the texts of options are parsed to them."""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from hybridc.errors import UsageError
from hybridc.json_values import JsonValueError, each, flag, member, number, optional, size, text
from hybridc.sizes import Sizes, sizes_of

NEW = "#new"
"""Behind the name of a state: that of a step's output which is its new value."""
AVERAGE = "average"
"""Behind the name of a parameter and `#`: the state that is its moving average."""
LOSSES = ("softmax_cross_entropy", "mse", "l1", "bce_with_logits")
_DECAY = "give a number between 0 and 1: 0.999"
_TERM = re.compile(
    r"\s*(?:(?P<weight>\d+(?:\.\d*)?(?:e-?\d+)?)\s*\*)?\s*(?P<kind>\w+)"
    r"(?:\((?P<output>[^()]*)\))?(?P<options>:[^+]*)?\s*"
)


@dataclass(frozen=True, slots=True)
class LossTerm:
    """One summand of the loss."""

    kind: str
    """One of `LOSSES`."""
    output: str | None = None
    """The model's output that it is about; None: the only one."""
    weight: float = 1.0
    label_smoothing: float = 0.0
    """Of softmax cross entropy: the share of the target that is spread over all classes."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer and its settings; formulas and defaults are PyTorch's."""

    kind: str = "sgd"
    """`sgd`, `adam` or `adamw`."""
    lr: float = 0.01
    """Before any schedule."""
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def scalar_values(self, learning_rate: float, step: int) -> dict[str, float]:
        """What the update needs besides tensors, at step `step`, counted from 1.

        For Adam the bias corrections of its moments, which start at zero (Kingma and Ba, 2015).
        """
        if self.kind == "sgd":
            return {"learning_rate": learning_rate}
        values = {
            "step_size": learning_rate / (1 - self.beta1**step),
            "second_correction": 1 / math.sqrt(1 - self.beta2**step),
        }
        return values | ({"shrink": 1 - learning_rate * self.weight_decay} if self.kind == "adamw" else {})


@dataclass(frozen=True, slots=True)
class TrainingSpec:
    """A training step, apart from the model and the target."""

    loss: tuple[LossTerm, ...] = ()
    """Empty: the model's first output is the loss."""
    optimizer: Optimizer = Optimizer()
    batch: int | None = None
    """Examples a step; None: as many as the model's inputs have."""
    accumulate: int = 1
    """Parts that a batch is gone through in, one after the other."""
    freeze: tuple[str, ...] = ()
    """Names of parameters that stay as they are, with `*` and `?`."""
    clip_norm: float | None = None
    """Largest 2-norm of the gradient of all parameters of a batch; None: any."""
    ema: float | None = None
    """Decay of the exponential moving average that is kept of each parameter; None: of none."""
    sync_batchnorm: bool = False
    """BatchNorm by the statistics of all parts of a batch, each of which is then on a rank of its own."""
    is_partial: bool = False
    """Whether a step may have fewer examples than the batch."""

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise _refusal(str(self.clip_norm), "norm to clip gradients by", "give a positive number: 1.0")
        if self.ema is not None and not 0 < self.ema < 1:
            raise _refusal(str(self.ema), "decay of averages", _DECAY)
        if self.accumulate < 1 or (self.batch is not None and self.batch % self.accumulate):
            what = f"a batch of {self.batch} cannot be split into {self.accumulate} equal micro-batches"
            raise UsageError("HC573", what, remedy="--accumulate must divide --batch")
        if self.is_partial and self.sync_batchnorm:
            what = "--sync-batchnorm needs parts of a batch that are of one size"
            raise UsageError("HC573", what, remedy="give --batch one number, or remove --sync-batchnorm")

    @property
    def synchronized_parts(self) -> int:
        """Over how many parts BatchNorm takes its statistics together."""
        return self.accumulate if self.sync_batchnorm else 1

    @property
    def micro_batch(self) -> int | None:
        """Examples that the device sees at a time."""
        return None if self.batch is None else self.batch // self.accumulate

    @property
    def has_padding(self) -> bool:
        """Whether what the device sees at a time may have fewer examples than it has room for."""
        return self.is_partial and self.micro_batch != 1

    def scalar_values(self, learning_rate: float, step: int) -> dict[str, float]:
        """As `Optimizer.scalar_values`; the first parameters that a step makes are their own average."""
        values = self.optimizer.scalar_values(learning_rate, step)
        return values if self.ema is None else values | {"average_share": 1 - self.ema if step > 1 else 1.0}

    def trains(self, parameter: str) -> bool:
        """Whether a parameter is not frozen."""
        return not any(fnmatchcase(parameter, pattern) for pattern in self.freeze)


def read_spec(
    loss: str | None,
    optimizer: str,
    batch: int | str | range | None,
    accumulate: int,
    freeze: Sequence[str],
    clip_norm: float | None,
    ema: float | None,
    sync_batchnorm: bool,
) -> TrainingSpec:
    """What the Python API is told of a step. Raises UsageError HC570 or HC573."""
    terms = () if loss is None else parse_loss(loss)
    size, is_partial = (None, False) if batch is None else batch_of(batch)
    return TrainingSpec(
        terms,
        parse_optimizer(optimizer),
        size,
        accumulate,
        tuple(freeze),
        clip_norm,
        ema,
        sync_batchnorm,
        is_partial,
    )


def batch_of(given: int | str | range) -> tuple[int, bool]:
    """Examples a step from `64`, `"64"`, `"1..64"` or `range(1, 65)`, and whether there may be fewer.

    Raises UsageError HC570.
    """
    if isinstance(given, str) and re.fullmatch(r"\d{1,10}", given, re.ASCII):
        given = int(given)
    if type(given) is int and given > 0:
        return given, False
    try:
        sizes = None if isinstance(given, int) else sizes_of(given)
    except UsageError:
        sizes = None
    if not isinstance(sizes, Sizes) or sizes.is_divided or sizes.intervals[0].low != 1:
        raise _refusal(str(given), "batch", "write 64, or 1..64 for steps of at most so many examples")
    return sizes.high, True


def parse_clip_norm(text: str) -> float:
    """Read a positive number. Raises UsageError HC570."""
    norm = _number(text)
    if norm is None or norm <= 0:
        raise _refusal(text, "norm to clip gradients by", "give a positive number: 1.0")
    return norm


def parse_decay(text: str) -> float:
    """Read a number between 0 and 1. Raises UsageError HC570."""
    decay = _number(text)
    if decay is None or not 0 < decay < 1:
        raise _refusal(text, "decay of averages", _DECAY)
    return decay


def parse_loss(text: str) -> tuple[LossTerm, ...]:
    """Read `mse`, `softmax_cross_entropy:label_smoothing=0.1` or `2*mse(out1)+l1(out2)`.

    Raises UsageError HC570.
    """
    if not isinstance(text, str):
        raise _refusal(text, "loss", "give a string such as 'mse'")
    terms, position = [], 0
    while True:
        match = _TERM.match(text, position)
        if match is None:
            raise _refusal(
                text, "loss", f"losses are {', '.join(LOSSES)}: write for example 2*mse(out1)+l1(out2)"
            )
        kind, options = parse_call(match["kind"] + (match["options"] or "").rstrip(), "loss", _LOSS_OPTIONS)
        terms.append(LossTerm(kind, match["output"], float(match["weight"] or 1.0), **options))
        position = match.end()
        if position == len(text):
            break
        if text[position] != "+":
            raise _refusal(text, "loss", f"{text[position:]!r} is unexpected")
        position += 1
    outputs = [term.output for term in terms]
    if len(terms) > 1 and None in outputs:
        raise _refusal(text, "loss", "name the output of every term: 2*mse(out1)+l1(out2)")
    if any(not 0 <= term.label_smoothing < 1 for term in terms):
        raise _refusal(text, "loss", "label_smoothing must be at least 0 and less than 1")
    return tuple(terms)


def parse_optimizer(text: str) -> Optimizer:
    """Read `sgd:lr=0.1,momentum=0.9`, `adam` or `adamw:weight_decay=0.1`. Raises UsageError HC570."""
    if not isinstance(text, str):
        raise _refusal(text, "optimizer", "give a string such as 'sgd:lr=0.1'")
    kind, options = parse_call(text, "optimizer", _OPTIMIZER_OPTIONS)
    if "nesterov" in options:
        options["nesterov"] = bool(options["nesterov"])
    optimizer = Optimizer(kind, **(_OPTIMIZER_DEFAULTS[kind] | options))
    if optimizer.nesterov and not optimizer.momentum:
        raise _refusal(text, "optimizer", "nesterov requires momentum: sgd:lr=0.1,momentum=0.9,nesterov=1")
    if not 0 <= optimizer.beta1 < 1 or not 0 <= optimizer.beta2 < 1:
        raise _refusal(text, "optimizer", "beta1 and beta2 must be at least 0 and less than 1")
    if min(optimizer.lr, optimizer.momentum, optimizer.eps, optimizer.weight_decay) < 0:
        raise _refusal(text, "optimizer", "no value may be negative")
    return optimizer


def loss_to_text(terms: tuple[LossTerm, ...]) -> str:
    """What `parse_loss` reads as these terms; empty for the model's own loss."""

    def written(term: LossTerm) -> str:
        kind, colon, options = call_to_text(term.kind, term, _LOSS_OPTIONS).partition(":")
        weight = "" if term.weight == 1.0 else f"{term.weight!r}*"
        output = "" if term.output is None else f"({term.output})"
        return f"{weight}{kind}{output}{colon}{options}"

    return "+".join(map(written, terms))


def optimizer_to_text(optimizer: Optimizer) -> str:
    """What `parse_optimizer` reads as this optimizer."""
    return call_to_text(optimizer.kind, optimizer, _OPTIMIZER_OPTIONS)


_LOSS_OPTIONS = {kind: ("label_smoothing",) * (kind == "softmax_cross_entropy") for kind in LOSSES}
_ADAM = ("lr", "beta1", "beta2", "eps", "weight_decay")
_OPTIMIZER_OPTIONS = {
    "sgd": ("lr", "momentum", "nesterov", "weight_decay"),
    "adam": _ADAM,
    "adamw": _ADAM,
}
_OPTIMIZER_DEFAULTS: Mapping[str, dict[str, Any]] = {
    "sgd": {"lr": 0.01},
    "adam": {"lr": 0.001},
    "adamw": {"lr": 0.001, "weight_decay": 0.01},
}


def parse_call(text: str, what: str, options: Mapping[str, tuple[str, ...]]) -> tuple[str, dict[str, Any]]:
    """Read `KIND:OPTION=NUMBER,OPTION=NUMBER`; `options` has those of each kind. Raises UsageError HC570."""
    kind, colon, rest = text.strip().partition(":")
    if kind not in options:
        close = difflib.get_close_matches(kind, options, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise _refusal(text, what, f"{hint}known ones are {', '.join(options)}")
    values: dict[str, Any] = {}
    for part in rest.split(",") if colon else ():
        name, _, number = (word.strip() for word in part.partition("="))
        value = _number(number)
        if name not in options[kind] or name in values or value is None:
            known = (
                f"options of {kind} are {', '.join(options[kind])}" if options[kind] else "it has no options"
            )
            raise _refusal(text, what, f"{known}: write {kind}:NAME=NUMBER,NAME=NUMBER")
        values[name] = value
    return kind, values


def call_to_text(kind: str, value: object, options: Mapping[str, tuple[str, ...]]) -> str:
    """What `parse_call` reads: all options of the kind, with the numbers that the value has for them."""
    numbers = ",".join(f"{name}={float(getattr(value, name))!r}" for name in options[kind])
    return f"{kind}:{numbers}" if numbers else kind


def _number(text: str) -> float | None:
    try:
        value = float({"true": "1", "false": "0"}.get(text.lower(), text))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _refusal(text: str, what: str, remedy: str) -> UsageError:
    return UsageError("HC570", f"invalid {what} {text!r}", remedy=remedy)


def spec_to_json(spec: TrainingSpec) -> dict[str, Any]:
    """The spec as plain JSON values; `spec_from_json` is the inverse."""
    return asdict(spec)


def spec_from_json(data: Any) -> TrainingSpec:
    """The inverse of `spec_to_json`. Raises JsonValueError with the path of the first wrong value."""
    batch, accumulate = member(data, "batch", optional(_positive)), member(data, "accumulate", _positive)
    is_partial = member(data, "is_partial", flag, False)
    if is_partial and batch is None:
        raise JsonValueError("a batch that need not be whole has no largest size")
    if batch is not None and batch % accumulate:
        raise JsonValueError(f"a batch of {batch} has not {accumulate} equal parts")
    return TrainingSpec(
        loss=member(data, "loss", each(_term_from_json)),
        optimizer=member(data, "optimizer", _optimizer_from_json),
        batch=batch,
        accumulate=accumulate,
        freeze=member(data, "freeze", each(text)),
        clip_norm=member(data, "clip_norm", optional(_above_zero)),
        ema=member(data, "ema", optional(_decay)),
        sync_batchnorm=member(data, "sync_batchnorm", flag, False),
        is_partial=is_partial,
    )


def _term_from_json(data: Any) -> LossTerm:
    return LossTerm(
        kind=member(data, "kind", _one_of(LOSSES)),
        output=member(data, "output", optional(text)),
        weight=float(member(data, "weight", number)),
        label_smoothing=member(data, "label_smoothing", _share),
    )


def _optimizer_from_json(data: Any) -> Optimizer:
    return Optimizer(
        kind=member(data, "kind", _one_of(tuple(_OPTIMIZER_OPTIONS))),
        lr=member(data, "lr", _at_least_zero),
        momentum=member(data, "momentum", _at_least_zero),
        nesterov=member(data, "nesterov", flag),
        weight_decay=member(data, "weight_decay", _at_least_zero),
        beta1=member(data, "beta1", _share),
        beta2=member(data, "beta2", _share),
        eps=member(data, "eps", _at_least_zero),
    )


def _one_of(names: tuple[str, ...]) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in names:
            raise JsonValueError(f"{reprlib.repr(value)} is none of {', '.join(names)}")
        return str(value)

    return read


def _positive(value: Any) -> int:
    if size(value) < 1:
        raise JsonValueError("is not positive")
    return int(value)


def _at_least_zero(value: Any) -> float:
    if number(value) < 0:
        raise JsonValueError(f"{reprlib.repr(value)} is negative")
    return float(value)


def _above_zero(value: Any) -> float:
    if number(value) <= 0:
        raise JsonValueError(f"{reprlib.repr(value)} is not positive")
    return float(value)


def _decay(value: Any) -> float:
    if not 0 < number(value) < 1:
        raise JsonValueError(f"{reprlib.repr(value)} is not between 0 and 1")
    return float(value)


def _share(value: Any) -> float:
    if _at_least_zero(value) >= 1:
        raise JsonValueError(f"{reprlib.repr(value)} is not less than 1")
    return float(value)
