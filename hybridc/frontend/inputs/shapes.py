"""Give every input a static shape: from the model, `shapes` by input name, `dims` by dimension name."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Mapping, Sequence

import onnx
from onnx import TensorShapeProto, ValueInfoProto

from hybridc.errors import ModelError, ModelWarning
from hybridc.frontend import codes
from hybridc.options import FixedShape
from hybridc.sizes import Sum


def fix_shapes(
    model: onnx.ModelProto,
    name: str,
    shapes: Mapping[str, FixedShape],
    dims: Mapping[str, int],
    refusals: codes.Refusals,
) -> None:
    """Write static dimensions into the inputs, in place; forget every other shape but initializers'.

    A dimension that is missing, zero or negative counts as unknown: 0 must be given. A named dimension
    that one input's shape fixes is fixed for all; if `shapes` give it two sizes, which some exporters'
    names need, that is a ModelWarning. Dimensions that stay unknown are refused (ModelError HC111). Raises
    HC112 if `shapes` or `dims` contradict the model or each other.
    """
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    _check_names(inputs, name, shapes, dims)
    sizes: dict[str, set[int]] = {}
    for value in inputs:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_value < 1:
                dim.ClearField("dim_value")
    for value in inputs:
        if value.name in shapes:
            _apply_shape(value, name, tuple(shapes[value.name]), dims, sizes)
    known = dict(dims) | {named: next(iter(found)) for named, found in sizes.items() if len(found) == 1}
    for named, found in sizes.items():
        if len(found) > 1:
            text = " and ".join(map(str, sorted(found)))
            warnings.warn(f"{name}: dimension {named!r} is {text} in inputs' shapes", ModelWarning, 2)
    for value in inputs:
        _apply_dims(value, name, known, refusals)
    forget_inferred(model)


def interface_of(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without nodes and contents of weights: of it shapes can be fixed once more."""
    made = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    made.graph.input.extend(model.graph.input)
    made.graph.output.extend(model.graph.output)
    made.graph.initializer.extend(onnx.TensorProto(name=tensor.name) for tensor in model.graph.initializer)
    return made


def _check_names(
    inputs: list[ValueInfoProto], name: str, shapes: Mapping[str, FixedShape], dims: Mapping[str, int]
) -> None:
    input_names = [value.name for value in inputs]
    dim_names = sorted({d.dim_param for v in inputs for d in v.type.tensor_type.shape.dim if d.dim_param})
    for given in shapes:
        if given not in input_names:
            raise _contradiction(f"there is no input {given!r}", name, f"inputs are {', '.join(input_names)}")
    for given in dims:
        if given not in dim_names:
            listed = (
                f"its named dimensions are {', '.join(dim_names)}"
                if dim_names
                else "it has no named dimension"
            )
            raise _contradiction(f"no input has a dimension {given!r}", name, listed)
    for given, sizes in (*shapes.items(), *((d, (size,)) for d, size in dims.items())):
        if any(size is not None and size < 0 for size in sizes):
            raise _contradiction(f"{given!r} is given as {_text(sizes)}", name, "give no negative size")


def _apply_shape(
    value: ValueInfoProto,
    name: str,
    shape: FixedShape,
    dims: Mapping[str, int],
    sizes: dict[str, set[int]],
) -> None:
    """Write the shape, and note the sizes of named dimensions; None leaves one as the model has it."""
    tensor = value.type.tensor_type
    where = f"{name}: input {value.name!r}"
    if not tensor.HasField("shape"):
        tensor.shape.SetInParent()  # a scalar's, too
        for _ in shape:
            tensor.shape.dim.add()
    if len(tensor.shape.dim) != len(shape):
        raise _contradiction(
            f"input {value.name!r} has {len(tensor.shape.dim)} dimensions, not {len(shape)}",
            where,
            f"its shape is {_dims_text(value)}",
        )
    declared = _dims_text(value)
    for dim, size in zip(tensor.shape.dim, shape, strict=True):
        if size is None:
            continue
        fixed = dim.dim_value if dim.HasField("dim_value") else dims.get(dim.dim_param, size)
        if fixed != size:
            raise _contradiction(
                f"input {value.name!r} cannot have shape {_text(shape)}: a dimension is already {fixed}",
                where,
                f"its shape is {declared}",
            )
        if dim.dim_param:
            sizes.setdefault(dim.dim_param, set()).add(size)
        dim.dim_value = size


