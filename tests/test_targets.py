"""Instruction sets: which one a processor gets, and what emulates what."""

from __future__ import annotations

import pytest

from hybridc import targets
from hybridc.errors import DeviceError, UsageError
from hybridc.machine import load_machine, machine_names
from hybridc.options import CompileOptions
from hybridc.targets import ISAS, DotProductUnit, Isa, capability_of, native_isa, parse_target, runs_on


@pytest.mark.parametrize("name", ["avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"])
def test_processor_gets_the_richest_set_that_it_has_and_never_an_emulated_one(monkeypatch, name):
    monkeypatch.setattr(targets, "cpu_flags", lambda: frozenset(ISAS[name].cpu_flags))
    assert native_isa().name == name


def test_processor_without_avx2_is_refused(monkeypatch):
    monkeypatch.setattr(targets, "cpu_flags", lambda: frozenset({"avx"}))
    with pytest.raises(DeviceError, match="avx2"):
        native_isa()


@pytest.mark.parametrize("isa", ISAS.values(), ids=lambda isa: isa.name)
def test_emulated_sets_need_no_narrow_instructions(isa: Isa) -> None:
    special = {"avx_vnni", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"}
    has_them = bool(special & set(isa.cpu_flags))
    assert has_them == (isa.dot_product_unit is not DotProductUnit.INT16 and not isa.is_emulated)


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("avx512", {"precision": "bf16"}),
        ("avx512_vnni", {"precision": "bf16"}),
        ("amx", {"precision": "fp8"}),
        ("amx", {"precision": "bf16", "rounding_error": -1.0}),
        ("amx", {"precision": "bf16", "rounding_error": float("nan")}),
        ("amx", {"precision": "tf32"}),
        ("cuda+amx", {"precision": "tf32"}),
        ("cuda:sm_75,sm_86+avx2", {"precision": "tf32"}),
    ],
)
def test_precision_that_cannot_be_had_is_refused(target, options):
    with pytest.raises(UsageError) as refusal:
        CompileOptions(target=parse_target(target), **options)
    assert refusal.value.code == "HC526"


@pytest.mark.parametrize(
    ("architectures", "loading", "refused"),
    [
        (("sm_75",), [(7, 5), (8, 0), (12, 1)], [(7, 0), (6, 1)]),
        (("sm_80", "sm_90"), [(8, 0), (8, 9), (9, 0), (10, 0)], [(7, 5)]),
        (("sm_86",), [(8, 6), (8, 9), (9, 0)], [(8, 0), (7, 5)]),
        (("sm_90a",), [(9, 0)], [(8, 9), (10, 0)]),
        (("sm_80", "sm_90a"), [(8, 0), (9, 0), (12, 0)], [(7, 5)]),
        (("sm_100f",), [(10, 0), (10, 3)], [(9, 0), (12, 0)]),
    ],
)
def test_gpu_loads_code_of_its_major_version_or_ptx_of_the_oldest(architectures, loading, refused):
    assert all(runs_on(architectures, capability) for capability in loading)
    assert not any(runs_on(architectures, capability) for capability in refused)


def test_cuda_alone_covers_the_gpu_of_every_profile() -> None:
    target = parse_target("cuda+avx2")
    chips = [load_machine(name).gpu.chip for name in machine_names()]
    for chip in filter(None, chips):
        assert runs_on(target.cuda_architectures, capability_of(chip.architecture))
    assert str(target) == "cuda+avx2" and parse_target("cuda:sm_75,sm_80,sm_90,sm_100,sm_120+avx2") == target


@pytest.mark.parametrize("name", ["sm_8", "sm80", "compute_80", "sm_90x", ""])
def test_unknown_architecture_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="unknown CUDA architecture"):
        parse_target(f"cuda:{name}+avx2")


@pytest.mark.parametrize(
    ("text", "meant"), [("avx521", "avx512"), ("cuda+axv2", "avx2"), ("cud+avx2", "cuda")]
)
def test_misspelt_target_is_corrected(text: str, meant: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse_target(text)
    assert refusal.value.code == "HC501" and f"did you mean '{meant}'?" in refusal.value.remedy
