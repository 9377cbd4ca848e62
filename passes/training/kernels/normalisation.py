"""Normalisation to mean 0 and variance 1 over some axes, and its gradient.

Batch, layer, group and instance normalisation differ in the axes that mean and variance are taken over, and
in those that scale and shift belong to. With x' = (x - mean) * rstd and g the gradient times the scale,

    dx = rstd * (g - mean(g) - x' * mean(g * x'))        (Ioffe and Szegedy, 2015, section 3, simplified)

What the backward pass keeps is the data and two numbers for each mean.

Of a batch that need not be whole, kernels of BatchNorm read how many examples there are, int64[1]: those
behind are in no mean, and get no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import relax, te, tirx

from hybridc.passes.training.gradients import extents, placeholder

Index = Sequence[tirx.Expr]


@dataclass(frozen=True, slots=True)
class Normalisation:
    """Data, and the axes over which they are normalised."""

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[int, ...]
    """Reduced by mean and variance; the others are a row's index."""
    parameter_axes: tuple[int, ...]
    """Indices of scale and shift."""
    epsilon: float
    is_centered: bool = True
    """False: divided by the root mean square."""

    @property
    def rows(self) -> tuple[int, ...]:
        """Shape of the means."""
        return tuple(n for axis, n in enumerate(self.shape) if axis not in self.axes)

    @property
    def parameters(self) -> tuple[int, ...]:
        """Shape of scale and shift."""
        return tuple(self.shape[axis] for axis in self.parameter_axes)

    @property
    def count(self) -> int:
        """Elements that one mean is taken of."""
        return math.prod(self.shape[axis] for axis in self.axes)

    def row(self, at: Index) -> tuple[tirx.Expr, ...]:
        """The index of an element's mean."""
        return tuple(i for axis, i in enumerate(at) if axis not in self.axes)

    def parameter(self, at: Index) -> tuple[tirx.Expr, ...]:
        """The index of an element's scale and shift."""
        return tuple(at[axis] for axis in self.parameter_axes)

    def input(self, name: str, shape: Sequence[int]) -> te.Tensor:
        """A parameter of the kernel, of the data's dtype."""
        return te.placeholder(extents(shape), self.dtype, name)

    def number(self, value: float) -> tirx.Expr:
        """A constant of the data's dtype."""
        return tirx.const(value, self.dtype)

    def total(self, name: str, kept: Sequence[int], term: Callable[[Index], tirx.Expr]) -> te.Tensor:
        """The sum of a term over all axes but `kept`, which are the result's, in order."""
        loops = {
            axis: te.reduce_axis((0, tirx.IntImm("int64", n)), f"k{axis}")
            for axis, n in enumerate(self.shape)
            if axis not in kept
        }

        def body(*outer: tirx.Var) -> tirx.Expr:
            index = {**loops, **dict(zip(kept, outer, strict=True))}
            return te.sum(
                term(tuple(index[axis] for axis in range(len(self.shape)))), axis=list(loops.values())
            )

        return te.compute(extents([self.shape[axis] for axis in kept]), body, name=name)

    @property
    def row_axes(self) -> list[int]:
        """Axes that are not reduced."""
        return [axis for axis in range(len(self.shape)) if axis not in self.axes]

    def elements(self, examples: te.Tensor | None) -> tirx.Expr:
        """What one mean is taken of, of so many examples."""
        if examples is None:
            return self.number(self.count)
        return examples[0].astype(self.dtype) * self.number(self.count // self.shape[0])

    def counted(self, examples: te.Tensor | None, at: Index, value: tirx.Expr) -> tirx.Expr:
        """0 behind the last example."""
        return value if examples is None else tirx.Select(at[0] < examples[0], value, self.number(0))

    def means(self, x: te.Tensor, examples: te.Tensor | None = None) -> tuple[te.Tensor, te.Tensor]:
        """Mean and variance, which is the mean squared distance from the mean: it keeps its digits."""
        count = self.elements(examples)
        if not self.is_centered:
            mean = te.compute(extents(self.rows), lambda *i: self.number(0), name="mean")
            squares = self.total("squares", self.row_axes, lambda at: x[at] * x[at])
        else:
            sums = self.total("sums", self.row_axes, lambda at: self.counted(examples, at, x[at]))
            mean = te.compute(extents(self.rows), lambda *i: sums[i] / count, name="mean")

            def square(at: Index) -> tirx.Expr:
                distance = x[at] - mean[self.row(at)]
                return self.counted(examples, at, distance * distance)

            squares = self.total("squares", self.row_axes, square)
        return mean, te.compute(extents(self.rows), lambda *i: squares[i] / count, name="variance")

    def rstd(self, variance: te.Tensor) -> te.Tensor:
        """`1 / sqrt(variance + epsilon)`, of shape `rows`."""
        epsilon = self.number(self.epsilon)
        return te.compute(variance.shape, lambda *i: tirx.rsqrt(variance[i] + epsilon), name="rstd")


def statistics(norm: Normalisation) -> tirx.PrimFunc:
    """Data to mean and 1 / sqrt(variance + epsilon), each of shape `rows`."""
    x = norm.input("data", norm.shape)
    mean, variance = norm.means(x)
    return te.create_prim_func([x, mean, norm.rstd(variance)])


def batch_statistics(norm: Normalisation, momentum: float, *, is_counted: bool = False) -> tirx.PrimFunc:
    """As `statistics`, of data and running mean and variance, whose new values are two more results.

    They take `momentum` of the batch's; its variance counts one element less, as in PyTorch. If it
    `is_counted` there is one more operand, the number of examples.
    """
    x, examples = norm.input("data", norm.shape), _examples(is_counted)
    old_mean, old_variance = (norm.input(name, norm.rows) for name in ("running_mean", "running_variance"))
    mean, variance = norm.means(x, examples)
    results = _running(norm, momentum, norm.elements(examples), mean, variance, old_mean, old_variance)
    operands = [x, old_mean, old_variance, *_given(examples)]
    return te.create_prim_func([*operands, mean, norm.rstd(variance), *results])


def _examples(is_counted: bool) -> te.Tensor | None:
    """The operand that says how many there are."""
    return te.placeholder((1,), "int64", "examples") if is_counted else None


def _given(examples: te.Tensor | None) -> list[te.Tensor]:
    return [] if examples is None else [examples]


def mean(norm: Normalisation) -> tirx.PrimFunc:
    """Data to their mean, of shape `rows`."""
    x, count = norm.input("data", norm.shape), norm.number(norm.count)
    sums = norm.total("sums", norm.row_axes, lambda at: x[at])
    return te.create_prim_func([x, te.compute(sums.shape, lambda *i: sums[i] / count, name="mean")])


def distance_from(norm: Normalisation) -> tirx.PrimFunc:
    """Data and a mean to the mean squared distance from it, of shape `rows`."""
    x, centre = norm.input("data", norm.shape), norm.input("mean", norm.rows)
    count = norm.number(norm.count)

    def square(at: Index) -> tirx.Expr:
        distance = x[at] - centre[norm.row(at)]
        return distance * distance

    squares = norm.total("squares", norm.row_axes, square)
    result = te.compute(squares.shape, lambda *i: squares[i] / count, name="variance")
    return te.create_prim_func([x, centre, result])


def running_statistics(norm: Normalisation, momentum: float, parts: int) -> tirx.PrimFunc:
    """Mean, variance, and the running ones, to 1 / sqrt(variance + epsilon) and new running ones.

    Of `parts` times as many elements as the data have.
    """
    names = ("mean", "variance", "running_mean", "running_variance")
    mean, variance, old_mean, old_variance = (norm.input(name, norm.rows) for name in names)
    running = _running(
        norm, momentum, norm.number(parts * norm.count), mean, variance, old_mean, old_variance
    )
    return te.create_prim_func([mean, variance, old_mean, old_variance, norm.rstd(variance), *running])


def _running(
    norm: Normalisation,
    momentum: float,
    count: tirx.Expr,
    mean: te.Tensor,
    variance: te.Tensor,
    *old: te.Tensor,
) -> list[te.Tensor]:
    """New running mean and variance, of the old ones: they take `momentum` of those of `count` elements."""
    old_mean, old_variance = old
    new, kept = norm.number(momentum), norm.number(1 - momentum)
    unbiased = new * count / tirx.max(count - norm.number(1), norm.number(1))
    return [
        te.compute(mean.shape, lambda *i: kept * old_mean[i] + new * mean[i], name="new_mean"),
        te.compute(
            mean.shape, lambda *i: kept * old_variance[i] + unbiased * variance[i], name="new_variance"
        ),
    ]


def copies(values: Sequence[relax.Expr]) -> tirx.PrimFunc:
    """Values to themselves."""
    inputs = [placeholder(value, f"x{i}") for i, value in enumerate(values)]
    outputs = [te.compute(x.shape, _element(x), name=f"y{i}") for i, x in enumerate(inputs)]
    return te.create_prim_func([*inputs, *outputs])


def _element(x: te.Tensor) -> Callable[..., tirx.Expr]:
    return lambda *at: x[at]


def normalised(norm: Normalisation) -> tirx.PrimFunc:
    """Data, mean, rstd, scale and shift to the normalised data."""
    x, (mean, rstd) = norm.input("data", norm.shape), _rows(norm)
    scale, shift = (norm.input(name, norm.parameters) for name in ("scale", "shift"))

    def body(*at: tirx.Var) -> tirx.Expr:
        row, parameter = norm.row(at), norm.parameter(at)
        return (x[at] - mean[row]) * (rstd[row] * scale[parameter]) + shift[parameter]

    out = te.compute(x.shape, body, name="normalised")
    return te.create_prim_func([x, mean, rstd, scale, shift, out])


def parameter_gradients(norm: Normalisation) -> tirx.PrimFunc:
    """Data, dy, mean and rstd to the gradients of scale and shift."""
    x, dy, (mean, rstd) = norm.input("data", norm.shape), norm.input("dy", norm.shape), _rows(norm)

    def standard(at: Index) -> tirx.Expr:
        return (x[at] - mean[norm.row(at)]) * rstd[norm.row(at)]

    scale = norm.total("dscale", norm.parameter_axes, lambda at: dy[at] * standard(at))
    shift = norm.total("dshift", norm.parameter_axes, lambda at: dy[at])
    return te.create_prim_func([x, dy, mean, rstd, scale, shift])


def batch_data_gradient(norm: Normalisation, *, is_counted: bool = False) -> tirx.PrimFunc:
    """Data, dy, mean, rstd, scale and the gradients of scale and shift to dx.

    Where scale and shift belong to a row, their gradients are the sums that dx asks for. If it `is_counted`
    there is one more operand, the number of examples.
    """
    x, dy, (mean, rstd) = norm.input("data", norm.shape), norm.input("dy", norm.shape), _rows(norm)
    scale, dscale, dshift = (norm.input(n, norm.parameters) for n in ("scale", "dscale", "dshift"))
    examples = _examples(is_counted)
    share = norm.number(1 / norm.count) if examples is None else norm.number(1) / norm.elements(examples)

    def body(*at: tirx.Var) -> tirx.Expr:
        c = norm.row(at)
        standard = (x[at] - mean[c]) * rstd[c]
        gradient = scale[c] * rstd[c] * (dy[at] - (dshift[c] + standard * dscale[c]) * share)
        return norm.counted(examples, at, gradient)

    out = te.compute(x.shape, body, name="batch_norm_data_gradient")
    return te.create_prim_func([x, dy, mean, rstd, scale, dscale, dshift, *_given(examples), out])


def data_gradient(norm: Normalisation) -> tirx.PrimFunc:
    """Data, dy, mean, rstd and scale to dx; the two sums for each row are taken first."""
    x, dy, (mean, rstd) = norm.input("data", norm.shape), norm.input("dy", norm.shape), _rows(norm)
    scale = norm.input("scale", norm.parameters)
    count = norm.number(1 / norm.count)

    def standard(at: Index) -> tirx.Expr:
        return (x[at] - mean[norm.row(at)]) * rstd[norm.row(at)]

    def scaled(at: Index) -> tirx.Expr:
        return dy[at] * scale[norm.parameter(at)]

    along = norm.total("along", norm.row_axes, lambda at: scaled(at) * standard(at))
    sums = norm.total("sums", norm.row_axes, scaled) if norm.is_centered else None

    def body(*at: tirx.Var) -> tirx.Expr:
        row = norm.row(at)
        rest = standard(at) * along[row] * count
        return rstd[row] * (scaled(at) - (rest if sums is None else rest + sums[row] * count))

    out = te.compute(x.shape, body, name="norm_data_gradient")
    return te.create_prim_func([x, dy, mean, rstd, scale, out])


def _rows(norm: Normalisation) -> tuple[te.Tensor, te.Tensor]:
    return norm.input("mean", norm.rows), norm.input("rstd", norm.rows)
