"""Tensors that stay bf16 between two kernels: uint16, the upper halves of floats.

A function that writes one ends with a block that rounds, and one that reads one begins with a block that
makes floats of it again, so that every rule reads what such functions compute. Rules for bf16 put packed
lanes together of what they read and never make floats of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import ir, s_tir, te, tirx

from hybridc.schedules.cpu.core.dot_products import bf16_bits
from hybridc.schedules.cpu.core.nest import loads, read_nest
from hybridc.schedules.shapes import index_shape

DTYPE = "uint16"


def rounding(shape: Sequence[int]) -> tirx.PrimFunc:
    """Floats to the nearest bf16 numbers."""
    x = te.placeholder(index_shape(shape), "float32", "x")
    return _function(x, te.compute(x.shape, lambda *i: bf16_bits(x(*i)).astype(DTYPE), name="rounded"))


def widening(shape: Sequence[int]) -> tirx.PrimFunc:
    """The same numbers as floats."""
    x = te.placeholder(index_shape(shape), DTYPE, "x")

    def at(*i: te.Var) -> te.Expr:
        return tirx.reinterpret("float32", x(*i).astype("uint32") << tirx.const(16, "uint32"))

    return _function(x, te.compute(x.shape, at, name="widened"))


def _function(x: te.Tensor, y: te.Tensor) -> tirx.PrimFunc:
    return te.create_prim_func([x, y]).with_attr("tirx.noalias", True)


@dataclass(frozen=True, slots=True)
class Widened:
    """A function that reads floats, in the place of one that makes them of a bf16 tensor first."""

    function: tirx.PrimFunc
    floats: ir.Var | None
    """Its parameter that is the bf16 tensor of the other one; None: there is none, and the function is the
    other one."""
    stored: ir.Var | None

    def kept(self, buffer: ir.Var) -> ir.Var:
        """What a kernel reads in the place of a parameter."""
        return self.stored if self.floats is not None and buffer.same_as(self.floats) else buffer


def without_widening(function: tirx.PrimFunc) -> Widened:
    """Leave out the block that `widening` begins a function with, if it does."""
    nest = read_nest(function)
    first = nest.blocks[0] if nest is not None else None
    if nest is None or first is None or first.name != "widened":
        return Widened(function, None, None)
    (load,) = loads(first.value)
    root = function.body.block
    params = [first.buffer if p.same_as(load.source) else p for p in function.params]
    buffers = [b for b in root.alloc_buffers if not b.same_as(first.buffer)]
    stages = list(root.body)[1:]
    body = stages[0] if len(stages) == 1 else tirx.SeqStmt(stages)
    block = s_tir.SBlock([], [], [], "root", body, alloc_buffers=buffers)
    realize = s_tir.SBlockRealize([], True, block)
    floats = tirx.PrimFunc(params, realize, function.ret_type, function.attrs)
    return Widened(floats, first.buffer, load.source)
