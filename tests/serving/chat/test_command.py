"""`hybridc serve --tokenizer`: options that do not fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridc.cli import main
from tests.support.serving import needs_kserve

pytestmark = [needs_kserve, pytest.mark.isa("avx2")]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["one", "--sequences", "2"], "HC500"),
        (["one", "--chat-template", "x.jinja"], "HC500"),
        (["one", "two", "--tokenizer", "TOKENIZER"], "HC500"),
        (["one", "--tokenizer", "TOKENIZER", "--batch", "N"], "HC500"),
        (["one", "--tokenizer", "TOKENIZER", "--stop-ids", "x"], "HC513"),
        (["one", "--tokenizer", "missing.json"], "HC530"),
        (["one", "--tokenizer", "BROKEN"], "HC595"),
        (["one", "--tokenizer", "TOKENIZER", "--chat-template", "BROKEN"], "HC595"),
    ],
)
def test_refused(
    words: list[str], code: str, decoders: dict[str, Path], tokenizer: Path, tmp_path: Path, capsys: Any
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("{% for")
    known = {**decoders, "TOKENIZER": tokenizer, "BROKEN": broken}
    assert main(["serve", *(str(known.get(word, word)) for word in words)]) == 2
    assert f"error[{code}]" in capsys.readouterr().err
