"""Weights that only a run knows: kernels of bf16 pack them as the compiler packs constants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tvm import relax

from hybridc.schedules.cpu.core.packed_weight import packed_weight
from hybridc.schedules.cpu.low_precision.bf16_conv1d import bf16_conv1d
from hybridc.schedules.cpu.low_precision.bf16_matmul import bf16_matmul
from hybridc.schedules.packing import Packing
from hybridc.schedules.rule import Request, Rule
from hybridc.targets import ISAS, Target
from tests.schedules.cpu.conftest import Harness
from tests.support.amx import executing, tiles_here
from tests.support.narrow import in_bf16, vectors_here

op = relax.op
Build = Callable[..., Any]


@pytest.fixture(params=[vectors_here(), tiles_here()])
def narrow(request: pytest.FixtureRequest) -> Iterator[Harness]:
    with executing(request.param) as isa:
        yield Harness(isa)


def _line(emit: Build, x: Any, w: Any) -> Any:
    return emit(op.nn.conv1d(x, w, padding=3, dilation=2))


def _product(emit: Build, x: Any, w: Any) -> Any:
    return emit(op.matmul(x, w))


CASES: list[tuple[Build, tuple[int, ...], tuple[int, ...], Rule]] = [
    (_line, (2, 15, 90), (17, 15, 4), bf16_conv1d),
    (_line, (1, 40, 70), (33, 40, 3), bf16_conv1d),
    (_product, (37, 45), (45, 50), bf16_matmul),
    (_product, (3, 64), (64, 96), bf16_matmul),
]


@pytest.mark.parametrize(
    ("build", "data", "weight", "rule"), CASES, ids=["line", "wide line", "product", "few rows"]
)
def test_result_is_the_same_to_the_last_bit(
    narrow: Harness, build: Build, data: tuple[int, ...], weight: tuple[int, ...], rule: Rule
) -> None:
    function = in_bf16(narrow.function(build, [data, weight]))
    random = np.random.default_rng(2)
    operands = [random.standard_normal(shape).astype("f4") for shape in (data, weight)]
    results = []
    for constants in ([1], []):
        scheduled = narrow.schedule(function, rule=rule, constants=constants)
        assert bool(scheduled.packings) == bool(constants)
        results.append(narrow.run(function, scheduled, operands)[0])
    np.testing.assert_array_equal(results[0], results[1])


def test_other_numbers_are_packed_when_compiling_only(narrow: Harness) -> None:
    function = narrow.function(_product, [(8, 8), (8, 8)])
    packing = Packing((8, 8), (2, 4, 8), (0, 2, 1), vnni_dtype="int8")
    request = Request(function, frozenset(), Target((), ISAS["amx"]))
    with pytest.raises(ValueError, match="bf16 pairs"):
        packed_weight(request, 1, packing, "panels")
