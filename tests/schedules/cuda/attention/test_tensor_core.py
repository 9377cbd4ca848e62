"""Attention on tensor cores: right for every size and way to divide it, and faults in it show."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from tvm import tirx

from hybridc.codegen.cuda import compile_cubin
from hybridc.emulator import ThreadOrder
from hybridc.gpu_model.fast import estimate_fast
from hybridc.gpu_model.tir import work_of_function
from hybridc.ir import Device
from hybridc.machine import Processor, gpu_named
from hybridc.schedules.cpu.core.attention import AttentionBlocks
from hybridc.schedules.cuda.attention import tensor_core
from hybridc.schedules.cuda.attention.cost import ranked_ways, shared_bytes, work_of_way
from hybridc.schedules.cuda.attention.operands import PaddedOperand
from hybridc.schedules.cuda.attention.read import read_stored_attention
from hybridc.schedules.cuda.attention.tensor_core_kernel import Way, tensor_core_kernel
from hybridc.schedules.cuda.core.launch import cuda_target, lowered_for_gpu
from hybridc.schedules.rule import Request
from hybridc.schedules.select import schedule
from hybridc.targets import parse_target
from tests.schedules.cuda.attention.cases import MASKS, drawn, drawn_of_one_tensor, spoilt_behind
from tests.schedules.cuda.harness import TARGET, Case, check, library_of, scheduled_for_gpu, wrong_cases

RULE = "tensor_core_attention"
WAYS = (
    Way(4, 1, 64),
    Way(2, 2, 32, copies=True),
    Way(1, 4, 16),
    Way(4, 1, 32, copies=True),
    Way(1, 4, 16, copies=True),
)


@pytest.fixture(autouse=True)
def every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of queries decide, so that cases tell which way they take."""

    def ranked(found: AttentionBlocks, _: Processor, *, copies: bool) -> list[Way]:
        way = WAYS[found.rows % len(WAYS)]
        return [replace(way, copies=way.copies and copies)]

    monkeypatch.setattr(tensor_core, "ranked_ways", ranked)


def cases() -> dict[str, Case]:
    generator, found = np.random.default_rng(3), {}
    for number in range(2 * len(WAYS)):
        mask, dtype = MASKS[number % len(MASKS)], ("float16", "bfloat16")[number % 2]
        rows = 5 * int(generator.integers(3, 8)) + number // 2 % len(WAYS)
        columns = max(rows, int(generator.integers(2, 140)))
        depth, width = (int(e) for e in generator.choice([8, 17, 40, 50, 64, 80], 2))
        sizes = int(generator.integers(1, 3)), rows, columns, int(generator.integers(1, 3))
        found[f"drawn_{number}"] = drawn(generator, sizes, depth, width, mask, RULE, dtype)
    found["deep"] = drawn(generator, (1, 8, 50, 1), 160, 160, "none", RULE, "float16")
    found["shared"] = drawn(generator, (2, 20, 50, 4), 40, 32, "keys", RULE, "float16", shared=2)
    for rows, columns in ((30, 72), (26, 80), (23, 41)):
        sizes = 1, rows, columns, 2
        found[f"turned_{rows}"] = drawn(generator, sizes, 48, 40, "keys", RULE, "float16", turned=True)
    found["stored_mask"] = drawn(
        generator, (1, 30, 64, 2), 32, 32, "causal", RULE, dict.fromkeys(range(5), "float16")
    )
    for rows in (30, 41, 27):
        dtype = ("float16", "bfloat16")[rows % 2]
        found[f"one_tensor_{rows}"] = drawn_of_one_tensor(generator, (2, rows, 4), 40, RULE, dtype, shared=2)
    return found


def test_keys_that_no_query_of_a_block_sees_are_not_read() -> None:
    generator, found = np.random.default_rng(6), {}
    for number in range(len(WAYS)):
        sizes = 1, 40 + number, 397, 2
        for mask, end in (("cache", 256), ("causal", 128)):
            case = drawn(generator, sizes, 32, 40, mask, RULE, "float16")
            found[f"{mask}_{number}"] = spoilt_behind(case, end)
        sizes = 1, 3 * (14 + number), 397, 2
        found[f"again_{number}"] = drawn(generator, sizes, 32, 40, "cache", RULE, "float16", again=3)
        for mask in ("late", "unseen"):
            found[f"{mask}_{number}"] = drawn(generator, sizes, 32, 40, mask, RULE, "bfloat16")
    check(found, (ThreadOrder.FORWARD, ThreadOrder.WARPS, ThreadOrder.SHUFFLED))


def test_attention_is_that_of_float64() -> None:
    check(cases(), (ThreadOrder.WARPS, ThreadOrder.SHUFFLED))


def fault(number: int, rows: int) -> Case:
    """Three tiles of keys, divided by the way that `rows` choose."""
    return drawn(np.random.default_rng(number), (1, rows, 190, 1), 32, 32, "none", RULE, "float16")


