"""Networks and operators drawn at random, by family: points of a speed that nobody tuned for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from drawn.attention import draw_attention
from drawn.case import Case
from drawn.depthwise import draw_depthwise
from drawn.networks import draw_network
from drawn.operators import draw_operator
from drawn.quantized import draw_quantized
from drawn.recurrent import draw_recurrent
from drawn.speech import draw_speech

FAMILIES: dict[str, Callable[[np.random.Generator], Case]] = {
    "recurrent": draw_recurrent,
    "attention": draw_attention,
    "speech": draw_speech,
    "depthwise": draw_depthwise,
    "quantized": draw_quantized,
    "operators": draw_operator,
    "networks": draw_network,
}


def draw(family: str, count: int, seed: int) -> list[Case]:
    """The first `count` networks that a seed gives: more of them begin with the same ones."""
    return [FAMILIES[family](np.random.default_rng((seed, i))) for i in range(count)]
