"""Bundles in a root folder that has glibc and nothing else, and for GPU parts an emulated driver."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import hybridc
from hybridc import emulator
from hybridc.bundle import write_bundle
from hybridc.models import build
from tests.bundle.conftest import gpu_environment

LIBRARIES = Path("/lib/x86_64-linux-gnu")
GLIBC = (
    *(LIBRARIES / name for name in ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0")),
    Path("/lib64/ld-linux-x86-64.so.2"),
)
CHROOT = ("unshare", "--map-root-user", "/usr/sbin/chroot")
GPU_BYTES = 128 << 20


@pytest.fixture(autouse=True)
def allowed() -> None:
    try:
        subprocess.run([*CHROOT, "/", "/bin/true"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this system lets nobody change the root folder")


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    yield
    if emulator.is_active():
        emulator.reset()


def root_of(bundle: Path, root: Path, files: Sequence[Path] = ()) -> Path:
    """A root folder with a bundle in `net`, glibc, and these files with what the linker loads for them."""
    shutil.copytree(bundle, root / "net")
    linked = (library for file in files for library in _needed(file))
    for file in {*GLIBC, *files, *linked}:
        copy = root / file.relative_to("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    return root


def _needed(library: Path) -> list[Path]:
    listed = subprocess.run(["ldd", str(library)], capture_output=True, text=True, check=True).stdout
    words = [word for line in listed.splitlines() for word in line.split()]
    return [Path(word) for word in words if word.startswith("/") and Path(word).is_file()]


def run(root: Path, *words: str, environment: dict[str, str] | None = None) -> None:
    """The runner; without /proc the linker does not find libraries by the place of the program."""
    command = [*CHROOT, str(root), "/net/run", "/net", *words]
    places = {"LD_LIBRARY_PATH": "/net/lib"} if environment is None else environment
    done = subprocess.run(command, env=places, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_glibc_is_enough(cpu_bundle: Path, tmp_path: Path) -> None:
    run(root_of(cpu_bundle, tmp_path / "root"), "--random")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "most_bytes"),
    [
        pytest.param("avx512", 10 << 20, marks=pytest.mark.isa("avx512")),
        pytest.param("cuda+avx2", 16 << 20, marks=pytest.mark.isa("avx2")),
    ],
)
def test_resnet50_gives_the_bytes_of_a_session(target: str, most_bytes: int, tmp_path: Path) -> None:
    artifact, x = tmp_path / "net.hyb", np.random.default_rng(0).random((1, 3, 224, 224), np.float32)
    is_hybrid = "cuda" in target
    budget = "50%" if is_hybrid else None
    hybridc.compile(build("resnet50"), artifact, target=target, gpu_memory=budget, plan_seconds=2.0)
    made = write_bundle(artifact, tmp_path / "bundle")
    assert made.size_bytes - made.weights_bytes < most_bytes
    environment, files = None, list[Path]()
    if is_hybrid:
        (driver := tmp_path / "driver").mkdir()
        environment = gpu_environment(artifact, driver, GPU_BYTES)
        kernels = next(word for word in (driver / "preloaded.c").read_text().split('"') if word[:1] == "/")
        files = [*driver.glob("*.so*"), Path(kernels)]
        environment["LD_LIBRARY_PATH"] += f":/net/lib:/usr{LIBRARIES}:{LIBRARIES}"
    root = root_of(made.path, tmp_path / "root", files)
    np.save(root / "x.npy", x)
    run(root, "--input", "x=/x.npy", "--output", "/y.npz", environment=environment)
    with hybridc.load(artifact, emulate_gpu=GPU_BYTES if is_hybrid else None) as session:
        [y] = session.run(None, {"x": x})
    assert np.load(root / "y.npz")["logits"].tobytes() == y.tobytes()