def faulty(rows: int, edits: Mapping[str, Callable[[str], str]]) -> list[str]:
    """Of versions of one kernel that are edited differently, those that are wrong in some thread order."""
    made = {name: fault(0, rows) for name in edits}
    scheduled = {name: scheduled_for_gpu(case.function) for name, case in made.items()}

    def edited(source: str) -> str:
        parts = re.split(r'(?=extern "C" __global__)', source)
        for name, edit in edits.items():
            [place] = [i for i, p in enumerate(parts) if re.search(rf"\b{name}_kernel\(", p) and "{" in p]
            parts[place] = edit(parts[place])
        return "".join(parts)

    library = library_of(scheduled, edited)
    wrong = [wrong_cases(made, scheduled, library, order) for order in ThreadOrder]
    return sorted({name for names in wrong for name in names})


def without(pattern: str, number: int = 0, instead: str = "") -> Callable[[str], str]:
    def edited(source: str) -> str:
        match = list(re.finditer(pattern, source))[number]
        return source[: match.start()] + instead + source[match.end() :]

    return edited


def source_of(case: Case) -> str:
    """Its CUDA C."""
    sources: list[str] = []

    def noted(source: str) -> str:
        sources.append(source)
        return source

    library_of({"kernel": scheduled_for_gpu(case.function)}, noted)
    return sources[0]


BARRIER = r"__syncthreads\(\);"


def test_missing_barriers_show() -> None:
    edits = {
        "right": lambda source: source,
        "reused": without(BARRIER, 0),
        "stored": without(BARRIER, 1),
    }
    assert faulty(35, edits) == ["reused", "stored"]


def test_missing_waits_and_barriers_of_copies_show() -> None:
    edits = {
        "right": lambda source: source,
        "barrier": without(BARRIER),
        "wait": without(r"await_copies\(0\);"),
        "early": without(r"await_copies\(0\);", 0, "await_copies(1);"),
    }
    assert faulty(33, edits) == ["barrier", "early", "wait"]


def test_missing_barriers_between_warps_that_share_queries_show() -> None:
    count = len(re.findall(BARRIER, source_of(fault(0, 32))))
    edits = {f"barrier_{i}": without(BARRIER, i) for i in range(count)}
    assert count >= 5 and len(faulty(32, edits)) >= count - 1


def test_lines_of_another_pitch_show(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dense(PaddedOperand):
        def offset(self, line: tirx.Var, at: tirx.Var) -> tirx.Var:
            return line * self.line + at

    read = PaddedOperand.fragments

    def dense(self: PaddedOperand, *arguments: Any, depth_first: bool) -> tirx.Stmt:
        values = {field.name: getattr(self, field.name) for field in fields(PaddedOperand)}
        return read(Dense(**values), *arguments, depth_first=depth_first)

    monkeypatch.setattr(PaddedOperand, "fragments", dense)
    assert faulty(35, {"dense": lambda source: source}) == ["dense"]


def test_nvidias_compiler_takes_it_for_turing_and_spills_nothing() -> None:
    case = drawn(np.random.default_rng(0), (1, 35, 40, 2), 64, 64, "keys", RULE, "float16")
    compile_cubin(source_of(case), "sm_75")


def test_turing_multiplies_float16_only() -> None:
    turing = parse_target("cuda:sm_75,sm_86+avx2")
    case = drawn(np.random.default_rng(0), (1, 16, 16, 1), 16, 16, "none", RULE, "float16")
    made = schedule(Request(case.function, frozenset(), turing), Device.GPU)
    assert made is not None and made.rule == RULE and "copy_async" not in str(made.function)


@pytest.mark.parametrize(
    ("sizes", "depth"), [((1, 128, 512, 12), 64), ((2, 1024, 256, 8), 40), ((1, 64, 64, 4), 128)]
)
def test_closed_form_follows_the_lowered_loops(sizes: tuple[int, int, int, int], depth: int) -> None:
    processor = gpu_named("rtx-3090")
    found = read_stored_attention(
        drawn(np.random.default_rng(0), sizes, depth, depth, "none", None, "float16").function
    )
    assert found is not None
    for way in ranked_ways(found.blocks, processor, copies=True)[:3]:
        counted = work_of_way(found.blocks, way)
        [work] = work_of_function(
            lowered_for_gpu(tensor_core_kernel(found, "float16", way), cuda_target(TARGET))
        )
        assert abs(work.shared_bytes - shared_bytes(found.blocks, way)) <= 64
        us, lowered = (estimate_fast(w, processor).us for w in (counted, work))
        assert us == pytest.approx(lowered, rel=0.25)


def test_warps_share_queries_where_there_are_few() -> None:
    def best(sizes: tuple[int, int, int, int]) -> Way:
        case = drawn(np.random.default_rng(0), sizes, 64, 64, "none", None, "float16")
        found = read_stored_attention(case.function)
        assert found is not None
        return ranked_ways(found.blocks, gpu_named("rtx-3090"), copies=True)[0]

    few, many = best((1, 32, 256, 8)), best((2, 512, 8, 16))
    assert few.across > 1 and few.copies
    assert many.across == 1 and not many.copies
