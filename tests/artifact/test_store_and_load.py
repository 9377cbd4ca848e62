"""Artifacts: what is written is what is read, and damage is found and named."""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridc.artifact import Contents, Port, Source, open_artifact, store
from hybridc.artifact.manifest import manifest_from_json, manifest_to_json
from hybridc.artifact.store import check_destination
from hybridc.errors import ArtifactError, DeviceError, HybridcError, UsageError
from hybridc.ir import Device
from hybridc.ir.bind import Weight
from hybridc.ir.graph import graph_from_json, graph_to_json
from hybridc.ir.plan import reserved_bytes
from hybridc.json_values import sealed
from hybridc.machine import load_machine
from tests.support.artifacts import (
    Model,
    cpu_model,
    hybrid_model,
    model_for_two_budgets,
    streaming_model,
    weight_array,
)

MIB = 1024**2


def contents_of(model: Model) -> Contents:
    def ports(names: tuple[str, ...]) -> tuple[Port, ...]:
        return tuple(Port(f"user {n}", model.graph.tensor[n].shape, "float32") for n in names)

    return Contents(
        graphs=(model.graph,) * len(model.plans),
        plans=model.plans,
        pins=({"k0": Device.CPU},) * len(model.plans),
        lowered=model.lower(),
        target=model.target,
        inputs=ports(model.graph.inputs),
        outputs=ports(model.graph.outputs),
        source=Source("hand.onnx", "ab" * 32, 18),
        machine=replace(
            load_machine(),
            measured_us={("matmul", Device.CPU): 1.5},
            estimated_us={("matmul", Device.GPU): 0.5},
        ),
        cuda_source="// kernels" if model.target.has_gpu else None,
        cuda_image_key="0123456789abcdef" if model.target.has_gpu else None,
        cuda_image_bytes=4096 if model.target.has_gpu else None,
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
    """Change a file, and the hash by which a manifest tells changes."""
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(sealed(data) if path.name == "manifest.json" else data))


@pytest.mark.parametrize(
    "model",
    [cpu_model(), hybrid_model(), streaming_model(), model_for_two_budgets()],
    ids=["cpu", "hybrid", "streaming", "two budgets"],
)
def test_what_is_stored_is_read_back(tmp_path: Path, model: Model) -> None:
    opened = open_artifact(write(tmp_path / "model.hyb", model))
    contents = contents_of(model)
    assert (opened.graph, opened.plans) == (model.graph, model.plans)
    assert opened.plan == model.plans[-1]
    assert opened.manifest.inputs == contents.inputs
    assert opened.manifest.source == contents.source
    assert opened.manifest.machine == contents.machine
    assert tuple(stored.pins for stored in opened.manifest.plans) == contents.pins
    assert opened.manifest.threads == 2
    assert opened.needs_gpu == model.target.has_gpu
    assert opened.cuda_source() == contents.cuda_source
    assert manifest_from_json(manifest_to_json(opened.manifest)) == opened.manifest


def test_graph_survives_json() -> None:
    graph = hybrid_model().graph
    assert graph_from_json(json.loads(json.dumps(graph_to_json(graph)))) == graph


def test_weights_are_aligned_packed_and_plain_ones_stored_once(tmp_path: Path) -> None:
    contents = contents_of(cpu_model())
    reshaped = Weight("w", 0, (48,), "float32")
    (binding,) = contents.lowered.plans
    binding = replace(binding, host_weights=(*binding.host_weights, reshaped))
    contents = replace(contents, lowered=replace(contents.lowered, plans=(binding,)))
    weights = {"w": weight_array((8, 6))}
    manifest = store(tmp_path / "m.hyb", weights, lambda folder: with_library(folder, contents))
    packed, plain, view = manifest.plans[0].host_weights
    data = (tmp_path / "m.hyb" / "weights.bin").read_bytes()
    assert all(w.offset_bytes % 64 == 0 for w in (packed, plain, view))
    assert (packed.layout, plain.layout) == (1, 0)
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
    tried: list[Path] = []
    monkeypatch.setattr(module, "_exchange", lambda one, other: tried.append(other))
    (artifact / "kernels.cu").write_text("old")
    write(artifact)
    assert tried == [artifact]
    assert not (artifact / "kernels.cu").exists()
    assert [p.name for p in artifact.parent.iterdir()] == [artifact.name]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "model.hyb").mkdir()
    assert open_artifact(write(tmp_path / "model.hyb")).graph == cpu_model().graph


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


