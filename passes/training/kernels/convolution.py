"""The gradient of a convolution's weight, of any rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import relax, te, tirx

from hybridc.passes.program.program import tensor_shape
from hybridc.passes.training.gradients import extents, placeholder
from hybridc.schedules.annotation import ConvAnnotation


@dataclass(frozen=True, slots=True)
class Window:
    """Attributes of a convolution, one number for each spatial axis."""

    strides: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    @classmethod
    def of(cls, call: relax.Call) -> Window:
        """That of a convolution."""
        attrs = call.attrs
        rank = len(attrs.strides)
        padding = tuple(int(p) for p in attrs.padding)
        return cls(
            tuple(int(s) for s in attrs.strides),
            padding[:rank],
            padding[rank:],
            tuple(int(d) for d in attrs.dilation),
            int(attrs.groups),
        )

    @property
    def padding(self) -> list[int]:
        """As Relax has it: before the axes, then after them."""
        return [*self.before, *self.after]

    def attributes(self, operator: str) -> dict[str, object]:
        """For `te.compute`: what a schedule rule reads off the block's annotations."""
        annotation = ConvAnnotation(operator, self.strides, tuple(self.padding), self.dilation, self.groups)
        return annotation.attributes()


def convolution_weight_gradient(
    data: relax.Expr, dy: relax.Expr, window: Window, taps: Sequence[int]
) -> tirx.PrimFunc:
    """`dw[o, i, k...] = sum over n, y... of dy[n, o, y...] * x[n, i, y * stride + k * dilation - pad...]`.

    Data [N, C, X...], dy [N, O, Y...], result [O, C / groups, K...]; what is read outside of the data is 0.
    """
    batches, channels, *_ = tensor_shape(data)
    outputs, *positions = tensor_shape(dy)[1:]
    per_group, outputs_per_group = channels // window.groups, outputs // window.groups
    rank = len(taps)
    x, grad = placeholder(data, "data"), placeholder(dy, "dy")
    padded = _padded(x, window)
    n = te.reduce_axis((0, tirx.IntImm("int64", batches)), "n")
    at = [te.reduce_axis((0, tirx.IntImm("int64", e)), f"y{i}") for i, e in enumerate(positions)]

    def body(o: tirx.Var, i: tirx.Var, *k: tirx.Var) -> tirx.Expr:
        source = [at[j] * window.strides[j] + k[j] * window.dilation[j] for j in range(rank)]
        channel = i if window.groups == 1 else o // outputs_per_group * per_group + i
        return te.sum(grad[(n, o, *at)] * padded[(n, channel, *source)], axis=[n, *at])

    name = f"conv{rank}d_wgrad"
    out = te.compute(extents((outputs, per_group, *taps)), body, name=name, attrs=window.attributes(name))
    return te.create_prim_func([x, grad, out])


def _padded(x: te.Tensor, window: Window) -> te.Tensor:
    """The data in a frame of zeros; a view that schedules inline."""
    if not any(window.padding):
        return x
    frame = [0, 0, *(a + b for a, b in zip(window.before, window.after, strict=True))]
    shape = [extent + more for extent, more in zip(x.shape, frame, strict=True)]
    zero = tirx.const(0, x.dtype)

    def body(*at: tirx.Var) -> tirx.Expr:
        source = [*at[:2], *(i - b for i, b in zip(at[2:], window.before, strict=True))]
        inside = [
            condition
            for i, extent in zip(source[2:], x.shape[2:], strict=True)
            for condition in (i >= 0, i < extent)
        ]
        return tirx.if_then_else(tirx.all(*inside), x[tuple(source)], zero)

    return te.compute(shape, body, name="padded")
