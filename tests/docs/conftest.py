"""What the commands of the pages share, as those of a user do."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridc.compile_cache import DEFAULT_SIZE, SIZE_VARIABLE


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def own_cache(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands find again what earlier ones compiled, but nothing of what ran before these tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_folder))
    monkeypatch.setenv(SIZE_VARIABLE, DEFAULT_SIZE)
