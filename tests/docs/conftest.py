"""What the commands of the pages share, as those of a user do."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hybridc import emulator
from hybridc.caches import cache_path
from hybridc.cli import main
from hybridc.compile_cache import DEFAULT_SIZE, SIZE_VARIABLE

Command = Callable[[list[str]], str]
"""Runs the words behind `hybridc`; what it prints."""


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With what g++ made of the compiler's and the emulator's own sources, which say nothing of networks."""
    folder = tmp_path_factory.mktemp("cache")
    for name in ("native", "emulator"):
        own = folder / "hybridc" / name
        own.mkdir(mode=0o700, parents=True)
        for built in cache_path(name).glob("[!.]*"):
            if not built.name.startswith("kernels-"):
                with suppress(FileNotFoundError):  # trimmed meanwhile by another process
                    if built.is_dir():  # a device that has a folder of libraries
                        shutil.copytree(built, own / built.name)
                    else:
                        shutil.copy2(built, own)
    return folder


@pytest.fixture
def own_cache(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands find again what earlier ones compiled, but nothing of what ran before these tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_folder))
    monkeypatch.setenv(SIZE_VARIABLE, DEFAULT_SIZE)


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    """Commands run in this process, which has imported TVM, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYBRIDC_TRACEBACK", "1")

    def run(words: list[str]) -> str:
        status = main(words)
        printed = capsys.readouterr()
        assert status == 0, f"{' '.join(words)}\n{printed.out}\n{printed.err}"
        return printed.out

    yield run
    if emulator.is_active():
        emulator.reset()
