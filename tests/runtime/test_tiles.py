"""Permission to use tile registers."""

from __future__ import annotations

import errno

import pytest

from hybridc.errors import DeviceError
from hybridc.runtime.tiles import enable_amx
from hybridc.targets import ISAS


def test_permission_is_asked_for_code_with_tiles_alone() -> None:
    asked: list[bool] = []

    def ask() -> int:
        asked.append(True)
        return 0

    for name in ("avx2", "avx512_bf16", "amx_emulated"):
        enable_amx(ISAS[name].cpu_flags, ask)
    assert not asked
    enable_amx(ISAS["amx"].cpu_flags, ask)
    assert asked


def test_refusal_says_what_to_do() -> None:
    with pytest.raises(DeviceError, match="does not allow this process to use AMX") as refusal:
        enable_amx(ISAS["amx"].cpu_flags, lambda: errno.EPERM)
    assert refusal.value.code == "HC410" and "avx512_bf16" in refusal.value.remedy
