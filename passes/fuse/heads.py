"""Products of one tensor with several weights become one product where attention reads what they make.

    reshape(x @ Wq + bq), reshape(x @ Wk + bk), ...  ->  parts of reshape(x @ [Wq Wk ...] + [bq bk ...])

The queries, keys and values of an encoder are such products. One by one they are three launches, each of too
few blocks for a large GPU. Parts are neighbouring heads, which `fuse_attention` reads where they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax

from hybridc.passes.program.program import (
    Program,
    ProgramBuilder,
    count_uses,
    is_op,
    substitute,
    tensor_dtype,
    tensor_shape,
    variables,
)
from hybridc.placeholders import is_placeholder, placeholder

MOST_BYTES = 64 << 20
"""Of a joined weight, which is a copy: a product with a larger one fills a GPU by itself."""


@dataclass(frozen=True, slots=True)
class _Heads:
    """A product that is read as heads, `[..., heads, depth]`."""

    source: relax.Var
    weight: relax.Var
    """`[channels, heads * depth]`."""
    bias: relax.Var | None
    """`[heads * depth]`."""
    members: tuple[relax.Var, ...]
    """The product, the sum with the bias if there is one, and the reshaped one."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tensor_shape(self.members[-1])

    @property
    def form(self) -> tuple[object, ...]:
        """What is equal of heads that can be joined."""
        *front, _, depth = self.shape
        return self.source, self.bias is None, tuple(front), depth


def join_heads(
    program: Program, together: Sequence[Sequence[relax.Var]], known: Mapping[str, np.ndarray]
) -> Program:
    """Replace those products by one whose heads are read `together`, of the same tensor and of one depth.

    `known` are weights by name: what was joined for another program of the network is not copied again.

    Requires: `main` canonical.
    Ensures: no joined product touches more bytes than the largest product of the program does, so that a
    network that was cut up to a limit stays below it. Of its heads each reader has a view, and a
    `strided_slice` of that.
    Raises: nothing of its own.
    """
    groups = list(_groups(program, together))
    if not groups:
        return program
    group_at = {group[0].members[0]: group for group in groups}
    dropped = {member for group in groups for heads in group for member in heads.members}
    builder = ProgramBuilder(program.inputs)
    new = builder.take_parameters(program)

    def renamed(expr: relax.Expr) -> relax.Expr:
        return substitute(expr, lambda var: new.get(var, var))

    part_of: dict[relax.Var, relax.Expr] = {}
    for binding in program.bindings:
        origins = program.origins.get(binding.var.name, ())
        if binding.var in group_at:
            group = group_at[binding.var]
            joined = _emit_joined(group, program, builder, renamed(group[0].source), known)
            part_of |= _emit_parts(group, program, builder, joined)
        if binding.var in part_of:
            new[binding.var] = builder.emit(part_of[binding.var], origins, binding.var.name)
        elif binding.var not in dropped:
            new[binding.var] = builder.emit(renamed(binding.value), origins, binding.var.name)
    return builder.finish([renamed(output) for output in program.outputs], program.functions)


def _groups(program: Program, together: Sequence[Sequence[relax.Var]]) -> Iterator[list[_Heads]]:
    values, uses = {b.var: b.value for b in program.bindings}, count_uses(program)
    order = {b.var: number for number, b in enumerate(program.bindings)}
    most = max((_touched_bytes(b) for b in program.bindings if is_op(b.value, "matmul")), default=0)
    for tensors in together:
        forms: dict[tuple[object, ...], list[_Heads]] = {}
        for tensor in dict.fromkeys(tensors):
            heads = _read(tensor, values, uses, program)
            if heads is not None:
                forms.setdefault(heads.form, []).append(heads)
        for group in forms.values():
            if len(group) > 1 and _joined_bytes(group) <= most and _weight_bytes(group) <= MOST_BYTES:
                yield sorted(group, key=lambda heads: order[heads.members[0]])


