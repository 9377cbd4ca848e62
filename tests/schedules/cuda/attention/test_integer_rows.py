"""Attention to keys and values in rows of 8-bit integers on the emulated GPU."""

from __future__ import annotations

import numpy as np
import pytest

from hybridc.emulator import ThreadOrder
from hybridc.ir import Device
from hybridc.schedules.cuda.attention.attention import attention
from hybridc.schedules.cuda.attention.few_queries import few_query_attention, plans
from hybridc.schedules.cuda.attention.few_queries_kernel import few_queries_kernel
from hybridc.schedules.cuda.attention.read import read_stored_attention
from hybridc.schedules.cuda.core.launch import cuda_target, finish_function
from hybridc.schedules.rule import Request
from hybridc.schedules.select import schedule
from tests.schedules.cuda.attention.cases import drawn
from tests.schedules.cuda.harness import (
    TARGET,
    check,
    library_of,
    scheduled_for_gpu,
    wrong_cases,
)

TILES, FEW = attention.__name__, few_query_attention.__name__
CACHE = {1: "int8", 2: "int8"}


def test_few_queries() -> None:
    generator, cases = np.random.default_rng(3), {}
    for depth in (48, 64, 80, 128):
        for rows, shared, mask in ((1, 4, "cache"), (3, 2, "keys"), (7, 1, "causal")):
            columns = int(generator.integers(65, 200))
            sizes = int(generator.integers(1, 3)), rows, columns, 4
            cases[f"of_{depth}_{rows}"] = drawn(
                generator, sizes, depth, depth, mask, FEW, CACHE, shared=shared
            )
    cases["deep"] = drawn(generator, (1, 2, 70, 1), 288, 288, "keys", FEW, CACHE)
    cases["sides_differ"] = drawn(generator, (1, 2, 90, 2), 20, 36, "keys", FEW, CACHE)
    cases["half_queries"] = drawn(
        generator, (1, 2, 90, 2), 64, 64, "keys", FEW, {0: "float16", 4: "float16", **CACHE}
    )
    cases["half_values"] = drawn(generator, (1, 1, 70, 2), 64, 64, "none", FEW, {1: "int8", 2: "float16"})
    for mask in ("late", "unseen"):
        cases[f"in_parts_{mask}"] = drawn(generator, (1, 3, 9001, 1), 64, 56, mask, FEW, CACHE)
    check(cases, (ThreadOrder.FORWARD, ThreadOrder.WARPS))
    parts = {name for name, case in cases.items() if scheduled_for_gpu(case.function).workspace_bytes}
    assert parts >= {"in_parts_late", "in_parts_unseen"}


def test_every_plan_computes_the_same() -> None:
    """Whatever blocks share."""
    generator, functions = np.random.default_rng(5), {}
    case = drawn(generator, (1, 3, 300, 8), 48, 40, "cache", FEW, CACHE, shared=4)
    found = read_stored_attention(case.function)
    assert found is not None and found.operand_dtypes == ("float32", "int8", "int8")
    ways = plans(found)
    assert {plan.shared for plan in ways} == {1, 2, 4}
    for number in generator.choice(len(ways), 5, replace=False):
        made = finish_function(few_queries_kernel(found, ways[number]), FEW, cuda_target(TARGET))
        assert made is not None
        functions[f"plan_{number}"] = made
    assert not wrong_cases(dict.fromkeys(functions, case), functions, library_of(functions))


def test_many_queries() -> None:
    generator = np.random.default_rng(4)
    check(
        {
            "one_tile": drawn(generator, (1, 9, 40, 2), 48, 80, "causal", TILES, CACHE, shared=2),
            "tiles": drawn(generator, (2, 37, 70, 4), 128, 128, "cache", TILES, CACHE, shared=4),
            "deep": drawn(generator, (1, 20, 37, 1), 256, 256, "keys", TILES, CACHE),
            "half": drawn(generator, (1, 18, 40, 2), 64, 64, "keys", TILES, {0: "float16", **CACHE}),
        }
    )


@pytest.mark.parametrize("rows", [2, 20])
def test_a_gpu_leaves_rows_to_the_cpu_that_begin_at_odd_places(rows: int) -> None:
    """It loads four bytes from multiples of four alone."""
    case = drawn(np.random.default_rng(0), (1, rows, 30, 2), 18, 16, "none", None, CACHE)
    request = Request(case.function, frozenset(), TARGET)
    assert schedule(request, Device.GPU) is None and schedule(request, Device.CPU) is not None
