"""Bundles that several tests run, made once per test process, and an emulated GPU for their processes."""

from __future__ import annotations

import hashlib
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from hybridc import emulator
from hybridc.artifact import open_artifact
from hybridc.bundle import write_bundle
from hybridc.emulator.device import build_device
from tests.support.artifacts import cpu_model, hybrid_model, model_for_two_budgets

EMULATED_BYTES = 1 << 20

_PRELOADED = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
struct {{
  uint64_t bytes; int32_t present, major, minor, order, lazy, workers, guard, refuse;
}} configuration = {{ {bytes}, 1, 9, 0, 0, 0, 1, 0, 0 }};
uint64_t hybridc_emulator_configure(const void* configuration);
void hybridc_emulator_register_image(uint64_t key, const char* path);
void hybridc_emulator_statistics(void* statistics);
void hybridc_emulator_watch_calls(const char* function, uint64_t ordinal, int error);
__attribute__((constructor)) static void start(void) {{
  hybridc_emulator_configure(&configuration);
  hybridc_emulator_register_image(0x{key}, "{kernels}");
  if (getenv("{failing}")) hybridc_emulator_watch_calls(getenv("{failing}"), atoi(getenv("{ordinal}")), 999);
}}
__attribute__((destructor)) static void tell(void) {{
  struct {{ uint64_t used, others[9], pinned, streams, events, graphs; }} now;
  hybridc_emulator_statistics(&now);
  const uint64_t held = now.used + now.pinned + now.streams + now.events + now.graphs;
  if (getenv("{failing}")) fprintf(stderr, "held %lu\\n", held);
}}
"""
"""A library that gives the process that it is preloaded into an emulated GPU; and, if the environment names a
call to fail, tells at the end what the process still holds of it."""
FAILING, ORDINAL = "HYBRIDC_TEST_FAILING", "HYBRIDC_TEST_ORDINAL"


@pytest.fixture(scope="session")
def cpu_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cpu_model().write(tmp_path_factory.mktemp("cpu") / "model.hyb")


@pytest.fixture(scope="session")
def cpu_bundle(cpu_artifact: Path) -> Path:
    return write_bundle(cpu_artifact, cpu_artifact.parent / "bundle").path


@pytest.fixture(scope="session")
def hybrid_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hybrid_model().write(tmp_path_factory.mktemp("hybrid") / "model.hyb")


@pytest.fixture(scope="session")
def several_plans_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_for_two_budgets().write(tmp_path_factory.mktemp("several") / "model.hyb")


def gpu_environment(artifact: Path, folder: Path, memory_bytes: int = EMULATED_BYTES) -> dict[str, str]:
    """What a process needs to run a bundle of this artifact on an emulated GPU of its own."""
    runtime, driver = build_device()
    for link, library in (("libcudart.so.13", runtime), ("libcuda.so.1", driver)):
        (folder / link).symlink_to(library)
    opened = open_artifact(artifact)
    key, source = opened.manifest.cuda_image_key, opened.cuda_source()
    assert key is not None and source is not None
    kernels = emulator.provide_kernels(key, source)
    code, library = folder / "preloaded.c", folder / "preloaded.so"
    code.write_text(
        _PRELOADED.format(bytes=memory_bytes, key=key, kernels=kernels, failing=FAILING, ordinal=ORDINAL)
    )
    links = ["-shared", "-fPIC", str(code), f"-L{folder}", "-l:libcudart.so.13"]
    subprocess.run(["gcc", *links, "-o", str(library)], check=True)
    return {"LD_LIBRARY_PATH": str(folder), "LD_PRELOAD": str(library)}


def seal(bundle: Path, name: str) -> None:
    """Let the hash of a file be that of what it is now."""
    digest = hashlib.sha256((bundle / name).read_bytes()).hexdigest()
    sums = bundle / "SHA256SUMS"
    sums.write_text(re.sub(rf".*  {re.escape(name)}\n", f"{digest}  {name}\n", sums.read_text()))


def run_bundle(
    bundle: Path, *words: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The runner, where nothing of Python's is set, and in another folder."""
    return subprocess.run(
        [str(bundle / "run"), *words],
        env=environment or {},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )


def outputs_of(
    bundle: Path, feeds: dict[str, np.ndarray], folder: Path, environment: dict[str, str] | None = None
) -> dict[str, np.ndarray]:
    """What the runner writes for these feeds, by the names of files."""
    folder.mkdir()
    words = []
    for number, (name, array) in enumerate(feeds.items()):
        np.save(folder / f"{number}.npy", array)
        words += ["--input", f"{name}={folder / f'{number}.npy'}"]
    done = run_bundle(bundle, *words, "--output", str(folder / "made"), environment=environment)
    assert done.returncode == 0, done.stderr
    return {path.stem: np.load(path) for path in (folder / "made").iterdir()}


def drawn(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
