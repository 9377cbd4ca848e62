"""Artifacts: what is written is what is read, and damage is found and named."""

from __future__ import annotations

import errno
import importlib
import json
import operator
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridc.artifact import Contents, Port, Source, open_artifact, store
from hybridc.artifact.manifest import manifest_from_json, manifest_to_json
from hybridc.errors import ArtifactError, DeviceError, HybridcError, UsageError
from hybridc.ir.graph import graph_from_json, graph_to_json
from hybridc.passes.bind import WeightLayout, bind
from tests.support.artifacts import Model, cpu_model, hybrid_model, weight_array


def contents_of(model: Model) -> Contents:
    binding = bind(model.graph, model.plan, model.functions)

    def ports(names: tuple[str, ...]) -> tuple[Port, ...]:
        return tuple(Port(f"user {n}", n, model.graph.tensor[n].shape, "float32") for n in names)

    return Contents(
        graph=model.graph,
        plan=model.plan,
        target=model.target,
        inputs=ports(model.graph.inputs),
        outputs=ports(model.graph.outputs),
        source=Source("hand.onnx", "ab" * 32, 18),
        host_weights=binding.host_weights,
        resident_weights=binding.resident_weights,
        event_count=1,
        cuda_source="// kernels" if model.target.has_gpu else None,
        cuda_image_key="0123456789abcdef" if model.target.has_gpu else None,
        threads=2,
    )


def with_library(folder: Path, contents: Contents) -> Contents:
    """What a build does: it puts a library into the folder and tells the rest."""
    (folder / "library.so").write_bytes(b"\x7fELF and so on")
    return contents


def write(path: Path, model: Model | None = None) -> Path:
    model = model or cpu_model()
    store(path, model.weights, lambda folder: with_library(folder, contents_of(model)))
    return path


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return write(tmp_path / "model.hyb")


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("model", [cpu_model(), hybrid_model()], ids=["cpu", "hybrid"])
def test_what_is_stored_is_read_back(tmp_path: Path, model: Model) -> None:
    opened = open_artifact(write(tmp_path / "model.hyb", model))
    contents = contents_of(model)
    assert (opened.graph, opened.plan) == (model.graph, model.plan)
    assert opened.manifest.inputs == contents.inputs
    assert opened.manifest.source == contents.source
    assert opened.manifest.threads == 2
    assert opened.needs_gpu == model.target.has_gpu
    assert opened.cuda_source() == contents.cuda_source
    assert manifest_from_json(manifest_to_json(opened.manifest)) == opened.manifest


def test_graph_survives_json() -> None:
    graph = hybrid_model().graph
    assert graph_from_json(json.loads(json.dumps(graph_to_json(graph)))) == graph


def test_weights_are_aligned_packed_and_plain_ones_stored_once(tmp_path: Path) -> None:
    contents = contents_of(cpu_model())
    reshaped = WeightLayout("w", None, (48,), "float32")
    contents = Contents(
        **{f: getattr(contents, f) for f in Contents.__slots__}
        | {"host_weights": (*contents.host_weights, reshaped)}
    )
    weights = {"w": weight_array((8, 6))}
    manifest = store(tmp_path / "m.hyb", weights, lambda folder: with_library(folder, contents))
    packed, plain, view = manifest.host_weights
    data = (tmp_path / "m.hyb" / "weights.bin").read_bytes()
    assert all(w.offset_bytes % 64 == 0 for w in manifest.host_weights)
    assert (packed.packed, plain.packed) == (True, False)
    assert plain.offset_bytes == view.offset_bytes != packed.offset_bytes
    stored = np.frombuffer(data, np.float32, 48, packed.offset_bytes).reshape(packed.shape)
    np.testing.assert_array_equal(stored, weight_array((8, 6)).T)


def test_storing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one.hyb"), write(tmp_path / "two.hyb")
    for path in one.iterdir():
        assert path.read_bytes() == (two / path.name).read_bytes(), path.name


def test_an_older_artifact_is_replaced_whole(artifact: Path) -> None:
    (artifact / "kernels.cu").write_text("old")
    write(artifact)
    assert not (artifact / "kernels.cu").exists()
    assert [p.name for p in artifact.parent.iterdir()] == [artifact.name]


def test_file_system_that_cannot_exchange_names_is_served_too(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("hybridc.artifact.store")  # the package has a function of that name
    monkeypatch.setattr(module, "_exchange", lambda one, other: False)
    test_an_older_artifact_is_replaced_whole(artifact)


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "model.hyb").mkdir()
    open_artifact(write(tmp_path / "model.hyb"))


