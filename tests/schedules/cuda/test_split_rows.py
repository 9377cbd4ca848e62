"""Reductions of few long rows, and of rows across memory: drawn sizes compute what numpy says."""

from __future__ import annotations

import math

import numpy as np
from tvm.relax import op

from hybridc.schedules.cuda.reduction import reduction, rows
from tests.schedules.cuda import references as ref
from tests.schedules.cuda.harness import case, check, scheduled_for_gpu

Array = np.ndarray


def normal(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype("float32")


def test_parts_of_long_rows_add_up() -> None:
    # shorter ones a block has in registers
    long = rows.LONG_ROW
    check(
        {
            "even": case(lambda e, x: op.sum(x, [1]), lambda x: x.sum(1), [normal(2, long)], "split_rows"),
            "uneven": case(
                lambda e, x: op.max(x, [1]), lambda x: x.max(1), [normal(3, long + 77)], "split_rows"
            ),
            "all": case(
                lambda e, x: op.sum(e(op.multiply(x, x))),
                lambda x: np.asarray((x**2).sum()),
                [normal(5, 31, 443)],
                "split_rows",
            ),
            "mean": case(
                lambda e, x: op.mean(x, [2, 3]),
                lambda x: x.mean((2, 3)),
                [normal(1, 3, 301, 243)],
                "split_rows",
            ),
        }
    )


def test_rows_that_many_blocks_have_anyway_are_left_to_others() -> None:
    many = case(lambda e, x: op.sum(x, [1]), lambda x: x.sum(1), [normal(600, 64)])
    assert scheduled_for_gpu(many.function).rule != "split_rows"


def test_rows_across_memory_have_a_thread_each() -> None:
    # of which blocks of 256 threads do, or do not, end where an axis does
    shapes = ((2, 33, 32, 256), (37, 33, 56, 8))
    check(
        {
            f"softmax_{shape[0]}": case(
                lambda e, x: op.nn.softmax(x, 1), lambda x: ref.softmax(x, 1), [normal(*shape)], "reduction"
            )
            for shape in shapes
        }
    )
    assert all(math.prod(shape) // shape[1] >= reduction.ACROSS for shape in shapes)
