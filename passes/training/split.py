"""Split a fully connected layer that has most of the parameters, so that its gradient never exists as a
whole.

A gradient lives until its parameter is updated, so what all gradients take is what the largest takes. Where
that is of one fully connected layer, its outputs are computed in parts, each with a parameter of its own:

    y = x w^T    becomes    y = concat(x w_0^T, x w_1^T, ...)      with w = concat(w_0, w_1, ...)

and each part is updated before the gradient of the next one is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tvm import relax

from hybridc.frontend import ImportedModel, ValueInfo
from hybridc.passes.program.program import (
    Program,
    ProgramBuilder,
    count_uses,
    is_op,
    substitute,
    tensor_dtype,
    tensor_shape,
)
from hybridc.passes.training.splits import SplitParameter, cut

MOST_SHARE = 1 / 16
"""Largest share of all parameters' elements that one parameter may have before it is split."""
LEAST_ELEMENTS = 1 << 18
"""Parameters below 1 MiB are never split: their gradients fit every device."""
OUTPUTS = 16
"""Parts have a multiple of this many outputs: vectors of every device divide it."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """`matmul` with a parameter, or its transpose, that has no other readers."""

    parameter: relax.Var
    transpose: relax.Var | None
    axis: int
    """Of the parameter, along which outputs lie."""


def split_model(model: ImportedModel) -> tuple[ImportedModel, dict[str, SplitParameter]]:
    """A model, read for training, with the parameters of dominating layers in parts, and how they are split.

    Both use the user's names: the parts of `w` are `w#part0`, `w#part1` and so on.
    """
    program = Program(model.module, model.weights, model.origins)
    trained = [v.variable for v in model.inputs if v.name in model.parameters]
    program, found = split_dominating(program, trained)
    if not found:
        return model, {}
    inputs: list[ValueInfo] = []
    splits: dict[str, SplitParameter] = {}
    for value in model.inputs:
        split = found.get(value.variable)
        if split is None:
            inputs.append(value)
            continue
        names = tuple(f"{value.name}#part{number}" for number in range(len(split.parts)))
        splits[value.name] = replace(split, parts=names)
        for name, variable, shape in zip(names, split.parts, _shapes(value.shape, split), strict=True):
            inputs.append(ValueInfo(name, variable, shape, value.dtype))
    changed = replace(
        model,
        module=program.module,
        weights=program.weights,
        origins=program.origins,
        inputs=tuple(inputs),
        parameters=cut(model.parameters, splits),
    )
    return changed, splits


def split_dominating(
    program: Program, parameters: Sequence[str], *, least_elements: int = LEAST_ELEMENTS
) -> tuple[Program, dict[str, SplitParameter]]:
    """Split the parameters, inputs by name, of fully connected layers that exceed `MOST_SHARE`.

    Parts have about `least_elements` or more. Inputs that are split are replaced, at their place, by their
    parts, whose names the splits give. Returns the program as it is where there are none.
    """
    inputs = {v.name: v for v in program.main.params if v.name not in program.weights}
    sizes = {name: math.prod(tensor_shape(inputs[name])) for name in parameters}
    limit = max(MOST_SHARE * sum(sizes.values()), least_elements)
    layers = {
        matmul: layer
        for matmul, layer in _layers(program).items()
        if sizes.get(layer.parameter.name, 0) > limit
    }
    splits: dict[str, SplitParameter] = {}
    taken = {v.name for v in program.main.params}
    for layer in layers.values():
        ends = _ends(tensor_shape(layer.parameter), layer.axis, limit)
        if len(ends) > 1:
            names = tuple(_fresh(f"{layer.parameter.name}_part{i}", taken) for i in range(len(ends)))
            splits[layer.parameter.name] = SplitParameter(layer.axis, names, ends)
    chosen = {matmul: layer for matmul, layer in layers.items() if layer.parameter.name in splits}
    return (_rewritten(program, chosen, splits) if splits else program), splits


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _layers(program: Program) -> dict[relax.Var, _Layer]:
    """Products with a parameter on the right, by their result."""
    uses, inputs = count_uses(program), set(program.main.params)
    transposed: dict[relax.Var, relax.Var] = {}
    found = {}
    for binding in program.bindings:
        value = binding.value
        if is_op(value, "permute_dims") and value.args[0] in inputs and len(tensor_shape(value.args[0])) == 2:
            transposed[binding.var] = value.args[0]
        if not is_op(value, "matmul") or uses[value.args[1]] != 1:
            continue
        right = value.args[1]
        parameter = transposed.get(right, right)
        if parameter in inputs and uses[parameter] == 1 and len(tensor_shape(parameter)) == 2:
            is_transposed = right in transposed
            found[binding.var] = _Layer(
                parameter, right if is_transposed else None, 0 if is_transposed else 1
            )
    return found


def _ends(shape: tuple[int, ...], axis: int, limit: float) -> tuple[int, ...]:
    """The fewest parts of about equal size within the limit."""
    outputs = shape[axis]
    parts = math.ceil(math.prod(shape) / limit)
    width = max(OUTPUTS, math.ceil(outputs / parts / OUTPUTS) * OUTPUTS)
    return tuple(min(end, outputs) for end in range(width, outputs + width, width))


def _rewritten(
    program: Program, layers: Mapping[relax.Var, _Layer], splits: Mapping[str, SplitParameter]
) -> Program:
    parts = {v.name: _parts(v, splits[v.name]) for v in program.inputs if v.name in splits}
    builder = ProgramBuilder([part for v in program.inputs for part in parts.get(v.name, [v])])
    new = builder.take_parameters(program)
    transposes = {layer.transpose for layer in layers.values()}
    for binding in program.bindings:
        if binding.var in transposes:
            continue
        origins, name = program.origins.get(binding.var.name, ()), binding.var.name
        if binding.var not in layers:
            value = substitute(binding.value, lambda var: new[var])
            new[binding.var] = builder.emit(value, origins, name)
            continue
        layer, data = layers[binding.var], new[binding.value.args[0]]
        results = []
        for part in parts[layer.parameter.name]:
            right = part
            if layer.transpose is not None:
                right = builder.emit(relax.op.permute_dims(part), origins, layer.transpose.name)
            results.append(builder.emit(relax.op.matmul(data, right), origins, name))
        axis = len(tensor_shape(binding.var)) - 1
        new[binding.var] = builder.emit(relax.op.concat(results, axis), origins, name)
    outputs = [substitute(output, lambda var: new[var]) for output in program.outputs]
    return builder.finish(outputs, program.functions)


def _parts(parameter: relax.Var, split: SplitParameter) -> list[relax.Var]:
    shapes, dtype = _shapes(tensor_shape(parameter), split), tensor_dtype(parameter)
    return [
        relax.Var(name, relax.TensorType(shape, dtype))
        for name, shape in zip(split.parts, shapes, strict=True)
    ]


def _shapes(whole: tuple[int, ...], split: SplitParameter) -> list[tuple[int, ...]]:
    """Shapes of the parts."""
    counts = [end - begin for begin, end in zip((0, *split.ends), split.ends, strict=False)]
    return [(*whole[: split.axis], count, *whole[split.axis + 1 :]) for count in counts]
