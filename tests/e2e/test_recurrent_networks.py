"""LSTM, GRU and RNN with attributes drawn at random, compiled and held against onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import hybridc
from hybridc.errors import ModelError
from hybridc.ir import Device, Graph
from hybridc.targets import ISAS, missing_flags
from tests.support.expansion import assert_compiled_agrees
from tests.support.recurrent_models import Recurrent, drawn, expected


def assert_agrees(case: Recurrent, folder: Path, target: str) -> Graph:
    """The graph that was made of it."""
    compiled = hybridc.compile(case.model(), folder / "n.hyb", target=target)
    with hybridc.load(folder / "n.hyb", emulate_gpu="1GiB" if "cuda" in target else None) as session:
        found = [result.copy() for result in session.run(None, case.feeds())]
    for result, reference in zip(found, expected(case), strict=True):
        assert result.shape == reference.shape
        scale = np.abs(reference).max()
        np.testing.assert_allclose(result, reference, rtol=0, atol=2e-5 * scale, err_msg=str(case))
    return compiled.graphs[-1]


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(i, marks=pytest.mark.slow) for i in range(4, 40))]
)
def test_random_networks_agree_with_onnxruntime(seed: int, tmp_path: Path) -> None:
    target = ("avx2", "avx512")[seed % 2]
    if missing := missing_flags(ISAS[target]):
        pytest.skip(f"this processor lacks {', '.join(missing)}")
    assert_agrees(drawn(seed), tmp_path, target)


@pytest.mark.parametrize(
    ("cell", "batch"),
    [
        ("LSTM", 7),
        ("GRU", 1),
        *(
            pytest.param(cell, batch, marks=pytest.mark.slow)
            for cell, batch in (("LSTM", 1), ("GRU", 7), ("RNN", 1), ("RNN", 7))
        ),
    ],
)
def test_wide_networks_run_in_parallel(cell: str, batch: int, tmp_path: Path) -> None:
    case = Recurrent(cell, steps=6, batch=batch, hidden=380, direction="bidirectional", lengths=batch > 1)
    graph = assert_agrees(case, tmp_path, "avx2")
    assert len(graph.kernels) <= 3


@pytest.mark.parametrize(
    ("cell", "attributes"),
    [
        ("LSTM", {}),
        pytest.param("GRU", {}, marks=pytest.mark.slow),
        ("GRU", {"linear_before_reset": 1}),
    ],
)
def test_directions_may_be_made_one_after_the_other(
    cell: str, attributes: dict[str, object], tmp_path: Path
) -> None:
    """Where a cache would not hold the weights of both, however many threads there are."""
    case = Recurrent(
        cell, steps=4, batch=5, hidden=410, direction="bidirectional", lengths=True, attributes=attributes
    )
    hybridc.compile(case.model(), tmp_path / "n.hyb", target="avx2", threads=2)
    wanted = expected(case)
    for threads in (1, 2, 3):
        with hybridc.load(tmp_path / "n.hyb", threads=threads) as session:
            found = [result.copy() for result in session.run(None, case.feeds())]
        for result, reference in zip(found, wanted, strict=True):
            np.testing.assert_allclose(result, reference, rtol=0, atol=2e-5 * np.abs(reference).max())


def test_one_initial_state_may_be_both(tmp_path: Path) -> None:
    """Of an LSTM whose result and memory begin with the same tensor."""
    model = Recurrent("LSTM", states=(True, False)).model()
    model.graph.node[0].input[6] = "initial_h"
    feeds = Recurrent("LSTM", states=(True, False)).feeds()
    wanted = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    hybridc.compile(model, tmp_path / "n.hyb", target="avx2")
    with hybridc.load(tmp_path / "n.hyb") as session:
        for result, reference in zip(session.run(None, feeds), wanted, strict=True):
            np.testing.assert_allclose(result, reference, atol=1e-5)


def test_a_gpu_leaves_the_steps_to_the_cpu(tmp_path: Path) -> None:
    graph = assert_agrees(Recurrent("LSTM", hidden=40), tmp_path, "cuda+avx2")
    (steps,) = [kernel for kernel in graph.kernels if kernel.function.startswith("lstm")]
    assert steps.devices == (Device.CPU,)


def test_what_is_not_supported_is_refused_by_name() -> None:
    case = Recurrent("RNN", attributes={"activations": ["Cosine"]})
    with pytest.raises(ModelError, match="RNN with activation Cosine is not supported"):
        hybridc.compile(case.model(), "never.hyb", target="avx2")


@pytest.mark.parametrize(
    ("direction", "dtype", "is_per_column"),
    [("bidirectional", "int8", True), ("forward", "int8", False), ("reverse", "uint8", False)],
)
def test_quantized_weights_give_what_onnxruntime_gives(
    direction: str, dtype: str, is_per_column: bool, tmp_path: Path
) -> None:
    """It rounds inputs and states, too, to 255 steps."""
    random, d, hidden = np.random.default_rng(3), 1 + (direction == "bidirectional"), 16
    shape = (d, 4 * hidden) if is_per_column else (d,)
    info = np.iinfo(dtype)

    def codes(rows: int) -> np.ndarray:
        return random.integers(info.min, info.max + 1, (d, rows, 4 * hidden)).astype(dtype)

    weights = {"w": codes(12), "r": codes(hidden), "b": random.standard_normal((d, 8 * hidden)).astype("f4")}
    for name in "wr":
        weights[f"{name}s"] = random.uniform(0.001, 0.003, shape).astype("f4")
        weights[f"{name}z"] = np.full(shape, 0 if dtype == "int8" else 120, dtype)
    assert_compiled_agrees(
        tmp_path,
        f"g (float[7,2,12] x) => (float[7,{d},2,{hidden}] y, float[{d},2,{hidden}] h)"
        f' {{ y, h = com.microsoft.DynamicQuantizeLSTM <direction="{direction}", hidden_size={hidden}>'
        ' (x, w, r, b, "", "", "", "", ws, wz, rs, rz) }',
        weights,
        tolerance=2e-2,
    )
