"""Two small networks, and servers of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import hybridc
from tests.support.expansion import parsed
from tests.support.serving import Server

PAIR = """g (float[N, 6] x, int64[N, 2] ids) => (float[N, 4] y, float[N, 2, 3] rows)
<float[6, 4] w, float[5, 3] table> {
    h = MatMul(x, w)
    y = Tanh(h)
    rows = Gather(table, ids)
}"""
"""With an open batch, and indices that may be wrong."""

TYPES = """g (bool[2, 3] choice, float16[2, 3] half, uint8[2, 3] small)
=> (float16[2, 3] chosen, bool[2, 3] no) {
    other = Cast<to = 10>(small)
    chosen = Where(choice, half, other)
    no = Not(choice)
}"""


NARROW = "g (bfloat16[2, 3] x) => (bfloat16[2, 3] y) { y = Neg(x) }"
"""Of a type that the protocol does not have."""


def pair_model() -> onnx.ModelProto:
    model = parsed(PAIR)
    random = np.random.default_rng(0)
    for name, shape in (("w", (6, 4)), ("table", (5, 3))):
        array = random.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


@pytest.fixture(scope="session")
def models() -> dict[str, onnx.ModelProto]:
    """By the names of their artifacts; `listed` is `pair` with sizes that are listed."""
    return {"pair": pair_model(), "listed": pair_model(), "types": parsed(TYPES), "narrow": parsed(NARROW)}


@pytest.fixture(scope="session")
def artifact(
    models: dict[str, onnx.ModelProto], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Of a model, compiled when it is first asked for."""
    folder = tmp_path_factory.mktemp("served")
    dims: dict[str, dict[str, Any]] = {"pair": {"N": "1..8"}, "listed": {"N": [2, 8]}}

    @functools.cache
    def compiled(name: str) -> Path:
        path = folder / f"{name}.hyb"
        hybridc.compile(models[name], path, target="avx2", dims=dims.get(name))
        return path

    return compiled


@pytest.fixture(scope="session")
def server(artifact: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Of all networks, with requests joined."""
    log = tmp_path_factory.mktemp("log") / "stderr"
    served = [artifact(name) for name in ("pair", "listed", "types")]
    with Server(served, "--batch", "N", log=log) as running:
        yield running
