"""Branches and loops that torch.jit.script exports, compiled, run and bundled, against onnxruntime."""

from __future__ import annotations

import io
import subprocess
import warnings
from collections.abc import Sequence
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
from hybridc.ir import Device
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


ROWS, WIDTH = 64, 64
RESULT_BYTES = 4 * ROWS * WIDTH
BRANCHES = {"taken": 128, "other": 256}
"""Of an If, how wide each is inside."""


def _branches(names: Sequence[str]) -> onnx.ModelProto:
    """y of x: three layers, those of the first branch where x has a positive sum; or of one branch alone."""
    random, weights, parts = np.random.default_rng(0), [], []
    for name, wide in BRANCHES.items():
        shapes = ((WIDTH, wide), (wide, wide), (wide, WIDTH))
        for i, shape in enumerate(shapes if name in names else ()):
            values = random.standard_normal(shape).astype(np.float32) / np.float32(np.sqrt(shape[0]))
            weights.append(onnx.numpy_helper.from_array(values, f"{name}{i}"))
        layers = " ".join(
            f"{name}m{i} = MatMul({f'{name}y{i - 1}' if i else 'x'}, {name}{i}) {name}y{i} = Tanh({name}m{i})"
            for i in range(3)
        )
        if name in names:
            parts.append((name, layers))
    kind = f"float[{ROWS}, {WIDTH}]"
    if len(parts) == 1:
        [(name, layers)] = parts
        text = f"{layers} z = Identity({name}y2)"
    else:
        (one, first), (other, second) = parts
        text = f"""s = ReduceSum<keepdims = 0>(x) none = Constant<value = float {{0}}>() c = Greater(s, none)
        z = If(c) <then_branch = t () => ({kind} {one}y2) {{ {first} }},
                   else_branch = e () => ({kind} {other}y2) {{ {second} }}>"""
    graph = onnx.parser.parse_graph(f"g ({kind} x) => ({kind} y) {{ {text} y = Add(z, x) }}")
    graph.initializer.extend(weights)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)


@pytest.mark.parametrize(
    "names", [("taken", "other"), pytest.param(("other", "taken"), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("target", ["avx2", pytest.param("cuda:sm_75+avx2", marks=pytest.mark.slow)])
def test_two_branches_need_the_memory_of_the_larger(
    target: str, names: tuple[str, str], tmp_path: Path
) -> None:
    """And that of the first one's result, which a choice reads behind the second."""
    device, options = Device.CPU, dict[str, Any](target=target, threads=2)
    if target != "avx2":
        device = Device.GPU
        options |= {"machine": EAGER_GPU, "plan_seconds": 0.2}
    largest = 0
    for name in names:
        hybridc.compile(_branches([name]), tmp_path / name, **options)
        largest = max(largest, open_artifact(tmp_path / name).plan.arena_bytes(device))
    most = largest + RESULT_BYTES + 1024
    model, path = _branches(names), tmp_path / "both.hyb"
    if device is Device.GPU:
        options["gpu_memory"] = f"{most // 1024}KiB"
    hybridc.compile(model, path, **options)
    assert open_artifact(path).plan.arena_bytes(device) <= most
    reference = exact_session(model)
    with hybridc.load(path, emulate_gpu=None if device is Device.CPU else "64MiB") as session:
        for sign in (1, -1):
            x = (np.random.default_rng(1).standard_normal((ROWS, WIDTH)) + sign).astype(np.float32)
            [found], [wanted] = session.run(None, {"x": x}), reference.run(None, {"x": x})
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
        assert session.memory()[device].allocated_bytes <= most


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
