"""Bundles with GPU parts, in processes whose CUDA libraries are those of the emulated GPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import hybridc
from hybridc import emulator
from hybridc.bundle import write_bundle
from hybridc.ir.plan import resident_pairs
from hybridc.runtime import load
from tests.bundle.conftest import (
    EMULATED_BYTES,
    FAILING,
    ORDINAL,
    drawn,
    gpu_environment,
    outputs_of,
    run_bundle,
)
from tests.support.artifacts import SHAPE, streaming_model
from tests.support.decoders import CONTEXT, llama
from tests.support.machines import EAGER_GPU


@pytest.fixture(scope="module")
def hybrid_bundle(hybrid_artifact: Path) -> Path:
    return write_bundle(hybrid_artifact, hybrid_artifact.parent / "bundle").path


def session_result(artifact: Path, x: np.ndarray) -> np.ndarray:
    emulator.start(EMULATED_BYTES)
    with load(artifact) as session:
        [y] = session.run(None, {"the/x": x})
    return y


def test_gpu_parts_give_the_bytes_of_the_session(
    hybrid_artifact: Path, hybrid_bundle: Path, tmp_path: Path
) -> None:
    environment = gpu_environment(hybrid_artifact, tmp_path)
    made = outputs_of(hybrid_bundle, {"the/x": drawn(SHAPE)}, tmp_path / "run", environment)
    np.testing.assert_array_equal(made["out_0"], session_result(hybrid_artifact, drawn(SHAPE)))
    done = run_bundle(
        hybrid_bundle, "--random", f"--trace={tmp_path / 'trace.json'}", environment=environment
    )
    assert done.returncode == 0, done.stderr
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [(event["name"], event["tid"]) for event in events if event["ph"] == "X"]
    assert names[:4] == [("x", 2), ("k0", 0), ("a", 3), ("k1", 1)] and len(names) == 8


@pytest.mark.slow
@pytest.mark.isa("avx2")
def test_caches_on_the_gpu_are_fed_and_returned(tmp_path: Path) -> None:
    artifact = tmp_path / "decoder.hyb"
    made = hybridc.compile(
        llama(int4=False),
        artifact,
        target="cuda+avx2",
        dims={"sequence": 1},
        gpu_memory="75%",
        machine=EAGER_GPU,
        plan_seconds=0.02,
    )
    assert resident_pairs(made.graphs[0], made.plans[0].steps)
    emulator.start(EMULATED_BYTES)
    with load(artifact) as session:
        random = np.random.default_rng(0)
        feeds: dict[str, np.ndarray] = {
            node.name: random.standard_normal(node.shape).astype(np.float32)
            for node in session.get_inputs()
            if node.name.startswith("past")
        }
        mask = (np.arange(CONTEXT) < 8).astype(np.int64).reshape(1, -1)
        feeds |= {"input_ids": np.array([[3]]), "attention_mask": mask}
        expected = session.run(None, feeds)
    bundle = write_bundle(artifact, tmp_path / "bundle").path
    found = outputs_of(bundle, feeds, tmp_path / "run", gpu_environment(artifact, tmp_path))
    assert len(found) == len(expected)
    for (name, array), other in zip(sorted(found.items()), expected, strict=True):
        np.testing.assert_array_equal(array, other, err_msg=name)


def test_weights_are_streamed_in_every_run(tmp_path: Path) -> None:
    artifact = streaming_model().write(tmp_path / "model.hyb")
    bundle = write_bundle(artifact, tmp_path / "bundle").path
    environment = gpu_environment(artifact, tmp_path)
    np.save(tmp_path / "x.npy", drawn(SHAPE))
    words = ["--input", f"the/x={tmp_path / 'x.npy'}", "--output", str(tmp_path / "made"), "--repeat", "3"]
    done = run_bundle(bundle, *words, environment=environment)
    assert done.returncode == 0, done.stderr
    expected = session_result(artifact, drawn(SHAPE))
    np.testing.assert_array_equal(np.load(tmp_path / "made" / "out_0.npy"), expected)


def test_the_plan_of_the_largest_budget_that_fits_is_taken(
    several_plans_artifact: Path, tmp_path: Path
) -> None:
    bundle = write_bundle(several_plans_artifact, tmp_path / "bundle").path

    def planned_bytes(memory_bytes: int, *words: str) -> int:
        folder = tmp_path / f"{memory_bytes}{''.join(words)}"
        folder.mkdir()
        environment = gpu_environment(several_plans_artifact, folder, memory_bytes)
        done = run_bundle(bundle, "--random", "--json", *words, environment=environment)
        assert done.returncode == 0, done.stderr
        return int(json.loads(done.stdout)["memory"]["gpu"]["planned_bytes"])

    with load(several_plans_artifact) as session:
        small, large = (plan.arenas[0].size_bytes for plan in session.artifact.plans)
    assert planned_bytes(EMULATED_BYTES) == large
    assert planned_bytes(large - 512) == small
    assert planned_bytes(EMULATED_BYTES, "--gpu-memory", "2KiB") == small


def test_a_gpu_that_is_missing_or_too_small_is_told(
    hybrid_artifact: Path, hybrid_bundle: Path, tmp_path: Path
) -> None:
    missing = run_bundle(hybrid_bundle, "--random")
    assert missing.returncode == 5 and "error[HC402]" in missing.stderr
    small = run_bundle(hybrid_bundle, "--random", environment=gpu_environment(hybrid_artifact, tmp_path, 512))
    assert small.returncode == 5 and "error[HC405]" in small.stderr
    refused = run_bundle(hybrid_bundle, "--random", "--gpu-memory", "512")
    assert refused.returncode == 2 and "error[HC558]" in refused.stderr


CALLS = {
    ("cudaMalloc", 0): ("HC405", "bytes of GPU memory"),
    ("cudaHostAlloc", 0): ("HC407", "the arena on the host"),
    ("cudaMemcpyAsync", 0): ("HC407", "weights at byte 0, which are copied to the GPU once"),
    ("cudaStreamCreateWithFlags", 1): ("HC407", "the streams of a plan's lanes"),
    ("cudaEventCreateWithFlags", 0): ("HC407", "the copy of tensor 'x'"),
    ("cudaEventRecord", 0): ("HC407", "the copy of tensor 'x'"),
    ("cudaMemcpyAsync", 1): ("HC407", "the copy of tensor 'x'"),
    ("cuLaunchKernelEx", 1): ("HC407", "kernel 'k2'"),
    ("cudaStreamWaitEvent", 0): ("HC407", "kernel 'k0'"),
    ("cuModuleLoadData", 0): ("HC407", "kernel 'k0'"),
    ("cudaMemGetInfo", 0): ("HC402", "no usable GPU"),
}
"""What fails, and what the runner says."""


def test_a_call_that_fails_is_told_and_nothing_is_held(
    hybrid_artifact: Path, hybrid_bundle: Path, tmp_path: Path
) -> None:
    environment = gpu_environment(hybrid_artifact, tmp_path)
    for (function, ordinal), (code, place) in CALLS.items():
        injected = environment | {FAILING: function, ORDINAL: str(ordinal)}
        done = run_bundle(hybrid_bundle, "--random", environment=injected)
        assert done.returncode == 5, f"{function} {ordinal}: {done}"
        assert f"error[{code}]" in done.stderr and place in done.stderr, f"{function}: {done.stderr}"
        assert "held 0\n" in done.stderr, f"{function}: {done.stderr}"