def _apply_dims(value: ValueInfoProto, name: str, known: Mapping[str, int], refusals: codes.Refusals) -> None:
    tensor = value.type.tensor_type
    declared = _dims_text(value)
    for dim in tensor.shape.dim:
        if dim.dim_param in known:
            dim.dim_value = known[dim.dim_param]
    unnamed = not tensor.HasField("shape") or any(
        not d.HasField("dim_value") and not d.dim_param for d in tensor.shape.dim
    )
    unknown = list(dict.fromkeys(d.dim_param for d in tensor.shape.dim if d.dim_param))
    if unknown or unnamed:
        sizes = _example(tensor.shape.dim)
        shape = "x".join(map(str, sizes)) or "1x3x224x224"
        by_name = {d.dim_param: size for d, size in zip(tensor.shape.dim, sizes, strict=True) if d.dim_param}
        asked = dict.fromkeys(term for d in unknown for term in _terms(d) if term not in known)
        by_dim = "".join(f" --dim {shlex.quote(f'{d}={by_name.get(d, 128)}')}" for d in asked)
        what = f"input {value.name!r} has unknown dimensions: {declared}"
        remedy = f"fix them, for example --shape {shlex.quote(f'{value.name}={shape}')}"
        remedy += f" or{by_dim}" if unknown and not unnamed else ""
        where = f"{name}: input {value.name!r}"
        refusals.add(ModelError(codes.UNKNOWN_DIMENSION, what, where=where, remedy=remedy))


def _terms(dim: str) -> tuple[str, ...]:
    """The dimensions whose sizes decide this one's."""
    found = Sum.of(dim)
    return (dim,) if found is None else found.names


def _example(dims: Sequence[TensorShapeProto.Dimension]) -> list[int]:
    """Sizes that a remedy can show: an image has 224 x 224 pixels, a sequence of a batch 128 elements."""
    sizes = [dim.dim_value for dim in dims]
    usual = dict.fromkeys(range(len(sizes)), 1)
    if len(sizes) == 4:
        has_channels_last = sizes[3] in (1, 3, 4)
        usual |= dict.fromkeys((1, 2) if has_channels_last else (2, 3), 224)
    elif len(sizes) in (2, 3) and not sizes[0]:
        usual[1] = 128
    return [size or usual[axis] for axis, size in enumerate(sizes)]


def forget_inferred(model: onnx.ModelProto) -> None:
    """Forget all shapes but those of inputs, in place: an exporter may have written symbolic ones, or just
    wrong ones. They are inferred again."""
    del model.graph.value_info[:]
    known = {value.name: value.type for value in model.graph.input}
    for output in model.graph.output:
        if output.name in known:
            output.type.CopyFrom(known[output.name])
        else:
            for dim in output.type.tensor_type.shape.dim:
                dim.Clear()


def _dims_text(value: ValueInfoProto) -> str:
    if not value.type.tensor_type.HasField("shape"):
        return "of unknown rank"
    dims = value.type.tensor_type.shape.dim
    separator = " x " if any(d.dim_param for d in dims) else "x"
    return separator.join(str(d.dim_value) if d.dim_value > 0 else d.dim_param or "?" for d in dims)


def _text(shape: FixedShape) -> str:
    return "x".join("_" if size is None else str(size) for size in shape)


def _contradiction(what: str, where: str, remedy: str) -> ModelError:
    return ModelError(codes.CONTRADICTED_SHAPE, what, where=where, remedy=remedy)
