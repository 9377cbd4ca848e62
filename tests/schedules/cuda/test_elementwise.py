"""Element-wise functions and moves of drawn shapes, by vectors, through tiles or element by element."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from tests.schedules.cuda.harness import case, check

Array = np.ndarray


def drawn(generator: np.random.Generator, rank: int) -> tuple[int, ...]:
    """A shape whose last axis is a whole number of vectors, or not."""
    last = int(generator.choice([4, 8, 16, 20, 64, 7, 9, 33, 50]))
    return (*(int(e) for e in generator.integers(1, 12, rank - 1)), last)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("seed", range(3))
def test_drawn_functions_compute_what_numpy_says(seed: int) -> None:
    generator = np.random.default_rng(seed)

    def normal(*shape: int, dtype: str = "float32") -> Array:
        return generator.standard_normal(shape).astype(dtype)

    n, c, h, w = drawn(generator, 4)
    axes = [int(a) for a in generator.permutation(4)]
    start, padding = int(generator.integers(0, w)), int(generator.integers(0, 5))
    cases = {
        "chain": case(
            lambda e, x, y: op.nn.silu(e(op.add(x, y))),
            lambda x, y: silu(x + y),
            [normal(n, c, h, w), normal(n, c, h, w)],
            "vector_elementwise",
        ),
        "channels": case(
            lambda e, x, y: op.nn.relu(e(op.multiply(x, y))),
            lambda x, y: np.maximum(x * y, 0),
            [normal(n, c, h, w), normal(c, 1, 1)],
        ),
        "columns": case(
            lambda e, x, y: op.subtract(x, y), lambda x, y: x - y, [normal(n, c, h, w), normal(w)]
        ),
        "half": case(
            lambda e, x, y: op.astype(op.exp(e(op.astype(op.add(x, y), "float32"))), "float16"),
            lambda x, y: np.exp(x + y),
            [normal(n, c, h, w, dtype="float16"), normal(n, c, h, w, dtype="float16")],
            "vector_elementwise",
            3e-3,
        ),
        "widened": case(
            lambda e, x: op.astype(x, "float32"), lambda x: x, [normal(n, c, h, w, dtype="float16")]
        ),
        "narrowed": case(lambda e, x: op.astype(x, "float16"), lambda x: x, [normal(n, c, h, w)], error=1e-3),
        "concat": case(
            lambda e, x, y, z: op.add(e(op.concat([x, y], 1)), z),
            lambda x, y, z: np.concatenate([x, y], 1) + z,
            [normal(n, c, h, w), normal(n, c + 1, h, w), normal(n, 2 * c + 1, h, w)],
        ),
        "concat_columns": case(
            lambda e, x, y, z: op.concat([x, y, z], -1),
            lambda x, y, z: np.concatenate([x, y, z], -1),
            [normal(c, w), normal(c, 8), normal(c, 4)],
        ),
        "pad": case(
            lambda e, x: op.nn.pad(x, (0, 0, 1, 2, padding, 4)),
            lambda x: np.pad(x, ((0, 0), (1, 2), (padding, 4))),
            [normal(n, h, w)],
        ),
        "slice": case(
            lambda e, x: op.strided_slice(x, [1, 2], [0, start], [h, w], [2, 1]),
            lambda x: x[:, ::2, start:],
            [normal(n, h, w)],
        ),
        "transpose": case(
            lambda e, x: op.permute_dims(x, axes), lambda x: x.transpose(axes), [normal(n, c, h, w)]
        ),
        "take": case(
            lambda e, x, i: op.take(x, i, 0, mode="clip"),
            lambda x, i: x[i],
            [normal(c + 2, w), generator.integers(0, c + 2, (n, 3)).astype("int64")],
        ),
        "where": case(
            lambda e, x, y: op.where(e(op.greater(x, y)), x, y),
            lambda x, y: np.maximum(x, y),
            [normal(n, c, w), normal(n, c, w)],
        ),
        "compare": case(lambda e, x, y: op.less(x, y), lambda x, y: x < y, [normal(n, w), normal(n, w)]),
        "integers": case(
            lambda e, x, y: op.add(op.multiply(x, y), relax.const(3, "int64")),
            lambda x, y: x * y + 3,
            [generator.integers(-99, 99, (n, w)), generator.integers(-99, 99, (n, w))],
        ),
        "bytes": case(
            lambda e, x: op.astype(x, "float32"),
            lambda x: x,
            [generator.integers(-99, 99, (c, w)).astype("int8")],
        ),
    }
    check(cases)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_transpositions_go_through_shared_memory(dtype: str) -> None:
    generator = np.random.default_rng(7)
    cases = {}
    for number in range(4):
        batch, rows, columns = (int(e) for e in generator.integers([1, 8, 8], [4, 90, 90]))
        x = generator.standard_normal((batch, rows, columns)).astype(dtype)
        bias = generator.standard_normal(rows).astype(dtype)
        cases[f"transposed_{number}"] = case(
            lambda e, x, b: op.add(e(op.permute_dims(x, [0, 2, 1])), b),
            lambda x, b: x.transpose(0, 2, 1) + b,
            [x, bias],
            "transpose",
            1e-5 if dtype == "float32" else 1e-3,
        )
    check(cases)


def test_quantization_takes_ties_to_even() -> None:
    steps = np.arange(-8, 9, dtype="f4").reshape(1, 17) / 2
    zero = relax.const(3, "int8")
    cases = {
        "quantize": case(
            lambda e, x: op.quantize(x, relax.const(1.0, "float32"), zero, out_dtype="int8"),
            lambda x: np.rint(x) + 3,
            [steps],
        )
    }
    check(cases)
