"""The user's cache is where the system keeps caches, and gives back what was put there or nothing."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hybridc import caches
from hybridc.caches import FileCache, cache_path, key_of

KEY = key_of("kernel", b"\0code")
CODE = b"machine code \0\xff" * 100


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


@pytest.fixture
def cache(tmp_path: Path) -> FileCache:
    return FileCache(tmp_path / "user" / "kernels")


def entry(cache: FileCache, key: str = KEY) -> Path:
    return cache.folder / key


def test_key_tells_parts_apart() -> None:
    assert len({key_of("ab", "c"), key_of("a", "bc"), key_of("abc"), key_of("c", "ab")}) == 4
    assert key_of("é") == key_of("é".encode())


def test_what_is_put_is_found_by_later_processes(cache: FileCache) -> None:
    assert cache.get(KEY) is None
    cache.put(KEY, CODE)
    later = FileCache(cache.folder)
    assert later.get(KEY) == CODE
    assert [path.name for path in cache.folder.iterdir()] == [KEY]


def test_nothing_is_an_entry_too(cache: FileCache) -> None:
    cache.put(KEY, b"")
    assert cache.get(KEY) == b""


def test_file_of_an_entry_begins_with_its_bytes(cache: FileCache) -> None:
    assert cache.find(KEY) is None
    cache.put(KEY, CODE)
    path = cache.find(KEY)
    assert path is not None and path.read_bytes().startswith(CODE)


def test_folder_and_entries_are_the_users_alone(cache: FileCache) -> None:
    before = os.umask(0)
    try:
        cache.put(KEY, CODE)
    finally:
        os.umask(before)
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(entry(cache).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:10],
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    ],
)
def test_damaged_entry_is_missing_and_then_replaced(
    cache: FileCache, damage: Callable[[bytes], bytes]
) -> None:
    cache.put(KEY, CODE)
    entry(cache).write_bytes(damage(entry(cache).read_bytes()))
    assert cache.get(KEY) is None
    cache.put(KEY, CODE)
    assert cache.get(KEY) == CODE


def test_entry_under_another_key_is_missing(cache: FileCache) -> None:
    other = key_of("another kernel")
    cache.put(KEY, CODE)
    entry(cache).rename(entry(cache, other))
    assert cache.get(other) is None


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_entry_that_others_may_write_is_missing(cache: FileCache, mode: int) -> None:
    cache.put(KEY, CODE)
    entry(cache).chmod(mode)
    assert cache.get(KEY) is None
    cache.put(KEY, CODE)
    assert cache.get(KEY) == CODE


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_folder_that_others_may_write_is_not_used(cache: FileCache, mode: int) -> None:
    cache.put(KEY, CODE)
    cache.folder.chmod(mode)
    assert cache.get(KEY) is None
    entry(cache).unlink()
    cache.put(KEY, CODE)
    assert not entry(cache).exists()


def test_files_of_another_user_are_not_used(cache: FileCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.put(KEY, CODE)
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)
    assert cache.get(KEY) is None
    cache.put(KEY, b"other")
    monkeypatch.undo()
    assert cache.get(KEY) == CODE


def make_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir(0o700)


@pytest.mark.parametrize("replace", [make_link, make_pipe, make_folder])
def test_only_a_plain_file_is_an_entry(cache: FileCache, replace: Callable[[Path], None]) -> None:
    cache.put(KEY, CODE)
    replace(entry(cache))
    assert cache.get(KEY) is None


def test_folder_that_cannot_be_made_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = FileCache(tmp_path / "file" / "kernels")
    cache.put(KEY, CODE)
    cache.trim(0)
    assert cache.get(KEY) is None


@pytest.mark.parametrize("failing", ["mkstemp", "replace", "write"])
def test_full_disk_keeps_nothing(cache: FileCache, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    where = {"mkstemp": tempfile, "replace": os, "write": caches}[failing]
    monkeypatch.setattr(where, "_checksum" if failing == "write" else failing, full)
    cache.put(KEY, CODE)
    monkeypatch.undo()
    assert list(cache.folder.iterdir()) == []


def test_least_recently_used_go_first(cache: FileCache) -> None:
    keys = [key_of(str(number)) for number in range(4)]
    for age, key in enumerate(keys):
        cache.put(key, bytes(1000))
        os.utime(entry(cache, key), (age, age))
    assert cache.get(keys[0]) is not None  # used just now
    cache.trim(2500)
    assert {path.name for path in cache.folder.iterdir()} == {keys[0], keys[3]}
    cache.trim(0)
    assert list(cache.folder.iterdir()) == []


def test_file_that_a_killed_process_left_goes_in_its_turn(cache: FileCache) -> None:
    cache.put(KEY, bytes(1000))
    left = cache.folder / ".unfinished-1"
    left.write_bytes(bytes(1000))
    os.utime(left, (0, 0))
    cache.trim(1500)
    assert [path.name for path in cache.folder.iterdir()] == [KEY]


def test_threads_share_a_cache(cache: FileCache) -> None:
    keys = [key_of(str(number)) for number in range(8)]

    def use(turn: int) -> bool:
        key = keys[turn % len(keys)]
        cache.put(key, key.encode() * 1000)
        cache.trim(300_000)
        return cache.get(key) in (None, key.encode() * 1000)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(use, range(200)))
    assert all(not path.name.startswith(".") for path in cache.folder.iterdir())


def test_processes_share_a_cache(cache: FileCache) -> None:
    program = """
import sys, pathlib
from hybridc.caches import FileCache, key_of
cache = FileCache(pathlib.Path(sys.argv[1]))
for turn in range(200):
    key = key_of(str(turn % 5))
    cache.put(key, key.encode() * 2000)
    assert cache.get(key) in (None, key.encode() * 2000)
    cache.trim(400_000)
"""
    command = [sys.executable, "-c", program, str(cache.folder)]
    processes = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert sum(path.stat().st_size for path in cache.folder.iterdir()) <= 400_000
