"""Optimizers: how a parameter and its states follow from its gradient. Formulas and defaults are PyTorch's.

Each update is one function that reads gradient, parameter and states once. What changes from step to step but
not from parameter to parameter comes as scalars, which the host computes in double precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tvm import relax, tirx

from hybridc.passes.program.program import tensor_dtype, tensor_shape
from hybridc.passes.training.gradients import Emitter
from hybridc.passes.training.kernels.updates import Element, update
from hybridc.passes.training.spec import AVERAGE

Elements = Mapping[str, tirx.Expr]


class UpdateRule(Protocol):
    """What a training step asks of an optimizer."""

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the tensors that are kept for each parameter, shaped like it and zero at first."""

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the step's scalars, of the parameters' dtype."""

    def results(self) -> Mapping[str, Element]:
        """`new_w` and `new_` states by name, each from those before it and the elements w, g, the states and
        the scalars."""


def emit_update(
    optimizer: UpdateRule,
    emitter: Emitter,
    parameter: relax.Expr,
    gradient: relax.Expr,
    states: Sequence[relax.Expr],
    scalars: Mapping[str, relax.Expr],
) -> list[relax.Var]:
    """One function call; returns the new parameter, and its new states in the optimizer's order."""
    arguments = {"w": parameter, "g": gradient, **dict(zip(optimizer.states, states, strict=True))}
    arguments |= {name: scalars[name] for name in optimizer.scalars}
    results = optimizer.results()
    like = relax.TensorType(tensor_shape(parameter), tensor_dtype(parameter))
    made = emitter.call(
        (f"{_name(optimizer)}_update", optimizer),
        lambda: update(arguments, results),
        list(arguments.values()),
        [like] * len(results) if len(results) > 1 else like,
    )
    if len(results) == 1:
        return [made]
    items = {name: emitter.item(made, i) for i, name in enumerate(results)}
    return [items["new_w"], *(items[f"new_{state}"] for state in optimizer.states)]


def _name(optimizer: UpdateRule) -> str:
    return type(optimizer.rule if isinstance(optimizer, Averaged) else optimizer).__name__.lower()


@dataclass(frozen=True, slots=True)
class Sgd:
    """Stochastic gradient descent, as `torch.optim.SGD` without dampening."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    @property
    def states(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    @property
    def scalars(self) -> tuple[str, ...]:
        return ("learning_rate",)

    def results(self) -> Mapping[str, Element]:
        def decayed(v: Elements) -> tirx.Expr:
            return _decayed(v, self.weight_decay)

        if not self.momentum:
            return {"new_w": lambda v: v["w"] - v["learning_rate"] * decayed(v)}

        def ahead(v: Elements) -> tirx.Expr:
            if not self.nesterov:
                return v["new_momentum"]
            return decayed(v) + _times(self.momentum, v["new_momentum"])

        return {
            "new_momentum": lambda v: _times(self.momentum, v["momentum"]) + decayed(v),
            "new_w": lambda v: v["w"] - v["learning_rate"] * ahead(v),
        }


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam (Kingma and Ba, 2015), as `torch.optim.Adam`; decoupled, the weight decay is that of `AdamW`."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    @property
    def states(self) -> tuple[str, ...]:
        return ("first_moment", "second_moment")

    @property
    def scalars(self) -> tuple[str, ...]:
        return ("step_size", "second_correction", *(["shrink"] if self.decoupled else []))

    def results(self) -> Mapping[str, Element]:
        def gradient(v: Elements) -> tirx.Expr:
            return v["g"] if self.decoupled else _decayed(v, self.weight_decay)

        def new_w(v: Elements) -> tirx.Expr:
            w = v["w"] * v["shrink"] if self.decoupled else v["w"]
            root = tirx.sqrt(v["new_second_moment"]) * v["second_correction"]
            return w - v["step_size"] * v["new_first_moment"] / (
                root + tirx.const(self.epsilon, root.ty.dtype)
            )

        return {
            "new_first_moment": lambda v: (
                v["first_moment"] + _times(1 - self.beta1, gradient(v) - v["first_moment"])
            ),
            "new_second_moment": lambda v: (
                _times(self.beta2, v["second_moment"]) + _times(1 - self.beta2, gradient(v) * gradient(v))
            ),
            "new_w": new_w,
        }


@dataclass(frozen=True, slots=True)
class Averaged:
    """Another optimizer, and an exponential moving average of each parameter beside it.

    As `torch.optim.swa_utils.get_ema_multi_avg_fn`: the average moves by the scalar's share towards the new
    parameter. At the first step the share is 1, which makes it that parameter.
    """

    rule: Sgd | Adam

    @property
    def states(self) -> tuple[str, ...]:
        return (*self.rule.states, AVERAGE)

    @property
    def scalars(self) -> tuple[str, ...]:
        return (*self.rule.scalars, "average_share")

    def results(self) -> Mapping[str, Element]:
        return {
            **self.rule.results(),
            f"new_{AVERAGE}": lambda v: v[AVERAGE] + v["average_share"] * (v["new_w"] - v[AVERAGE]),
        }


def _decayed(v: Elements, weight_decay: float) -> tirx.Expr:
    """The gradient with that of the squared parameters' sum."""
    return v["g"] + _times(weight_decay, v["w"]) if weight_decay else v["g"]


def _times(factor: float, value: tirx.Expr) -> tirx.Expr:
    return tirx.const(factor, value.ty.dtype) * value
