"""The networks, and the shares of their memory that they are planned at."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import onnx
from cpu import SUITE as CPU_SUITE
from drawn.attention import encoder
from drawn.depthwise import convnext

from hybridc import models

LEAST_SHARE, MOST_SHARE = 0.08, 0.95
"""Of what a network needs entirely on the GPU."""
NETWORKS: dict[str, Callable[[], onnx.ModelProto]] = {
    **{name: partial(models.build, name, **options) for name, options in CPU_SUITE.items()},
    "resnet152": partial(models.build, "resnet152", batch=4),
    # these four are in no other table of plans
    "googlenet": partial(models.build, "googlenet"),
    "minilm": partial(models.build, "bert", tokens=128, layers=6, hidden=384, heads=12),
    "convnext": partial(convnext, 224, 64, (2, 3, 2)),
    "encoder": partial(encoder, 1500, 8, 64, 2),
}


def drawn_shares(name: str, count: int, seed: int) -> list[float]:
    """The first `count` shares that a seed gives a network: more of them begin with the same ones."""
    rng = np.random.default_rng((seed, list(NETWORKS).index(name)))
    return [round(float(rng.uniform(LEAST_SHARE, MOST_SHARE)), 4) for _ in range(count)]
