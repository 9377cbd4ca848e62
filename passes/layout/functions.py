"""Rewrite PrimFuncs of training that compute each channel from itself alone to the blocked layout.

Gradients of pooling and normalisation, statistics, derivatives of activations: each TensorIR block of such a
function computes an element `[n, c, y, x]`, or one number per channel `[c]`, from elements of the same
channel. With c = cb * b + lane it does the same for `[n, cb, y, x, lane]` and `[cb, lane]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import ir, s_tir, te, tirx

from hybridc.schedules.blocked_operators import extents, sum_over
from hybridc.schedules.cpu.core.nest import Nest, NestBlock, read_nest, replace_loads, substitute
from hybridc.schedules.shapes import shape_of


@dataclass(frozen=True, slots=True)
class Channels:
    """A number of channels, and the size `lanes` of their blocks, which divides it."""

    count: int
    lanes: int

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return self.count // self.lanes

    def axis(self, shape: Sequence[int]) -> int | None:
        """The axis of the channels in a tensor of this shape; None if it has none."""
        if len(shape) == 4 and shape[1] == self.count:
            return 1
        return 0 if tuple(shape) == (self.count,) else None

    def shape(self, plain: Sequence[int]) -> tuple[int, ...]:
        """The blocked shape of a tensor: the lanes are the last axis."""
        axis = self.axis(plain)
        if axis is None:
            return tuple(plain)
        return (*plain[:axis], self.blocks, *plain[axis + 1 :], self.lanes)


def in_blocks(function: tirx.PrimFunc, channels: Channels) -> tirx.PrimFunc | None:
    """The function of blocked tensors; None if it mixes channels, or has a form that is not recognised.

    Tensors `[N, C, H, W]` become `[N, CB, H, W, b]` and `[C]` become `[CB, b]`; others stay as they are.
    """
    nest = read_nest(function)
    if nest is None:
        return None
    written = {block.buffer for block in nest.blocks}
    tensors: dict[ir.Var, te.Tensor] = {}
    for number, parameter in enumerate(function.params):
        if parameter not in written:
            shape = channels.shape(shape_of(parameter))
            tensors[parameter] = te.placeholder(extents(*shape), str(parameter.dtype), f"p{number}")
    notes = _annotations(function, nest)
    try:
        for block in nest.blocks:
            tensors[block.buffer] = _Rewriter(block, channels, tensors).tensor(notes[block.name])
    except _NotChannelwise:
        return None
    made = te.create_prim_func([tensors[parameter] for parameter in function.params])
    return made.with_attr("tirx.noalias", True)


class _NotChannelwise(Exception):
    """A TensorIR block mixes channels."""


def _annotations(function: tirx.PrimFunc, nest: Nest) -> dict[str, dict[str, Any]]:
    schedule = s_tir.Schedule(function)
    return {b.name: dict(schedule.get(schedule.get_sblock(b.name)).annotations) for b in nest.blocks}


@dataclass(frozen=True, slots=True)
class _Rewriter:
    """One TensorIR block, and the blocked form of its operands."""

    block: NestBlock
    channels: Channels
    tensors: Mapping[ir.Var, te.Tensor]

    def tensor(self, annotations: dict[str, Any]) -> te.Tensor:
        block, shape = self.block, shape_of(self.block.buffer)
        axis = self.channels.axis(shape)
        reduce = {v: sum_over(block.extents[v], v.name) for v in block.reduce}

        def body(*iterators: te.Var) -> te.Expr:
            index = list(iterators)
            place: tuple[te.Var, te.Var] | None = None
            if axis is not None:
                place = index[axis], index.pop()
                index[axis] = place[0] * self.channels.lanes + place[1]
            at = {v: i for v, i in zip(block.indices, index, strict=True) if isinstance(v, ir.Var)}
            at |= {v: tirx.const(0, str(v.ty.dtype)) for v in block.spatial if v not in at}
            channel = None if axis is None else block.indices[axis]
            value = self._value({**at, **{v: r.var for v, r in reduce.items()}}, channel, place)
            return te.sum(value, axis=list(reduce.values())) if reduce else value

        blocked = extents(*self.channels.shape(shape))
        return te.compute(blocked, body, name=block.name, attrs=annotations or None)

    def _value(
        self, at: Mapping[ir.Var, ir.Expr], channel: ir.Expr | None, place: tuple[te.Var, te.Var] | None
    ) -> ir.Expr:
        """The value, or what is summed, at a point whose channel is at `place`."""

        missing: list[ir.Var] = []

        def load(buffer: ir.Var, indices: Sequence[ir.Expr]) -> ir.Expr | None:
            axis, moved = self.channels.axis(shape_of(buffer)), [substitute(i, at) for i in indices]
            own = axis is None or (channel is not None and indices[axis].same_as(channel))
            if buffer not in self.tensors or not own:
                missing.append(buffer)
                return None
            if axis is not None and place is not None:
                moved[axis] = place[0]
                moved.append(place[1])
            return self.tensors[buffer](*moved)

        value = substitute(replace_loads(self._operand(), load), at)
        if missing:  # an exception does not keep its class on its way through TVM's walk
            raise _NotChannelwise
        return value

    def _operand(self) -> ir.Expr:
        value = self.block.value
        if not self.block.reduce:
            return value
        own = isinstance(value, tirx.Add) and isinstance(value.a, ir.TensorLoad)
        if not own or not value.a.source.same_as(self.block.buffer):
            raise _NotChannelwise
        return value.b
