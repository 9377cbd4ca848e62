"""Networks beside a GPU in layouts that are drawn, not chosen."""

from __future__ import annotations

import random
from collections.abc import Mapping, Set
from typing import Any

import pytest

from hybridc.passes.layout import channels_last as layout
from hybridc.passes.phases import TiledNetwork
from hybridc.passes.program.program import Program
from hybridc.passes.stages import channels_last, tile


def draw_layouts(monkeypatch: pytest.MonkeyPatch, seed: int, share: float = 0.7) -> None:
    """From now on such a share of the tensors that may have channels last has them, and networks are planned
    in no other form."""
    draw = random.Random(seed)

    def chosen(program: Program, convolutions: Mapping[str, Set[int]], us: layout.Us) -> frozenset[str]:
        groups = layout._groups(layout._calls(program), convolutions)
        return frozenset().union(*(g for g in groups if draw.random() < share))

    def laid_out(whole: Any, tilings: tuple[Any, ...], peak_bytes: int) -> TiledNetwork:
        found = [t for t in tilings if any(tensor.channels_last for tensor in t.graph.tensors)]
        assert found
        return TiledNetwork(whole, tuple(found), peak_bytes)

    monkeypatch.setattr(channels_last, "choose_channels_last", chosen)
    monkeypatch.setattr(tile, "TiledNetwork", laid_out)
