"""Branches and loops that torch.jit.script exports, compiled, run and bundled, against onnxruntime."""

from __future__ import annotations

import io
import subprocess
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import hybridc
from hybridc import emulator
from hybridc.artifact import open_artifact
from hybridc.bundle import write_bundle
from tests.support.exact_reference import exact_session
from tests.support.machines import EAGER_GPU

torch = pytest.importorskip("torch")
LOOP = "/Loop"


@pytest.fixture(scope="module")
def scripted() -> onnx.ModelProto:
    """One of two layers by the sign of a sum, then steps that grow a state, some of them more, up to 6."""

    class Network(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x):  # type: ignore[no-untyped-def]
            if bool(x.sum() > 0):
                y = torch.relu(self.one(x))
            else:
                y = torch.tanh(self.other(x))
            i = 0
            while bool(y.abs().max() < 50) and i < 6:
                y = y * 2.5
                if bool(y[0, 0] > 1):
                    y = y + 1
                i += 1
            return y, torch.tensor(i)

    torch.manual_seed(0)
    file, names = io.BytesIO(), {"input_names": ["x"], "output_names": ["y", "n"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = torch.jit.script(Network().eval())
        torch.onnx.export(network, (torch.zeros(4, 8),), file, dynamo=False, opset_version=17, **names)
    return onnx.load_from_string(file.getvalue())


def _fed(seed: int) -> dict[str, np.ndarray]:
    dice = np.random.default_rng(seed)
    return {"x": ((1 + seed) * dice.standard_normal((4, 8)) + (-1) ** seed).astype(np.float32)}


def test_a_scripted_network_agrees(scripted: onnx.ModelProto, tmp_path: Path) -> None:
    reference, path, trips = exact_session(scripted), tmp_path / "m.hyb", set()
    hybridc.compile(scripted, path, target="avx2", plan_seconds=0.05, bounds={LOOP: 6})
    bundle = write_bundle(path, tmp_path / "bundle").path
    with hybridc.load(path) as session:
        for seed in range(6):
            y, n = reference.run(None, _fed(seed))
            found = session.run(None, _fed(seed))
            np.testing.assert_allclose(found[0], y, rtol=1e-4, atol=1e-4)
            assert found[1] == n
            trips.add(int(n))
    assert len(trips) > 2
    np.save(tmp_path / "x.npy", _fed(5)["x"])
    words = ["--input", f"x={tmp_path / 'x.npy'}", "--output", str(tmp_path / "made")]
    subprocess.run([str(bundle / "run"), *words], check=True, capture_output=True)
    made = [np.load(file) for file in sorted((tmp_path / "made").glob("*.npy"))]
    assert {array.shape for array in made} == {(4, 8), ()}
    for array in made:
        np.testing.assert_array_equal(array, found[0] if array.ndim else found[1])


def test_half_the_memory_of_a_gpu_is_enough(scripted: onnx.ModelProto, tmp_path: Path) -> None:
    reference, path = exact_session(scripted), tmp_path / "m.hyb"
    emulator.start(1 << 22)
    try:
        options: dict[str, Any] = {"target": "cuda+avx2", "gpu_memory": "50%", "machine": EAGER_GPU}
        hybridc.compile(scripted, path, plan_seconds=0.05, bounds={LOOP: 6}, **options)
        guarded = [kernel for kernel in open_artifact(path).graph.kernels if kernel.guards]
        assert len(guarded) > 12
        with hybridc.load(path) as session:
            for seed in range(6):
                wanted = reference.run(None, _fed(seed))
                for found, value in zip(session.run(None, _fed(seed)), wanted, strict=True):
                    np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-4)
            held = emulator.statistics()
            assert held.used_bytes <= (open_artifact(path).plan.budget_bytes or 0)
    finally:
        emulator.reset()


@pytest.mark.slow
def test_trips_that_slice_at_other_places_agree(tmp_path: Path) -> None:
    """So many that their functions are compiled by families."""
    trips = 110
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[4] x, float[{trips}, 4] z) => (float[4] y) {{
            y = Scan<num_scan_inputs = 1, body = b (float[4] s, float[4] c) => (float[4] t) {{
                a = Add(s, c)
                t = Tanh(a)
            }}>(x, z)
        }}"""
    model = onnx.parser.parse_model(text)
    hybridc.compile(model, tmp_path / "model.hyb", target="avx2", cache=False)
    dice = np.random.default_rng(0)
    fed = {name: dice.standard_normal(s).astype(np.float32) for name, s in (("x", 4), ("z", (trips, 4)))}
    with hybridc.load(tmp_path / "model.hyb") as session:
        [found] = session.run(None, fed)
    [wanted] = exact_session(model).run(None, fed)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert b"_family" in (tmp_path / "model.hyb" / "library.so").read_bytes()
