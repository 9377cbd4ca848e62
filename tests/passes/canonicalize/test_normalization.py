"""Decomposed normalisation becomes one kernel, and its variance is accurate."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from hybridc.ir import Device
from hybridc.passes.canonicalize.canonicalize import canonicalize
from hybridc.passes.fuse.fuse import fuse
from hybridc.schedules.rule import Request
from hybridc.schedules.select import schedule
from hybridc.targets import parse_target
from tests.support.programs import built_program as program
from tests.support.programs import drawn, run_llvm

op = relax.op
EPSILON = 1e-5


def chain(axes, square):
    """(x - mean) / sqrt(mean of squares + epsilon), as exporters write it."""

    def build(e, x, *weights):
        distance = e(op.subtract(x, e(op.mean(x, axes, True))))
        root = e(op.sqrt(e(op.add(square(e, x, distance, axes), relax.const(EPSILON, "float32")))))
        result = e(op.divide(distance, root))
        return e(op.add(e(op.multiply(result, weights[0])), weights[1])) if weights else result

    return build


def power(e, x, distance, axes):
    return e(op.mean(e(op.power(distance, relax.const(2.0, "float32"))), axes, True))


def product(e, x, distance, axes):
    return e(op.mean(e(op.multiply(distance, distance)), axes, True))


def variance(e, x, distance, axes):
    return e(op.variance(x, axes, True))


def root_mean_square(inverse):
    """x by the root of the mean of its squares, in the ways of exporters, times a weight."""

    def build(e, x, *weights):
        squares = e(op.power(x, relax.const(2.0, "float32"))) if inverse == "rsqrt" else e(op.multiply(x, x))
        shifted = e(op.add(e(op.mean(squares, [-1], True)), relax.const(EPSILON, "float32")))
        if inverse == "rsqrt":
            result = e(op.multiply(e(op.rsqrt(shifted)), x))
        elif inverse == "reciprocal":
            one = relax.const(1.0, "float32")
            result = e(op.multiply(x, e(op.divide(one, e(op.sqrt(shifted))))))
        else:
            result = e(op.divide(x, e(op.sqrt(shifted))))
        return e(op.multiply(result, weights[0]))

    return build


def standard(x, axes):
    centred = x - x.mean(axes, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axes, keepdims=True) + EPSILON)


def by_groups(x, groups):
    split = x.reshape(x.shape[0], groups, -1)
    return standard(split, -1).reshape(x.shape)


def group_norm(groups):
    return lambda e, x, *weights: e(
        op.nn.group_norm(x, *weights, num_groups=groups, channel_axis=1, axes=[2, 3], epsilon=EPSILON)
    )


def instance_norm(e, x, *weights):
    return e(op.nn.instance_norm(x, *weights, channel_axis=1, axes=[2, 3], epsilon=EPSILON))


CASES = {
    "layer norm with a power": (chain([-1], power), (2, 5, 24), (24,), lambda x: standard(x, -1)),
    "layer norm with a product": (chain([-1], product), (2, 5, 24), (24,), lambda x: standard(x, -1)),
    "instance norm": (chain([2, 3], variance), (2, 6, 5, 7), (6, 1, 1), lambda x: standard(x, (2, 3))),
    "group norm": (group_norm(3), (2, 6, 5, 7), (6,), lambda x: by_groups(x, 3)),
    "group norm of one group": (group_norm(1), (2, 6, 5, 7), (6,), lambda x: by_groups(x, 1)),
    "group norm of single channels": (group_norm(6), (2, 6, 5, 7), (6,), lambda x: by_groups(x, 6)),
    "instance norm operator": (instance_norm, (2, 6, 5, 7), (6,), lambda x: standard(x, (2, 3))),
}


@pytest.mark.parametrize("name", CASES)
def test_normalisation_is_one_kernel_and_accurate_far_from_zero(name):
    build, shape, weight, reference = CASES[name]
    weights = [drawn(i, *weight) for i in (1, 2)]
    after = fuse(canonicalize(program(build, shape, weights)))
    assert len(after.bindings) == 1

    x = drawn(0, *shape) + 3000
    arguments = [x, *(after.weights[v.name] for v in after.main.params[1:])]
    (got,) = run_llvm(after.module, *arguments)
    scale, shift = (w.reshape(-1, 1, 1) if len(shape) == 4 else w for w in weights)
    expected = reference(x.astype("f8")) * scale + shift
    # the inputs themselves are rounded to 1e-4 of the deviation; the sum of 3000s is not much worse
    np.testing.assert_allclose(got, expected, atol=3e-3)


@pytest.mark.parametrize("inverse", ["rsqrt", "reciprocal", "root"])
def test_root_mean_square_is_one_kernel(inverse):
    weight = drawn(1, 24)
    after = fuse(canonicalize(program(root_mean_square(inverse), (2, 5, 24), [weight])))
    assert len(after.bindings) == 1
    x = drawn(0, 2, 5, 24) * 1000
    (got,) = run_llvm(after.module, x, weight)
    wide = x.astype("f8")
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPSILON) * weight
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)


def test_a_root_that_others_read_is_computed_once():
    def build(e, x):
        mean = e(op.mean(e(op.multiply(x, x)), [-1], True))
        root = e(op.sqrt(e(op.add(mean, relax.const(EPSILON, "float32")))))
        return e(op.add(e(op.divide(x, root)), root))

    assert not canonicalize(program(build, (2, 5, 24))).functions


@pytest.mark.parametrize("target", ["avx2", "cuda:sm_75+avx2"])
@pytest.mark.parametrize("name", ["group norm", "instance norm", "root mean square"])
def test_standardization_has_a_schedule_of_its_own(name, target):
    if name == "root mean square":
        before = program(root_mean_square("root"), (2, 5, 64), [drawn(1, 64)])
    else:
        build, shape, weight, _ = CASES[name]
        before = program(build, shape, [drawn(i, *weight) for i in (1, 2)])
    after = fuse(canonicalize(before))
    (function,) = after.functions.values()
    device = Device.GPU if target.startswith("cuda") else Device.CPU
    scheduled = schedule(Request(function, frozenset(), parse_target(target)), device)
    assert scheduled is not None
    assert scheduled.rule == ("rows" if device is Device.GPU else "reduction")


def test_other_quotients_stay():
    def build(e, x):
        root = e(op.sqrt(e(op.add(e(op.variance(x, [1], True)), relax.const(EPSILON, "float32")))))
        return e(op.divide(e(op.subtract(x, e(op.mean(x, [2], True)))), root))

    assert not canonicalize(program(build, (2, 5, 24))).functions
