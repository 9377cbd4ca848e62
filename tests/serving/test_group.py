"""Artifacts that share a budget are served as any others."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tests.support.artifacts import SHAPE, hybrid_model, weight_array
from tests.support.serving import Server, needs_kserve

pytestmark = needs_kserve


def test_members_of_a_group_answer_in_turns(tmp_path: Path) -> None:
    """y = -(a + relu(a)) of a = x @ w, by numpy: partly on the emulated GPU, whose arena both members use."""
    paths = [hybrid_model().write(tmp_path / f"{name}.hyb") for name in ("first", "second")]
    options = ("--gpu-memory", "64KiB", "--runs", "first=2", "--emulate-gpu", "1MiB")
    with Server(paths, *options, log=tmp_path / "log") as server:
        about = json.loads(server.request("GET", "/v2/models/first")[1])

        def ask(number: int) -> None:
            x = np.random.default_rng(number).standard_normal(SHAPE, dtype=np.float32)
            given = {**about["inputs"][0], "data": x.tolist()}
            path = f"/v2/models/{('first', 'second')[number % 2]}/infer"
            headers = {"Content-Type": "application/json"}
            status, answer = server.request("POST", path, json.dumps({"inputs": [given]}).encode(), headers)
            assert status == 200, answer
            a = x.astype(np.float64) @ weight_array((8, 8))
            y = np.reshape(json.loads(answer)["outputs"][0]["data"], SHAPE)
            np.testing.assert_allclose(y, -(a + np.maximum(a, 0)), rtol=1e-5, atol=1e-5)

        assert server.models == ["first", "second"]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(ask, range(12)))
        assert server.metric("hybridc_memory_bytes", device="gpu") > 0
