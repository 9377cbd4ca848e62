"""The runtime's helper is compiled once for its sources and headers, whatever the cache of compilations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridc.codegen import helper


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, ...]]]:
    """The options of each compilation, which only pretends; the cache is empty at first."""
    calls: list[tuple[str, ...]] = []

    def pretend(options: tuple[str, ...]) -> bytes:
        calls.append(options)
        return b"object %d" % len(calls)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(helper, "_compiled", pretend)
    helper.helper_object.cache_clear()
    yield calls
    helper.helper_object.cache_clear()


def in_a_new_process() -> bytes:
    helper.helper_object.cache_clear()
    return helper.helper_object()


def test_helper_is_compiled_once_for_all_processes(compiled: list[tuple[str, ...]]) -> None:
    assert in_a_new_process() == in_a_new_process() == b"object 1"
    assert len(compiled) == 1


def test_damaged_helper_is_compiled_anew(compiled: list[tuple[str, ...]], tmp_path: Path) -> None:
    in_a_new_process()
    [kept] = (tmp_path / "cache" / "hybridc" / "native").iterdir()
    kept.write_bytes(b"x" + kept.read_bytes()[1:])
    assert in_a_new_process() == b"object 2"


@pytest.mark.parametrize("changed", ["helper.cc", "lanes.h"])
def test_other_sources_are_another_helper(
    compiled: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    folder = tmp_path / "native"
    folder.mkdir()
    for file in helper.HELPER_SOURCE.parent.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(helper, "HELPER_SOURCE", folder / helper.HELPER_SOURCE.name)
    assert in_a_new_process() == b"object 1"
    (folder / changed).write_text((folder / changed).read_text() + "// another\n")
    assert in_a_new_process() == b"object 2"


def test_other_options_are_another_helper(
    compiled: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert in_a_new_process() == b"object 1"
    monkeypatch.setattr(helper, "_OPTIONS", (*helper._OPTIONS, "-g"))
    assert in_a_new_process() == b"object 2"
    assert compiled[1] != compiled[0]


def test_place_that_cannot_be_written_is_no_error(
    compiled: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert in_a_new_process() == b"object 1"
    assert in_a_new_process() == b"object 2"
