"""Faults put into the CUDA kernels of a compiled model are caught on the emulated GPU."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

import hybridc
from hybridc import emulator
from hybridc.artifact import open_artifact
from hybridc.emulator import ThreadOrder
from hybridc.errors import DeviceError
from hybridc.ir import Device
from hybridc.json_values import sealed
from hybridc.models import build
from tests.support.light_models import random_feeds

CAP_BYTES = 4 << 20
BARRIER = "__syncthreads();"


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return build("mlp", inputs=96, hidden=80, layers=2, classes=48, batch=32)


@pytest.fixture(scope="module")
def artifact(model: onnx.ModelProto, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faults") / "mlp.hyb"
    hybridc.compile(model, path, target="cuda:sm_75+avx2", pins={"*": "gpu"}, plan_seconds=0.05)
    return path


@pytest.fixture
def device() -> Iterator[None]:
    yield
    emulator.reset()
    emulator.start(CAP_BYTES)


def with_kernels(artifact: Path, source: str, folder: Path) -> Path:
    """A copy of the artifact with another kernels.cu, its hashes put right."""
    copy = folder / "mutated.hyb"
    shutil.copytree(artifact, copy)
    (copy / "kernels.cu").write_text(source)
    manifest = json.loads((copy / "manifest.json").read_text())
    for entry in manifest["files"]:
        if entry["name"] == "kernels.cu":
            entry |= {
                "size_bytes": len(source.encode()),
                "sha256": hashlib.sha256(source.encode()).hexdigest(),
            }
    (copy / "manifest.json").write_text(json.dumps(sealed(manifest)))
    return copy


def run(
    artifact: Path, model: onnx.ModelProto, order: ThreadOrder, *, guard_tensors: bool = False
) -> np.ndarray:
    emulator.start(CAP_BYTES, thread_order=order, guard_tensors=guard_tensors)
    with hybridc.load(artifact) as session:
        return session.run(None, random_feeds(model))[0]


def is_caught(artifact: Path, model: onnx.ModelProto, expected: np.ndarray) -> bool:
    """Whether some thread order gives a wrong result or an error."""
    for order in ThreadOrder:
        try:
            if not np.allclose(run(artifact, model, order), expected, rtol=1e-4, atol=1e-4):
                return True
        except DeviceError:
            return True
        finally:
            emulator.reset()
    return False


@pytest.fixture(scope="module")
def expected(model: onnx.ModelProto) -> np.ndarray:
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, random_feeds(model))[0]


def barriers(source: str) -> list[int]:
    return [match.start() for match in re.finditer(re.escape(BARRIER), source)]


def test_the_kernels_have_barriers_and_are_right_in_every_thread_order(artifact, model, expected, device):
    assert len(barriers((artifact / "kernels.cu").read_text())) >= 2
    for order in ThreadOrder:
        for guard_tensors in (False, True):
            found = run(artifact, model, order, guard_tensors=guard_tensors)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("which", [0, 1])
def test_a_removed_barrier_is_caught(which, artifact, model, expected, device, tmp_path):
    source = (artifact / "kernels.cu").read_text()
    at = barriers(source)[which]
    assert is_caught(
        with_kernels(artifact, source[:at] + source[at + len(BARRIER) :], tmp_path), model, expected
    )


def test_a_barrier_that_only_some_threads_reach_is_reported(artifact, model, device, tmp_path):
    source = (artifact / "kernels.cu").read_text()
    mutated = source.replace(BARRIER, "if (threadIdx.x < 3) " + BARRIER, 1)
    with pytest.raises(DeviceError, match="divergent barrier"):
        run(with_kernels(artifact, mutated, tmp_path), model, ThreadOrder.FORWARD)


@pytest.mark.parametrize("offset", [1_000_000, -2_000_000])
def test_an_index_outside_the_arena_is_reported_with_the_kernel(offset, artifact, model, device, tmp_path):
    source = (artifact / "kernels.cu").read_text()
    mutated = source.replace("(p0_ptr + (", f"(p0_ptr + ({offset} + ", 1)
    assert mutated != source
    with pytest.raises(DeviceError, match=r"kernel \w+: out-of-bounds access"):
        run(with_kernels(artifact, mutated, tmp_path), model, ThreadOrder.FORWARD)


def test_an_index_off_by_one_inside_the_arena_gives_a_wrong_result(
    artifact, model, expected, device, tmp_path
):
    source = (artifact / "kernels.cu").read_text()
    mutated = source.replace("(p0_ptr + (", "(p0_ptr + (1 + ", 1)
    assert is_caught(with_kernels(artifact, mutated, tmp_path), model, expected)


def test_harm_to_no_tensor_in_the_arena_is_caught_where_tensors_are_guarded(
    artifact, model, expected, device, tmp_path
):
    """The last kernel writes one number past its result, where the model's input was and is not needed."""
    plan = open_artifact(artifact).plan
    (output,) = (b for b in plan.buffers if (b.tensor, b.device) == ("matmul_1", Device.GPU))
    assert all(
        b.end_bytes <= output.end_bytes or b.offset_bytes >= output.end_bytes + 4 or b.last_step < 2
        for b in plan.buffers
        if b.device is Device.GPU
    )
    assert plan.arena_bytes(Device.GPU) >= output.end_bytes + 4
    mutated = with_statement(
        artifact, "matmul_add_gpu_kernel", f"T_add_intermediate_ptr[{output.size_bytes // 4}] = 1;", tmp_path
    )
    assert not is_caught(mutated, model, expected)
    with pytest.raises(
        DeviceError, match=r"kernel matmul_add_gpu_kernel: out-of-bounds access at .* a tensor"
    ):
        run(mutated, model, ThreadOrder.FORWARD, guard_tensors=True)


def test_read_of_another_tensor_is_caught_where_tensors_are_guarded(
    artifact, model, expected, device, tmp_path
):
    """A weight's neighbour in the arena is read, and has no say in the result."""
    mutated = with_statement(
        artifact,
        "matmul_add_gpu_kernel",
        "if (p1_ptr[80 * 48] == 1e30f) T_add_intermediate_ptr[0] = 1;",
        tmp_path,
    )
    assert not is_caught(mutated, model, expected)
    with pytest.raises(DeviceError, match=r"0 bytes past the end of a tensor of 15360 bytes"):
        run(mutated, model, ThreadOrder.FORWARD, guard_tensors=True)


def with_statement(artifact: Path, kernel: str, statement: str, folder: Path) -> Path:
    """A copy of the artifact in which every thread of a kernel begins with a statement."""
    source = (artifact / "kernels.cu").read_text()
    mutated = re.sub(rf"({kernel}\([^)]*\) {{)", rf"\1 {statement}", source)
    assert mutated != source
    return with_kernels(artifact, mutated, folder)
