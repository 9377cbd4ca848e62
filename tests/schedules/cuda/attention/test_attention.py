"""Attention by plain cores on the emulated GPU: of many queries, and of few."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybridc.emulator import ThreadOrder
from hybridc.gpu_model.fast import estimate_fast
from hybridc.gpu_model.tir import work_of_function
from hybridc.machine import gpu_named
from hybridc.schedules.cuda.attention.attention import attention
from hybridc.schedules.cuda.attention.few_queries import MOST_ROWS, few_query_attention
from hybridc.schedules.cuda.core.launch import cuda_target, lowered_for_gpu
from hybridc.schedules.rule import Request
from tests.schedules.cuda.attention.cases import MASKS, drawn, drawn_of_one_tensor
from tests.schedules.cuda.harness import TARGET, Case, check, scheduled_for_gpu

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
    cases["in_parts"] = drawn(generator, (1, 2, 9000, 1), 64, 56, "late", FEW, "float16")
    cases["in_parts_unseen"] = drawn(generator, (1, 2, 9000, 1), 64, 56, "unseen", FEW, "float16")
    cases["single"] = drawn(generator, (1, 1, 1, 1), 32, 32, "none", FEW)
    cases["mixed"] = drawn(generator, (1, 2, 40, 1), 64, 48, "none", FEW, {0: "float16", 2: "float16"})
    cases["cache"] = drawn(generator, (1, 2, 90, 2), 64, 64, "keys", FEW, {1: "float16", 2: "float16"})
    return cases


def test_few_queries_share_the_keys_of_a_head() -> None:
    cases = few_cases()
    check(cases, (ThreadOrder.FORWARD, ThreadOrder.WARPS))
    parts = [name for name, case in cases.items() if scheduled_for_gpu(case.function).workspace_bytes]
    assert parts == ["in_parts", "in_parts_unseen"]


def test_keys_behind_the_last_one_that_is_seen_are_not_read() -> None:
    """They are NaN behind the turn of the last one, where blocks share a head, too."""
    generator, cases = np.random.default_rng(8), {}
    for columns, seen in ((1000, 130), (9000, 2000), (9000, 8000)):
        case = drawn(generator, (1, 3, columns, 1), 64, 64, "none", FEW)
        q, k, v = (np.array(x) for x in case.inputs)
        mask = np.where(np.arange(columns) < seen, 0, -np.inf).astype(np.float32)
        whole = drawn(generator, (1, 3, columns, 1), 64, 64, "keys", FEW)
        logits = np.einsum("rd,nd->rn", q[0, :, 0], k[0, :seen, 0].astype("f8")) / 8
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        expected = weights / weights.sum(-1, keepdims=True) @ v[0, :seen, 0]
        # no turn is of more keys than this
        k[0, seen + 512 :], v[0, seen + 512 :] = np.nan, np.nan
        inputs = [q, k, v, mask.reshape(1, 1, 1, columns)]
        cases[f"of_{columns}_{seen}"] = replace(whole, inputs=inputs, expected=expected[None, :, None])
    check(cases)


def test_large_blocks_have_an_estimated_time() -> None:
    case = drawn(np.random.default_rng(0), (1, 4, 1024, 32), 64, 64, "none", FEW)
    function = scheduled_for_gpu(case.function).function
    [work] = work_of_function(lowered_for_gpu(function, cuda_target(TARGET)))
    gpu = gpu_named("rtx-3090")
    memory_us = work.memory_bytes / gpu.bandwidth_gb_s / 1e3
    assert work.threads >= 256 and memory_us <= estimate_fast(work, gpu).us <= 2 * memory_us


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
