"""Compiled decoders: `float32` and `optimum` read up to eight tokens in a run, `pair` has two sequences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import pytest

import hybridc
from tests.support.decoders import CONTEXT, appending, as_optimum, llama, with_open_lengths


class Artifacts(dict[str, Path]):
    """Each is compiled when it is first asked for: few files of tests need all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, name: str) -> Path:
        model, sizes = DECODERS[name]
        self[name] = self.folder / f"{name}.hyb"
        hybridc.compile(model(), self[name], target="avx2", dims=sizes)
        return self[name]


_ONE, _TWO = {"sequence": [1]}, {"sequence": [1, 8]}
_LENGTHS = {"past_sequence_length": CONTEXT, "total_sequence_length": CONTEXT}
DECODERS: dict[str, tuple[Callable[[], onnx.ModelProto], dict[str, Any]]] = {
    "float32": (with_open_lengths, {**_TWO, **_LENGTHS}),
    "int4": (llama, _ONE),
    "pair": (partial(llama, batch=2, int4=False), _ONE),
    "appending": (appending, {"n": 1, "past": CONTEXT, "total": CONTEXT + 1}),
    "optimum": (
        as_optimum,
        {"batch_size": 1, "sequence_length": [1, 8], "past_sequence_length": CONTEXT},
    ),
}


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Artifacts(tmp_path_factory.mktemp("decoders"))
