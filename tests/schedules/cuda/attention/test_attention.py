"""Attention by plain cores on the emulated GPU: of many queries, and of few."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hybridc.emulator import ThreadOrder
from hybridc.gpu_model.fast import estimate_fast
from hybridc.gpu_model.tir import work_of_function
from hybridc.machine import gpu_named
from hybridc.schedules.cuda.attention.attention import attention
from hybridc.schedules.cuda.attention.few_queries import MOST_ROWS, best_plan, few_query_attention, plans
from hybridc.schedules.cuda.attention.few_queries_cost import estimated_us
from hybridc.schedules.cuda.attention.few_queries_kernel import few_queries_kernel
from hybridc.schedules.cuda.attention.read import read_stored_attention
from hybridc.schedules.cuda.core.launch import cuda_target, finish_function, lowered_for_gpu
from hybridc.schedules.rule import Request
from tests.schedules.cuda.attention.cases import MASKS, drawn, drawn_of_one_tensor, spoilt_behind
from tests.schedules.cuda.harness import (
    TARGET,
    Case,
    check,
    library_of,
    scheduled_for_gpu,
    wrong_cases,
)

TILES, FEW = attention.__name__, few_query_attention.__name__


def test_attention_of_drawn_sizes() -> None:
    generator, cases = np.random.default_rng(0), {}
    for number, mask in enumerate((*MASKS, *MASKS)):
        batch, heads = (int(e) for e in generator.integers(1, 3, 2))
        rows, columns = int(generator.integers(8, 70)), int(generator.integers(2, 70))
        depth, width = (int(e) for e in generator.choice([4, 17, 20, 32, 36, 64, 66], 2))
        if mask == "causal":
            columns = max(rows, columns)
        sizes = batch, rows, columns, heads
        cases[f"tiles_{number}"] = drawn(generator, sizes, depth, width, mask, TILES)
    cases["deep"] = drawn(generator, (1, 20, 37, 2), 160, 160, "keys", TILES)
    cases["deepest"] = drawn(generator, (1, 20, 37, 1), 256, 252, "none", TILES)
    cases["shared"] = drawn(generator, (1, 20, 37, 6), 32, 16, "keys", TILES, shared=3)
    cases["turned"] = drawn(generator, (2, 20, 37, 2), 32, 20, "none", TILES, turned=True)
    # types that tensor cores do not multiply together
    cases["mixed"] = drawn(generator, (1, 18, 19, 2), 32, 40, "keys", TILES, {1: "float16", 3: "float16"})
    cases["cache"] = drawn(generator, (1, 18, 40, 2), 64, 64, "keys", TILES, {1: "float16", 2: "float16"})
    check(cases)


def test_keys_that_no_query_of_a_block_sees_are_not_read() -> None:
    """A cache with room, a prompt, and a query that sees nothing, to which all keys weigh the same."""
    generator = np.random.default_rng(6)
    sizes = 2, 40, 397, 2
    check(
        {
            "cache": spoilt_behind(drawn(generator, sizes, 32, 36, "cache", TILES), 224),
            "causal": spoilt_behind(drawn(generator, sizes, 32, 32, "causal", TILES), 64),
            "window": drawn(generator, sizes, 32, 32, "late", TILES),
            "unseen": drawn(generator, sizes, 32, 32, "unseen", TILES),
            "again": spoilt_behind(drawn(generator, sizes, 32, 32, "cache", TILES, again=4), 192),
            "few_again": drawn(generator, (2, 6, 397, 2), 32, 32, "cache", FEW, again=3),
            "shared": spoilt_behind(drawn(generator, (1, 24, 300, 4), 32, 32, "cache", TILES, shared=2), 160),
        },
        (ThreadOrder.FORWARD, ThreadOrder.WARPS, ThreadOrder.SHUFFLED),
    )


def test_heads_of_one_tensor() -> None:
    generator = np.random.default_rng(11)
    check(
        {
            "tiles": drawn_of_one_tensor(generator, (2, 21, 3), 20, TILES),
            "narrow": drawn_of_one_tensor(generator, (1, 19, 4), 17, TILES, shared=2),
            "few": drawn_of_one_tensor(generator, (2, 5, 2), 40, FEW),
            "few_float16": drawn_of_one_tensor(generator, (1, 3, 4), 64, FEW, "float16", shared=2),
        }
    )


def test_rows_of_a_thread_grow_with_the_number_of_blocks() -> None:
    generator = np.random.default_rng(5)
    check(
        {
            "many": drawn(generator, (1, 37, 33, 163), 8, 4, "keys", TILES),
            "more": drawn(generator, (1, 70, 40, 81), 4, 8, "none", TILES),
        }
    )


def few_cases() -> dict[str, Case]:
    generator, cases = np.random.default_rng(7), {}
    for number, mask in enumerate((*MASKS, "keys")):
        rows, columns = int(generator.integers(1, MOST_ROWS + 1)), int(generator.integers(7, 200))
        depth, width = (int(e) for e in generator.choice([4, 17, 40, 64, 72, 128], 2))
        dtype = ("float32", "float16", "bfloat16")[number % 3]
        sizes = int(generator.integers(1, 3)), rows, columns, 2
        cases[f"few_{number}_{dtype}"] = drawn(generator, sizes, depth, width, mask, FEW, dtype)
    cases["one"] = drawn(generator, (1, 1, 300, 3), 64, 64, "none", FEW, "float16")
    cases["most"] = drawn(generator, (1, 7, 33, 1), 256, 256, "keys", FEW)
    cases["shared"] = drawn(generator, (1, 2, 40, 6), 64, 64, "keys", FEW, "float16", shared=3)
    cases["turned"] = drawn(generator, (1, 3, 40, 2), 32, 40, "keys", FEW, "float16", turned=True)
    # blocks share a head
    for mask in ("late", "cache", "unseen"):
        cases[f"in_parts_{mask}"] = drawn(generator, (1, 3, 9001, 1), 64, 56, mask, FEW, "float16")
    cases["in_parts_heads"] = drawn(generator, (1, 1, 3001, 4), 64, 64, "heads", FEW, "float16", shared=4)
    cases["single"] = drawn(generator, (1, 1, 1, 1), 32, 32, "none", FEW)
    cases["mixed"] = drawn(generator, (1, 2, 40, 1), 64, 48, "none", FEW, {0: "float16", 2: "float16"})
    cases["cache"] = drawn(generator, (1, 2, 90, 2), 64, 64, "keys", FEW, {1: "float16", 2: "float16"})
    return cases


def test_few_queries_share_the_keys_of_a_head() -> None:
    cases = few_cases()
    check(cases, (ThreadOrder.FORWARD, ThreadOrder.WARPS))
    parts = {name for name, case in cases.items() if scheduled_for_gpu(case.function).workspace_bytes}
    assert parts >= {"in_parts_late", "in_parts_cache", "in_parts_unseen", "in_parts_heads"}


def cached_as(dtype: str) -> Mapping[int, str] | str:
    """Types in memory of keys and values alone."""
    return dtype if dtype == "float32" else {1: dtype, 2: dtype}


@settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.generate])
@given(data=st.data())
def test_every_plan_of_few_queries_computes_the_same(data: st.DataObject) -> None:
    """Whatever blocks share: heads of queries, keys that no number of parts divides, or both."""
    generator, cases, functions = np.random.default_rng(data.draw(st.integers(0, 999))), {}, {}
    for number in range(4):
        shared, groups = data.draw(st.sampled_from([1, 2, 3, 4, 8])), data.draw(st.integers(1, 2))
        rows, columns = data.draw(st.integers(1, MOST_ROWS)), data.draw(st.integers(1, 500))
        depth, width = (data.draw(st.sampled_from([8, 17, 40, 64, 128, 256])) for _ in range(2))
        masks = [mask for mask in (*MASKS, "heads", "rows") if mask != "causal" or columns >= rows]
        mask, dtype = (data.draw(st.sampled_from(each)) for each in (masks, ("float32", "float16")))
        sizes = data.draw(st.integers(1, 2)), rows, columns, shared * groups
        case = drawn(generator, sizes, depth, width, mask, FEW, cached_as(dtype), shared=shared)
        attention = read_stored_attention(case.function)
        assert attention is not None
        plan = data.draw(st.sampled_from(plans(attention)))
        cases[f"case_{number}"] = case
        made = finish_function(few_queries_kernel(attention, plan), FEW, cuda_target(TARGET))
        assert made is not None
        functions[f"case_{number}"] = made
    assert not wrong_cases(cases, functions, library_of(functions))


def test_heads_of_queries_with_the_same_keys_are_joined() -> None:
    """As many as the estimate prefers; and blocks share what is left of the heads."""
    case = drawn(np.random.default_rng(0), (1, 1, 1024, 8), 128, 128, "cache", FEW, "float16", shared=4)
    attention = read_stored_attention(case.function)
    assert attention is not None
    assert {plan.shared for plan in plans(attention)} == {1, 2, 4}
    best = best_plan(attention, gpu_named("rtx-3090"))
    assert best.shared > 1 and best.parts > 1


@pytest.mark.parametrize(
    ("sizes", "shared", "dtype"),
    [
        ((1, 1, 4096, 16), 1, "float16"),
        ((1, 1, 2048, 16), 8, "float16"),
        ((2, 7, 1024, 8), 1, "float32"),
        ((1, 1, 300, 2), 1, "float16"),
        ((1, 1, 4096, 16), 1, "int8"),
        ((1, 1, 2048, 16), 8, "int8"),
    ],
)
def test_closed_form_follows_the_lowered_loops(
    sizes: tuple[int, int, int, int], shared: int, dtype: str
) -> None:
    """Of decoding with a mask too, whose row that sees nothing costs nothing where there is none."""
    processor = gpu_named("rtx-3090")
    case = drawn(np.random.default_rng(0), sizes, 64, 64, "cache", FEW, cached_as(dtype), shared=shared)
    attention = read_stored_attention(case.function)
    assert attention is not None
    plan = best_plan(attention, processor)
    made = finish_function(few_queries_kernel(attention, plan), FEW, cuda_target(TARGET))
    assert made is not None
    works = work_of_function(lowered_for_gpu(made.function, cuda_target(TARGET)))
    us = sum(estimate_fast(work, processor).us for work in works)
    us += (len(works) - 1) * processor.next_launch_us
    assert estimated_us(attention.blocks, plan, processor)[0] == pytest.approx(us, rel=0.25)


def test_keys_behind_the_last_one_that_is_seen_are_not_read() -> None:
    """They are NaN behind the turn of the last one, where blocks share a head, too."""
    generator, cases = np.random.default_rng(8), {}
    for columns, first, seen in ((1000, 0, 130), (9000, 0, 2000), (9000, 0, 8000), (9000, 3000, 3040)):
        case = drawn(generator, (1, 3, columns, 1), 64, 64, "none", FEW)
        q, k, v = (np.array(x) for x in case.inputs)
        keys = np.arange(columns)
        mask = np.where((keys >= first) & (keys < seen), 0, -np.inf).astype(np.float32)
        whole = drawn(generator, (1, 3, columns, 1), 64, 64, "keys", FEW)
        logits = np.einsum("rd,nd->rn", q[0, :, 0], k[0, first:seen, 0].astype("f8")) / 8
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        expected = weights / weights.sum(-1, keepdims=True) @ v[0, first:seen, 0]
        # no turn is of more keys than this
        k[0, seen + 512 :], v[0, seen + 512 :] = np.nan, np.nan
        inputs = [q, k, v, mask.reshape(1, 1, 1, columns)]
        cases[f"of_{columns}_{first}_{seen}"] = replace(
            whole, inputs=inputs, expected=expected[None, :, None]
        )
    check(cases)


def test_rows_without_a_key_are_zero() -> None:
    generator = np.random.default_rng(9)
    check(
        {
            "tiles": drawn(generator, (1, 9, 12, 1), 16, 16, "rows", TILES),
            "few": drawn(generator, (1, 3, 12, 1), 16, 16, "rows", FEW),
            "tensor_cores": drawn(
                generator, (1, 9, 12, 1), 16, 16, "rows", "tensor_core_attention", "float16"
            ),
        }
    )


@pytest.mark.parametrize(("depth", "width"), [(16, 257), (257, 16)])
def test_other_sizes_are_left_to_others(depth: int, width: int) -> None:
    case = drawn(np.random.default_rng(0), (1, 16, 8, 1), depth, width, "none", None)
    assert attention(Request(case.function, frozenset(), TARGET)) is None


def test_times_are_those_of_all_keys_though_a_mask_may_hide_some() -> None:
    """What a run hides is not known before, and looking for it costs little."""
    generator = np.random.default_rng(8)

    def arithmetic(mask: str) -> float:
        case = drawn(generator, (1, 64, 512, 2), 64, 64, mask, TILES)
        lowered = lowered_for_gpu(scheduled_for_gpu(case.function).function, cuda_target(TARGET))
        [work] = work_of_function(lowered)
        return work.instructions

    assert arithmetic("none") <= arithmetic("causal") <= 1.2 * arithmetic("none")