@pytest.mark.parametrize("name", ["", ".", "..", "mine/.."])
def test_place_without_a_name_is_refused_even_if_it_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    with pytest.raises(UsageError, match="no file name") as caught:
        write(Path(name))
    assert caught.value.code == "HC561"


def test_place_that_cannot_be_written_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "model.hyb", tmp_path / "file" / "deeper" / "model.hyb"):
        with pytest.raises(UsageError, match="Not a directory") as caught:
            check_destination(path)
        assert caught.value.code == "HC562"
    check_destination(tmp_path / "not" / "yet" / "there.hyb")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_folder_with_a_deeply_nested_manifest_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(UsageError) as caught:
        check_destination(tmp_path)
    assert caught.value.code == "HC561"


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
        lambda a: edit(
            a / "manifest.json", lambda m: m["plans"][0]["host_weights"][0].update(offset_bytes=-64)
        ),
    ),
    "weight behind the end": (
        "HC303",
        lambda a: edit(
            a / "manifest.json", lambda m: m["plans"][0]["host_weights"][0].update(offset_bytes=1 << 40)
        ),
    ),
    "shape of other bytes": (
        "HC303",
        lambda a: edit(a / "manifest.json", lambda m: m["plans"][0]["host_weights"][0].update(shape=[1])),
    ),
    "output weight is missing": (
        "HC303",
        lambda a: edit(a / "manifest.json", lambda m: m["plans"][0]["host_weights"].pop()),
    ),
    "architecture that there cannot be": (
        "HC303",
        lambda a: edit(a / "manifest.json", lambda m: m.update(cuda_architectures=["newest"])),
    ),
    "image key is no number": (
        "HC303",
        lambda a: edit(a / "manifest.json", lambda m: m.update(cuda_image_key="../../x")),
    ),
    "parameter of no size": (
        "HC303",
        lambda a: edit(
            a / "manifest.json", lambda m: m["functions"][0]["parameters"][0].update(dtype="float")
        ),
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
    edit(path / "manifest.json", lambda m: m["plans"][0]["gpu_weights"][0].update(arena_offset_bytes=256))
    with pytest.raises(ArtifactError, match="GPU weights"):
        open_artifact(path)


def test_streamed_weight_that_the_plan_does_not_copy_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model.hyb", streaming_model())
    assert [w.tensor for w in open_artifact(path).stored_plan.streamed_weights] == ["w"]
    edit(path / "manifest.json", lambda m: m["plans"][0]["streamed_weights"].clear())
    with pytest.raises(ArtifactError, match="streamed weights"):
        open_artifact(path)


def test_weights_of_several_plans_are_stored_once_for_each_layout(tmp_path: Path) -> None:
    opened = open_artifact(write(tmp_path / "model.hyb", model_for_two_budgets()))
    small, large = opened.manifest.plans
    (plain,), (packed,) = small.host_weights, small.streamed_weights
    assert (plain.layout, packed.layout) == (0, 1)
    assert (large.host_weights, large.streamed_weights) == ((), (packed,))
    assert opened.weights.size_bytes == 2 * weight_array((8, 8)).nbytes


@pytest.mark.parametrize(
    ("gpu_memory_bytes", "budget_bytes"), [(2048, 2048), (4095, 2048), (4096, 4096), (1 << 40, 4096)]
)
def test_plan_of_the_largest_budget_that_is_not_more_is_chosen(
    tmp_path: Path, gpu_memory_bytes: int, budget_bytes: int
) -> None:
    opened = open_artifact(write(tmp_path / "model.hyb", model_for_two_budgets()))
    chosen = opened.within(gpu_memory_bytes)
    assert chosen.plan.budget_bytes == budget_bytes
    assert chosen.stored_plan == opened.manifest.plans[chosen.number]


def test_budget_below_all_plans_is_refused_with_those_there_are(tmp_path: Path) -> None:
    opened = open_artifact(write(tmp_path / "model.hyb", model_for_two_budgets()))
    with pytest.raises(UsageError, match="2,047 bytes") as caught:
        opened.within(2047)
    assert caught.value.code == "HC558"
    assert "2KiB, 4KiB" in caught.value.remedy


def test_plan_without_a_limit_keeps_to_what_its_arena_has(tmp_path: Path) -> None:
    opened = open_artifact(write(tmp_path / "model.hyb", streaming_model()))
    arena_bytes = opened.plan.arena_bytes(Device.GPU)
    assert opened.within(arena_bytes).plan == opened.plan
    with pytest.raises(UsageError):
        opened.within(arena_bytes - 1)


def test_free_memory_is_compared_with_arenas_and_not_with_budgets(tmp_path: Path) -> None:
    opened = open_artifact(write(tmp_path / "model.hyb", model_for_two_budgets()))
    small, large = (plan.arena_bytes(Device.GPU) for plan in opened.plans)
    assert large < 4096
    numbers = [opened.fitting(free).number for free in (0, small, large - 1, large, 1 << 40)]
    assert numbers == [0, 0, 0, 1, 1]


def test_free_memory_is_compared_with_the_pages_that_a_driver_reserves(tmp_path: Path) -> None:
    opened = open_artifact(write(tmp_path / "model.hyb", model_for_two_budgets()))
    sizes = (5 * MIB, 9 * MIB + 512)
    plans = [
        replace(plan, arenas=tuple(replace(a, size_bytes=size) for a in plan.arenas))
        for plan, size in zip(opened.plans, sizes, strict=True)
    ]
    opened = replace(opened, plans=tuple(plans))
    numbers = [opened.fitting(free).number for free in (sizes[1], 10 * MIB - 1, 10 * MIB)]
    assert numbers == [0, 0, 1]
    numbers = [opened.fitting(free, page_bytes=512).number for free in (sizes[1] - 1, sizes[1])]
    assert numbers == [0, 1]


def test_allocation_takes_whole_pages_or_a_part_of_one() -> None:
    assert [reserved_bytes(n) for n in (0, 512, 2 * MIB, 2 * MIB + 1)] == [0, 512, 2 * MIB, 4 * MIB]


@pytest.mark.parametrize(
    "change",
    [
        lambda plans: plans.reverse(),
        lambda plans: plans.clear(),
        lambda plans: plans.pop(),
        lambda plans: plans.append(plans[1]),
    ],
)
def test_plans_that_are_not_for_increasing_budgets_or_not_in_the_manifest_are_refused(
    tmp_path: Path, change: Callable[[list[Any]], object]
) -> None:
    path = write(tmp_path / "model.hyb", model_for_two_budgets())
    edit(path / "plan.json", lambda data: change(data["plans"]))
    data = (path / "plan.json").read_bytes()

    def describe(manifest: dict[str, Any]) -> None:
        (file,) = (f for f in manifest["files"] if f["name"] == "plan.json")
        file.update(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    edit(path / "manifest.json", describe)
    with pytest.raises(ArtifactError) as caught:
        open_artifact(path)
    assert caught.value.code == "HC303"


def test_every_missing_manifest_field_is_refused(artifact: Path) -> None:
    whole = (artifact / "manifest.json").read_text()
    for field in json.loads(whole):
        data = json.loads(whole)
        del data[field]
        (artifact / "manifest.json").write_text(json.dumps(data if field == "sha256" else sealed(data)))
        with pytest.raises(ArtifactError):
            open_artifact(artifact)


def test_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="the artifact does not exist"):
        open_artifact(tmp_path / "nothing.hyb")


def test_weights_can_be_trusted_to_save_reading_them(artifact: Path) -> None:
    _flip(artifact / "weights.bin")
    assert open_artifact(artifact, check_weights=False).graph == cpu_model().graph
    with pytest.raises(ArtifactError, match="SHA-256"):
        open_artifact(artifact)


def test_file_that_may_not_be_read_is_no_damage(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object, *_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ArtifactError) as caught:
        open_artifact(artifact)
    assert (caught.value.code, caught.value.remedy) == ("HC304", "check its permissions")


def test_processor_without_the_instruction_set_is_refused(artifact: Path) -> None:
    edit(artifact / "manifest.json", lambda m: m["instruction_sets"][0]["cpu_flags"].append("avx4096"))
    with pytest.raises(DeviceError, match="avx4096") as caught:
        open_artifact(artifact)
    assert caught.value.code == "HC401"
    open_artifact(artifact, check_host=False)


def test_errors_say_what_where_and_what_to_do(artifact: Path) -> None:
    _flip(artifact / "library.so")
    with pytest.raises(HybridcError) as caught:
        open_artifact(artifact)
    assert caught.value.what and caught.value.where and caught.value.remedy
