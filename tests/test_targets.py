"""Instruction sets: which one a processor gets, and what emulates what."""

from __future__ import annotations

import pytest

from hybridc import targets
from hybridc.errors import DeviceError, UsageError
from hybridc.options import CompileOptions
from hybridc.targets import ISAS, Isa, native_isa, parse_target


@pytest.mark.parametrize("name", ["avx2", "avx512", "avx512_bf16", "amx"])
def test_processor_gets_the_richest_set_that_it_has_and_never_an_emulated_one(monkeypatch, name):
    monkeypatch.setattr(targets, "cpu_flags", lambda: frozenset(ISAS[name].cpu_flags))
    assert native_isa().name == name


def test_processor_without_avx2_is_refused(monkeypatch):
    monkeypatch.setattr(targets, "cpu_flags", lambda: frozenset({"avx"}))
    with pytest.raises(DeviceError, match="avx2"):
        native_isa()


@pytest.mark.parametrize("isa", ISAS.values(), ids=lambda isa: isa.name)
def test_emulated_sets_need_no_narrow_instructions(isa: Isa) -> None:
    special = {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"}
    has_them = bool(special & set(isa.cpu_flags))
    assert has_them == (isa.dot_product_unit is not None and not isa.is_emulated)


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("avx512", {"precision": "bf16"}),
        ("avx2", {"precision": "int8"}),
        ("amx", {"precision": "fp8"}),
        ("amx", {"precision": "bf16", "rounding_error": -1.0}),
        ("amx", {"precision": "bf16", "rounding_error": float("nan")}),
        ("cuda+amx", {"precision": "int8"}),
    ],
)
def test_precision_that_cannot_be_had_is_refused(target, options):
    with pytest.raises(UsageError) as refusal:
        CompileOptions(target=parse_target(target), **options)
    assert refusal.value.code == "HC526"


@pytest.mark.parametrize(
    ("text", "meant"), [("avx521", "avx512"), ("cuda+axv2", "avx2"), ("cud+avx2", "cuda")]
)
def test_misspelt_target_is_corrected(text: str, meant: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse_target(text)
    assert refusal.value.code == "HC501" and f"did you mean '{meant}'?" in refusal.value.remedy
