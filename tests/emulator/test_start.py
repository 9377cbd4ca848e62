"""Starting the emulated GPU: in any order with TVM, from two processes, and beside a real driver."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from hybridc import emulator
from hybridc.emulator import device as emulator_device
from hybridc.emulator import toolchain
from hybridc.errors import DeviceError

RELU_AND_MATMUL = """
import numpy as np, tvm, tvm_ffi
from tvm import relax
from hybridc import emulator

{after_import}
gpu = tvm.cuda(0)
assert gpu.exist and gpu.compute_version == "9.0"
image = b"image of the program"

def compile_kernels(source):
    emulator.provide_kernels(emulator.image_key(image), str(source))
    return image

tvm_ffi.register_global_func("tvm_callback_cuda_compile", compile_kernels, override=True)
builder = relax.BlockBuilder()
a = relax.Var("a", relax.TensorType((64, 32), "{dtype}"))
b = relax.Var("b", relax.TensorType((32, 48), "{dtype}"))
with builder.function("main", [a, b]):
    with builder.dataflow():
        product = builder.emit(relax.op.matmul(a, b))
        result = builder.emit_output(relax.op.nn.relu(product))
    builder.emit_func_output(result)
target = tvm.target.Target(dict(kind="cuda", arch="sm_80", max_threads_per_block=1024,
                                max_shared_memory_per_block=49152, thread_warp_size=32), host="llvm")
vm = relax.VirtualMachine(tvm.compile(builder.get(), target=target), gpu)
rng = np.random.default_rng(0)
x, y = rng.standard_normal((64, 32)).astype("{dtype}"), rng.standard_normal((32, 48)).astype("{dtype}")
out = vm["main"](tvm.runtime.tensor(x, gpu), tvm.runtime.tensor(y, gpu)).numpy()
np.testing.assert_allclose(out, np.maximum(x.astype("f8") @ y.astype("f8"), 0), atol={tolerance})
print(emulator.statistics().launches)
"""

START = "from hybridc import emulator; emulator.start(16 << 20)\n"


BUILD_TOGETHER = """
import pathlib, sys, time
from hybridc.emulator import toolchain

compile_and_link = toolchain._compile_and_link

def meet_first(*arguments):
    folder = pathlib.Path(sys.argv[1])
    (folder / sys.argv[2]).touch()
    end = time.monotonic() + 60  # the other may have died
    while len(list(folder.glob("process*"))) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    return compile_and_link(*arguments)

toolchain._compile_and_link = meet_first
library = toolchain.build_library(["int one() { return 1; }"], name="one")
assert library.is_file()
print(library)
"""


def run_python(program: str) -> str:
    """What it prints."""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulator_device, "_process", emulator_device._Process())


def test_tvm_program_runs_when_started_before_tvm() -> None:
    program = START + RELU_AND_MATMUL.format(after_import="", dtype="float32", tolerance=1e-4)
    assert int(run_python(program)) > 0, "kernels were launched"


def test_tvm_program_in_half_precision_runs_when_started_after_tvm() -> None:
    program = RELU_AND_MATMUL.format(after_import=START, dtype="float16", tolerance=5e-2)
    assert int(run_python(program)) > 0, "kernels were launched"


def test_preloaded_driver_has_no_device_until_started() -> None:
    printed = run_python(
        "from hybridc import emulator; emulator.preload(); import tvm, tvm_ffi\n"
        "print(tvm_ffi.get_global_func('device_api.cuda', allow_missing=True) is not None)\n"
        "print(tvm.cuda(0).exist, emulator.is_active())\n"
        "emulator.start(1 << 20)\n"
        "print(tvm.cuda(0).exist, emulator.is_active())\n"
    )
    assert printed.splitlines() == ["True", "False False", "True True"]


def test_fault_outside_a_kernel_still_ends_the_process() -> None:
    program = START + (
        "import ctypes\n"
        "from tests.support.gpu_program import Program, allocate, call\n"
        "Program('extern \"C\" __global__ void k(float* x) { *x = 1; }').launch('k', [allocate(4)])\n"
        "call('cudaDeviceSynchronize')\n"
        "ctypes.string_at(0)\n"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, check=False)
    assert result.returncode == -signal.SIGSEGV, result.stderr


def test_two_processes_can_build_at_once(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BUILD_TOGETHER, str(tmp_path), f"process{number}"],
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1]
    assert not list((tmp_path / "hybridc" / "emulator").glob("*-building-*"))


def test_real_driver_is_refused(no_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    mapping = "7f00-7f01 r-xp 00000000 00:00 1 /usr/lib/x86_64-linux-gnu/libcuda.so.580.65.06\n"
    monkeypatch.setattr(emulator_device, "_mapped_files", lambda: mapping)
    with pytest.raises(DeviceError) as caught:
        emulator.start(1 << 20)
    assert caught.value.code == "HC420"


def test_statistics_without_a_device_are_refused(no_device: None) -> None:
    with pytest.raises(DeviceError) as caught:
        emulator.statistics()
    assert caught.value.code == "HC425"


def test_missing_compiler_is_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    toolchain._compiler.cache_clear()
    with pytest.raises(DeviceError) as caught:
        toolchain.build_library(("",), name="nothing")
    assert caught.value.code == "HC421"
    toolchain._compiler.cache_clear()


def test_cache_that_cannot_be_made_is_a_device_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DeviceError) as caught:
        toolchain.cache_folder()
    assert caught.value.code == "HC427"


def test_missing_cuda_headers_are_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    toolchain.cuda_include_folder.cache_clear()
    with pytest.raises(DeviceError) as caught:
        toolchain.cuda_include_folder()
    assert caught.value.code == "HC422"
    assert "hybridc[cuda]" in caught.value.remedy
    toolchain.cuda_include_folder.cache_clear()


def test_image_key_ignores_what_follows_the_image() -> None:
    fatbin = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 8) + b"contents"
    assert emulator.image_key(fatbin + b"whatever follows") == emulator.image_key(fatbin)
    assert emulator.image_key(b"ptx text\0 rest") == emulator.image_key(b"ptx text")
    assert emulator.image_key(b"ptx text") != emulator.image_key(b"ptx texu")
