"""Artifacts that several tests load, built once per test process, and the emulated GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridc import emulator
from tests.support.artifacts import cpu_model, hybrid_model, streaming_model

EMULATED_BYTES = 1 << 20


@pytest.fixture(scope="session")
def cpu_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cpu_model().write(tmp_path_factory.mktemp("cpu") / "model.hyb")


@pytest.fixture(scope="session")
def hybrid_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hybrid_model().write(tmp_path_factory.mktemp("hybrid") / "model.hyb")


@pytest.fixture(scope="session")
def racing_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hybrid artifact without the wait between the GPU's first kernel and the copy of its result."""
    return hybrid_model(drop_waits=True).write(tmp_path_factory.mktemp("racing") / "model.hyb")


@pytest.fixture(scope="session")
def streaming_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return streaming_model().write(tmp_path_factory.mktemp("streaming") / "model.hyb")


@pytest.fixture
def emulated_gpu() -> Iterator[None]:
    emulator.start(EMULATED_BYTES)
    yield
    emulator.reset()
