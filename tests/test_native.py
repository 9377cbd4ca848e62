"""C++ of the compiler itself: built once, found again, and done without where it cannot be built."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridc.native import build_library

SOURCE = """
extern "C" __attribute__((visibility("default"))) int add(int a, int b) { return a + b; }
int hidden() { return 0; }
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "add.cpp"
    path.write_text(SOURCE)
    build_library.cache_clear()
    yield path
    build_library.cache_clear()


def built(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache" / "hybridc" / "native").glob("*"))


def test_functions_with_default_visibility_can_be_called(source: Path, tmp_path: Path) -> None:
    library = build_library(source, "add")
    assert library is not None
    assert library.add(2, 3) == 5
    assert not hasattr(library, "hidden")
    [name] = built(tmp_path)
    assert name.startswith("add-") and name.endswith(".so")


def test_library_is_built_once_for_a_source(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_library(source, "add")
    path = tmp_path / "cache" / "hybridc" / "native" / built(tmp_path)[0]
    before, content = path.stat(), path.read_bytes()
    build_library.cache_clear()
    assert build_library(source, "add") is not None
    # a library that is built anew is another file; the time of this one is that of its last use
    assert (path.stat().st_ino, path.stat().st_size) == (before.st_ino, before.st_size)
    assert path.read_bytes() == content


def test_damaged_library_is_built_anew(source: Path, tmp_path: Path) -> None:
    build_library(source, "add")
    path = tmp_path / "cache" / "hybridc" / "native" / built(tmp_path)[0]
    whole = path.read_bytes()
    for damage in (b"", b"garbage", whole[: len(whole) // 2], whole[:-1] + bytes([whole[-1] ^ 1])):
        path.unlink()  # what this process has mapped stays as it is
        path.write_bytes(damage)
        build_library.cache_clear()
        library = build_library(source, "add")
        assert library is not None and library.add(2, 3) == 5
        assert path.read_bytes() != damage


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_nothing_is_loaded_from_a_folder_that_others_may_write_to(
    source: Path, tmp_path: Path, mode: int
) -> None:
    build_library(source, "add")
    (tmp_path / "cache" / "hybridc" / "native").chmod(mode)
    build_library.cache_clear()
    assert build_library(source, "add") is None


def test_changed_source_is_built_anew(source: Path, tmp_path: Path) -> None:
    build_library(source, "add")
    source.write_text(SOURCE.replace("a + b", "a + b + 1"))
    build_library.cache_clear()
    library = build_library(source, "add")
    assert library is not None and library.add(2, 3) == 6
    assert len(built(tmp_path)) == 2


def test_changed_header_is_built_anew(source: Path, tmp_path: Path) -> None:
    header = tmp_path / "step.h"
    source.write_text('#include "step.h"\n' + SOURCE.replace("a + b", "a + b + STEP"))
    for step in (1, 2):
        header.write_text(f"#define STEP {step}")
        build_library.cache_clear()
        library = build_library(source, "add")
        assert library is not None and library.add(2, 3) == 5 + step
    assert len(built(tmp_path)) == 2


def test_two_processes_may_build_at_once(source: Path, tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from hybridc.native import build_library;"
        "sys.exit(build_library(pathlib.Path(sys.argv[1]), 'add').add(20, 22))"
    )
    processes = [subprocess.Popen([sys.executable, "-c", program, str(source)]) for _ in range(2)]
    assert [process.wait() for process in processes] == [42, 42]
    assert len(built(tmp_path)) == 1


def test_no_compiler_no_library(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert build_library(source, "add") is None


def test_source_that_is_refused_gives_no_library_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    source.write_text("int f( {")
    assert build_library(source, "add") is None
    assert built(tmp_path) == []


def test_no_folder_to_write_to_no_library(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert build_library(source, "add") is None
