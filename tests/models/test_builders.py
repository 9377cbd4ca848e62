"""Every builder makes a valid model that computes something, the same bytes each time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from hybridc import models
from hybridc.errors import UsageError
from hybridc.models.resnet import blocks_of
from tests.support.light_models import random_feeds

TINY: dict[str, dict[str, Any]] = {
    "mlp": {"inputs": 20, "hidden": 32},
    "lenet": {},
    "cifar_quick": {"width": 4},
    "alexnet": {"size": 67, "width": 6, "hidden": 16, "classes": 10, "dropout": True},
    "resnet": {"depth": 53, "size": 32, "width": 8, "classes": 10},
    "resnet18": {"size": 32, "width": 8, "classes": 10},
    "resnet50": {"size": 32, "width": 8, "classes": 10},
    "resnet152": {"size": 32, "width": 4, "classes": 10},
    "vgg": {"depth": 11, "size": 32, "width": 4, "hidden": 16, "classes": 10},
    "vgg11": {"size": 32, "width": 4, "hidden": 16, "classes": 10, "dropout": True},
    "vgg16": {"size": 32, "width": 4, "hidden": 16, "classes": 10},
    "googlenet": {"size": 64, "width": 8, "classes": 10, "dropout": True},
    "mobilenet_v2": {"size": 32, "width": 0.25, "classes": 10},
    "unet": {"size": 32, "width": 4, "batch_norm": True},
    "bert": {"tokens": 6, "layers": 2, "hidden": 16, "heads": 2, "vocabulary": 50, "attention_mask": True},
    "encoder": {"tokens": 6, "layers": 2, "hidden": 16, "heads": 2, "vocabulary": 50, "dropout": True},
    "vit": {"size": 12, "patch": 4, "width": 16, "depth": 2, "heads": 2, "mlp": 24, "classes": 10},
    "vit_b16": {"size": 32, "width": 16, "depth": 2, "heads": 2, "mlp": 24, "classes": 10},
    "atacworks": {"length": 100, "channels": 4, "kernel": 5},
    "super_resolution": {"size": 12, "width": 8, "blocks": 2, "scale": 4},
}

OUTPUT_SHAPES = {
    "lenet": [(1, 10)],
    "unet": [(1, 2, 32, 32)],
    "bert": [(1, 6, 16)],
    "atacworks": [(1, 100), (1, 100)],
    "super_resolution": [(1, 3, 48, 48)],
}
CLASSIFIER_SHAPES = [(1, 10)]


def run(model: onnx.ModelProto | Path, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"]).run(None, feeds)


def parameter_count(model: onnx.ModelProto) -> int:
    """Trainable numbers: statistics of BatchNormalization and integer constants are none."""
    statistics = {
        n for node in model.graph.node if node.op_type == "BatchNormalization" for n in node.input[3:]
    }
    return sum(
        math.prod(t.dims)
        for t in model.graph.initializer
        if t.dims and t.data_type == onnx.TensorProto.FLOAT and t.name not in statistics
    )


def test_every_model_has_tiny_parameters_here() -> None:
    assert set(TINY) == set(models.names()) - {"llama", "llama_7b"}  # which test_llama.py has


@pytest.mark.parametrize("name", TINY)
def test_tiny_model_is_valid_and_computes_varied_numbers_near_one(name: str) -> None:
    model = models.build(name, **TINY[name])
    onnx.checker.check_model(model, full_check=True)
    outputs = run(model, random_feeds(model))
    assert [o.shape for o in outputs] == OUTPUT_SHAPES.get(name, CLASSIFIER_SHAPES)
    for output in outputs:
        assert np.isfinite(output).all()
        assert 0.02 < output.std() < 20
        assert len(np.unique(output)) > 0.5 * output.size


@pytest.mark.parametrize("name", TINY)
def test_same_parameters_give_the_same_bytes_and_another_seed_others(name: str) -> None:
    first, again, other = (
        models.build(name, **TINY[name], seed=seed).SerializeToString() for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("name", TINY)
def test_dynamic_batch_runs_as_each_item_alone(name: str) -> None:
    model = models.build(name, **TINY[name], dynamic_batch=True)
    onnx.checker.check_model(model, full_check=True)
    assert [i.type.tensor_type.shape.dim[0].dim_param for i in model.graph.input] == ["N"] * len(
        model.graph.input
    )
    feeds = random_feeds(model, symbolic=3)
    together = run(model, feeds)
    alone = run(models.build(name, **TINY[name]), {n: array[1:2] for n, array in feeds.items()})
    for many, one in zip(together, alone, strict=True):
        np.testing.assert_allclose(many[1:2], one, rtol=0, atol=1e-5 * np.abs(many).max())


@pytest.mark.parametrize("name", TINY)
def test_value_infos_name_every_tensor_between_nodes(name: str) -> None:
    graph = models.build(name, **TINY[name], batch=2).graph
    made = {output for node in graph.node for output in node.output}
    assert {v.name for v in graph.value_info} == made - {o.name for o in graph.output}
    assert all(v.type.tensor_type.shape.dim[0].dim_value == 2 for v in graph.output)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("cifar_quick", 145_578),
        ("googlenet", 6_998_552),
        ("mobilenet_v2", 3_504_872),
        ("resnet18", 11_689_512),
        ("resnet50", 25_557_032),
    ],
)
def test_parameter_count_is_the_published_one(name: str, published: int) -> None:
    assert parameter_count(models.build(name)) == published


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("alexnet", 60_965_224),
        ("vgg", 138_357_544),
        ("resnet152", 60_192_808),
        ("bert", 108_891_648),
        ("unet", 31_031_810),
        ("vit", 86_567_656),
    ],
)
def test_parameter_count_of_a_large_model_is_the_published_one(name: str, published: int) -> None:
    assert parameter_count(models.build(name)) == published


def test_atacworks_has_25_convolutions() -> None:
    nodes = models.build("atacworks", length=100).graph.node
    assert sum(node.op_type == "Conv" for node in nodes) == 25


@pytest.mark.parametrize(
    ("depth", "blocks"),
    [
        (10, (1, 1, 1, 1)),
        (26, (3, 3, 3, 3)),
        (53, (4, 4, 5, 4)),
        (152, (3, 8, 36, 3)),
        (1517, (6, 32, 461, 6)),
    ],
)
def test_resnet_of_any_depth_has_as_many_layers(depth: int, blocks: tuple[int, ...]) -> None:
    assert blocks_of(depth) == blocks
    assert (3 if depth >= 50 else 2) * sum(blocks) + 2 == depth


def test_activations_of_an_extra_deep_resnet_stay_finite() -> None:
    model = models.build("resnet", depth=1517, size=32, width=2, classes=10)
    (logits,) = run(model, random_feeds(model))
    assert 0.02 < logits.std() < 20


def test_bert_ignores_padding() -> None:
    model = models.build("bert", **TINY["bert"])
    feeds = random_feeds(model)
    feeds["attention_mask"] = np.array([[1, 1, 1, 1, 0, 0]])
    other = feeds | {"input_ids": (feeds["input_ids"] + np.array([[0, 0, 0, 0, 1, 1]])) % 50}
    (before,), (after,) = run(model, feeds), run(model, other)
    np.testing.assert_array_equal(before[:, :4], after[:, :4])


def test_unknown_name_is_refused_with_close_matches() -> None:
    with pytest.raises(UsageError, match="HC502") as error:
        models.build("resnet51")
    assert error.value.code == "HC502"
    assert "resnet50" in error.value.remedy


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("unet", {"sise": 32}),
        ("unet", {"size": 40}),
        ("lenet", {"size": 16}),
        ("resnet", {"depth": 51}),
        ("vgg", {"depth": 12}),
        ("alexnet", {"width": 64}),
        ("alexnet", {"size": 32}),
        ("googlenet", {"width": 12}),
        ("encoder", {"heads": 5}),
        ("bert", {"heads": 5}),
        ("bert", {"tokens": 600}),
        ("vit", {"heads": 5}),
        ("vit", {"size": 225}),
        ("atacworks", {"kernel": 50}),
        ("super_resolution", {"scale": 3}),
        ("mlp", {"batch": 0}),
        ("mlp", {"layers": 2.5}),
        ("mlp", {"seed": -1}),
        ("unet", {"batch_norm": "no"}),
        ("mobilenet_v2", {"width": 0.0}),
    ],
)
def test_impossible_parameters_are_refused(name: str, parameters: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as error:
        models.build(name, **parameters)
    assert error.value.code == "HC502"


def test_every_model_is_described_in_one_line() -> None:
    assert all(10 < len(models.describe(name)) < 110 for name in models.names())
    assert models.describe("resnet18") == "resnet with depth 18"
    assert models.parameters("resnet18")["depth"] == 18


@pytest.mark.parametrize("external_data", [False, True])
def test_exported_file_computes_what_the_model_does(tmp_path: Path, external_data: bool) -> None:
    path = tmp_path / "m.onnx"
    for _ in range(2):  # over an older export too
        models.export("mlp", path, external_data=external_data, **TINY["mlp"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", *["m.onnx.data"] * external_data]
    model = models.build("mlp", **TINY["mlp"])
    feeds = random_feeds(model)
    np.testing.assert_array_equal(run(path, feeds)[0], run(model, feeds)[0])


@pytest.mark.slow
def test_model_beyond_the_limit_of_protobuf_is_exported_with_external_data(tmp_path: Path) -> None:
    path = models.export("resnet", tmp_path / "m.onnx", depth=1517, size=32)
    assert path.stat().st_size < 50_000_000
    weights = tmp_path / "m.onnx.data"
    assert weights.stat().st_size > 2**31
    onnx.checker.check_model(path)
    weights.unlink()  # pytest keeps the folders of the last three runs
