"""The networks whose sessions are made to fail: together they make every call of CUDA that sessions make."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import hybridc
from hybridc import emulator, models
from tests.fault_injection.trial import Network
from tests.support.artifacts import SHAPE, hybrid_model, streaming_model, weight_array

X = np.random.default_rng(3).standard_normal(SHAPE, dtype=np.float32)
EMULATED_BYTES = 1 << 28


def small_networks(folder: Path) -> tuple[Network, ...]:
    """Copies in both directions, a CUDA graph, and weights that are resident, streamed or in slots."""
    emulator.start(EMULATED_BYTES)
    feeds, w, wide = {"the/x": X}, weight_array((8, 8)).astype(np.float64), X.astype(np.float64)
    both = hybrid_model().write(folder / "both.hyb")
    streamed = streaming_model().write(folder / "streamed.hyb")
    product, positive = wide @ w, np.maximum(wide, 0) @ w @ w
    return (
        Network("both_devices", both, feeds, (-(np.maximum(product, 0) + product),)),
        Network("streamed", streamed, feeds, (positive,)),
        Network("slots", streamed, feeds, (positive,), slot_bytes=64),
    )


def compiled_network(folder: Path) -> Network:
    """LeNet-5 on the GPU, with half the memory that it needs there, and the results of ONNX Runtime."""
    import onnxruntime

    emulator.start(EMULATED_BYTES)
    model = models.build("lenet")
    path = folder / "lenet.hyb"
    pins = {"*": "gpu"}  # where some weights are streamed
    hybridc.compile(model, path, target="cuda:sm_75+avx2", gpu_memory="50%", pins=pins, plan_seconds=0.2)
    reference = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    [port] = reference.get_inputs()
    feeds = {port.name: np.random.default_rng(5).standard_normal(port.shape, dtype=np.float32)}
    return Network("lenet at 50%", path, feeds, tuple(reference.run(None, feeds)), tolerance=1e-4)
