"""Weights of blocked convolutions: packed at compile time if they are known, else by a function in every
run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import relax

from hybridc.passes.layout.state import Layout
from hybridc.passes.program.program import tensor_shape
from hybridc.schedules.blocked_operators import pack_weight


@dataclass(frozen=True, slots=True)
class ConvWeight:
    """Weights `[O, I, KH, KW]`."""

    expr: relax.Expr | None
    """Their variable in the old program."""
    value: np.ndarray | None
    """If it is known at compile time."""

    @property
    def shape(self) -> tuple[int, ...]:
        """`(O, I, KH, KW)`."""
        return tensor_shape(self.expr) if self.value is None else self.value.shape

    def packed(self, layout: Layout, lanes: int, input_lanes: int | None) -> relax.Var:
        """`[OB, IB, KH, KW, i, o]`; for plain data, whose `input_lanes` is None, `[OB, KH, KW, I, o]`."""
        outputs, inputs, kh, kw = self.shape
        blocks, width = -(-outputs // lanes), input_lanes or inputs
        input_blocks = -(-inputs // width)
        taps = (kh, kw) if input_lanes is None else (input_blocks, kh, kw)
        shape = (blocks, *taps, width, lanes)
        if self.value is None:
            return self._packed_later(layout, shape, lanes, input_lanes)
        padded = np.zeros((blocks * lanes, input_blocks * width, kh, kw), self.value.dtype)
        padded[:outputs, :inputs] = self.value
        split = padded.reshape(blocks, lanes, input_blocks, width, kh, kw).transpose(0, 2, 4, 5, 3, 1)
        return layout.builder.weight(np.ascontiguousarray(split).reshape(shape), "weight")

    def packed_depthwise(self, layout: Layout, lanes: int) -> relax.Var:
        """`[CB, KH, KW, c]` of weights `[C, 1, KH, KW]`."""
        channels, _, kh, kw = self.shape
        blocks = -(-channels // lanes)
        if self.value is None:
            return self._packed_later(layout, (blocks, kh, kw, lanes), lanes, None, depthwise=True)
        padded = np.zeros((blocks * lanes, kh, kw), self.value.dtype)
        padded[:channels] = self.value[:, 0]
        packed = np.ascontiguousarray(padded.reshape(blocks, lanes, kh, kw).transpose(0, 2, 3, 1))
        return layout.builder.weight(packed, "weight")

    def _packed_later(
        self,
        layout: Layout,
        shape: tuple[int, ...],
        lanes: int,
        input_lanes: int | None,
        *,
        depthwise: bool = False,
    ) -> relax.Var:
        assert self.expr is not None
        key = ("pack_weight", self.shape, lanes, input_lanes, depthwise)
        return layout.call(
            key,
            lambda: pack_weight(self.shape, lanes, input_lanes, depthwise=depthwise),
            [layout.as_plain(self.expr)],
            shape,
        )
