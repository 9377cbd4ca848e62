"""Convolution and pooling along padded axes: windows that see in the padding what they see behind an end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from hybridc.frontend.counted.along import limit, same
from hybridc.frontend.counted.ledger import Axes, Ledger
from hybridc.frontend.counted.places import total
from hybridc.frontend.counted.rules import ALONG
from hybridc.frontend.expand.builder import Builder, Unsupported, is_used, operand, shape_of


@dataclass(frozen=True, slots=True)
class _Window:
    """Along one spatial axis."""

    reach: int
    """From its first to its last element, and one more."""
    stride: int
    before: int
    after: int

    @property
    def added(self) -> int:
        """To the extent, for the last place of a window times the stride."""
        return self.before + self.after - self.reach


def _windows(node: ir.Node, kernel: Sequence[int]) -> list[_Window]:
    """Raises Unsupported where the amount of padding follows from the extent."""
    rank, attributes = len(kernel), node.attributes
    strides = attributes.get_ints("strides", None) or [1] * rank
    dilations = attributes.get_ints("dilations", None) or [1] * rank
    pads = attributes.get_ints("pads", None) or [0] * (2 * rank)
    automatic = attributes.get_string("auto_pad", "NOTSET") or "NOTSET"
    reaches = [dilation * (size - 1) + 1 for size, dilation in zip(kernel, dilations, strict=True)]
    before, after = list(pads[:rank]), list(pads[rank:])
    if automatic == "VALID":
        before = after = [0] * rank
    elif automatic != "NOTSET":
        if any(stride != 1 for stride in strides):
            raise Unsupported(f"with {automatic} and strides {ALONG}")
        less, more = [(reach - 1) // 2 for reach in reaches], [reach // 2 for reach in reaches]
        before, after = (less, more) if automatic == "SAME_UPPER" else (more, less)
    if attributes.get_int("ceil_mode", 0):
        raise Unsupported(f"with ceil_mode {ALONG}")
    return [_Window(*parts) for parts in zip(reaches, strides, before, after, strict=True)]


def _spatial(axes: Axes) -> Axes:
    """Those that windows go along. Raises Unsupported if channels are padded."""
    if 1 in axes:
        raise Unsupported(f"with channels {ALONG}")
    return {axis: count for axis, count in axes.items() if axis > 1}


def _results(axes: Axes, windows: Sequence[_Window], build: Builder, ledger: Ledger) -> Axes:
    found = {axis: count for axis, count in axes.items() if axis == 0}
    for axis, count in _spatial(axes).items():
        window = windows[axis - 2]
        samples = ledger.samples(count)
        if not isinstance(count, int) or not samples or min(samples) + window.added < 0:
            raise Unsupported(ALONG)
        found[axis] = ledger.windows(count, window.added, window.stride, build)
    return found


def convolution(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value] | None:
    """Of zeros in the padding, as behind the ends."""
    x = operand(node, 0)
    axes = ledger.axes(x)
    hidden = _spatial(axes)
    if not hidden:
        return None
    if any(ledger.axes(value) for value in node.inputs[1:]):
        raise Unsupported("whose second or a later operand has an extent that is not fixed")
    windows = _windows(node, shape_of(operand(node, 1))[2:])
    [result] = same(node, ledger.zeroed(x, hidden, build), build)
    return [ledger.mark(result, _results(axes, windows, build, ledger))]


def max_pool(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value] | None:
    """Of minus infinity in the padding, as behind the ends."""
    x = operand(node, 0)
    axes = ledger.axes(x)
    hidden = _spatial(axes)
    if not hidden:
        return None
    if is_used(node, 1):
        raise Unsupported(f"with indices {ALONG}")
    windows = _windows(node, node.attributes.get_ints("kernel_shape", ()))
    result, *_ = same(node, ledger.filled(x, hidden, limit(x, -math.inf, build), build), build)
    return [ledger.mark(result, _results(axes, windows, build, ledger))]


def average_pool(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value] | None:
    """Of zeros in the padding, over the share of a window that counts."""
    x = operand(node, 0)
    axes, shape = ledger.axes(x), shape_of(x)
    hidden = _spatial(axes)
    if not hidden:
        return None
    windows = _windows(node, node.attributes.get_ints("kernel_shape", ()))
    found = _results(axes, windows, build, ledger)
    attributes = {name: each.value for name, each in node.attributes.items()} | {"count_include_pad": 1}
    zeroed = ledger.zeroed(x, hidden, build)
    [result] = build.ops("AveragePool", [zeroed], attributes)
    if not node.attributes.get_int("count_include_pad", 0) and any(w.before or w.after for w in windows):
        ones = build.cast(build.constant(np.ones((1, 1, *shape[2:]), np.float32)), ir.DataType.FLOAT)
        counted = ledger.filled(ones, hidden, build.constant(np.float32(0)), build)
        [share] = build.ops("AveragePool", [counted], attributes)
        assert x.dtype is not None
        result = build.op("Div", result, build.cast(share, x.dtype))
    return [ledger.mark(result, found)]


def global_average(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value] | None:
    """The sum of zeros in the padding, divided by how many elements there are."""
    x = operand(node, 0)
    axes, shape = ledger.axes(x), shape_of(x)
    hidden, chosen = _spatial(axes), list(range(2, len(shape)))
    if not hidden:
        return None
    sums = build.reduce("ReduceSum", ledger.zeroed(x, hidden, build), chosen)
    assert x.dtype is not None
    divisor = build.op("Cast", total(shape, axes, chosen, build, ledger), to=int(x.dtype))
    return [ledger.mark(build.op("Div", sums, divisor), {a: c for a, c in axes.items() if a == 0})]


def global_maximum(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value] | None:
    """Of minus infinity in the padding."""
    x = operand(node, 0)
    axes, hidden = ledger.axes(x), _spatial(ledger.axes(x))
    if not hidden:
        return None
    filled = ledger.filled(x, hidden, limit(x, -math.inf, build), build)
    result = build.reduce("ReduceMax", filled, list(range(2, len(shape_of(x)))))
    return [ledger.mark(result, {a: c for a, c in axes.items() if a == 0})]
