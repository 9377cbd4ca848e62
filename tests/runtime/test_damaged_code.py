"""Artifacts whose code is damaged, with hashes that fit: refused by name, and the process goes on."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hybridc.errors import ArtifactError
from hybridc.runtime import load
from hybridc.runtime.elf import fault_of_library
from tests.artifact.test_trust import replace_file

PAGE_BYTES = 4096


def sum_of_run(artifact: Path) -> float:
    with load(artifact, threads=1) as session:
        feeds = {port.name: np.ones(port.shape, np.float32) for port in session.get_inputs()}
        return sum(float(value.sum()) for value in session.run(None, feeds))


def refusal(artifact: Path, tmp_path: Path, name: str, change: Callable[[bytes], bytes]) -> ArtifactError:
    """Of a copy with one file changed; the artifact itself runs before and afterwards."""
    expected = sum_of_run(artifact)
    copy = Path(shutil.copytree(artifact, tmp_path / "copy.hyb"))
    replace_file(copy, name, change((copy / name).read_bytes()))
    with pytest.raises(ArtifactError) as caught:
        sum_of_run(copy)
    assert sum_of_run(artifact) == expected
    assert caught.value.code == "HC307" and caught.value.where == str(copy / name)
    return caught.value


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: b"", "the file is empty"),
        (lambda content: b"garbage" * 1000, "no ELF file"),
        (lambda content: content[:32], "no ELF file"),
        (lambda content: content[:100], "program headers"),
        (lambda content: content[: len(content) // 2], "a segment ends at byte"),
        (lambda content: content[:PAGE_BYTES], "a segment ends at byte"),
        (lambda content: content[:64] + bytes(len(content) - 64), "no segments to load"),
        (lambda content: content.replace(b"hybridc_run\0", b"hybridc_ran\0"), "no hybridc_run"),
        (lambda content: content.replace(b"relu_cpu", b"rely_cpu"), "no relu_cpu"),
    ],
)
def test_damaged_library_is_refused(
    emulated_gpu: None,
    hybrid_artifact: Path,
    tmp_path: Path,
    change: Callable[[bytes], bytes],
    reason: str,
) -> None:
    assert reason in refusal(hybrid_artifact, tmp_path, "library.so", change).what


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda source: b"garbage {\n" + source, "g++ cannot compile it for the emulated GPU: error: "),
        (lambda source: b"garbage {", "g++ cannot compile it for the emulated GPU: error: "),
        (lambda source: b"", "the GPU's code has no kernel matmul_gpu_kernel"),
        (lambda source: source.replace(b"negate_gpu", b"negative_gpu"), "has no kernel negate_gpu_kernel"),
    ],
)
def test_damaged_cuda_source_is_refused_on_an_emulated_gpu(
    emulated_gpu: None,
    hybrid_artifact: Path,
    tmp_path: Path,
    change: Callable[[bytes], bytes],
    reason: str,
) -> None:
    assert reason in refusal(hybrid_artifact, tmp_path, "kernels.cu", change).what


def test_library_is_whole_only_with_all_its_segments(cpu_artifact: Path) -> None:
    content = (cpu_artifact / "library.so").read_bytes()
    assert fault_of_library(content) is None
    segments_at, count = struct.unpack_from("<Q", content, 32)[0], struct.unpack_from("<H", content, 56)[0]
    places = [struct.unpack_from("<8xQ16xQ", content, segments_at + 56 * i) for i in range(count)]
    end = max(offset + size for offset, size in places)
    assert fault_of_library(content[:end]) is None, "section headers are not for the loader"
    assert all(fault_of_library(content[:size]) for size in (*range(0, end, 97), end - 1))


@pytest.mark.parametrize("value", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_no_number_of_a_header_makes_the_check_fail_itself(cpu_artifact: Path, value: int) -> None:
    content = (cpu_artifact / "library.so").read_bytes()[: 1 << 13]
    for place in range(16, 1024, 8):
        changed = bytearray(content)
        changed[place : place + 8] = value.to_bytes(8, "little")
        assert fault_of_library(bytes(changed))