def test_writers_at_the_same_time_do_not_disturb_each_other_or_a_reader(artifact: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        written = [pool.submit(write, artifact) for _ in range(40)]
        while not all(future.done() for future in written):
            open_artifact(artifact)
        assert [future.result() for future in written] == [artifact] * 40
    assert [p.name for p in artifact.parent.iterdir()] == [artifact.name]


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_anything_else_is_not_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "mine"
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
        (path / "precious").touch()
    else:
        path.symlink_to(write(tmp_path / "other.hyb"))
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(UsageError) as caught:
        write(path)
    assert caught.value.code == "HC561"
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    def build(folder: Path) -> Contents:
        with_library(folder, contents_of(model))
        raise OSError(errno.ENOSPC, "No space left on device")

    model = cpu_model()
    with pytest.raises(UsageError, match="No space left") as caught:
        store(tmp_path / "model.hyb", model.weights, build)
    assert caught.value.code == "HC562"
    assert list(tmp_path.iterdir()) == []


def test_failing_build_keeps_the_older_artifact(artifact: Path) -> None:
    def build(folder: Path) -> Contents:
        raise RuntimeError("no compiler")

    model = cpu_model()
    with pytest.raises(RuntimeError):
        store(artifact, model.weights, build)
    open_artifact(artifact)
    assert [p.name for p in artifact.parent.iterdir()] == [artifact.name]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "no manifest": ("HC301", lambda a: (a / "manifest.json").unlink()),
    "manifest is a list": ("HC301", lambda a: (a / "manifest.json").write_text("[]")),
    "other schema": ("HC302", lambda a: edit(a / "manifest.json", lambda m: m.update(schema_version=99))),
    "other tvm": ("HC302", lambda a: edit(a / "manifest.json", lambda m: m["versions"].update(tvm="0.1"))),
    "manifest is not JSON": ("HC303", lambda a: (a / "manifest.json").write_text("{")),
    "manifest lacks a field": ("HC303", lambda a: edit(a / "manifest.json", lambda m: m.pop("inputs"))),
    "negative offset": (
        "HC303",
        lambda a: edit(a / "manifest.json", lambda m: m["host_weights"][0].update(offset_bytes=-64)),
    ),
    "weight behind the end": (
        "HC303",
        lambda a: edit(a / "manifest.json", lambda m: m["host_weights"][0].update(offset_bytes=1 << 40)),
    ),
    "shape of other bytes": (
        "HC303",
        lambda a: edit(a / "manifest.json", lambda m: m["host_weights"][0].update(shape=[1])),
    ),
    "output weight is missing": (
        "HC303",
        lambda a: edit(a / "manifest.json", lambda m: m["host_weights"].pop()),
    ),
    "image key is no number": (
        "HC303",
        lambda a: edit(a / "manifest.json", lambda m: m.update(cuda_image_key="../../x")),
    ),
    "more events than steps": (
        "HC303",
        lambda a: edit(a / "manifest.json", lambda m: m.update(event_count=99)),
    ),
    "other interface": (
        "HC303",
        lambda a: edit(a / "manifest.json", lambda m: m["inputs"][0].update(shape=[1])),
    ),
    "library is missing": ("HC304", lambda a: (a / "library.so").unlink()),
    "library has grown": ("HC304", lambda a: (a / "library.so").open("ab").write(b"x")),
    "a bit of the weights": ("HC304", lambda a: _flip(a / "weights.bin")),
    "a bit of the plan": ("HC304", lambda a: _flip(a / "plan.json")),
    "name that leaves the folder": (
        "HC305",
        lambda a: edit(a / "manifest.json", lambda m: m["files"][0].update(name="../x")),
    ),
    "file is a link": ("HC305", lambda a: _link(a / "weights.bin")),
}


def _link(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(artifact: Path, damage: str) -> None:
    code, apply = DAMAGES[damage]
    apply(artifact)
    with pytest.raises(ArtifactError) as caught:
        open_artifact(artifact)
    assert caught.value.code == code
    assert str(artifact) in caught.value.where


def test_upload_to_another_place_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model.hyb", hybrid_model())
    edit(path / "manifest.json", lambda m: m["gpu_weights"][0].update(arena_offset_bytes=256))
    with pytest.raises(ArtifactError, match="GPU weights"):
        open_artifact(path)


def test_every_missing_manifest_field_is_refused(artifact: Path) -> None:
    whole = (artifact / "manifest.json").read_text()
    for field in json.loads(whole):
        (artifact / "manifest.json").write_text(whole)
        edit(artifact / "manifest.json", operator.methodcaller("pop", field))
        with pytest.raises(ArtifactError):
            open_artifact(artifact)


def test_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no such artifact"):
        open_artifact(tmp_path / "nothing.hyb")


def test_weights_can_be_trusted_to_save_reading_them(artifact: Path) -> None:
    _flip(artifact / "weights.bin")
    open_artifact(artifact, check_weights=False)


def test_processor_without_the_instruction_set_is_refused(artifact: Path) -> None:
    edit(artifact / "manifest.json", lambda m: m["cpu_flags"].append("avx4096"))
    with pytest.raises(DeviceError, match="avx4096") as caught:
        open_artifact(artifact)
    assert caught.value.code == "HC401"
    open_artifact(artifact, check_host=False)


def test_errors_say_what_where_and_what_to_do(artifact: Path) -> None:
    _flip(artifact / "library.so")
    with pytest.raises(HybridcError) as caught:
        open_artifact(artifact)
    assert caught.value.what and caught.value.where and caught.value.remedy
