"""Sums of columns, and a few rows times a matrix: drawn sizes, with and without whole tiles."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.relax import op

from hybridc.ir import Device
from hybridc.schedules.rule import Request
from hybridc.schedules.select import schedule
from hybridc.targets import parse_target
from tests.schedules.cuda.harness import Case, case, check
from tests.schedules.cuda.test_packed import LAYOUTS, product

Array = np.ndarray


def cases_of(generator: np.random.Generator) -> dict[str, Case]:
    def normal(*shape: int) -> Array:
        return generator.standard_normal(shape).astype("float32")

    found: dict[str, Case] = {}
    for number in range(4):
        depth, vectors = int(generator.integers(128, 700)), int(generator.integers(1, 60))
        rows = int(generator.integers(1, 4))
        a, b, bias = normal(rows, depth), normal(depth, 4 * vectors), normal(4 * vectors)
        found[f"product_{number}"] = case(
            lambda e, a, b, c: op.nn.relu(op.add(e(op.matmul(a, b)), c)),
            lambda a, b, c: np.maximum(a @ b + c, 0),
            [a, b, bias],
            "few_rows",
        )
        batch = int(generator.integers(1, 4))
        pixels = int(generator.integers(32, 128))
        image = normal(batch, pixels, 4 * vectors)
        found[f"pixels_{number}"] = case(
            lambda e, x: op.mean(x, [1]), lambda x: x.mean(1), [image], "columns"
        )
        x = normal(batch, depth, 4 * vectors)
        found[f"mean_{number}"] = case(lambda e, x: op.mean(x, [1]), lambda x: x.mean(1), [x], "columns")
        found[f"squares_{number}"] = case(
            lambda e, x: op.sum(e(op.multiply(x, x)), [0, 1]), lambda x: (x**2).sum((0, 1)), [x]
        )
        keys = int(generator.integers(128, 400))
        weights, values = normal(3, 1, keys), normal(3, keys, 64)
        found[f"batched_{number}"] = case(
            lambda e, a, b: op.matmul(a, b), lambda a, b: a @ b, [weights, values], "few_rows"
        )
    return found


def test_results() -> None:
    check(cases_of(np.random.default_rng(20)))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 4])
def test_packed_products(bits: int, rows: int) -> None:
    generator, depth, columns, width = np.random.default_rng(bits + rows), 256, 192, 64
    function = product((rows,), columns, LAYOUTS["uint4" if bits == 4 else "int8"])
    a = generator.standard_normal((rows, depth)).astype("float32")
    if bits == 4:
        codes = generator.integers(0, 256, (columns // width, depth // 2, width), np.uint8)
        # of a span of 32, the first half lies in the low bits
        halves = codes.reshape(columns // width, -1, 1, 16, width)
        numbers = (
            np.concatenate([halves & 15, halves >> 4], 2).reshape(-1, depth, width).astype("float64") - 8
        )
    else:
        codes = generator.integers(-128, 128, (columns // width, depth, width), np.int8)
        numbers = codes.astype("float64")
    scales = generator.uniform(0.5, 1, (columns // width, depth // 64, width)).astype("float16")
    weights = numbers * np.repeat(scales.astype("float64"), 64, axis=1)
    expected = np.maximum(a.astype("float64") @ weights.transpose(1, 0, 2).reshape(depth, columns), 0)
    check({"packed": Case(function, [a, codes, scales], expected, "few_rows")})


def test_columns_that_are_no_vectors_are_left_to_others() -> None:
    request = Request(product((1,), 70, LAYOUTS["uint4"]), frozenset({1, 2}), parse_target("cuda:sm_80+avx2"))
    found = schedule(request, Device.GPU)
    assert found is not None and found.rule == "packed_gemv"
