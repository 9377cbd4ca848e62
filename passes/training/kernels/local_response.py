"""Local response normalisation: each element divided by a power of the squares of channels around it.

    y = x / s^beta        with s[c] = bias + alpha / size * sum of x[c']^2 for c' in c's window

(Krizhevsky et al., 2012, section 3.3.) Both passes compute s again, so that of the forward pass only x is
kept, and the gradient is one expression, which needs no memory besides its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import relax, te, tirx

from hybridc.passes.training.gradients import placeholder

Index = Sequence[tirx.Expr]


@dataclass(frozen=True, slots=True)
class Response:
    """A window of `size` channels that begins `before` channels ahead of its own; channels on axis 1."""

    size: int
    before: int
    alpha: float
    beta: float
    bias: float

    def scale(self, x: te.Tensor, at: Index) -> tirx.Expr:
        """s at a position."""
        window = [offset - self.before for offset in range(self.size)]
        squares = _around(x, at, window, lambda near: x[near] * x[near])
        return tirx.const(self.bias, x.dtype) + tirx.const(self.alpha / self.size, x.dtype) * squares

    def power(self, scale: tirx.Expr) -> tirx.Expr:
        """s^beta."""
        return tirx.power(scale, tirx.const(self.beta, str(scale.ty.dtype)))


def response(data: relax.Expr, of: Response) -> tirx.PrimFunc:
    """Data [N, C, X...] to y."""
    x = placeholder(data, "data")
    out = te.compute(x.shape, lambda *at: x[at] / of.power(of.scale(x, at)), name="local_response")
    return te.create_prim_func([x, out])


def response_gradient(data: relax.Expr, of: Response) -> tirx.PrimFunc:
    """Data and dy [N, C, X...] to dx = dy / s^beta - 2 alpha beta / size * x * sum of dy x / s^(beta + 1).

    The sum is over the channels in whose windows an element is.
    """
    x, dy = placeholder(data, "data"), placeholder(data, "dy")
    factor = tirx.const(2 * of.alpha * of.beta / of.size, x.dtype)

    def share(at: Index) -> tirx.Expr:
        scale = of.scale(x, at)
        return dy[at] * x[at] / (of.power(scale) * scale)

    def body(*at: tirx.Var) -> tirx.Expr:
        windows = [of.before - offset for offset in range(of.size)]
        return dy[at] / of.power(of.scale(x, at)) - factor * x[at] * _around(x, at, windows, share)

    out = te.compute(x.shape, body, name="local_response_gradient")
    return te.create_prim_func([x, dy, out])


def _around(x: te.Tensor, at: Index, offsets: Sequence[int], term: Callable[[Index], tirx.Expr]) -> tirx.Expr:
    """The sum of a term of neighbouring channels, of those that exist."""
    zero = tirx.const(0, x.dtype)
    terms = []
    for offset in offsets:
        channel = at[1] + offset
        inside = tirx.all(channel >= 0, channel < x.shape[1])
        terms.append(tirx.if_then_else(inside, term((at[0], channel, *at[2:])), zero))
    return sum(terms[1:], start=terms[0])
