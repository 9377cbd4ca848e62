"""The emulator's cache of compiled libraries: nothing is loaded from it that this user did not put there."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hybridc import caches
from hybridc.emulator import toolchain
from hybridc.emulator.toolchain import build_library, cache_folder
from hybridc.errors import DeviceError

SOURCE = 'extern "C" __attribute__((visibility("default"))) int two() { return 2; }'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield cache_folder()
    toolchain._compiler.cache_clear()


def build() -> Path:
    return build_library((SOURCE,), name="two")


def two(path: Path) -> int:
    """What the function returns. The linker takes a name that it knows for a library that it has."""
    fresh = path.with_name(f"copy{len(list(path.parent.iterdir()))}.so")
    fresh.write_bytes(path.read_bytes())
    result: int = ctypes.CDLL(str(fresh)).two()
    fresh.unlink()
    return result


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    toolchain._compiler.cache_clear()


def test_library_is_found_again_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    path = build()
    without_compiler(monkeypatch)
    assert build() == path and two(path) == 2
    with pytest.raises(DeviceError) as caught:
        build_library((SOURCE + "//",), name="two")
    assert caught.value.code == "HC421"


def test_folder_and_library_are_the_users_alone(folder: Path) -> None:
    assert folder.stat().st_mode & 0o777 == 0o700
    assert build().stat().st_mode & 0o777 == 0o600


def swap(path: Path) -> None:
    """Put another library there, as somebody would who wants it to be loaded."""
    other = build_library((SOURCE.replace("2", "3"),), name="two")
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-5000]),
        lambda path: path.write_bytes(path.read_bytes().replace(b"two", b"tw0")),
        lambda path: path.chmod(0o666),
        lambda path: path.rename(path.with_name("x")) and path.symlink_to("x"),
        swap,
    ],
    ids=["emptied", "cut", "edited", "writable", "link", "swapped"],
)
def test_damaged_entry_is_built_again(damage: Callable[[Path], object]) -> None:
    path = build()
    whole = path.read_bytes()
    damage(path)
    assert build() == path and not path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(path.read_bytes()) == len(whole) and two(path) == 2


def test_folder_that_others_may_write_to_is_refused(folder: Path) -> None:
    build()
    folder.chmod(0o777)
    with pytest.raises(DeviceError, match="others may write to it") as caught:
        build()
    assert caught.value.code == "HC427" and "XDG_CACHE_HOME" in caught.value.remedy


def test_folder_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    build()
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)
    with pytest.raises(DeviceError, match="it belongs to another user") as caught:
        build()
    assert caught.value.code == "HC427"


@pytest.mark.parametrize("where", ["building", "keeping"])
def test_full_disk_is_told(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if where == "building":
        monkeypatch.setattr(toolchain, "_compile_and_link", full)
    else:
        monkeypatch.setattr(caches.tempfile, "mkstemp", full)
    with pytest.raises(DeviceError, match=r"No space|disk may be full") as caught:
        build()
    assert caught.value.code == "HC427"
