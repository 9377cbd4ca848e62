"""The gradient of taking rows: rows are added where they were taken from, several of them in one place."""

from __future__ import annotations

from tvm import te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from hybridc.passes.training.gradients import extents

COLUMNS = 16
"""Columns that one thread sums, row after row: a vector of AVX-512. No two threads write one element, and the
order is fixed."""


def take_gradient(
    outer: int, rows: int, inner: int, taken: int, dtype: str, index_dtype: str
) -> tirx.PrimFunc:
    """dy [outer, taken, inner] and indices [taken], which count modulo `rows`, to dx [outer, rows, inner]."""
    grad = te.placeholder(extents((outer, taken, inner)), dtype, "dy")
    indices = te.placeholder(extents((taken,)), index_dtype, "indices")
    width = min(COLUMNS, inner)
    chunks = -(-inner // width)

    def build(dy_buffer: tirx.Buffer, index_buffer: tirx.Buffer, out_buffer: tirx.Buffer) -> tirx.Stmt:
        dy, index, out = (T.buffer_proxy(buffer) for buffer in (dy_buffer, index_buffer, out_buffer))
        with IRBuilder() as builder:
            with T.seq_scope():
                with T.parallel(0, outer * rows) as row, T.serial(0, inner) as column:
                    out[row * inner + column] = tirx.const(0, dtype)
                with (
                    T.parallel(0, outer * chunks) as task,
                    T.serial(0, taken) as t,
                    T.serial(0, width) as lane,
                ):
                    place = tirx.floordiv(task, chunks)
                    column = tirx.floormod(task, chunks) * width + lane
                    target = tirx.floormod(index[t].astype("int64"), rows)
                    with T.If(column < inner), T.Then():
                        at = (place * rows + target) * inner + column
                        out[at] = out[at] + dy[(place * taken + t) * inner + column]
            return builder.get()

    buffer = tirx.decl_buffer(extents((outer, rows, inner)), dtype, "dx", layout=None)
    out = te.extern(
        [extents((outer, rows, inner))],
        [grad, indices],
        lambda inputs, outputs: build(inputs[0], inputs[1], outputs[0]),
        dtype=dtype,
        out_buffers=[buffer],
        name="take_gradient",
    )
    return te.create_prim_func([grad, indices, out])
