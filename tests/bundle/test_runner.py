"""The runner of a bundle: same bytes as a session, files in and out, and errors with codes."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import hybridc
from hybridc.bundle import write_bundle
from hybridc.errors import ArtifactError, UsageError
from hybridc.runtime import load
from tests.bundle.conftest import drawn, outputs_of, run_bundle
from tests.support.artifacts import SHAPE

SYSTEM_LIBRARIES = {
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "librt.so.1",
    "ld-linux-x86-64.so.2",
}


def test_outputs_are_the_bytes_of_the_session(cpu_artifact: Path, cpu_bundle: Path, tmp_path: Path) -> None:
    made = outputs_of(cpu_bundle, {"the/x": drawn(SHAPE)}, tmp_path / "run")
    with load(cpu_artifact) as session:
        expected = dict(
            zip(("out_0", "out_1", "out_2"), session.run(None, {"the/x": drawn(SHAPE)}), strict=True)
        )
    assert made.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(made[name], array)


def test_nothing_but_glibc_is_needed_beside_the_bundle(cpu_bundle: Path) -> None:
    files = [path for path in cpu_bundle.rglob("*") if path.is_file() and path.read_bytes()[:4] == b"\x7fELF"]
    own = {path.name for path in files}
    for path in files:
        printed = subprocess.run(
            ["readelf", "-dW", str(path)], capture_output=True, text=True, check=True
        ).stdout
        assert set(re.findall(r"NEEDED.*\[(.*)\]", printed)) <= own | SYSTEM_LIBRARIES, path


def test_a_bundle_for_the_cpu_has_at_most_10_mib_beside_weights(cpu_artifact: Path, tmp_path: Path) -> None:
    made = write_bundle(cpu_artifact, tmp_path / "bundle")
    on_disk = sum(path.stat().st_size for path in made.path.rglob("*") if path.is_file())
    assert made.size_bytes == on_disk and made.size_bytes - made.weights_bytes < 10 << 20


def test_the_same_artifact_gives_the_same_bytes(cpu_artifact: Path, cpu_bundle: Path, tmp_path: Path) -> None:
    archives = [write_bundle(cpu_artifact, tmp_path / n / "net", archive=True).path for n in ("one", "two")]
    first, second = (hashlib.sha256(path.read_bytes()).hexdigest() for path in archives)
    assert first == second
    with tarfile.open(archives[0]) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    unpacked = tmp_path / "unpacked" / "net"
    assert (unpacked / "SHA256SUMS").read_bytes() == (cpu_bundle / "SHA256SUMS").read_bytes()
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=unpacked, check=True)
    assert run_bundle(unpacked, "--random").returncode == 0


def test_no_path_of_this_computer_is_in_a_bundle(cpu_bundle: Path) -> None:
    places = [str(Path(hybridc.__file__).parent).encode(), str(Path(np.__file__).parents[1]).encode()]
    for name in ("run", "lib/libhybridc_runtime.so", "program.json", "README.md"):
        assert not [place for place in places if place in (cpu_bundle / name).read_bytes()], name


@pytest.fixture(scope="module")
def data_dependent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact whose indices are fed, and whose second output's size follows from data."""
    folder = tmp_path_factory.mktemp("data")
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["x", "i"], ["rows"], "gather", axis=0),
            helper.make_node("NonZero", ["rows"], ["places"], "places"),
        ],
        "net",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, (5, 3)),
            helper.make_tensor_value_info("i", TensorProto.INT64, (4,)),
        ],
        [
            helper.make_tensor_value_info("rows", TensorProto.FLOAT, (4, 3)),
            helper.make_tensor_value_info("places", TensorProto.INT64, (2, None)),
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), folder / "net.onnx")
    hybridc.compile(folder / "net.onnx", folder / "net.hyb", target="avx2")
    write_bundle(folder / "net.hyb", folder / "bundle")
    return folder


def test_outputs_are_cut_to_the_elements_that_there_are(data_dependent: Path, tmp_path: Path) -> None:
    x = drawn((5, 3))
    x[1:3] = 0
    feeds = {"x": x, "i": np.array([0, 1, 4, 2])}
    made = outputs_of(data_dependent / "bundle", feeds, tmp_path / "run")
    rows = x[[0, 1, 4, 2]]
    np.testing.assert_array_equal(made["rows"], rows)
    np.testing.assert_array_equal(made["places"], np.stack(np.nonzero(rows)))


