"""The functions that ONNX lists for recurrent cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tvm import ir, tirx


@dataclass(frozen=True, slots=True)
class Activation:
    """A function of ONNX's list, and its parameters."""

    name: str
    alpha: float = 0.0
    beta: float = 0.0

    def of(self, x: ir.Expr) -> ir.Expr:
        """Its value at x, of float32. Raises KeyError for a name not in `ACTIVATIONS`."""
        return ACTIVATIONS[self.name][0](x, number(self.alpha), number(self.beta))


def number(value: float) -> ir.Expr:
    """A float32."""
    return tirx.const(value, "float32")


_Function = Callable[[ir.Expr, ir.Expr, ir.Expr], ir.Expr]


def _soft_plus(x: ir.Expr) -> ir.Expr:
    """log(1 + exp(x)), which does not overflow."""
    return tirx.max(x, number(0.0)) + tirx.log(number(1.0) + tirx.exp(number(0.0) - tirx.abs(x)))


ACTIVATIONS: Mapping[str, tuple[_Function, tuple[float, ...]]] = MappingProxyType(
    {
        "Affine": (lambda x, a, b: a * x + b, (1.0, 0.0)),
        "Elu": (lambda x, a, b: tirx.Select(x < 0.0, a * (tirx.exp(x) - number(1.0)), x), (1.0,)),
        "HardSigmoid": (
            lambda x, a, b: tirx.max(tirx.min(a * x + b, number(1.0)), number(0.0)),
            (0.2, 0.5),
        ),
        "LeakyRelu": (lambda x, a, b: tirx.Select(x < 0.0, a * x, x), (0.01,)),
        "Relu": (lambda x, a, b: tirx.max(x, number(0.0)), ()),
        "ScaledTanh": (lambda x, a, b: a * tirx.tanh(b * x), (1.0, 1.0)),
        "Sigmoid": (lambda x, a, b: tirx.sigmoid(x), ()),
        "Softplus": (lambda x, a, b: _soft_plus(x), ()),
        "Softsign": (lambda x, a, b: x / (number(1.0) + tirx.abs(x)), ()),
        "Tanh": (lambda x, a, b: tirx.tanh(x), ()),
        "ThresholdedRelu": (lambda x, a, b: tirx.Select(x > a, x, number(0.0)), (1.0,)),
    }
)
"""Functions of x, alpha and beta, and the defaults of those parameters that they take."""
