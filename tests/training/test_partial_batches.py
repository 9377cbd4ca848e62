"""Batches that need not be whole: a step is that of a network compiled for as many examples."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hybridc
from hybridc.cli import main
from hybridc.errors import HybridcError, UsageError
from hybridc.models.builder import GraphBuilder
from hybridc.passes.training.spec import batch_of
from hybridc.runtime import Session
from hybridc.training.artifact import STEP
from hybridc.training.batches import part_sizes
from hybridc.training.data import Dataset
from hybridc.training.loop import NullCallback, TrainingRun, train
from hybridc.training.session import TrainingSession
from tests.support.machines import EAGER_GPU
from tests.support.random_examples import random_examples
from tests.training.conftest import BATCH, CLASSES, LOSS, OPTIMIZER, examples, network, network_with_loss

pytestmark = pytest.mark.isa("avx2")
UP_TO_BATCH = f"1..{BATCH}"
Compile = Callable[..., Path]
Trained = tuple[list[float], Mapping[str, np.ndarray]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Compiles each step once."""
    made: dict[str, Path] = {}

    def step(model: Callable[[], onnx.ModelProto], batch: int | str, **options: Any) -> Path:
        key = repr((model.__name__, batch, sorted(options.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("step") / "step.hyb"
            given = {"loss": LOSS, "optimizer": OPTIMIZER, "target": "avx2"} | options
            hybridc.compile_training(model(), made[key], batch=batch, **given)
        return made[key]

    return step


def plain() -> onnx.ModelProto:
    """No example depends on the others."""
    g = GraphBuilder("plain", 3)
    x = g.relu(g.gemm(g.flatten(g.input("x", ("N", 1, 8, 8))), 12))
    return g.model(logits=g.gemm(x, CLASSES))


def own_loss() -> onnx.ModelProto:
    return network_with_loss(dropout=0.0)


def trained(session: TrainingSession, counts: list[int]) -> Trained:
    """Losses of steps of so many examples, one of the evaluation behind them, and all states."""
    losses = []
    for number, count in enumerate(counts):
        images, labels = examples(count, seed=number)
        feeds = [{"x": images, "labels": labels}] if "labels" in _names(session) else [images, labels]
        losses.append(session.step(*feeds))
    losses.append(session.evaluate(*feeds).loss)
    return losses, session.state_dict() | session.optimizer_state_dict()


def _names(session: TrainingSession) -> list[str]:
    return [port.name for port in session.inputs]


def check_same(
    found: tuple[list[float], Mapping[str, np.ndarray]],
    expected: tuple[list[float], Mapping[str, np.ndarray]],
) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-6)
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        *((model, 7) for model in (network, own_loss)),
        *(
            pytest.param(model, count, marks=pytest.mark.slow)
            for model in (network, own_loss)
            for count in (1, BATCH)
        ),
    ],
)
def test_step_is_that_of_a_network_compiled_for_as_many(
    model: Callable[[], onnx.ModelProto], count: int, compiled: Compile
) -> None:
    """With BatchNorm's statistics, gradients and running statistics of these examples alone."""
    loss = None if model is own_loss else LOSS
    with (
        hybridc.load_training(compiled(model, UP_TO_BATCH, loss=loss)) as session,
        hybridc.load_training(compiled(model, count, loss=loss)) as exact,
    ):
        assert session.batch == BATCH
        check_same(trained(session, [count] * 3), trained(exact, [count] * 3))


def wide() -> onnx.ModelProto:
    """Convolutions whose activations are larger than all weights."""
    g = GraphBuilder("wide", 3)
    x = g.input("x", ("N", 1, 8, 8))
    for _ in range(2):
        x = g.relu(g.batch_norm(g.conv(x, 4, 3)))
    return g.model(logits=g.gemm(g.flatten(x), CLASSES))


@pytest.mark.slow  # many ways to cut the network up are planned
@pytest.mark.parametrize("budget", ["15%", "50%"])  # of the first a batch goes through in micro-batches
def test_step_on_a_gpu_is_that_of_a_network_compiled_for_as_many(budget: str, compiled: Compile) -> None:
    options: dict[str, Any] = {"target": "cuda:sm_75+avx2", "machine": EAGER_GPU, "gpu_memory": budget}
    path = compiled(wide, UP_TO_BATCH, plan_seconds=0.05, **options)
    with (
        hybridc.load_training(path, emulate_gpu="1MiB") as session,
        hybridc.load_training(compiled(wide, 5)) as exact,
    ):
        check_same(trained(session, [5, 5]), trained(exact, [5, 5]))


