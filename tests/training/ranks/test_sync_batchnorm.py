"""`--sync-batchnorm`: ranks with a part of a batch each, against one that has it as a whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import hybridc
from hybridc.artifact.load import open_artifact
from hybridc.cli import main
from hybridc.errors import PlanError, UsageError
from hybridc.ir import Lane, Run
from hybridc.ir.verify import verify
from hybridc.machine import Network
from hybridc.models.builder import LINEAR_GAIN, GraphBuilder
from hybridc.training.artifact import ACCUMULATE
from hybridc.training.checkpoint import read_checkpoint
from hybridc.training.ranks.collectives import collectives_of, with_means
from tests.training.conftest import BATCH, CLASSES, LOSS
from tests.training.ranks.conftest import PARTS
from tests.training.ranks.test_ranks import command, losses, refusal

pytestmark = pytest.mark.isa("avx2")
OPTIONS: dict[str, Any] = {
    "loss": LOSS,
    "optimizer": "sgd:lr=0.01,momentum=0.9",
    "batch": BATCH,
    "target": "avx2",
}


def images_network() -> onnx.ModelProto:
    """BatchNorm of images, and of what they become."""
    g = GraphBuilder("normed", 3)
    x = g.input("x", ("N", 1, 8, 8))
    x = g.relu(g.batch_norm(g.conv(x, 6, 3)))
    x = g.relu(g.batch_norm(g.gemm(g.flatten(x), 12)))
    return g.model(logits=g.gemm(x, CLASSES, LINEAR_GAIN))


@pytest.fixture(scope="module")
def synchronized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sync") / "parts.hyb"
    hybridc.compile_training(images_network(), path, accumulate=PARTS, sync_batchnorm=True, **OPTIONS)
    return path


@pytest.fixture(scope="module")
def of_whole_batch(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """The checkpoint of five epochs by one process."""
    folder = tmp_path_factory.mktemp("whole")
    hybridc.compile_training(images_network(), folder / "step.hyb", **OPTIONS)
    words = ["train", folder / "step.hyb", "--data", data, "--epochs", 5, "--checkpoint", folder / "run"]
    assert main([str(word) for word in words]) == 0
    return folder / "run"


@pytest.mark.parametrize(
    "more", [(), pytest.param(("--shard-states",), marks=pytest.mark.slow)], ids=["alone", "sharing_states"]
)
def test_ranks_have_losses_and_statistics_of_the_whole_batch(
    more: tuple[str, ...], synchronized: Path, of_whole_batch: Path, data: Path, tmp_path: Path
) -> None:
    found = losses(PARTS, synchronized, data, "--epochs", 5, "--checkpoint", tmp_path, *more)
    whole, parts = read_checkpoint(of_whole_batch), read_checkpoint(tmp_path)
    assert whole is not None and parts is not None and len(found) == 50
    np.testing.assert_allclose(found, whole.progress.losses, rtol=1e-6)
    for name, value in whole.model.items():
        np.testing.assert_allclose(parts.model[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_means_of_ranks_are_ordered_with_the_kernels_around_them(synchronized: Path) -> None:
    artifact = open_artifact(synchronized / ACCUMULATE)
    verify(*with_means(artifact.graph, artifact.plan, PARTS, Network(0.0, 1e6)))
    graph, plan = with_means(artifact.graph, artifact.plan, PARTS, Network())
    verify(graph, plan)
    # of each norm mean, variance, and the sums of the backward pass
    assert len(collectives_of(plan)) == 2 * 3
    assert plan.arenas == artifact.plan.arenas
    position = next(i for i, s in enumerate(plan.steps) if s.lane is Lane.CPU and s.waits)
    loose = replace(plan.steps[position], waits=())
    with pytest.raises(PlanError, match=r"HC213|HC216"):
        verify(graph, replace(plan, steps=(*plan.steps[:position], loose, *plan.steps[position + 1 :])))


def test_one_rank_alone_copies_its_means(synchronized: Path) -> None:
    artifact = open_artifact(synchronized / ACCUMULATE)
    kernels = [kernel for kernel in artifact.graph.kernels if kernel.is_mean_of_ranks]
    assert len(kernels) == 6
    assert not any(isinstance(s, Run) and s.is_collective for s in artifact.plan.steps)


def test_other_numbers_of_ranks_than_of_parts_are_refused(synchronized: Path, data: Path) -> None:
    with pytest.raises(UsageError, match="HC587") as raised:
        hybridc.load_training(synchronized)
    assert "a rank for each of the 4 parts of a batch, not 1" in raised.value.what
    assert "error[HC587]: --sync-batchnorm needs a rank for each of the 4 parts of a batch, not 2" in refusal(
        2, *command(synchronized, data)
    )


def test_a_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="HC525"):
        options = {**OPTIONS, "target": "cuda+avx2"}
        hybridc.compile_training(
            images_network(), tmp_path / "step.hyb", accumulate=2, sync_batchnorm=True, **options
        )
