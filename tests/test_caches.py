"""The user's cache is where the system keeps caches."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridc.caches import cache_path


def test_cache_is_in_the_folder_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_path("native") == tmp_path / "hybridc" / "native"


@pytest.mark.parametrize("unset", [True, False])
def test_cache_is_in_the_home_folder_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unset: bool
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if not unset:
        monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_path("tuning.json") == tmp_path / ".cache" / "hybridc" / "tuning.json"
