"""Functions with several tiles, and a record of how fast they are pretended to be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tvm import te

from hybridc.passes.schedule import Tunable
from hybridc.schedules.rule import Request, Scheduled
from hybridc.targets import parse_target
from hybridc.tuning.record import Entry

MakeTunable = Callable[..., Tunable]


@pytest.fixture
def tunable() -> MakeTunable:
    def make(
        name: str, *, flops: int = 1, size: int = 8, labels: tuple[str, ...] = ("a", "b", "c")
    ) -> Tunable:
        x = te.placeholder((size,), name="x")
        function = te.create_prim_func([x, te.compute((size,), lambda i: x[i] + 1.0, name="y")])
        request = Request(function, frozenset(), parse_target("avx2"))
        return Tunable(name, request, Scheduled(function, "rule", choices=labels), flops)

    return make


@pytest.fixture
def entry() -> Callable[..., Entry]:
    def make(predicted: str = "a", **relative: float) -> Entry:
        times = {predicted: 1.0, **relative}
        return Entry("k", "rule", "avx2", 2, "some processor", "0.1.0", predicted, 0.5, times)

    return make
