"""Texts of options: what is read, what is refused, and what is printed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridc.errors import UsageError
from hybridc.keywords import options_of
from hybridc.options import (
    Budget,
    CompileOptions,
    format_budget,
    format_bytes,
    parse_bound,
    parse_budget,
    parse_budgets,
    parse_bytes,
    parse_count,
    parse_dim,
    parse_seed,
    parse_shape,
)
from hybridc.targets import DEFAULT_THREADS, parse_target

MIB = 1024**2


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("64MiB", 64 * MIB),
        ("1.5GiB", 1536 * MIB),
        ("500MB", 500_000_000),
        ("500mb", 500_000_000),
        ("1 kB", 1000),
        ("2TiB", 2 * 1024**4),
        ("123456B", 123456),
        ("0B", 0),
        (" 7KiB ", 7168),
        ("0.5B", 0),
        ("4G", 4 * 1024**3),
        ("4g", 4 * 1024**3),
        ("4Gi", 4 * 1024**3),
        ("4GB", 4 * 1000**3),
        ("512M", 512 * MIB),
        ("4096k", 4 * MIB),
        ("4096K", 4 * MIB),
        ("1.5 t", 1536 * 1024**3),
        (1 << 20, MIB),
        (np.int64(7), 7),
        (0, 0),
    ],
)
def test_budget_in_bytes(text: Any, size_bytes: int) -> None:
    assert parse_budget(text) == Budget(size_bytes=size_bytes)
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "MiB",
        "64",
        "-1MiB",
        "1e9B",
        "64X",
        "64 Mi B",
        "4 Gigabytes",
        -1,
        1 << 63,
        True,
        0.5,
        None,
        b"1MiB",
        "1,5GiB",
        "nan%",
        "inf",
        "12%%",
        "٣MiB",
        "9" * 30 + "B",
        "9999999TiB",
    ],
)
def test_budget_refused(text: Any) -> None:
    with pytest.raises(UsageError, match=r"^.") as refusal:
        parse_budget(text)
    assert refusal.value.code == "HC510"
    assert refusal.value.exit_code == 2


def test_budget_without_a_unit_is_told_how_to_write_it() -> None:
    with pytest.raises(UsageError) as refusal:
        parse_budget("64")
    assert "64B" in refusal.value.remedy and "64MiB" in refusal.value.remedy


def test_percentage_is_resolved_against_the_all_gpu_peak() -> None:
    assert parse_budget("50%").resolve(1001) == 500
    assert parse_budget("12.5%").resolve(800) == 100
    assert parse_budget("100%").resolve(2**50 + 1) == 2**50 + 1
    assert parse_budget("1KiB").resolve(7) == 1024


def test_percentage_is_no_amount_of_bytes() -> None:
    with pytest.raises(UsageError, match="not a percentage"):
        parse_bytes("50%")


def test_budgets_are_separated_by_commas_and_keep_their_order() -> None:
    assert parse_budgets("50%") == (Budget(percent=50),)
    assert [str(b) for b in parse_budgets("1GiB, 64MiB,50%,64MiB")] == [
        "1.00 GiB",
        "64.0 MiB",
        "50%",
        "64.0 MiB",
    ]


def test_budgets_may_be_a_sequence() -> None:
    assert parse_budgets(["1GiB", MIB, "50%"]) == (*parse_budgets("1G,1MiB"), Budget(percent=50))
    assert parse_budgets(MIB) == (Budget(size_bytes=MIB),)


@pytest.mark.parametrize("text", ["", ",", "1GiB,", "1GiB,,2GiB", "1GiB;2GiB", "64", [], ["1GiB", 0.5], {}])
def test_lists_of_budgets_that_are_none_are_refused(text: Any) -> None:
    with pytest.raises(UsageError) as caught:
        parse_budgets(text)
    assert caught.value.code == "HC510"


def test_budget_is_either_bytes_or_percentage() -> None:
    with pytest.raises(ValueError):
        Budget()
    with pytest.raises(ValueError):
        Budget(size_bytes=1, percent=1.0)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 * 1024 - 1, "10.0 KiB"),
        (MIB - 1, "1.00 MiB"),
        (1536 * MIB, "1.50 GiB"),
        (2**60, "1048576.0 TiB"),
    ],
)
def test_bytes_for_people(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@given(st.integers(0, 2**50))
def test_formatted_bytes_read_back_closely(size_bytes: int) -> None:
    assert abs(parse_bytes(format_bytes(size_bytes)) - size_bytes) <= size_bytes * 0.005 + 1


@given(st.integers(0, 2**50))
def test_formatted_budget_reads_back_as_no_less_and_hardly_more(size_bytes: int) -> None:
    assert size_bytes <= parse_bytes(format_budget(size_bytes)) <= size_bytes * 1.001 + 1


@given(st.integers(0, 10_000).map(lambda n: n / 10))
def test_percentage_reads_back(percent: float) -> None:
    assert parse_budget(str(Budget(percent=percent))).percent == pytest.approx(percent, rel=1e-5)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("x=1x3x224x224", ("x", (1, 3, 224, 224))),
        ("x=7", ("x", (7,))),
        ("scope/x:0=2x2", ("scope/x:0", (2, 2))),
        ("a=b=2x2", ("a=b", (2, 2))),
        ("x=8x_x_", ("x", (8, None, None))),
        ("x=scalar", ("x", ())),
    ],
)
def test_shape(text: str, shape: tuple[str, tuple[int, ...]]) -> None:
    assert parse_shape(text) == shape


@given(st.text(min_size=1), st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=6))
def test_shape_of_any_name_reads_back(name: str, dims: list[int]) -> None:
    assert parse_shape(f"{name}={'x'.join(map(str, dims))}") == (name, tuple(dims))


@pytest.mark.parametrize(
    "text",
    ["", "x", "x=", "=1x2", "x=-1x2", "x=1X2", "x=1xN", "x=1x", "x=1x__", "x=scalars", "x=²", f"x={2**31}"],
)
def test_shape_refused(text: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse_shape(text)
    assert refusal.value.code == "HC511"


def test_dim() -> None:
    assert parse_dim("N=8") == ("N", 8)
    assert parse_dim("a=b=1") == ("a=b", 1)


@pytest.mark.parametrize("text", ["N", "N=", "=1", "N=-1", "N=x", "N=1x2"])
def test_dim_refused(text: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse_dim(text)
    assert refusal.value.code == "HC512"


def test_bound() -> None:
    assert parse_bound("/Loop=8") == ("/Loop", 8)
    assert options_of({"target": "avx2", "bounds": {"a": 3}}).bounds == (("a", 3),)
    for text in ("N", "N=", "=1", "N=-1", "N=x", "N=1..8", "N=1,2"):
        with pytest.raises(UsageError) as refusal:
            parse_bound(text)
        assert refusal.value.code == "HC512"


def test_counts_and_seeds() -> None:
    assert (parse_count("2"), parse_seed("0")) == (2, 0)
    for parse, text in ((parse_count, "0"), (parse_count, "two"), (parse_seed, "-1"), (parse_seed, "1.0")):
        with pytest.raises(UsageError) as refusal:
            parse(text)
        assert refusal.value.code == "HC513"


def test_options_refuse_two_shapes_for_one_input() -> None:
    with pytest.raises(UsageError, match="--shape specifies 'x' more than once"):
        CompileOptions(target=parse_target("avx2"), shapes=(("x", (1,)), ("x", (2,))))


def test_options_refuse_a_gpu_budget_without_a_gpu() -> None:
    with pytest.raises(UsageError, match="has no GPU") as refusal:
        CompileOptions(target=parse_target("avx2"), gpu_memory=(Budget(size_bytes=MIB),))
    assert "cuda+avx2" in refusal.value.remedy


@pytest.mark.parametrize("keywords", [{"shapes": [1, 3]}, {"dims": "batch=1"}, {"pins": "a=cpu"}])
def test_keywords_that_are_dictionaries(keywords: Any) -> None:
    with pytest.raises(UsageError, match="must be a dictionary") as refusal:
        options_of({"target": "cuda+avx2", **keywords})
    assert "write for example {" in refusal.value.remedy


def test_mistyped_keyword_and_number_are_told() -> None:
    with pytest.raises(TypeError, match="'targt'; did you mean 'target'"):
        options_of({"targt": "avx2"})
    with pytest.raises(UsageError, match="invalid --rounding-error 'x'"):
        options_of({"target": "avx2", "rounding_error": "x"})


def test_keywords_take_bytes_as_numbers() -> None:
    options = options_of({"target": "cuda+avx2", "gpu_memory": 1 << 20, "host_memory": 1 << 30})
    assert options.gpu_memory == (Budget(size_bytes=MIB),) and options.host_memory_bytes == 1 << 30


@pytest.mark.parametrize(
    ("code", "options"),
    [
        ("HC511", {"shapes": (("x", (4, -1)),)}),
        ("HC511", {"shapes": (("x", (4.0, 8)),)}),
        ("HC511", {"shapes": (("x", 4),)}),
        ("HC511", {"shapes": (("x", (2**70,)),)}),
        ("HC512", {"dims": (("N", "4"),)}),
        ("HC512", {"dims": (("N", True),)}),
        ("HC512", {"bounds": (("loop", 0),)}),
        ("HC512", {"bounds": (("loop", "4"),)}),
        ("HC557", {"threads": 0}),
        ("HC557", {"threads": 10**6}),
        ("HC557", {"threads": "2"}),
        ("HC518", {"tune_seconds": 0}),
        ("HC518", {"tune_seconds": float("nan")}),
        ("HC518", {"tune_seconds": float("inf")}),
        ("HC518", {"tune_seconds": "60"}),
    ],
)
def test_options_that_no_compilation_can_have_are_refused(code: str, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as refusal:
        CompileOptions(target=parse_target("avx2"), **options)
    assert refusal.value.code == code


def test_kernels_are_scheduled_for_the_threads_that_will_run_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridc.targets.available_threads", lambda: 3)
    target = parse_target("avx512")
    monkeypatch.setattr("hybridc.targets.cpu_flags", lambda: frozenset(target.isa.cpu_flags))
    assert CompileOptions(target=target).cpu_threads == 3
    assert CompileOptions(target=target, threads=64).cpu_threads == 64
    monkeypatch.setattr("hybridc.targets.cpu_flags", lambda: frozenset[str]())
    assert CompileOptions(target=target).cpu_threads == DEFAULT_THREADS
    assert CompileOptions(target=target, threads=2).cpu_threads == 2
