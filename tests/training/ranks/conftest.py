"""MPI jobs on this machine, of a step whose batch is gone through in four parts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import hybridc
from tests.support.machines import EAGER_GPU
from tests.support.process import PATIENCE_SECONDS
from tests.training.conftest import BATCH, LOSS, OPTIMIZER, examples, network

ROOT = Path(__file__).parents[3]
PARTS = 4


def mpiexec() -> str:
    """Of the wheel beside this Python, or the system's."""
    pytest.importorskip("mpi4py")
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        pytest.skip("needs mpiexec")
    return found


def start(count: int, *words: object) -> subprocess.Popen[str]:
    """`python WORDS` on so many ranks of one thread each."""
    command = [mpiexec(), "-n", str(count), sys.executable, *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, text=True, stdout=pipe, stderr=pipe)


def finish(job: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    try:
        out, err = job.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        job.kill()
        raise
    return job.returncode, out, err


@pytest.fixture(scope="session")
def parts_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With BatchNorm and Dropout."""
    path = tmp_path_factory.mktemp("ranks") / "step.hyb"
    options = {"loss": LOSS, "optimizer": OPTIMIZER, "batch": BATCH, "accumulate": PARTS}
    hybridc.compile_training(network(dropout=0.1), path, target="avx2", **options)  # type: ignore[arg-type]
    return path


@pytest.fixture(scope="session")
def sixths_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a batch in six parts, with two states of the optimizer for each parameter."""
    path = tmp_path_factory.mktemp("ranks") / "sixths.hyb"
    hybridc.compile_training(
        network(dropout=0.1), path, loss=LOSS, optimizer="adam", batch=18, accumulate=6, target="avx2"
    )
    return path


@pytest.fixture(scope="session")
def clipping_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a norm that some of the gradients exceed."""
    path = tmp_path_factory.mktemp("ranks") / "clipping.hyb"
    options = {"loss": LOSS, "optimizer": OPTIMIZER, "batch": BATCH, "accumulate": PARTS, "clip_norm": 1.0}
    hybridc.compile_training(network(dropout=0.1), path, target="avx2", **options)  # type: ignore[arg-type]
    return path


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    images, labels = examples(10 * BATCH)
    path = tmp_path_factory.mktemp("examples") / "train.npz"
    np.savez(path, x=images, y=labels)
    return path


@pytest.fixture(scope="session")
def gpu_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For half of the GPU memory that all of it would need."""
    path = tmp_path_factory.mktemp("ranks") / "gpu.hyb"
    options = {"loss": LOSS, "optimizer": OPTIMIZER, "batch": BATCH, "accumulate": PARTS, "plan_seconds": 0.5}
    hybridc.compile_training(
        network(dropout=0.1),
        path,
        target="cuda:sm_75+avx2",
        gpu_memory="50%",
        machine=EAGER_GPU,
        **options,  # type: ignore[arg-type]
    )
    return path
