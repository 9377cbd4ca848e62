"""Caches in files: what goes on from them is what would have come, and other files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridc
from hybridc.array_files import open_arrays, write_arrays
from hybridc.cli import main
from hybridc.errors import UsageError
from tests.support.decoders import CONTEXT, VOCABULARY, with_open_lengths

PROMPT = [5, 17, 200, 3, 99, 42, 8, 150, 77]
pytestmark = pytest.mark.isa("avx2")


@pytest.mark.parametrize("name", ["float32", "int4", "appending"])
def test_what_goes_on_from_a_file_is_the_same(name: str, artifacts: dict[str, Path], tmp_path: Path) -> None:
    with hybridc.load_generation(artifacts[name]) as session:
        session.append([PROMPT])
        session.save(tmp_path / "c.npz")
        wanted = session.append([[7, 9]])
    with hybridc.load_generation(artifacts[name]) as other:
        other.append([[1, 2, 3]])  # of which nothing is left
        other.restore(tmp_path / "c.npz")
        assert other.sequences == (tuple(PROMPT),)
        np.testing.assert_array_equal(other.append([[7, 9]]), wanted)
        other.rewind(4)
        again = other.append([[*PROMPT[4:], 7, 9]])
    np.testing.assert_allclose(again, wanted, atol=1e-4 * np.abs(wanted).max())


def test_sequences_of_different_lengths(artifacts: dict[str, Path], tmp_path: Path) -> None:
    with hybridc.load_generation(artifacts["pair"]) as session:
        session.append([PROMPT, [4]])
        session.save(tmp_path / "c.npz")
        wanted = session.append([[7], [8]])
        session.append([[9], []])
        session.restore(tmp_path / "c.npz")
        np.testing.assert_array_equal(session.append([[7], [8]]), wanted)


@pytest.mark.slow
def test_another_target_goes_on(artifacts: dict[str, Path], tmp_path: Path) -> None:
    """A GPU's memory holds the cache that is written, and takes what is read."""
    sizes: dict[str, Any] = {
        "sequence": [1, 8],
        "past_sequence_length": CONTEXT,
        "total_sequence_length": CONTEXT,
    }
    hybridc.compile(with_open_lengths(), tmp_path / "gpu.hyb", target="cuda+avx2", dims=sizes)
    with hybridc.load_generation(artifacts["float32"]) as session:
        wanted = [session.append([PROMPT]), session.append([[7]])]
        session.rewind(len(PROMPT))
        session.save(tmp_path / "cpu.npz")
    with hybridc.load_generation(tmp_path / "gpu.hyb", emulate_gpu="64MiB") as session:
        session.restore(tmp_path / "cpu.npz")
        found = session.append([[7]])
        np.testing.assert_allclose(found, wanted[1], atol=1e-4 * np.abs(wanted[1]).max())
        session.save(tmp_path / "gpu.npz")
        wanted.append(session.append([[8]]))
    with hybridc.load_generation(artifacts["float32"]) as session:
        session.restore(tmp_path / "gpu.npz")
        np.testing.assert_allclose(session.append([[8]]), wanted[2], atol=1e-4 * np.abs(wanted[2]).max())


def damaged(path: Path, how: str) -> None:
    """Change a saved cache of `float32`."""
    with open_arrays(path) as stored:
        header = stored.header
        arrays = {f"c{i}": stored.array(f"c{i}") for i in range(len(header["caches"]))}
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-100])
        return
    if how == "text":
        path.write_text("no archive")
        return
    if how == "format":
        header["format"] = "another"
    elif how == "model":
        header["model"] = "0" * 64
    elif how == "vocabulary":
        header["sequences"][0][1] = VOCABULARY
    elif how == "negative":
        header["sequences"][0][1] = -1
    elif how == "lengths":
        header["sequences"][0].pop()
    elif how == "batch":
        header["sequences"].append([1])
    elif how == "name":
        header["caches"][0] = "past_key_values.9.key"
    elif how == "shape":
        arrays["c0"] = arrays["c0"][:, :1]
    elif how == "type":
        arrays["c0"] = arrays["c0"].astype(np.float64)
    elif how == "numbers":
        arrays["c1"][0, 0, 1, 2] = np.nan
    elif how == "objects":
        arrays["c0"] = np.frombuffer(json.dumps({}).encode(), np.uint8)
    write_arrays(path, header, arrays)


KINDS = [
    "cut",
    "text",
    "format",
    "model",
    "vocabulary",
    "negative",
    "lengths",
    "batch",
    "name",
    "shape",
    "type",
]


@pytest.mark.parametrize("how", [*KINDS, "numbers", "objects"])
def test_other_files_are_refused(how: str, artifacts: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "c.npz"
    with hybridc.load_generation(artifacts["float32"]) as session:
        session.append([PROMPT])
        session.save(path)
        damaged(path, how)
        with pytest.raises(UsageError) as caught:
            session.restore(path)
        assert caught.value.code == "HC582"
        assert session.sequences == (tuple(PROMPT),)  # as it was
        assert np.isfinite(session.append([[1]])).all()


def test_the_command_reads_a_prompt_once(
    artifacts: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def generated(prompt: list[int], *words: str) -> dict[str, Any]:
        ids = ",".join(map(str, prompt))
        command = ["generate", str(artifacts["float32"]), "--prompt-ids", ids, "--max-tokens", "6", "--json"]
        assert main([*command, *words]) == 0
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        return report

    kept = ("--prompt-cache", str(tmp_path / "c.npz"))
    first = generated(PROMPT, *kept)
    assert first["cached"] == 0 and first["ids"] == generated(PROMPT)["ids"]
    again = generated(PROMPT, *kept)
    assert again["cached"] == len(PROMPT) - 1 and again["ids"] == first["ids"]
    longer = [*PROMPT, *first["ids"], 4]
    found = generated(longer, *kept)
    assert found["cached"] >= len(PROMPT) and found["ids"] == generated(longer)["ids"]
    assert generated([9, 8], *kept)["cached"] == 0
    (tmp_path / "c.npz").write_text("nothing")
    command = ["generate", str(artifacts["float32"]), "--prompt-ids", "1", *kept]
    assert main(command) == 2 and "error[HC582]" in capsys.readouterr().err
    command[-1] = str(tmp_path)
    assert main(command) == 2 and "error[HC" in capsys.readouterr().err
