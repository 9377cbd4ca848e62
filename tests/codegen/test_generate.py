"""What is certain to fail is refused before anything is compiled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import hybridc
from hybridc.codegen.generate import check_gpu
from hybridc.errors import UsageError
from hybridc.machine import load_machine
from hybridc.targets import parse_target


def test_code_that_the_profiles_gpu_cannot_load_is_refused(tmp_path: Path) -> None:
    target, machine = "cuda:sm_80,sm_90+avx2", "laptop-4gb"
    with pytest.raises(UsageError, match="HC503"):
        hybridc.plan(b"", target=target, machine=machine)
    with pytest.raises(UsageError, match=r"GTX 1650 Mobile \(sm_75\).* sm_80,sm_90") as caught:
        hybridc.compile(b"", tmp_path / "m.hyb", target=target, machine=machine)
    assert caught.value.code == "HC503"
    remedy = caught.value.remedy
    assert "--target cuda:sm_75,sm_80,sm_90+avx2" in remedy
    assert "rtx-3090" in remedy and "rtx-2060" not in remedy


@pytest.mark.parametrize(
    ("target", "machine"),
    [
        ("cuda+avx2", "laptop-4gb"),
        ("cuda:sm_80+avx2", "rtx-4090"),
        ("cuda:sm_75+avx2", "h100"),
        ("avx2", "t4"),
    ],
)
def test_code_that_runs_on_the_profiles_gpu_is_taken(target: str, machine: str) -> None:
    check_gpu(parse_target(target), load_machine(machine))


def test_gpu_of_which_nothing_is_known_takes_any_code() -> None:
    machine = load_machine("laptop-4gb")
    unknown = replace(machine, gpu=replace(machine.gpu, chip=None))
    check_gpu(parse_target("cuda:sm_90+avx2"), unknown)
