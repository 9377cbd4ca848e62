"""The wheel hybridc-runtime, in a virtual environment that has numpy and no hybridc."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import hybridc
from hybridc import emulator
from hybridc.bundle import write_bundle
from hybridc.bundle.wheel import write_wheel
from hybridc.errors import UsageError
from hybridc.runtime import load
from tests.bundle.conftest import EMULATED_BYTES, drawn, gpu_environment
from tests.bundle.session_use import use
from tests.support.artifacts import SHAPE

LARGEST_BYTES = 20 << 20
USE = Path(__file__).with_name("session_use.py")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with the wheel, and the numpy of this one."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", f"--python={python}", "install", "--no-index", "--no-deps", "--quiet"]
    subprocess.run([*pip, str(wheel)], check=True)
    [site] = folder.glob("lib/*/site-packages")
    for package in Path(np.__file__).parents[1].glob("numpy*"):
        (site / package.name).symlink_to(package)
    return python


def run(python: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python in another folder, where nothing points to this repository."""
    done = subprocess.run(
        [str(python), "-I", *words], cwd="/", env=variables, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done


def test_a_session_does_what_that_of_hybridc_does(
    environment: Path, wheel: Path, cpu_artifact: Path, cpu_bundle: Path
) -> None:
    packages = "('hybridc', 'tvm', 'tvm_ffi', 'onnx')"
    run(
        environment, "-c", f"from importlib.util import find_spec; assert not any(map(find_spec, {packages}))"
    )
    told = json.loads(run(environment, str(USE), str(cpu_bundle)).stdout)
    expected = json.loads(json.dumps(use(load, str(cpu_artifact))))
    for key, value in expected.items():
        assert told["used"][key] == value, key
    print(f"wheel: {wheel.stat().st_size:,} bytes; seconds: {told['seconds']}")


def other_python(version: str) -> str | None:
    """On the path, or one of pyenv's."""
    folders = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/*/bin"))
    found = (shutil.which(f"python{version}", path=str(folder)) for folder in reversed(folders))
    on_path = shutil.which(f"python{version}")
    candidates = [python for python in (on_path, *found) if python is not None]
    works = (c for c in candidates if not subprocess.run([c, "--version"], capture_output=True).returncode)
    return next(works, None)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_every_python_gives_the_same(
    version: str, wheel: Path, cpu_artifact: Path, cpu_bundle: Path, tmp_path: Path
) -> None:
    """With a numpy of its own, which pip downloads."""
    interpreter = other_python(version)
    if interpreter is None:
        pytest.skip(f"Python {version} is not installed")
    subprocess.run([interpreter, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([str(python), "-I", "-m", "pip", "install", "--quiet", str(wheel)], check=True)
    told = json.loads(run(python, str(USE), str(cpu_bundle)).stdout)
    for key, value in json.loads(json.dumps(use(load, str(cpu_artifact)))).items():
        assert told["used"][key] == value, key
    print(f"Python {version}; seconds: {told['seconds']}")


def test_the_wheel_is_small_and_the_same_whenever_it_is_written(wheel: Path, tmp_path: Path) -> None:
    assert wheel.stat().st_size <= LARGEST_BYTES
    again = write_wheel(tmp_path)
    assert again.name == wheel.name and again.read_bytes() == wheel.read_bytes()
    assert wheel.name.startswith(f"hybridc_runtime-{hybridc.__version__}-py3-none-manylinux_2_")
    with zipfile.ZipFile(wheel) as file:
        unpacked_bytes = sum(entry.file_size for entry in file.infolist())
        record = next(name for name in file.namelist() if name.endswith("/RECORD"))
        assert len(file.read(record).splitlines()) == len(file.namelist())
    assert unpacked_bytes < 2 * LARGEST_BYTES
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError) as caught:
        write_wheel(tmp_path / "file" / "folder")
    assert caught.value.code == "HC562"


PROGRAM = """
import os, sys
import numpy as np
import hybridc_runtime as runtime

path, x = sys.argv[1], np.random.default_rng(0).standard_normal((4, 8), dtype=np.float32)

def code(action):
    try:
        action()
    except runtime.HybridcError as error:
        return type(error).__name__, error.code, error.where, bool(error.remedy)
"""
"""What programs in these tests begin with."""


def test_a_session_of_a_process_that_forked_this_one_is_refused(environment: Path, cpu_bundle: Path) -> None:
    program = """
session = runtime.load(path)
[before, *_] = session.run(None, {"the/x": x})
child = os.fork()
if child == 0:
    told = {code(action)[1] for action in (lambda: session.run(None, {"the/x": x}), session.memory)}
    session.close()
    with runtime.load(path) as own:
        same = own.run(None, {"the/x": x})[0].tobytes() == before.tobytes()
    os._exit(0 if told == {"HC559"} and same else 1)
assert os.waitpid(child, 0)[1] == 0
assert session.run(None, {"the/x": x})[0].tobytes() == before.tobytes()
future = session.run_async(None, {"the/x": x})  # and the program ends without closing anything
"""
    run(environment, "-c", PROGRAM + program, str(cpu_bundle))


def test_a_library_of_tvm_from_elsewhere_is_told(environment: Path, cpu_bundle: Path) -> None:
    program = """
import ctypes
ctypes.CDLL(path + "/lib/libtvm_runtime.so")
kind, number, _, has_remedy = code(lambda: runtime.load(path))
assert (kind, number, has_remedy) == ("ArtifactError", "HC307", True)
"""
    run(environment, "-c", PROGRAM + program, str(cpu_bundle))


def test_what_is_damaged_is_refused_with_place_and_remedy(environment: Path, cpu_bundle: Path) -> None:
    program = """
import shutil, tempfile
with tempfile.TemporaryDirectory() as folder:
    copy = shutil.copytree(path, folder + "/net")
    open(copy + "/weights.bin", "ab").write(b"1")
    assert code(lambda: runtime.load(copy)) == ("ArtifactError", "HC304", copy + "/weights.bin", True)
    runtime.load(copy, check_weights=False).close()
assert code(lambda: runtime.load(path, gpu_memory_bytes=-1))[:2] == ("UsageError", "HC510")
assert code(lambda: runtime.load(path + chr(0)))[:2] == ("ArtifactError", "HC301")
"""
    run(environment, "-c", PROGRAM + program, str(cpu_bundle))


def test_a_gpu_part_runs_there(environment: Path, hybrid_artifact: Path, tmp_path: Path) -> None:
    """On the emulated GPU of the process."""
    bundle = write_bundle(hybrid_artifact, tmp_path / "bundle").path
    program = """
with runtime.load(path) as session:
    held = session.memory()["gpu"]
    assert 0 < held.planned_bytes <= held.allocated_bytes
    session.warm_up()
    print(session.run(["out/0"], {"the/x": x})[0].tobytes().hex())
    assert len(session.measure({"the/x": x})) == 8
    child = os.fork()
    if child == 0:
        os._exit(code(lambda: session.run(None, {"the/x": x}))[1] != "HC559")
    assert os.waitpid(child, 0)[1] == 0
"""
    variables = gpu_environment(hybrid_artifact, tmp_path)
    printed = run(environment, "-c", PROGRAM + program, str(bundle), **variables).stdout
    emulator.start(EMULATED_BYTES)
    with load(hybrid_artifact) as session:
        [y] = session.run(["out/0"], {"the/x": drawn(SHAPE)})
    assert printed.strip() == y.tobytes().hex()
    missing = """
kind, number, _, has_remedy = code(lambda: runtime.load(path))
assert (kind, number, has_remedy) == ("DeviceError", "HC402", True)
"""
    run(environment, "-c", PROGRAM + missing, str(bundle))


def test_outputs_whose_size_follows_from_data_are_cut(environment: Path, tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("NonZero", ["x"], ["places"], "places")],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE)],
        [helper.make_tensor_value_info("places", TensorProto.INT64, (2, None))],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), tmp_path / "net.onnx")
    hybridc.compile(tmp_path / "net.onnx", tmp_path / "net.hyb", target="avx2")
    bundle = write_bundle(tmp_path / "net.hyb", tmp_path / "bundle").path
    program = """
x[x < 0.5] = 0
with runtime.load(path) as session:
    [places] = session.run(None, {"x": x})
    np.testing.assert_array_equal(places, np.stack(np.nonzero(x)))
    assert session.get_outputs()[0].shape == [2, 32]
    binding = session.io_binding()
    binding.bind_input("x", x)
    binding.bind_output("places", np.zeros((2, 32), np.int64))
    assert code(lambda: session.run_with_iobinding(binding))[1] == "HC554"
    binding.bind_output("places")
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(binding.get_outputs()[0], np.stack(np.nonzero(x)))
"""
    run(environment, "-c", PROGRAM + program, str(bundle))
