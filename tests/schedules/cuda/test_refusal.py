"""What TVM refuses goes to the next rule; an error of our own code surfaces wherever it happens."""

from __future__ import annotations

import logging
from typing import NoReturn

import pytest
from tvm import s_tir, tirx
from tvm.s_tir.dlight.base.utils import suggest_threads_per_block
from tvm.target import Target

from hybridc.ir import Device
from hybridc.schedules.cuda.conv2d import conv2d
from hybridc.schedules.cuda.core import anchor, launch
from hybridc.schedules.cuda.core.refusal import attempt
from hybridc.schedules.cuda.matmul import matmul
from hybridc.schedules.cuda.matmul.matmul import TiledMatmul
from hybridc.schedules.rule import Request
from hybridc.schedules.select import schedule
from hybridc.targets import parse_target
from tests.schedules.cuda.families import FAMILIES

TARGET = parse_target("cuda:sm_80+avx2")


def broken(*arguments: object, **options: object) -> NoReturn:
    raise AttributeError("seeded")


def schedule_family(name: str) -> None:
    schedule(Request(FAMILIES[name].function(name), frozenset(), TARGET), Device.GPU)


@pytest.mark.parametrize("family", ["conv", "matmul_wide"])
def test_bug_in_a_rule_that_dlight_calls_surfaces(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for rules in (matmul, conv2d):
        monkeypatch.setattr(rules, "tiled", lambda *arguments: None)  # which comes first
    monkeypatch.setattr(TiledMatmul, "get_configs", broken)
    with pytest.raises(AttributeError, match="seeded"):
        schedule_family(family)


def test_bug_while_lowering_for_the_proof_surfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_LOWER", broken)
    with pytest.raises(AttributeError, match="seeded"):
        schedule_family("conv")


def test_bug_while_an_anchor_is_read_surfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    function = FAMILIES["matmul_wide"].function("matmul")
    monkeypatch.setattr(s_tir.Schedule, "get_child_blocks", broken)
    with pytest.raises(AttributeError, match="seeded"):
        anchor.find_anchor(function)


def test_error_that_dlight_may_raise_is_no_refusal_if_our_code_raises_it() -> None:
    no_gpu = parse_target("avx2")  # of no architectures there is no oldest one
    with pytest.raises(ValueError, match="empty"):
        attempt("a rule", lambda: launch.cuda_target(no_gpu))


def test_refusal_of_tvm_is_logged_and_gives_none(caplog: pytest.LogCaptureFixture) -> None:
    function = FAMILIES["matmul_wide"].function("matmul")
    unknown = s_tir.Schedule(function)
    empty = tirx.For(tirx.Var("i", "int64"), 0, 0, tirx.ForKind.SERIAL, tirx.Evaluate(0))
    with caplog.at_level(logging.INFO):
        assert attempt("a primitive", lambda: unknown.get_sblock("missing")) is None
        assert attempt("dlight", lambda: suggest_threads_per_block(Target("cuda"), [empty])) is None
    assert [r.getMessage().split(" does")[0] for r in caplog.records] == ["a primitive", "dlight"]
