"""Bundles that are damaged or edited are refused by a code, and never end the process by a signal."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.bundle.conftest import run_bundle, seal


@pytest.fixture
def bundle(cpu_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(cpu_bundle, tmp_path / "bundle"))


def code_of(bundle: Path) -> str:
    """Of the error with which the runner refuses a bundle."""
    done = run_bundle(bundle, "--random")
    found = re.match(r"error\[(HC\d{3})\]", done.stderr)
    assert found is not None and done.returncode in (2, 3, 5), (done.returncode, done.stderr)
    return found[1]


@pytest.mark.parametrize("name", ["program.json", "weights.bin", "library.so"])
def test_missing_cut_and_changed_files_are_refused(bundle: Path, name: str) -> None:
    path = bundle / name
    content = path.read_bytes()
    generator = random.Random(0)
    for damaged in (
        content[: len(content) // 2],
        b"",
        *(bytes(_flipped(content, generator)) for _ in range(3)),
    ):
        path.write_bytes(damaged)
        assert code_of(bundle) == "HC304"
    path.unlink()
    assert code_of(bundle) == "HC304"
    path.mkdir()
    assert code_of(bundle) == "HC304"


def _flipped(content: bytes, generator: random.Random) -> bytearray:
    damaged = bytearray(content)
    damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
    return damaged


def test_what_is_no_bundle_is_refused(bundle: Path, tmp_path: Path) -> None:
    (bundle / "SHA256SUMS").write_text("no hash\n")
    assert code_of(bundle) == "HC303"
    (bundle / "SHA256SUMS").write_text("")
    assert code_of(bundle) == "HC303"
    (bundle / "SHA256SUMS").unlink()
    assert code_of(bundle) == "HC301"


def _rename_function(program: Any, name: str) -> None:
    """To one that the library may not have."""
    for each in (program["functions"][0], program["graphs"][0]["kernels"][0]):
        each["function" if "function" in each else "name"] = name


@pytest.mark.parametrize(
    ("edit", "code"),
    [
        (lambda p: p.update(format="other"), "HC301"),
        (lambda p: p.update(schema_version=1), "HC302"),
        (lambda p: p.update(tvm_ffi="0.0.1"), "HC302"),
        (lambda p: p["instruction_sets"][0].update(cpu_flags=["avx9"]), "HC401"),
        (lambda p: p.update(plans=[]), "HC303"),
        (lambda p: p.update(plans={}), "HC303"),
        (lambda p: p["inputs"][0].update(shape=[4, -8]), "HC303"),
        (lambda p: p["inputs"][0].update(shape=[2**40, 2**40]), "HC303"),
        (lambda p: p["inputs"][0].update(shape=[4, 2**30]), "HC303"),
        (lambda p: p["inputs"][0].update(dtype="complex64"), "HC303"),
        (lambda p: p["inputs"][0].update(dtype="int48"), "HC303"),
        (lambda p: p["outputs"][0].update(cuts=[{"axis": 2, "count": 0}]), "HC303"),
        (lambda p: p["outputs"][0].update(cuts=[{"axis": 0, "count": 0}]), "HC303"),
        (lambda p: p["plans"][0].update(graph=1), "HC303"),
        (lambda p: p["plans"][0].update(budget_bytes=-1), "HC303"),
        (lambda p: p["plans"][0].update(makespan_us=0.5), "HC306"),
        (lambda p: p["plans"][0].update(buffers=[]), "HC306"),
        (lambda p: p["plans"][0]["arenas"][0].update(size_bytes=512), "HC306"),
        (lambda p: p["plans"][0]["arenas"][0].update(size_bytes=2**48), "HC408"),
        (lambda p: p["plans"][0]["arenas"][0].update(size_bytes=2**49), "HC303"),
        (lambda p: p["plans"][0]["buffers"][0].update(offset_bytes=512), "HC306"),
        (lambda p: p["plans"][0]["buffers"][0].update(offset_bytes=2), "HC306"),
        (lambda p: p["plans"][0]["buffers"][0].update(offset_bytes=2**47), "HC306"),
        (lambda p: p["plans"][0]["buffers"][1].update(last_step=0), "HC306"),
        (lambda p: p["plans"][0]["buffers"][1].update(kind="other"), "HC303"),
        (lambda p: p["plans"][0]["buffers"][1].update(device="gpu"), "HC306"),
        (lambda p: p["plans"][0]["steps"].pop(), "HC306"),
        (lambda p: p["plans"][0]["steps"].reverse(), "HC306"),
        (lambda p: p["plans"][0]["steps"][0].update(run="none"), "HC306"),
        (lambda p: p["plans"][0]["steps"][0].update(device="gpu"), "HC306"),
        (lambda p: p["plans"][0]["steps"][0].update(waits=[3]), "HC306"),
        (lambda p: p["plans"][0]["steps"][0].update(us=-1), "HC303"),
        (lambda p: p["plans"][0]["weights"].clear(), "HC306"),
        (lambda p: p["plans"][0]["weights"][0].update(tensor="x"), "HC306"),
        (lambda p: p["plans"][0]["weights"][0].update(offset_bytes=2), "HC303"),
        (lambda p: p["plans"][0]["weights"][0].update(offset_bytes=2**40), "HC303"),
        (lambda p: p["graphs"][0]["tensors"][0].update(shape=[4, 9]), "HC306"),
        (lambda p: p["graphs"][0]["tensors"][0].update(shape=[2**40, 2**40]), "HC303"),
        (lambda p: p["graphs"][0]["tensors"][0].update(dtype="float99x"), "HC303"),
        (lambda p: p["graphs"][0]["kernels"][1].update(may_overwrite=[]), "HC306"),
        (lambda p: p["graphs"][0]["kernels"][1].update(may_overwrite=[["y"]]), "HC303"),
        (lambda p: p["graphs"][0]["kernels"][0].update(inputs=["none"]), "HC306"),
        (lambda p: p["graphs"][0]["kernels"][0].update(cpu_workspace_bytes=512), "HC306"),
        (lambda p: p["graphs"][0].update(outputs=[]), "HC303"),
        (lambda p: p["graphs"][0].update(outputs=["y", "y", "y"]), "HC303"),
        (lambda p: p["functions"][0]["parameters"].pop(), "HC306"),
        (lambda p: p["functions"][0]["parameters"][0].update(shape=[2**20, 2**20]), "HC306"),
        (lambda p: p["functions"][0]["parameters"][0].update(shape=[2**24, 2**30]), "HC303"),
        (lambda p: p["functions"][0]["parameters"][0].update(dtype="int4"), "HC303"),
        (lambda p: p["functions"][0].update(name="other"), "HC306"),
        (lambda p: _rename_function(p, "none"), "HC307"),
        (lambda p: _rename_function(p, "hybridc_run"), "HC307"),
    ],
)
def test_an_edited_program_is_refused(bundle: Path, edit: Callable[[Any], None], code: str) -> None:
    program = json.loads((bundle / "program.json").read_text())
    edit(program)
    (bundle / "program.json").write_text(json.dumps(program))
    seal(bundle, "program.json")
    assert code_of(bundle) == code


def edited(value: Any, generator: random.Random) -> Any:
    """The same JSON value but for one place."""
    if isinstance(value, (dict, list)) and value and generator.random() < 0.9:
        keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = generator.choice(keys)
        copy = value.copy()
        if generator.random() < 0.05:
            del copy[key]
        else:
            copy[key] = edited(value[key], generator)
        return copy
    return generator.choice(
        [None, True, "", "cpu", "gpu", -1, 0, 1, 2, 7, 64, 2**31, 2**48, 2**63, 1.5, [], {}]
    )


@pytest.mark.parametrize("seed", range(4))
def test_random_edits_never_end_the_process_by_a_signal(bundle: Path, seed: int) -> None:
    text, generator = (bundle / "program.json").read_text(), random.Random(seed)
    outcomes = set()
    for _ in range(25):
        program = json.loads(text)
        part = generator.choice(["functions", "graphs", "inputs", "outputs", "plans", "plans"])
        program[part] = edited(program[part], generator)
        (bundle / "program.json").write_text(json.dumps(program))
        seal(bundle, "program.json")
        done = run_bundle(bundle, "--random")
        told = re.match(r"error\[HC[345]\d\d\]", done.stderr)
        assert (done.returncode == 0) == (told is None) and done.returncode in (0, 2, 3, 5), done.stderr
        outcomes.add(done.returncode)
    assert 3 in outcomes


@pytest.mark.parametrize("content", ["", "[", "[" * 100_000, '{"format": 1}', "nul", "1e999", '{"a":"\\'])
def test_what_is_no_json_is_refused(bundle: Path, content: str) -> None:
    (bundle / "program.json").write_text(content)
    seal(bundle, "program.json")
    assert code_of(bundle) == "HC303"


def test_weights_that_end_too_early_are_refused_though_their_hash_fits(bundle: Path) -> None:
    (bundle / "weights.bin").write_bytes(b"")
    seal(bundle, "weights.bin")
    assert code_of(bundle) in ("HC303", "HC306")


def test_weights_may_be_trusted(bundle: Path) -> None:
    content = (bundle / "weights.bin").read_bytes()
    (bundle / "weights.bin").write_bytes(content[:-1] + b"\1")
    assert code_of(bundle) == "HC304"
    assert run_bundle(bundle, "--random", "--trust-weights").returncode == 0
