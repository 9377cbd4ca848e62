"""Bundles whose inputs and outputs are in two parts, one on the emulated GPU and one on the host."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridc
from hybridc import emulator
from hybridc.appended_rows import SCALE_BYTES
from hybridc.bundle import write_bundle
from hybridc.passes.tiling import side_by_side
from hybridc.runtime import load
from tests.bundle.conftest import EMULATED_BYTES, drawn, gpu_environment, outputs_of, run_bundle, seal
from tests.support.artifacts import SHAPE, model_in_parts
from tests.support.decoders import CONTEXT, llama
from tests.support.integer_rows import rows_of
from tests.support.machines import SLOW_MEMORIES


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_in_parts().write(tmp_path_factory.mktemp("parts") / "model.hyb")


@pytest.fixture(scope="module")
def bundle(artifact: Path) -> Path:
    return write_bundle(artifact, artifact.parent / "bundle").path


def test_rows_of_both_parts_are_fed_and_joined(artifact: Path, bundle: Path, tmp_path: Path) -> None:
    feeds = {"the/x": drawn(SHAPE), "the/a": drawn(SHAPE, 1)}
    made = outputs_of(bundle, feeds, tmp_path / "run", gpu_environment(artifact, tmp_path))
    emulator.start(EMULATED_BYTES)
    with load(artifact) as session:
        b, y = session.run(None, feeds)
    np.testing.assert_array_equal(y[:, :3], -feeds["the/x"][:, :3])
    np.testing.assert_array_equal(made["out_0"], b)
    np.testing.assert_array_equal(made["out_1"], y)


@pytest.mark.parametrize(
    ("edit", "code"),
    [
        (lambda p: p["graphs"][0].pop("parts"), "HC303"),
        (lambda p: p["graphs"][0]["parts"].pop(), "HC303"),
        (lambda p: p["graphs"][0]["parts"][0].pop(), "HC303"),
        (lambda p: p["graphs"][0].update(parts=7), "HC303"),
        (lambda p: p["graphs"][0]["parts"][0].reverse(), "HC306"),
        (lambda p: p["graphs"][0]["parts"].append(["x", "x_behind"]), "HC306"),
        (lambda p: p["graphs"][0]["parts"][0].__setitem__(1, "none"), "HC306"),
        (lambda p: p["graphs"][0]["parts"].append(["a", "b"]), "HC306"),
        (lambda p: p["graphs"][0]["inputs"].reverse(), "HC306"),
        (lambda p: p["inputs"][0].update(shape=[8, 4]), "HC303"),  # as many elements, but no axis joins them
        (lambda p: p["inputs"][0].update(shape=[4, 9]), "HC303"),
        (lambda p: p["inputs"][0].update(shape=[32]), "HC303"),
    ],
)
def test_damaged_parts_are_refused(
    bundle: Path, tmp_path: Path, edit: Callable[[Any], None], code: str
) -> None:
    damaged = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    program = json.loads((damaged / "program.json").read_text())
    edit(program)
    (damaged / "program.json").write_text(json.dumps(program))
    seal(damaged, "program.json")
    done = run_bundle(damaged, "--random")
    assert done.returncode == 3 and f"error[{code}]" in done.stderr, done.stderr


@pytest.mark.isa("avx2")
@pytest.mark.parametrize("kv_cache", [None, "int8"])
def test_a_decoder_with_heads_on_both_devices(
    kv_cache: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over some steps, in which what one has left in the caches is fed to the next."""
    artifact = tmp_path / "decoder.hyb"
    monkeypatch.setattr(side_by_side, "_LEAST_BYTES", 1)
    monkeypatch.setattr(side_by_side, "_STEP", 16)
    compiled = hybridc.compile(
        llama(int4=False),
        artifact,
        target="cuda+avx2",
        dims={"sequence": 1},
        gpu_memory="60%",
        machine=SLOW_MEMORIES,
        plan_seconds=0.1,
        kv_cache=kv_cache,
    )
    assert compiled.graphs[0].parts

    def cache(*shape: int) -> np.ndarray:
        if kv_cache is None:
            return random.standard_normal(shape).astype(np.float32)
        return rows_of(random.standard_normal((*shape[:-1], shape[-1] - SCALE_BYTES)).astype(np.float32))

    bundle = write_bundle(artifact, tmp_path / "bundle").path
    environment, random = gpu_environment(artifact, tmp_path), np.random.default_rng(0)
    emulator.start(EMULATED_BYTES)
    with load(artifact) as session:
        names = [node.name for node in session.get_outputs()]
        caches = {
            node.name: cache(*node.shape) for node in session.get_inputs() if node.name.startswith("past")
        }
        for step in range(3):
            mask = (np.arange(CONTEXT) < 8 + step).astype(np.int64).reshape(1, -1)
            feeds = {"input_ids": np.array([[3 + step]]), "attention_mask": mask, **caches}
            expected = [array.copy() for array in session.run(names, feeds)]
            found = outputs_of(bundle, feeds, tmp_path / f"run{step}", environment)
            made = [found[name] for name in names]
            for name, array, other in zip(names, made, expected, strict=True):
                np.testing.assert_array_equal(array, other, err_msg=name)
            caches = dict(zip(caches, made[1:], strict=True))
