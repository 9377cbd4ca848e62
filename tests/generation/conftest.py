"""Compiled decoders: `float32` and `optimum` read up to eight tokens in a run, `pair` has two sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

import hybridc
from tests.support.decoders import CONTEXT, appending, as_optimum, llama, with_open_lengths


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, one, two = tmp_path_factory.mktemp("decoders"), {"sequence": [1]}, {"sequence": [1, 8]}
    fixed = {"n": 1, "past": CONTEXT, "total": CONTEXT + 1}
    lengths = {"past_sequence_length": CONTEXT, "total_sequence_length": CONTEXT}
    made: dict[str, tuple[onnx.ModelProto, dict[str, Any]]] = {
        "float32": (with_open_lengths(), {**two, **lengths}),
        "int4": (llama(), one),
        "pair": (llama(batch=2, int4=False), one),
        "appending": (appending(), fixed),
        "optimum": (
            as_optimum(),
            {"batch_size": 1, "sequence_length": [1, 8], "past_sequence_length": CONTEXT},
        ),
    }
    for name, (model, sizes) in made.items():
        hybridc.compile(model, folder / f"{name}.hyb", target="avx2", dims=sizes)
    return {name: folder / f"{name}.hyb" for name in made}
