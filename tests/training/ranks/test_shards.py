"""States of the optimizer that ranks share: the steps of those that each has, in less memory."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hybridc.cli import main
from hybridc.errors import UsageError
from hybridc.ir import Device, Graph, Plan, Run
from hybridc.ir.verify import verify
from hybridc.keywords import PlanKeywords, options_of
from hybridc.models import build
from hybridc.passes.training.spec import TrainingSpec, parse_loss, parse_optimizer
from hybridc.training.artifact import UPDATE
from hybridc.training.checkpoint import read_checkpoint
from hybridc.training.compile import plan_training
from hybridc.training.ranks.part import part_of
from hybridc.training.ranks.shards import Shards, owners
from tests.training.ranks.conftest import finish, start
from tests.training.ranks.test_ranks import losses

PROGRAM = Path(__file__).with_name("shards_of_ranks.py")


def planned(target: str, clip_norm: float | None = None) -> tuple[Graph, Plan]:
    """The update of cifar_quick; with a GPU for half of what it needs there."""
    given = {"target": target, "plan_seconds": 0.2}
    if "cuda" in target:
        given["gpu_memory"] = "50%"
    loss, optimizer = parse_loss("softmax_cross_entropy"), parse_optimizer("adam")
    spec = TrainingSpec(loss, optimizer, 64, 4, clip_norm=clip_norm)
    model = build("cifar_quick", dynamic_batch=True)
    made = plan_training(model, options_of(given, PlanKeywords), spec, wanted=[UPDATE])[UPDATE]
    return made.graphs[-1], made.plans[-1]


@pytest.mark.parametrize("target", ["avx2", pytest.param("cuda+avx2", marks=pytest.mark.slow)])
def test_parts_of_an_update_make_its_results_in_their_share_of_memory(target: str) -> None:
    graph, plan = planned(target)
    of_parameters = [graph.outputs[i : i + 3] for i in range(0, len(graph.outputs), 3)]
    thirds = [sum(of_parameters[i::3], ()) for i in range(3)]
    parts = [part_of(graph, plan, outputs) for outputs in thirds]
    for outputs, (part, made) in zip(thirds, parts, strict=True):
        verify(part, made)
        assert part.outputs == outputs
        assert {s.device for s in made.steps if isinstance(s, Run)} <= {
            s.device for s in plan.steps if isinstance(s, Run)
        }
        assert made.arena_bytes(Device.GPU) <= plan.arena_bytes(Device.GPU)
    held = sum(made.arena_bytes(Device.CPU) for _, made in parts)
    assert held < 1.1 * plan.arena_bytes(Device.CPU)


def test_part_of_a_clipped_update_keeps_the_norm_of_all_gradients() -> None:
    graph, plan = planned("avx2", clip_norm=1.0)
    part, made = part_of(graph, plan, graph.outputs[:1])
    verify(part, made)
    sums = [name for name in graph.inputs if graph.tensor[name].shape and name in part.inputs]
    assert len(sums) > 4 and len(part.inputs) < len(graph.inputs)
    assert made.arena_bytes(Device.CPU) < plan.arena_bytes(Device.CPU)


def test_parameters_are_shared_evenly_by_size() -> None:
    sizes = {"a": 10, "b": 7, "c": 6, "d": 5, "e": 2}
    found = owners(sizes, 2)
    held = [sum(sizes[name] for name in sizes if found[name] == rank) for rank in range(2)]
    assert held == [15, 15]
    assert set(owners({"a": 1}, 3).values()) == {0}


@pytest.mark.isa("avx2")
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_shared_states_are_those_of_ranks_that_each_have_all(
    count: int, sixths_artifact: Path, tmp_path: Path
) -> None:
    output = tmp_path / "report.json"
    code, _, told = finish(start(count, PROGRAM, sixths_artifact, output))
    assert code == 0, told
    report = json.loads(output.read_text())
    shared, whole = report["shared"], report["whole"]
    for mine, other in zip(shared, whole, strict=True):
        assert mine["losses"] == other["losses"] and mine["parameters"] == other["parameters"]
    assert shared[0]["moments"] == whole[0]["moments"] and shared[1]["names"] == ["step"]
    held = [found["state_bytes"] for found in shared]
    assert sum(held) == whole[0]["state_bytes"] > max(held)
    sent = [sum(found["sent_bytes"] for found in each) for each in (shared, whole)]
    assert sent[0] == pytest.approx(sent[1], rel=0.02)


@pytest.mark.slow
@pytest.mark.isa("avx2")
def test_checkpoint_of_shared_states_goes_on_with_any_number_of_ranks(
    sixths_artifact: Path, data: Path, tmp_path: Path
) -> None:
    words = ["train", sixths_artifact, "--data", data, "--checkpoint", tmp_path / "whole", "--epochs", 3]
    assert main([str(word) for word in words]) == 0
    whole = read_checkpoint(tmp_path / "whole")
    assert whole is not None
    kept = ("--checkpoint", tmp_path / "run", "--resume", "--epochs")
    losses(3, sixths_artifact, data, *kept, 1, "--shard-states")
    losses(2, sixths_artifact, data, *kept, 2, "--shard-states")
    found = losses(1, sixths_artifact, data, *kept, 3)
    np.testing.assert_allclose(found, whole.progress.losses, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.isa("avx2")
def test_clipped_gradients_of_shared_states_are_of_the_whole_batch(
    clipping_artifact: Path, data: Path
) -> None:
    assert losses(2, clipping_artifact, data, "--shard-states") == losses(2, clipping_artifact, data)


def test_averages_of_weights_cannot_be_shared() -> None:
    manifest = SimpleNamespace(spec=TrainingSpec(ema=0.9), states=())
    with pytest.raises(UsageError, match="HC587") as raised:
        Shards.of(SimpleNamespace(count=2), manifest)  # type: ignore[arg-type]
    assert raised.value.is_shared and "averages" in raised.value.what


def test_shared_states_need_ranks(data: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["train", str(tmp_path), "--data", str(data), "--shard-states"]) == 2
    assert "--shard-states requires --ranks" in capsys.readouterr().err