@pytest.mark.parametrize("parts", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, BATCH))])
@random_examples(10)
@given(count=st.integers(1, BATCH))
def test_parts_of_any_batch_have_the_mean_of_its_examples(count: int, parts: int, compiled: Compile) -> None:
    with (
        hybridc.load_training(compiled(plain, UP_TO_BATCH, accumulate=parts)) as session,
        hybridc.load_training(compiled(plain, UP_TO_BATCH)) as whole,
    ):
        found, expected = (trained(each, [count, BATCH, count]) for each in (session, whole))
        check_same(found, expected)


@given(examples=st.integers(0, 1000), parts=st.integers(1, 20))
def test_parts_are_alike(examples: int, parts: int) -> None:
    sizes = part_sizes(examples, parts)
    assert sum(sizes) == examples and len(sizes) == parts and max(sizes) - min(sizes) < 2
    assert list(sizes) == sorted(sizes, reverse=True)


def test_nothing_depends_on_what_is_behind_the_examples(compiled: Compile) -> None:
    path = compiled(network, UP_TO_BATCH)
    images, labels = examples(BATCH)
    others, other_labels = examples(BATCH, seed=1)
    with hybridc.load_training(path) as session, Session(path / STEP) as step:
        manifest = session.artifact.manifest
        feeds = {**session.artifact.initial_values(), "x": images, "target": labels}
        feeds |= {manifest.scalars[name]: np.array(0.1, np.float32) for name in manifest.scalars}
        [size] = manifest.sizes
        ports = step.artifact.manifest
        names = [port.name for port in ports.outputs]
        ran = []
        for behind, labels_behind in ((images, labels), (1e3 * others, other_labels)):
            feeds["x"] = np.concatenate([images[:6], behind[6:]])
            feeds["target"] = np.concatenate([labels[:6], labels_behind[6:]])
            read = {name: feeds[name] for name in (port.name for port in ports.inputs) if name != size}
            ran.append([array.copy() for array in step.run(names, read | {size: np.array([6], np.int64)})])
        for one, other in zip(*ran, strict=True):
            np.testing.assert_array_equal(one, other)


def test_evaluation_is_of_any_number_of_examples(compiled: Compile) -> None:
    images, labels = examples(2 * BATCH + 5)
    with (
        hybridc.load_training(compiled(network, UP_TO_BATCH)) as session,
        hybridc.load_training(compiled(network, len(images))) as exact,
    ):
        found, expected = (each.evaluate(images, labels) for each in (session, exact))
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.outputs["logits"].shape == (len(images), CLASSES)
    np.testing.assert_allclose(found.outputs["logits"], expected.outputs["logits"], rtol=1e-5, atol=1e-6)


class _Told(NullCallback):
    def __init__(self) -> None:
        self.examples: list[int] = []
        self.means: list[float] = []

    def stepped(self, loss: float, examples: int) -> None:
        self.examples.append(examples)

    def epoch_ended(self, epoch: int, mean_loss: float, evaluated: object) -> None:
        self.means.append(mean_loss)


def test_epoch_has_all_examples_and_goes_on_from_its_last_step(compiled: Compile, tmp_path: Path) -> None:
    images, labels = examples(2 * BATCH + 3)
    data = Dataset({"x": images}, {"target": labels})
    path, told = compiled(network, UP_TO_BATCH), _Told()
    with hybridc.load_training(path) as session:
        whole = train(session, data, TrainingRun(2), callback=told)
        states = session.state_dict()
    assert told.examples == 2 * [BATCH, BATCH, 3] and len(whole.losses) == 6
    expected = np.average(whole.losses[:3], weights=[BATCH, BATCH, 3])
    assert told.means[0] == pytest.approx(expected, rel=1e-6)
    steps = iter([False, True])
    run = TrainingRun(2, checkpoint=tmp_path / "run", stop=lambda: next(steps, False))
    with hybridc.load_training(path) as session:
        assert train(session, data, run).position == 2
    run = TrainingRun(2, checkpoint=tmp_path / "run", resume=True)
    with hybridc.load_training(path) as session:
        assert train(session, data, run).losses == whole.losses
        for name, value in session.state_dict().items():
            np.testing.assert_array_equal(value, states[name])


def test_fewer_examples_than_a_batch_can_be_trained_on(compiled: Compile) -> None:
    images, labels = examples(3)
    data = Dataset({"x": images}, {"target": labels})
    with hybridc.load_training(compiled(network, UP_TO_BATCH)) as session:
        assert len(train(session, data, TrainingRun(2)).losses) == 2
    with (
        hybridc.load_training(compiled(network, BATCH)) as session,
        pytest.raises(UsageError, match="HC579"),
    ):
        train(session, data, TrainingRun(1))


