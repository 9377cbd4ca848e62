"""Padding is within the convolution or pooling behind it, where that computes the same."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tvm import relax

from hybridc.passes.canonicalize.canonicalize import canonicalize
from tests.support.programs import built_program, drawn, run_llvm

op = relax.op
SHAPE = (1, 4, 7, 6)
WIDTHS = [0, 0, 0, 0, 0, 1, 2, 1]


def conv(e, x, w):
    return e(op.nn.conv2d(x, w, strides=(2, 2), padding=(1, 0, 0, 1)))


def depthwise(e, x, w):
    return e(op.nn.conv2d(x, w, dilation=(2, 1), groups=4))


def average(e, x, *_):
    return e(op.nn.avg_pool2d(x, (3, 3), (2, 2)))


def counted(e, x, *_):
    return e(op.nn.avg_pool2d(x, (3, 3), (2, 2), (1, 1), count_include_pad=True))


def maximum(e, x, *_):
    return e(op.nn.max_pool2d(x, (3, 3), (2, 2)))


def padded(widths=WIDTHS, value=0.0, mode="constant"):
    return lambda e, x: e(op.nn.pad(x, widths, mode, value))


def positive(e, x):
    clipped = e(op.minimum(e(op.maximum(x, relax.const(0.0, "float32"))), relax.const(6.0, "float32")))
    return padded()(e, clipped)


WITHIN = {
    "convolution": (padded(), conv, (5, 4, 3, 3)),
    "depthwise": (padded(), depthwise, (4, 1, 3, 3)),
    "average": (padded(), average, ()),
    "average that counts": (padded(), counted, ()),
    "maximum of positive data": (positive, maximum, ()),
    "maximum with infinities": (padded(value=-math.inf), maximum, ()),
}


def both(pad, window, kernel):
    before = built_program(
        lambda e, x, *w: window(e, pad(e, x), *w), SHAPE, [drawn(1, *kernel)] if kernel else []
    )
    return before, canonicalize(before)


def names(program):
    return [binding.value.op.name.removeprefix("relax.") for binding in program.bindings]


@pytest.mark.parametrize("name", WITHIN)
def test_padding_is_within_the_window(name):
    before, after = both(*WITHIN[name])
    assert "nn.pad" not in names(after)
    assert {"node_lv"} <= {origin for origins in after.origins.values() for origin in origins}
    x = drawn(0, *SHAPE)
    want, got = (
        run_llvm(p.module, x, *(p.weights[v.name] for v in p.main.params[1:]))[0] for p in (before, after)
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


BEFORE = {
    "convolution of other numbers": (padded(value=1.0), conv, (5, 4, 3, 3)),
    "convolution of mirrored data": (padded(mode="reflect"), conv, (5, 4, 3, 3)),
    "channels": (padded([0, 0, 0, 1, 0, 0, 0, 0]), conv, (5, 5, 3, 3)),
    "average that counts no padding": (
        padded(),
        lambda e, x: e(op.nn.avg_pool2d(x, (3, 3), (2, 2), (1, 1))),
        (),
    ),
    "maximum of any data": (padded(), maximum, ()),
    "windows beside the data": (padded([0, 0, 0, 0, 4, 4, 0, 0], -math.inf), maximum, ()),
}


@pytest.mark.parametrize("name", BEFORE)
def test_other_padding_stays_before_it(name):
    _, after = both(*BEFORE[name])
    assert "nn.pad" in names(after)


def test_padding_that_others_read_stays_for_them():
    def build(e, x, w):
        wide = padded([0, 0, 0, 0, 1, 1, 1, 1])(e, x)
        return e(op.add(e(op.nn.conv2d(wide, w, padding=(1, 1))), wide))

    before = built_program(build, SHAPE, [drawn(1, 4, 4, 3, 3)])
    after = canonicalize(before)
    assert sorted(names(after)) == ["add", "nn.conv2d", "nn.pad"]
    x = drawn(0, *SHAPE)
    want, got = (run_llvm(p.module, x, p.weights["w0"])[0] for p in (before, after))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
