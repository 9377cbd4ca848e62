"""Permutations of axes that cancel are left out, with whatever lies between them in the other order."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from hybridc.passes.canonicalize.canonicalize import canonicalize
from hybridc.passes.canonicalize.permutations import cancel_permutations
from tests.support.programs import built_program, drawn, run_llvm

op = relax.op
SHAPE, KERNEL = (2, 4, 6, 5), (4, 4, 3, 3)
LAST, FIRST = [0, 2, 3, 1], [0, 3, 1, 2]


def names(program):
    calls = [b.value for b in program.bindings if isinstance(b.value, relax.Call)]
    return [call.op.name.removeprefix("relax.") for call in calls]


def assert_same(before, after):
    x = drawn(0, *SHAPE)
    wants, gots = (
        run_llvm(p.module, x, *(p.weights[v.name] for v in p.main.params[1:])) for p in (before, after)
    )
    for want, got in zip(wants, gots, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def last(e, x):
    return e(op.permute_dims(x, LAST))


def first(e, x):
    return e(op.permute_dims(x, FIRST))


def number(value):
    return relax.const(np.asarray(value, "float32"))


def hard_swish(e, x, *_):
    six = e(op.minimum(e(op.maximum(e(op.add(x, number(3.0))), number(0.0))), number(6.0)))
    return e(op.multiply(x, e(op.divide(six, number(6.0)))))


def excited(e, x, *_):
    mean = e(op.mean(x, [1, 2], keepdims=True))
    return e(op.multiply(x, e(op.sigmoid(last(e, first(e, mean))))))


BETWEEN = {
    "nothing": lambda e, x, *_: x,
    "hard swish": hard_swish,
    "bias": lambda e, x, w, b: e(op.add(x, b)),
    "squeeze and excitation": excited,
    "padding": lambda e, x, *_: e(op.nn.pad(x, [0, 0, 0, 1, 2, 0, 0, 0])),
    "concatenation": lambda e, x, *_: e(op.concat([x, e(op.nn.relu(x))], axis=2)),
    "softmax": lambda e, x, *_: e(op.nn.softmax(x, axis=-1)),
    "sum over channels": lambda e, x, *_: e(op.add(x, e(op.sum(x, [-1], keepdims=True)))),
    "two of them": lambda e, x, *_: e(op.add(x, last(e, e(op.nn.relu(first(e, x)))))),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_operators_between_two_permutations_are_computed_in_the_other_order(name):
    def build(e, x, w, b):
        between = BETWEEN[name](e, last(e, e(op.nn.conv2d(x, w, padding=(1, 1)))), w, b)
        return e(op.nn.conv2d(first(e, between), w, padding=(1, 1)))

    before = built_program(build, SHAPE, [drawn(1, *KERNEL), drawn(2, 4)])
    after = cancel_permutations(before)
    assert "permute_dims" not in names(after)
    assert all(after.origins.values())
    assert_same(before, after)


def test_a_bias_between_permutations_is_the_convolutions():
    def build(e, x, w, b):
        y = e(op.add(last(e, e(op.nn.conv2d(x, w, padding=(1, 1)))), b))
        return e(op.nn.relu(first(e, y)))

    after = canonicalize(built_program(build, SHAPE, [drawn(1, *KERNEL), drawn(2, 4)]))
    assert names(after) == ["nn.conv2d", "add", "nn.relu"]


def test_means_of_images_need_no_order():
    def build(e, x):
        return e(op.mean(e(op.nn.relu(last(e, x))), [1, 2]))

    before = built_program(build, SHAPE)
    after = cancel_permutations(before)
    assert names(after) == ["nn.relu", "mean"]
    assert_same(before, after)


def test_a_result_that_others_read_in_its_order_is_permuted_for_them():
    def build(e, x, w):
        y = e(op.nn.relu(last(e, x)))
        z = e(op.nn.conv2d(first(e, y), w))
        deep = e(op.tanh(e(op.matmul(y, number(np.eye(4))))))
        return e(op.add(e(op.sum(z)), e(op.sum(deep))))

    before = built_program(build, SHAPE, [drawn(1, *KERNEL)])
    after = cancel_permutations(before)
    assert names(after).count("permute_dims") == 1
    assert_same(before, after)


KEPT = {
    "an operator that has an order": lambda e, x: e(
        op.nn.relu(e(op.matmul(last(e, x), number(np.eye(4, dtype="f")))))
    ),
    "nothing undoes it": lambda e, x: e(op.nn.relu(last(e, x))),
    "another permutation": lambda e, x: e(op.permute_dims(e(op.nn.relu(last(e, x))), [0, 2, 1, 3])),
    "heads of attention": lambda e, x: e(
        op.matmul(e(op.multiply(last(e, x), number(0.5))), e(op.permute_dims(last(e, x), [0, 1, 3, 2])))
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_permutations_that_do_not_cancel_stay(name):
    before = built_program(KEPT[name], SHAPE)
    assert cancel_permutations(before) is before


def extents(var):
    return [int(extent) for extent in var.ty.shape.values]


def drawn_operator(rng, e, value, partner):
    """One that has an order of axes, or none; `partner` has the shape of `value`."""
    shape, axis, other = extents(value), int(rng.integers(4)), int(rng.integers(-4, 0))
    match int(rng.integers(12)):
        case 0:
            return op.permute_dims(value, [0, 2, 1, 3])
        case 1 | 2 | 3:
            return op.permute_dims(value, LAST if rng.random() < 0.5 else FIRST)
        case 4:
            return op.nn.relu(value)
        case 5:
            return op.add(value, partner)
        case 6:
            return op.multiply(number(drawn(axis, *shape[int(rng.integers(4)) :])), value)
        case 7:
            return op.subtract(value, e(op.mean(value, [axis], keepdims=True)))
        case 8:
            return op.nn.softmax(value, axis=other)
        case 9:
            return op.concat([value, partner], axis=other)
        case 10:
            return op.nn.pad(value, [int(width) for width in rng.integers(0, 2, 8)])
    return op.strided_slice(value, [axis], [0], [max(1, shape[axis] - 1)])


def drawn_network(seed):
    rng = np.random.default_rng(seed)

    def build(e, x):
        made = [x]
        for _ in range(int(rng.integers(6, 16))):
            value = made[-1] if rng.random() < 0.7 else made[int(rng.integers(len(made)))]
            alike = [each for each in made if extents(each) == extents(value)]
            made.append(e(drawn_operator(rng, e, value, alike[int(rng.integers(len(alike)))])))
        return e(op.sum(e(op.multiply(made[-1], made[-1])), [1, 2] if rng.random() < 0.5 else None))

    return built_program(build, (2, 3, 4, 5))


@pytest.mark.parametrize("seed", range(12))
def test_drawn_networks_compute_the_same(seed):
    before = drawn_network(seed)
    after = cancel_permutations(before)
    x = drawn(seed, 2, 3, 4, 5)
    want, got = (
        run_llvm(p.module, x, *(p.weights[v.name] for v in p.main.params[1:]))[0] for p in (before, after)
    )
    np.testing.assert_allclose(got, want, rtol=1e-4)
    assert names(after).count("permute_dims") <= names(before).count("permute_dims")
