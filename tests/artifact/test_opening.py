"""Opening: every file once, only regular ones, of possible sizes and with unchanged bytes."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hybridc.artifact import open_artifact
from hybridc.artifact.manifest import LARGEST_JSON_BYTES
from hybridc.errors import ArtifactError
from hybridc.files import OpenFile
from hybridc.json_values import sealed
from hybridc.runtime.session import verify_plans
from tests.artifact.test_hostile_files import code_of_refusal, put
from tests.artifact.test_store_and_load import write
from tests.support.artifacts import cpu_model, hybrid_model, model_for_two_budgets
from tests.support.file_edits import damaged, edited
from tests.support.process import open_handles

FILES = ("manifest.json", "plan.json", "library.so", "weights.bin", "kernels.cu")


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return write(tmp_path / "model.hyb", hybrid_model())


def refusal(path: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        open_artifact(path)
    return caught.value.code


def test_no_byte_of_a_manifest_can_change_what_it_says(artifact: Path) -> None:
    path = artifact / "manifest.json"
    whole = path.read_bytes()
    for seed in range(400):
        content = damaged(whole, Random(seed))
        path.write_bytes(content)
        code = code_of_refusal(artifact)
        assert code is not None or json.loads(content) == json.loads(whole), seed


def test_changed_digit_of_an_offset_is_refused_as_damage(artifact: Path) -> None:
    path = artifact / "manifest.json"
    path.write_text(path.read_text().replace('"arena_offset_bytes": 0', '"arena_offset_bytes": 9'))
    assert refusal(artifact) == "HC304"


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_refused_and_never_waited_for(artifact: Path, name: str) -> None:
    path = artifact / name
    path.unlink()
    os.mkfifo(path)
    assert refusal(artifact) == "HC305"
    path.unlink()
    path.symlink_to("/dev/zero")
    assert refusal(artifact) == "HC305"
    path.unlink()
    path.mkdir()
    assert refusal(artifact) == "HC305"


def test_socket_is_refused(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (artifact / "plan.json").unlink()
    monkeypatch.chdir(artifact)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("plan.json")
        assert refusal(artifact) == "HC305"


@pytest.mark.parametrize("name", ["manifest.json", "plan.json"])
def test_file_larger_than_is_read_is_refused_before_it_is_read(artifact: Path, name: str) -> None:
    os.truncate(artifact / name, LARGEST_JSON_BYTES + 1)
    if name == "plan.json":
        manifest = json.loads((artifact / "manifest.json").read_text())
        (file,) = (f for f in manifest["files"] if f["name"] == name)
        file.update(size_bytes=LARGEST_JSON_BYTES + 1)
        put(artifact, "manifest.json", manifest)
    assert refusal(artifact) == ("HC304" if name == "manifest.json" else "HC303")


def put_weights(path: Path, change: Callable[[dict[str, Any]], object], data: bytes | None = None) -> None:
    """Change the manifest's first weight, and perhaps weights.bin, with hashes that fit."""
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest["plans"][0]["host_weights"][0])
    if data is not None:
        (path / "weights.bin").write_bytes(data)
        (file,) = (f for f in manifest["files"] if f["name"] == "weights.bin")
        file.update(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    put(path, "manifest.json", manifest)


def test_weights_that_overlap_or_leave_a_gap_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model.hyb", cpu_model())
    data = (path / "weights.bin").read_bytes()
    assert len(json.loads((path / "manifest.json").read_text())["plans"][0]["host_weights"]) == 2
    put_weights(path, lambda weight: weight.update(offset_bytes=64))  # into the next weight
    assert refusal(path) == "HC303"
    put_weights(path, lambda weight: weight.update(offset_bytes=0), data + bytes(128))
    assert refusal(path) == "HC303"
    put_weights(path, lambda weight: weight.update(offset_bytes=192), data)  # all of the next one
    assert refusal(path) == "HC303"


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "int32"},
        {"dtype": "float7"},
        {"tensor": "x"},
        {"tensor": "unknown"},
        {"shape": [4, 6], "size_bytes": 96},
        {"shape": [2**40, 2**40, 0], "size_bytes": 0},
        {"arena_offset_bytes": 0},
    ],
)
def test_host_weights_are_those_of_the_graph(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = write(tmp_path / "model.hyb", cpu_model())
    manifest = json.loads((path / "manifest.json").read_text())
    plain = next(w for w in manifest["plans"][0]["host_weights"] if not w["layout"])
    plain.update(changes)
    put(path, "manifest.json", manifest)
    assert refusal(path) == "HC303"


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("graphs", 0, "tensors", 0, "shape", 0), 2**61),
        (("graphs", 0, "tensors", 0, "shape"), [2**40, 2**40, 0]),
        (("graphs", 0, "tensors", 0, "shape"), [1] * 100),
        (("graphs", 0, "tensors", 0, "dtype"), "float1"),
        (("graphs", 0, "kernels", 0, "gpu_workspace_bytes"), 2**61),
        (("graphs", 0, "kernels", 0, "name"), "\ud800"),
        (("plans", 0, "arenas", 0, "size_bytes"), 2**61),
        (("plans", 0, "arenas", 1, "size_bytes"), 2**49),
        (("plans", 0, "steps", 0, "us"), 1e300),
        (("plans", 0, "makespan_us"), -1),
    ],
)
def test_numbers_that_no_memory_holds_are_refused(artifact: Path, place: Any, value: Any) -> None:
    data = json.loads((artifact / "plan.json").read_text())
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    put(artifact, "plan.json", data)
    assert code_of_refusal(artifact) in ("HC303", "HC306")


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", "9" * 400, "9" * 5000, "[" * 50_000, "\udcff"])
def test_values_that_json_has_not_are_refused(artifact: Path, text: str) -> None:
    plan = (artifact / "plan.json").read_text()
    content = plan.replace('"makespan_us": 8.0', f'"makespan_us": {text}').encode(errors="surrogateescape")
    manifest = json.loads((artifact / "manifest.json").read_text())
    (file,) = (f for f in manifest["files"] if f["name"] == "plan.json")
    file.update(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    (artifact / "plan.json").write_bytes(content)
    put(artifact, "manifest.json", manifest)
    assert refusal(artifact) == "HC303"
    (artifact / "manifest.json").write_bytes(b'{"threads": ' + text.encode(errors="surrogateescape"))
    assert refusal(artifact) == "HC303"


def test_source_that_is_no_text_is_malformed(artifact: Path) -> None:
    content = b"\xff\xfe garbage"
    manifest = json.loads((artifact / "manifest.json").read_text())
    (file,) = (f for f in manifest["files"] if f["name"] == "kernels.cu")
    file.update(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    (artifact / "kernels.cu").write_bytes(content)
    (artifact / "manifest.json").write_text(json.dumps(sealed(manifest)))
    with pytest.raises(ArtifactError) as caught:
        open_artifact(artifact).cuda_source()
    assert caught.value.code == "HC303"


@pytest.mark.parametrize("name", ["manifest.json", "plan.json"])
def test_edits_are_refused_by_name_or_verified(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "model.hyb", model_for_two_budgets())
    whole = json.loads((path / name).read_text())
    for seed in range(200):
        put(path, name, edited(whole, Random(seed)))
        code = code_of_refusal(path)
        assert code is None or code.startswith("HC3"), seed


def test_files_are_those_that_were_opened_whatever_takes_their_names(tmp_path: Path) -> None:
    path = write(tmp_path / "model.hyb", cpu_model())
    opened = open_artifact(path)
    library = opened.read_library()
    path.rename(tmp_path / "old.hyb")
    write(path, model_for_two_budgets())
    (path / "library.so").write_bytes(b"another")
    verify_plans(opened)
    assert opened.read_library() == library
    opened.check_weights()


def test_file_that_is_written_to_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "model.hyb", hybrid_model())
    opened = open_artifact(path)
    for name in ("library.so", "kernels.cu", "weights.bin"):
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        os.utime(path / name, ns=(0, 0))
    for use in (opened.read_library, opened.cuda_source, opened.check_weights):
        with pytest.raises(ArtifactError) as caught:
            use()
        assert caught.value.code == "HC304"


def test_handles_are_closed_with_what_holds_them(tmp_path: Path) -> None:
    path = write(tmp_path / "model.hyb", hybrid_model())
    before = open_handles()
    for _ in range(50):
        open_artifact(path)
    assert open_handles() <= before
    file = OpenFile(path / "plan.json")
    file.close()
    file.close()
    assert open_handles() <= before
