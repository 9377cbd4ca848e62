"""A compilation that finds its parts in the cache makes the same artifact, whatever the cache holds."""

from __future__ import annotations

import functools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import hybridc
from hybridc import compile_cache, models
from hybridc.caches import FileCache
from hybridc.codegen.library import build_library
from hybridc.passes.planner.choose_tilings import choose_tilings
from hybridc.results import Cached, Compiled
from tests.support.artifacts import CPU_TARGET, cpu_model

HYBRID: dict[str, Any] = {
    "target": "cuda:sm_75+avx2",
    "gpu_memory": "60%",
    "plan_seconds": 0.1,
    "threads": 2,
}
GPU = HYBRID | {"gpu_memory": "100%", "pins": {"*": "gpu"}}
CPU: dict[str, Any] = {"target": "avx2", "threads": 2}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own; what g++ builds of hybridc's own sources stays where it is."""
    monkeypatch.delenv("HYBRIDC_CACHE_SIZE")
    monkeypatch.setattr(compile_cache, "cache_path", lambda name: tmp_path / "cache" / name)
    return tmp_path / "cache" / "compiled"


@pytest.fixture(scope="module")
def network() -> onnx.ModelProto:
    return models.build("mlp", inputs=64, hidden=32)


def contents(artifact: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in artifact.iterdir()}


def cached(compiled: Compiled) -> Cached:
    assert compiled.cached is not None
    return compiled.cached


@functools.wraps(choose_tilings)  # whose name is part of a key
def forbidden(*_: object, **__: object) -> None:
    raise AssertionError("done again")


@pytest.mark.parametrize("options", [CPU, GPU, pytest.param(HYBRID, marks=pytest.mark.slow)])
def test_artifact_is_the_same_byte_by_byte_and_nothing_slow_is_done_again(
    network: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    without = hybridc.compile(network, tmp_path / "without.hyb", cache=False, **options)
    cold = hybridc.compile(network, tmp_path / "cold.hyb", **options)
    for name in (
        "hybridc.passes.schedule.schedule",
        "hybridc.passes.stages.tile.choose_tilings",
        "hybridc.passes.planner.make_plans.partition",
        "hybridc.codegen.library.tirx.build",
        "hybridc.codegen.helper._compiled",
        "hybridc.codegen.cuda._compile",
    ):
        monkeypatch.setattr(name, forbidden)
    warm = hybridc.compile(network, tmp_path / "warm.hyb", **options)
    assert without.cached is None
    assert cached(cold).functions > 0 and cached(cold).found == 0
    assert cached(warm) == Cached(cached(cold).functions, cached(cold).functions)
    assert contents(tmp_path / "cold.hyb") == contents(tmp_path / "without.hyb")
    assert contents(tmp_path / "warm.hyb") == contents(tmp_path / "without.hyb")


def test_budgets_share_functions(network: onnx.ModelProto, tmp_path: Path) -> None:
    one = hybridc.compile(network, tmp_path / "one.hyb", **HYBRID | {"gpu_memory": "0B"})
    other = hybridc.compile(network, tmp_path / "other.hyb", **HYBRID | {"gpu_memory": "1kB"})
    assert cached(one).found == 0
    assert cached(other).found == cached(other).functions == cached(one).functions


def test_another_target_shares_nothing(network: onnx.ModelProto, tmp_path: Path) -> None:
    hybridc.compile(network, tmp_path / "one.hyb", **CPU)
    other = hybridc.compile(network, tmp_path / "other.hyb", **CPU | {"target": "avx512"})
    assert cached(other).found == 0


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40] + bytes(40))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def open_to_all(path: Path) -> None:
    path.chmod(0o666)