def test_a_fed_index_that_is_outside_is_refused(data_dependent: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", drawn((5, 3)))
    np.save(tmp_path / "i.npy", np.array([0, 1, 5, 2]))
    words = [f"--input={name}={tmp_path / name}.npy" for name in ("x", "i")]
    done = run_bundle(data_dependent / "bundle", *words)
    assert done.returncode == 2
    assert "error[HC560]: Gather 'gather': index 5 is outside of [-5, 4]" in done.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([], "HC533"),
        (["--input", "z={x}"], "HC533"),
        (["--input", "the/x={x}", "--input", "the/x={x}"], "HC533"),
        (["--input", "{x}"], "HC533"),
        (["--input", "the/x=/none.npy"], "HC530"),
        (["--input", "the/x={text}"], "HC530"),
        (["--input", "the/x={cut}"], "HC530"),
        (["--input", "the/x={doubles}"], "HC553"),
        (["--input", "the/x={turned}"], "HC554"),
        (["--input", "the/x={columns}"], "HC530"),
        (["--input", "the/x={big}"], "HC530"),
        (["--random", "--output", "/proc/none/outputs"], "HC531"),
        (["--random", "--threads", "0"], "HC513"),
        (["--random", "--gpu-memory", "much"], "HC510"),
        (["--random", "--gpu-memory", "999999999TiB"], "HC510"),
        (["--frob"], "HC500"),
        (["--seed"], "HC500"),
    ],
)
def test_wrong_use_is_refused_with_a_code(
    cpu_bundle: Path, tmp_path: Path, words: list[str], code: str
) -> None:
    x = drawn(SHAPE)
    files = {
        name: tmp_path / f"{name}.npy" for name in ("x", "text", "cut", "doubles", "turned", "columns", "big")
    }
    np.save(files["x"], x)
    files["text"].write_text("1 2 3")
    files["cut"].write_bytes(files["x"].read_bytes()[:-4])
    np.save(files["doubles"], x.astype(np.float64))
    np.save(files["turned"], np.ascontiguousarray(x.T))
    np.save(files["columns"], np.asfortranarray(x))
    np.save(files["big"], x.astype(">f4"))
    done = run_bundle(cpu_bundle, *(word.format(**files) for word in words))
    assert f"error[{code}]" in done.stderr and done.returncode == 2


def test_a_report_for_programs(cpu_bundle: Path) -> None:
    done = run_bundle(cpu_bundle, "--random", "--json", "--repeat", "3", "--threads", "1")
    report = json.loads(done.stdout)
    assert len(report["seconds"]) == 3 and report["memory"]["cpu"]["planned_bytes"] == 1024


def test_a_trace_has_each_step_on_its_lane(cpu_bundle: Path, tmp_path: Path) -> None:
    done = run_bundle(cpu_bundle, "--random", "--trace", str(tmp_path / "trace.json"))
    assert done.returncode == 0, done.stderr
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [(span["name"], span["tid"], span["args"]) for span in spans] == [
        ("k0", 1, {"planned_us": 1.0}),
        ("k1", 1, {"planned_us": 1.0}),
    ]
    assert 0 <= spans[0]["ts"] <= spans[0]["ts"] + spans[0]["dur"] <= spans[1]["ts"]


def test_a_bundle_replaces_a_bundle_and_nothing_else(cpu_artifact: Path, tmp_path: Path) -> None:
    for _ in range(2):
        write_bundle(cpu_artifact, tmp_path / "bundle")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    for place in (tmp_path / "other", cpu_artifact, tmp_path / "other" / "file"):
        with pytest.raises(UsageError) as caught:
            write_bundle(cpu_artifact, place)
        assert caught.value.code == "HC561"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "other"]


def test_an_archive_replaces_an_archive_of_a_bundle_and_nothing_else(
    cpu_artifact: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        made = write_bundle(cpu_artifact, tmp_path / "net", archive=True).path
    whole = made.read_bytes()
    with tarfile.open(tmp_path / "mine.tar.gz", "w:gz") as tar:
        tar.add(made, "mine/net.tar.gz")
    (tmp_path / "cut.tar.gz").write_bytes(whole[:100])
    (tmp_path / "text.tar.gz").write_text("mine")
    for name in ("mine", "cut", "text"):
        before = (tmp_path / f"{name}.tar.gz").read_bytes()
        with pytest.raises(UsageError) as caught:
            write_bundle(cpu_artifact, tmp_path / name, archive=True)
        assert caught.value.code == "HC561" and (tmp_path / f"{name}.tar.gz").read_bytes() == before


def test_what_is_no_artifact_is_not_bundled(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as caught:
        write_bundle(tmp_path / "none.hyb", tmp_path / "bundle")
    assert caught.value.code == "HC301"


def test_types_that_numpy_has_not_go_in_as_it_writes_them(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    ports = [helper.make_tensor_value_info(name, TensorProto.BFLOAT16, (2, 3)) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"], "relu")], "net", ports[:1], ports[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), tmp_path / "net.onnx")
    hybridc.compile(tmp_path / "net.onnx", tmp_path / "net.hyb", target="avx2")
    bundle = write_bundle(tmp_path / "net.hyb", tmp_path / "bundle").path
    x = drawn((2, 3)).astype(ml_dtypes.bfloat16)
    made = outputs_of(bundle, {"x": x}, tmp_path / "run")
    np.testing.assert_array_equal(made["y"], np.maximum(x.astype(np.float32), 0))


def test_hashes_are_those_of_sha256(cpu_bundle: Path, tmp_path: Path) -> None:
    """Files of all lengths around a block, hashed by the library as it opens a bundle."""
    bundle = Path(shutil.copytree(cpu_bundle, tmp_path / "bundle"))
    weights = (bundle / "weights.bin").read_bytes()
    sums = (bundle / "SHA256SUMS").read_text()
    for more in (0, 1, 54, 55, 56, 63, 64, 65, 119, 120, 4097):
        content = weights + os.urandom(more)
        (bundle / "weights.bin").write_bytes(content)
        digest = hashlib.file_digest(io.BytesIO(content), "sha256").hexdigest()
        (bundle / "SHA256SUMS").write_text(re.sub(r".*  weights.bin", f"{digest}  weights.bin", sums))
        assert run_bundle(bundle, "--random").returncode == 0, more
