"""Sharing: what a network computes several times is computed once.

Exporters and the expansion of fused operators write positions, masks and angles anew for each layer.
"""

from __future__ import annotations

import tvm_ffi
from tvm import relax

from hybridc.ir.bind import size_bytes
from hybridc.passes.program.program import (
    Program,
    ProgramBuilder,
    constant_name,
    is_op,
    substitute,
)
from hybridc.placeholders import is_placeholder

LIMIT_BYTES = 1 << 20
"""Of a result that is kept until its last reader instead of being computed again. Masks of a prompt fit;
large activations would take memory from the layers between, and what computes them joins its reader."""
UNBUDGETED_LIMIT_BYTES = 16 << 20
"""The same where memory has no budget: causal masks of eight prompts."""

_READ_IN_PLACE = ("permute_dims", "broadcast_to", "repeat", "quantize", "dequantize")
"""A kernel that is the only reader does these while it reads."""


def share_equal(program: Program, limit_bytes: int = LIMIT_BYTES) -> Program:
    """Bind equal expressions of at most `limit_bytes` once. Small weights of the same value count as equal.

    Requires: `main` canonical.
    Ensures: a shared binding has the origins of the first that it stands for, so that a pin on the nodes of a
    later layer does not move what all layers read. Weights that are not read count as different.
    Raises: nothing of its own.
    """
    builder = ProgramBuilder(program.inputs)
    new = builder.take_parameters(program)
    weights: dict[str, relax.Expr] = {}
    for parameter, weight in new.items():
        value = program.weights.get(parameter.name)
        if value is not None and value.nbytes <= LIMIT_BYTES and not is_placeholder(value):
            new[parameter] = weights.setdefault(constant_name(value), weight)
    made: dict[int, list[tuple[relax.Expr, relax.Var]]] = {}
    for binding in program.bindings:
        expr = substitute(binding.value, lambda var: new.get(var, var))
        alike = made.setdefault(tvm_ffi.structural_hash(expr), []) if _is_shared(binding, limit_bytes) else []
        var = next((var for other, var in alike if tvm_ffi.structural_equal(other, expr)), None)
        if var is None:
            copy = substitute(expr, lambda var: var)  # without the type that the builder notes
            var = builder.emit(expr, program.origins.get(binding.var.name, ()), binding.var.name)
            alike.append((copy, var))
        new[binding.var] = var
    outputs = [substitute(output, lambda var: new.get(var, var)) for output in program.outputs]
    return builder.finish(outputs, program.functions)


def _is_shared(binding: relax.VarBinding, limit_bytes: int) -> bool:
    types = binding.var.ty
    results = list(types.fields) if isinstance(types, relax.TupleType) else [types]
    if is_op(binding.value, *_READ_IN_PLACE) or not all(isinstance(t, relax.TensorType) for t in results):
        return False
    sizes = (size_bytes(tuple(int(n) for n in t.shape.values), str(t.dtype)) for t in results)
    return sum(sizes) <= limit_bytes
