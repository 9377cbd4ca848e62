"""One artifact for several CPU instruction sets: the processor chooses, each is right, GPU code is shared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import hybridc
from hybridc import emulator
from hybridc.artifact import load
from hybridc.artifact.load import open_artifact
from hybridc.bundle import write_bundle
from hybridc.errors import DeviceError
from hybridc.ir import Device
from hybridc.models import build
from hybridc.targets import ISAS
from tests.bundle.conftest import run_bundle, seal
from tests.support.light_models import random_feeds
from tests.support.machines import EAGER_GPU

pytestmark = pytest.mark.isa("avx512")


@pytest.fixture(scope="module")
def perceptron() -> onnx.ModelProto:
    return build("mlp", batch=8, inputs=64, hidden=64, layers=3, classes=32)


@pytest.fixture(scope="module")
def expected(perceptron: onnx.ModelProto) -> np.ndarray:
    session = onnxruntime.InferenceSession(perceptron.SerializeToString())
    return np.asarray(session.run(None, random_feeds(perceptron))[0])


@pytest.fixture(scope="module")
def artifact(perceptron: onnx.ModelProto, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sets") / "mlp.hyb"
    hybridc.compile(perceptron, path, target="avx512,avx2")
    return path


@pytest.fixture
def device() -> Iterator[None]:
    yield
    emulator.reset()


def has_flags_of(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(load, "cpu_flags", lambda: frozenset(ISAS[name].cpu_flags))


def target_of(session: hybridc.Session) -> str:
    return session.get_modelmeta().custom_metadata_map["target"]


@pytest.mark.parametrize(("processor", "chosen"), [("avx2", "avx2"), ("avx512", "avx512"), ("amx", "avx512")])
def test_processor_runs_the_richest_that_it_has(
    artifact: Path,
    perceptron: onnx.ModelProto,
    expected: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
    processor: str,
    chosen: str,
) -> None:
    has_flags_of(monkeypatch, processor)
    with hybridc.load(artifact) as session:
        assert target_of(session) == chosen
        np.testing.assert_allclose(
            session.run(None, random_feeds(perceptron))[0], expected, rtol=1e-4, atol=1e-5
        )


def test_processor_without_any_of_them_is_refused(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "cpu_flags", lambda: frozenset({"avx", "avx2"}))
    with pytest.raises(DeviceError, match="lacks fma") as refusal:
        open_artifact(artifact)
    assert refusal.value.code == "HC401" and "avx2,avx512 needs" in refusal.value.what


def test_plans_of_all_are_checked_but_those_of_one_are_used(artifact: Path) -> None:
    whole = open_artifact(artifact, every_instruction_set=True)
    assert [each.name for each in whole.manifest.instruction_sets] == ["avx2", "avx512"]
    assert [plan.instruction_set for plan in whole.manifest.plans] == [0, 1]
    chosen = open_artifact(artifact)
    assert len(chosen.plans) == 1 and chosen.manifest.target in ("avx2", "avx512")


def test_gpu_has_its_functions_and_weights_once(
    perceptron: onnx.ModelProto,
    expected: np.ndarray,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: None,
) -> None:
    """Where everything runs there, a second instruction set of the CPU makes no more code nor weights."""
    paths = {"cuda:sm_80+avx2": tmp_path / "one.hyb", "cuda:sm_80+avx2,avx512": tmp_path / "two.hyb"}
    for target, path in paths.items():
        hybridc.compile(
            perceptron, path, target=target, gpu_memory="100%", machine=EAGER_GPU, plan_seconds=1.0
        )
    manifests = [open_artifact(path, every_instruction_set=True).manifest for path in paths.values()]
    one, two = ({f.name for f in each.functions if f.device is Device.GPU} for each in manifests)
    assert one == two
    sizes = [next(f.size_bytes for f in each.files if f.name == "weights.bin") for each in manifests]
    assert sizes[0] == sizes[1]
    for name in ("avx2", "avx512"):
        has_flags_of(monkeypatch, name)
        with hybridc.load(tmp_path / "two.hyb", emulate_gpu="16MiB:sm_80") as session:
            assert target_of(session) == f"cuda:sm_80+{name}"
            found = session.run(None, random_feeds(perceptron))[0]
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_sizes_in_a_range_for_each_instruction_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mlp", inputs=16, hidden=32, layers=2, classes=8, dynamic_batch=True)
    reference = onnxruntime.InferenceSession(model.SerializeToString())
    hybridc.compile(model, tmp_path / "range.hyb", target="avx2,avx512", dims={"N": "1..4"})
    for name in ("avx2", "avx512"):
        has_flags_of(monkeypatch, name)
        with hybridc.load(tmp_path / "range.hyb") as session:
            for batch in (1, 3, 4):
                feeds = {session.get_inputs()[0].name: np.ones((batch, 16), np.float32)}
                found, wanted = session.run(None, feeds)[0], reference.run(None, feeds)[0]
                np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_bundle_chooses_as_the_session_does(artifact: Path, tmp_path: Path) -> None:
    bundle = write_bundle(artifact, tmp_path / "bundle").path
    program = json.loads((bundle / "program.json").read_text())
    assert [each["target"] for each in program["instruction_sets"]] == ["avx2", "avx512"]
    assert json.loads(run_bundle(bundle, "--random", "--json").stdout)["target"] == "avx512"
    program["instruction_sets"][1]["cpu_flags"].append("avx9")  # which no processor has
    (bundle / "program.json").write_text(json.dumps(program))
    seal(bundle, "program.json")
    assert json.loads(run_bundle(bundle, "--random", "--json").stdout)["target"] == "avx2"