@pytest.mark.parametrize("spoil", [damage, empty, open_to_all])
def test_spoilt_entries_are_made_anew(
    network: onnx.ModelProto, tmp_path: Path, folder: Path, spoil: Any
) -> None:
    hybridc.compile(network, tmp_path / "cold.hyb", **CPU)
    for entry in folder.iterdir():
        spoil(entry)
    spoilt = hybridc.compile(network, tmp_path / "spoilt.hyb", **CPU)
    assert cached(spoilt).found == 0
    again = hybridc.compile(network, tmp_path / "again.hyb", **CPU)
    assert cached(again).found == cached(again).functions
    assert contents(tmp_path / "spoilt.hyb") == contents(tmp_path / "again.hyb")


def test_place_that_cannot_be_written_is_no_error(
    network: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(compile_cache, "cache_path", lambda name: tmp_path / "file" / name)
    made = hybridc.compile(network, tmp_path / "model.hyb", **CPU)
    assert cached(made).found == 0


def test_threads_share_the_cache(tmp_path: Path, folder: Path) -> None:
    """Networks are imported one at a time in a process; code may be generated for several at once."""
    module, cache = cpu_model().lower().module, FileCache(folder)

    def built(number: int) -> bytes:
        (tmp_path / str(number)).mkdir()
        return build_library(module, CPU_TARGET, tmp_path / str(number), cache=cache).path.read_bytes()

    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(built, range(4)))) == 1


@pytest.mark.slow
def test_processes_compile_at_once(
    network: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "hybridc" / "compiled"
    onnx.save(network, tmp_path / "mlp.onnx")
    program = """
import sys, hybridc
made = hybridc.compile("mlp.onnx", sys.argv[1], target="cuda:sm_75+avx2", gpu_memory="60%", plan_seconds=0.1)
"""
    command = [sys.executable, "-c", program]
    processes = [subprocess.Popen([*command, f"{n}.hyb"], cwd=tmp_path) for n in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert contents(tmp_path / "0.hyb") == contents(tmp_path / "1.hyb")
    assert all(not path.name.startswith(".") for path in folder.iterdir())


@pytest.mark.parametrize(
    ("at", "error"),
    [
        ("import", RuntimeError),
        ("schedule", KeyboardInterrupt),
        ("code", KeyboardInterrupt),
        ("code", RuntimeError),
        ("store", KeyboardInterrupt),
    ],
)
def test_callback_may_end_a_compilation(
    network: onnx.ModelProto, tmp_path: Path, at: str, error: type[BaseException]
) -> None:
    def stop(stage: str, done: int, total: int | None) -> None:
        if stage == at:
            raise error

    with pytest.raises(error):
        hybridc.compile(network, tmp_path / "out" / "model.hyb", progress=stop, **CPU)
    assert list((tmp_path / "out").glob("*")) == []


def test_callback_hears_of_every_stage(network: onnx.ModelProto, tmp_path: Path) -> None:
    heard: list[tuple[str, int, int | None]] = []
    hybridc.compile(
        network, tmp_path / "model.hyb", progress=lambda stage, *counts: heard.append((stage, *counts)), **CPU
    )
    stages = [stage for stage, _, total in heard if total is None]
    assert stages[:2] == ["import", "passes"] and stages[-2:] == ["code", "store"]
    counted = [(done, total) for stage, done, total in heard if stage == "code" and total is not None]
    functions = counted[-1][1]
    assert counted == [(done, functions) for done in range(functions + 1)]


def test_networks_of_one_shape_are_told_apart(tmp_path: Path) -> None:
    x = np.array([[-1.0, 0.5]], np.float32)
    for operator, expected in ("Relu", np.maximum(x, 0)), ("Abs", np.abs(x)), ("Neg", -x):
        head = '<ir_version: 8, opset_import: ["": 18]> g (float[1,2] x) => (float[1,2] y)'
        model = onnx.parser.parse_model(f"{head} {{ y = {operator} (x) }}")
        hybridc.compile(model, tmp_path / "model.hyb", **CPU)
        with hybridc.load(tmp_path / "model.hyb") as session:
            np.testing.assert_array_equal(session.run(None, {"x": x})[0], expected)
