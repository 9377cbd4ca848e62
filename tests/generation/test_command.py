"""`hybridc generate`: tokens and text, and what it refuses."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from hybridc.cli import main
from tests.support.decoders import VOCABULARY, greedy, llama

PROMPT = [5, 17, 200, 3]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(VOCABULARY)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def generated(capsys: Any, *words: str) -> dict[str, Any]:
    assert main(["generate", *words, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


@pytest.mark.isa("avx2")
def test_tokens_and_text(artifacts: dict[str, Path], tokenizer: Path, capsys: Any) -> None:
    path, ids = str(artifacts["int4"]), ",".join(map(str, PROMPT))
    wanted = list(islice(greedy(llama(), PROMPT, in_places=True), 12))
    report = generated(capsys, path, "--prompt-ids", ids, "--max-tokens", "12")
    assert report["ids"] == wanted and report["ended_by"] == "max-tokens"
    assert report["decode"]["tokens"] == 11 and report["decode"]["tokens_per_s"] > 0
    assert report["memory"]["cpu"]["allocated_bytes"] > 0
    text = " ".join(f"w{token}" for token in wanted)
    words = [path, "--prompt", " ".join(f"w{i}" for i in PROMPT), "--tokenizer", str(tokenizer)]
    report = generated(capsys, *words, "--max-tokens", "12")
    assert report["ids"] == wanted and report["text"] == text
    assert main(["generate", *words, "--max-tokens", "12"]) == 0
    printed = capsys.readouterr()
    assert printed.out == text + "\n" and "decode: 11 tokens" in printed.err
    stop = f"w{wanted[4]}"
    report = generated(capsys, *words, "--stop", stop)
    assert report["text"] == text[: text.index(stop)] and report["ended_by"] == "stop"
    report = generated(capsys, *words, "--stop-ids", str(wanted[4]))
    assert report["ids"] == wanted[: wanted.index(wanted[4]) + 1] and report["ended_by"] == "stop-id"


@pytest.mark.isa("avx2")
@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([], "HC500"),
        (["--prompt", "w1"], "HC500"),
        (["--prompt-ids", "1", "--stop", "a"], "HC500"),
        (["--prompt-ids", "1,x"], "HC513"),
        (["--prompt-ids", str(VOCABULARY)], "HC591"),
        (["--prompt-ids", "1", "--max-tokens", "1000"], "HC592"),
        (["--prompt-ids", "1", "--top-p", "2"], "HC596"),
    ],
)
def test_what_makes_no_sense_is_refused(
    words: list[str], code: str, artifacts: dict[str, Path], capsys: Any
) -> None:
    assert main(["generate", str(artifacts["int4"]), *words]) == 2
    assert f"error[{code}]" in capsys.readouterr().err


@pytest.mark.isa("avx2")
def test_a_damaged_tokenizer_and_a_missing_package(
    artifacts: dict[str, Path], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{")
    words = ["generate", str(artifacts["int4"]), "--prompt", "w1", "--tokenizer", str(path)]
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "tokenizers", None)
        assert main(words) == 2
        assert "error[HC594]" in capsys.readouterr().err
    pytest.importorskip("tokenizers")
    assert main(words) == 2
    assert "error[HC595]" in capsys.readouterr().err
