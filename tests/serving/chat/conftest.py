"""Small decoders with a tokenizer of made-up words, and servers of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hybridc
from tests.support.decoders import CONTEXT, VOCABULARY, llama, with_open_lengths
from tests.support.serving import Server

TEMPLATE = "{% for m in messages %}{{ bos_token if m.role == 'user' }} {{ m.content }} {% endfor %}w2"
"""A user's turn begins with the first token, and an answer comes behind w2."""


@pytest.fixture(scope="session")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`one` has one sequence and runs of up to eight tokens, `two` has two and reads one by one."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("decoders")
    open_sizes: dict[str, Any] = {
        "sequence": [1, 8],
        "past_sequence_length": CONTEXT,
        "total_sequence_length": CONTEXT,
    }
    hybridc.compile(with_open_lengths(), folder / "one.hyb", target="avx2", dims=open_sizes)
    pair = llama(batch=2, int4=False)
    hybridc.compile(pair, folder / "two.hyb", target="avx2", dims={"sequence": [1]})
    return {name: folder / f"{name}.hyb" for name in ("one", "two")}


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tokenizer")
    words = {f"w{i}": i for i in range(VOCABULARY)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": {"content": "w1"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder / "tokenizer.json"


@pytest.fixture(scope="session", params=["one", "two"])
def server(
    request: pytest.FixtureRequest,
    decoders: dict[str, Path],
    tokenizer: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    """Of a decoder with eight sequences."""
    log = tmp_path_factory.mktemp("log") / "stderr"
    options = ("--tokenizer", str(tokenizer), "--sequences", "8")
    with Server([decoders[request.param]], *options, log=log) as running:
        yield running
