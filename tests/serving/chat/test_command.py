"""`hybridc serve --tokenizer`: options that do not fit together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.process import PATIENCE_SECONDS
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
    words: list[str], code: str, decoders: dict[str, Path], tokenizer: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("{% for")
    known = {**decoders, "TOKENIZER": tokenizer, "BROKEN": broken}
    # a process of its own: KServe and tritonclient cannot be imported in one
    command = [sys.executable, "-m", "hybridc", "serve", *(str(known.get(word, word)) for word in words)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert ran.returncode == 2 and f"error[{code}]" in ran.stderr