def _read(
    tensor: relax.Var, values: Mapping[relax.Var, Any], uses: Mapping[relax.Var, int], program: Program
) -> _Heads | None:
    reshaped: Any = values.get(tensor)
    if not is_op(reshaped, "reshape") or uses[tensor] != 1:
        return None
    made, bias = reshaped.args[0], None
    members: tuple[relax.Var, ...] = (made, tensor)
    added: Any = values.get(made)
    if is_op(added, "add") and uses[made] == 1:
        made, bias = added.args
        members = (made, *members)
    product: Any = values.get(made)
    if not is_op(product, "matmul") or uses[made] != 1:
        return None
    source, weight = product.args
    known = [weight] if bias is None else [weight, bias]
    if any(not isinstance(v, relax.Var) or v.name not in program.weights for v in known):
        return None
    (*front, width), (*before, heads, depth) = tensor_shape(made), tensor_shape(tensor)
    is_split = front == before and width == heads * depth
    is_plain = len(tensor_shape(weight)) == 2 and (bias is None or tensor_shape(bias) == (width,))
    is_float = all(tensor_dtype(v) == "float32" for v in (source, *known))
    return _Heads(source, weight, bias, members) if is_split and is_plain and is_float else None


def _touched_bytes(product: relax.VarBinding) -> int:
    """Of a product, with its operands; all floats count 32 bits here."""
    return 4 * sum(math.prod(tensor_shape(v)) for v in (*variables(product.value), product.var))


def _weight_bytes(group: Sequence[_Heads]) -> int:
    return 4 * sum(math.prod(tensor_shape(heads.weight)) for heads in group)


def _joined_bytes(group: Sequence[_Heads]) -> int:
    tensors = [group[0].source, *(heads.members[0] for heads in group)]
    return _weight_bytes(group) + 4 * sum(math.prod(tensor_shape(v)) for v in tensors)


def _emit_joined(
    group: Sequence[_Heads],
    program: Program,
    builder: ProgramBuilder,
    source: relax.Expr,
    known: Mapping[str, np.ndarray],
) -> relax.Var:
    def weight(parts: Sequence[relax.Var]) -> relax.Var:
        # weights of one name are equal in all programs of a network
        name = "+".join(part.name for part in parts)
        found = known.get(name)
        if found is None:
            found = _joined([program.weights[part.name] for part in parts])
        return builder.weight(found, name)

    def emit(expr: relax.Expr, members: Sequence[relax.Var], hint: str) -> relax.Var:
        origins = [o for member in members for o in program.origins.get(member.name, ())]
        return builder.emit(expr, origins, hint)

    product = relax.op.matmul(source, weight([heads.weight for heads in group]))
    result = emit(product, [heads.members[0] for heads in group], "joined")
    biases = [heads.bias for heads in group if heads.bias is not None]
    if biases:
        result = emit(relax.op.add(result, weight(biases)), [heads.members[1] for heads in group], "joined")
    return result


def _joined(weights: Sequence[np.ndarray]) -> np.ndarray:
    if all(map(is_placeholder, weights)):
        first, *_ = weights
        return placeholder((*first.shape[:-1], sum(each.shape[-1] for each in weights)), first.dtype)
    return np.concatenate(weights, axis=-1)


def _emit_parts(
    group: Sequence[_Heads], program: Program, builder: ProgramBuilder, joined: relax.Var
) -> dict[relax.Var, relax.Expr]:
    """The expression of each member that others read. Each is of a view of its own, so that a kernel has a
    parameter for each: nvcc splits loads by way of one pointer that differ in width."""
    found, begin = {}, 0
    *front, _, depth = group[0].shape
    shape, axis = (*front, sum(heads.shape[-2] for heads in group), depth), len(front)
    for heads in group:
        made, end = heads.members[-1], begin + heads.shape[-2]
        view = builder.emit(
            relax.op.reshape(joined, shape), program.origins.get(made.name, ()), "joined_heads"
        )
        found[made] = relax.op.strided_slice(view, [axis], [begin], [end])
        begin = end
    return found
