"""What the control groups of a process leave it of the host's memory: containers and job schedulers set them.

Both versions, by the files that the kernel documents in "Control Group v2" and "Memory Resource Controller".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

UNLIMITED_BYTES = 1 << 60
"""Limits from here on are none: version 1 writes the largest number of pages, version 2 `max`."""


@dataclass(frozen=True, slots=True)
class _Version:
    """Names of a version's files and of what it counts."""

    filesystem: str
    controller: str
    """By which it names the groups that count memory: version 2 has one hierarchy for all, without a name."""
    limit: str
    usage: str
    cached: tuple[str, ...]
    """Of the file `memory.stat`: pages of files, which the kernel takes back before it refuses memory."""
    swap_limit: str
    swap_usage: str
    swap_is_total: bool
    """Whether these two count memory and swap together."""


_VERSIONS = (
    _Version(
        "cgroup2",
        "",
        "memory.max",
        "memory.current",
        ("inactive_file", "active_file"),
        "memory.swap.max",
        "memory.swap.current",
        False,
    ),
    _Version(
        "cgroup",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
        "memory.memsw.limit_in_bytes",
        "memory.memsw.usage_in_bytes",
        True,
    ),
)


def bytes_left(swap_free_bytes: int, system: Path = Path("/")) -> tuple[int, int]:
    """What the process can still get within all its groups: in memory, and with the swap that the host has.

    `UNLIMITED_BYTES` or more where nothing limits it. `system` is the folder that has `proc`.
    """
    left = total = UNLIMITED_BYTES
    for version, folder in _groups(system):
        limit = _number(folder / version.limit)
        if limit is None or limit >= UNLIMITED_BYTES:
            continue
        cached = sum(_counted(folder / "memory.stat", name) for name in version.cached)
        own = limit - (_number(folder / version.usage) or 0) + cached
        swap_limit = _number(folder / version.swap_limit)
        more = swap_free_bytes
        if swap_limit is not None and swap_limit < UNLIMITED_BYTES:
            swap_left = swap_limit - (_number(folder / version.swap_usage) or 0)
            more = min(more, swap_left + cached - own if version.swap_is_total else swap_left)
        left, total = min(left, own), min(total, own + max(0, more))
    return left, total


def _groups(system: Path) -> Iterator[tuple[_Version, Path]]:
    """The folders of the groups that count the memory of this process, and of those around them."""
    memberships = [line.split(":", 2)[1:] for line in _lines(system / "proc/self/cgroup")]
    for line in _lines(system / "proc/self/mountinfo"):
        mount, _, source = line.partition(" - ")
        root, mount_point = mount.split()[3:5]
        filesystem, _, options = source.split()[:3]
        for version in _VERSIONS:
            if filesystem != version.filesystem or (version.controller not in ("", *options.split(","))):
                continue
            top = system / mount_point.lstrip("/")
            for controllers, path in memberships:
                if version.controller in controllers.split(","):
                    # in a container the mount may begin at the process's group, or at one that it cannot see
                    inside = PurePosixPath(path).is_relative_to(root)
                    own = top / PurePosixPath(path).relative_to(root) if inside else top
                    yield from ((version, f) for f in (own, *own.parents) if f.is_relative_to(top))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """The number in a file; None for `max`, and where there is no such file."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _counted(path: Path, name: str) -> int:
    found = (line.split() for line in _lines(path))
    return next((int(words[1]) for words in found if words[0] == name), 0)