@pytest.mark.parametrize(("images", "labels"), [(0, 0), (BATCH + 1, BATCH + 1), (4, 5)])
def test_other_numbers_of_examples_are_refused(images: int, labels: int, compiled: Compile) -> None:
    feeds, _ = examples(max(images, 1))
    _, targets = examples(max(labels, 1))
    with hybridc.load_training(compiled(network, UP_TO_BATCH)) as session:
        with pytest.raises(UsageError) as caught:
            session.step(feeds[:images], targets[:labels])
        assert caught.value.code == "HC577" and f"1 to {BATCH} examples" in caught.value.what
        assert session.step_count == 0


def _normalizing_a_parameter() -> onnx.ModelProto:
    """BatchNorm of a table that no example changes."""
    model = network()
    norm = next(node for node in model.graph.node if node.op_type == "BatchNormalization")
    table = np.random.default_rng(0).standard_normal((BATCH, 12)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    before, norm.input[0] = norm.input[0], "table"
    add = onnx.helper.make_node("ReduceMean", [norm.output[0]], ["row"], "the_row", axes=[0], keepdims=1)
    both = onnx.helper.make_node("Add", [before, "row"], ["both"], "the_sum")
    position = list(model.graph.node).index(norm)
    for node in list(model.graph.node)[position + 1 :]:
        node.input[:] = ["both" if name == norm.output[0] else name for name in node.input]
    model.graph.node.insert(position + 1, add)
    model.graph.node.insert(position + 2, both)
    model.opset_import[0].version = min(model.opset_import[0].version, 17)
    return model


def _of_one_size() -> onnx.ModelProto:
    model = network()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = BATCH
    return model


def _with_a_batch_along_another_axis() -> onnx.ModelProto:
    model = network()
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "N"
    return model


@pytest.mark.parametrize(
    ("model", "options", "code", "told"),
    [
        (_normalizing_a_parameter, {}, "HC114", "'BatchNormalization_0'"),
        (_of_one_size, {}, "HC575", "axis 0 of input 'x' has one size"),
        (_with_a_batch_along_another_axis, {}, "HC575", "axis 1 of input 'x' has a batch"),
        (network, {"accumulate": 2, "sync_batchnorm": True}, "HC573", "--sync-batchnorm"),
        (network, {"batch": "2..16"}, "HC570", "2..16"),
        (network, {"batch": "4,16"}, "HC570", "4,16"),
        (network, {"batch": "none"}, "HC570", "none"),
    ],
)
def test_what_needs_whole_batches_is_refused(
    model: Callable[[], onnx.ModelProto], options: dict[str, Any], code: str, told: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"batch": UP_TO_BATCH, "loss": LOSS, "target": "avx2"} | options
    with pytest.raises(HybridcError) as caught:
        hybridc.compile_training(model(), tmp_path / "step.hyb", **given)
    assert caught.value.code == code and told in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_batches_are_written_in_many_ways() -> None:
    assert batch_of(64) == batch_of("64") == (64, False)
    assert batch_of("1..64") == batch_of(range(1, 65)) == (64, True)
    for wrong in ("", "0", "1..", "64..1", "1..64:8,64", "rows + 1", 0, -1, True, range(5)):
        with pytest.raises(UsageError):
            batch_of(wrong)


def test_command_tells_what_it_leaves_out(
    compiled: Compile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images, labels = examples(BATCH + 4)
    np.savez(tmp_path / "train.npz", x=images, y=labels)
    for batch, is_told in ((BATCH, True), (UP_TO_BATCH, False)):
        assert main(["train", str(compiled(network, batch)), "--data", str(tmp_path / "train.npz")]) == 0
        told = f"4 of 20 examples, others in each epoch, are left out: compile with --batch 1..{BATCH}"
        assert (told in capsys.readouterr().out) == is_told


@pytest.mark.slow
def test_command_trains_on_all_examples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(network(dropout=0.1), tmp_path / "small.onnx")
    images, labels = examples(BATCH + 4)
    np.savez(tmp_path / "train.npz", x=images, y=labels)
    options = ["--train", "--loss", LOSS, "--batch", UP_TO_BATCH, "--accumulate", "2", "--target", "avx2"]
    model, step = str(tmp_path / "small.onnx"), str(tmp_path / "step.hyb")
    assert main(["compile", model, "-o", step, *options]) == 0
    assert main(["plan", model, *options]) == 0
    capsys.readouterr()
    train_command = ["train", step, "--data", str(tmp_path / "train.npz"), "--epochs", "2", "--json"]
    assert main(train_command) == 0
    assert len(json.loads(capsys.readouterr().out)["losses"]) == 4
