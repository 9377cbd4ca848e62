"""What control groups leave a process, read from folders like those of both versions of the interface."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridc.runtime import staging
from hybridc.runtime.cgroup import UNLIMITED_BYTES, bytes_left

MIB = 1 << 20
V2_MOUNT = "31 24 0:27 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
OTHER_MOUNTS = """22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/root rw
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu"""


def system_with(folder: Path, membership: str, mount: str, files: dict[str, object]) -> Path:
    """A folder that has what the kernel shows in /proc and /sys."""
    shown = {"proc/self/cgroup": membership, "proc/self/mountinfo": f"{OTHER_MOUNTS}\n{mount}", **files}
    for name, content in shown.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{content}\n")
    return folder


def test_the_tightest_group_counts_and_cached_files_are_free(tmp_path: Path) -> None:
    top = "sys/fs/cgroup/batch"
    files = {
        f"{top}/memory.max": 1000 * MIB,
        f"{top}/memory.current": 900 * MIB,
        f"{top}/memory.stat": f"anon 5\ninactive_file {300 * MIB}\nactive_file {100 * MIB}",
        f"{top}/memory.swap.max": 50 * MIB,
        f"{top}/memory.swap.current": 20 * MIB,
        f"{top}/job/memory.max": "max",
        f"{top}/job/memory.current": 1,
    }
    system = system_with(tmp_path, "0::/batch/job", V2_MOUNT, files)
    assert bytes_left(0, system) == (500 * MIB, 500 * MIB)
    assert bytes_left(10 * MIB, system) == (500 * MIB, 510 * MIB)
    assert bytes_left(1000 * MIB, system) == (500 * MIB, 530 * MIB)


@pytest.mark.parametrize("root", ["/", "/docker/1f"])
def test_first_version_counts_memory_and_swap_together(tmp_path: Path, root: str) -> None:
    """In a container the mount begins at the group of the process."""
    top = "sys/fs/cgroup/memory" + ("/docker/1f" if root == "/" else "")
    files = {
        f"{top}/memory.limit_in_bytes": 512 * MIB,
        f"{top}/memory.usage_in_bytes": 400 * MIB,
        f"{top}/memory.stat": f"cache 7\ntotal_inactive_file {80 * MIB}\ntotal_active_file 0",
        f"{top}/memory.memsw.limit_in_bytes": 600 * MIB,
        f"{top}/memory.memsw.usage_in_bytes": 430 * MIB,
    }
    mount = V1_MOUNT.format(root=root)
    system = system_with(tmp_path, "5:cpu:/docker/1f\n4:memory:/docker/1f", mount, files)
    assert bytes_left(0, system) == (192 * MIB, 192 * MIB)
    assert bytes_left(1000 * MIB, system) == (192 * MIB, 250 * MIB)


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_no_limit_is_none(tmp_path: Path, limit: str) -> None:
    files = {"sys/fs/cgroup/memory.max": limit, "sys/fs/cgroup/memory.current": 5}
    assert bytes_left(7, system_with(tmp_path, "0::/", V2_MOUNT, files)) == (UNLIMITED_BYTES,) * 2
    assert bytes_left(7, tmp_path / "nowhere") == (UNLIMITED_BYTES,) * 2


def test_a_run_gets_no_more_than_its_group_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "bytes_left", lambda swap_free: (3 * MIB, 4 * MIB))
    assert staging.available_host_bytes() == 3 * MIB and staging.host_room_bytes() == 4 * MIB
