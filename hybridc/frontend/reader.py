"""The frontend's steps in order: load, check, simplify, import, bring into normal form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from tvm import relax

from hybridc.errors import ModelError
from hybridc.frontend import codes
from hybridc.frontend.check import check_domains, check_interface, check_model, check_with_inputs
from hybridc.frontend.counted.outputs import cuts_of
from hybridc.frontend.importer import import_graph
from hybridc.frontend.inputs.fixed_values import fix_values
from hybridc.frontend.inputs.loop_bounds import bound_loops
from hybridc.frontend.inputs.shapes import fix_shapes, interface_of
from hybridc.frontend.load import Loaded, load
from hybridc.frontend.loss_nodes import labels_of
from hybridc.frontend.model import ImportedModel, ValueInfo
from hybridc.frontend.names import unique_names
from hybridc.frontend.normal_form import normal_form
from hybridc.frontend.opsets import check_opset, modernize
from hybridc.frontend.parameters import Chooser, check_export, promote
from hybridc.frontend.ranges.opening import Dimension, Opening, at_bounds, dimension_names
from hybridc.frontend.simplify import simplify
from hybridc.frontend.tensors import check_tensors, with_weights_apart, without_weights
from hybridc.frontend.values import NARROW_TYPES, dtype_name
from hybridc.garbage import uncollected
from hybridc.labels import Labels
from hybridc.options import FixedShape, Shape, Size
from hybridc.sizes import Bucket, with_sums

Source = str | Path | bytes | onnx.ModelProto | Loaded
"""Where a model comes from, or what `load_model` made of it."""


def load_model(source: Source) -> Loaded:
    """The model as it is read again and again, for other sizes: it is loaded once. Raises as `load` does."""
    if isinstance(source, Loaded):
        return source
    with _text_checked():
        return with_weights_apart(load(source))


def read_model(
    source: Source,
    *,
    shapes: Mapping[str, Shape] = {},
    dims: Mapping[str, Size] = {},
    values: Mapping[str, np.ndarray] = {},
    bounds: Mapping[str, int] = {},
    parameters: Chooser | None = None,
    refusals: codes.Refusals | None = None,
    dimensions: tuple[Dimension, ...] = (),
    bucket: Bucket = (),
    reads_weights: bool = True,
) -> ImportedModel:
    """Read an ONNX model from an untrusted source.

    `shapes` fixes inputs by name, but for dimensions that are None, `dims` named dimensions; all shapes are
    static afterwards. Open `dimensions` have the largest sizes of `bucket`, and inputs for their real ones.
    Inputs with `values` become constants, which are folded as those of the file; `bounds` are the most trips
    of loops, by name. With `parameters`, which says by name what is trained, the model is read for training:
    what it chooses are inputs instead of weights, Dropout drops, and BatchNorm uses the batch's statistics.
    Unless it `reads_weights`, weights that are external data are placeholders (`hybridc/placeholders.py`).
    Raises ModelError with a code of `hybridc.frontend.codes` for everything that can be wrong with a model
    (the first that `refusals` note, if they are given), UsageError HC527 for values that are not of its
    inputs, and HC528 for bounds of no loop.
    """
    model = load_model(source)
    with _text_checked(), uncollected():  # a fifth of the time otherwise, and graphs of all sizes are kept
        sizes_by_name = with_sums(dimension_names(model.proto), dims)
        fixed = at_bounds(shapes, sizes_by_name, dimensions, bucket)
        loaded = replace(model.copy(), weights={n: w for n, w in model.weights.items() if n not in values})
        if not reads_weights:
            loaded = without_weights(loaded)
        opening = None
        if dimensions:
            interface = interface_of(loaded.proto)

            def inputs_at(sizes: Bucket) -> Sequence[onnx.ValueInfoProto]:
                fixed = at_bounds(shapes, sizes_by_name, dimensions, sizes)
                return _inputs_of(loaded, interface, fixed, values)

            opening = Opening(
                dimensions,
                bucket,
                lambda sizes: _shapes_of(inputs_at(sizes)),
                lambda sizes: check_with_inputs(loaded, inputs_at(sizes)),
            )
        named = fix_values(loaded.proto, loaded.source.name, values, fixed[1])
        return _read(loaded, fixed[0], named, bounds, parameters, refusals or codes.Refusals(), opening)


@contextmanager
def _text_checked() -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:  # protobuf decodes text when it is looked at
        raise ModelError(
            codes.NOT_ONNX,
            f"not an ONNX model: a name is not valid text: {error}",
            remedy="export the network again",
        ) from error


def _read(
    loaded: Loaded,
    shapes: Mapping[str, FixedShape],
    dims: Mapping[str, int],
    bounds: Mapping[str, int],
    is_trained: Chooser | None,
    refusals: codes.Refusals,
    opening: Opening | None,
) -> ImportedModel:
    name = loaded.source.name
    node_names = _name_nodes(loaded)
    bound_loops(loaded.proto, name, bounds)
    check_tensors(loaded)
    check_interface(loaded, refusals)
    check_domains(loaded, refusals)
    check_opset(loaded)
    promoted = {} if is_trained is None else promote(loaded, is_trained)
    check_export(loaded, promoted)
    fix_shapes(loaded.proto, name, shapes, dims, refusals)
    # of nodes whose operands are not known nothing can be said
    refusals.stop(codes.UNSUPPORTED_TYPE, codes.UNKNOWN_DIMENSION)
    modernize(loaded)
    check_model(loaded)
    output_names = [value.name for value in loaded.proto.graph.output]
    model = simplify(
        loaded.proto,
        name,
        loaded.folder,
        unread=loaded.unread,
        weights=loaded.weights,
        for_training=is_trained is not None,
        refusals=refusals,
        opening=opening,
    )
    cuts = cuts_of(model.graph).by_output
    if is_trained is not None and not all(map(_is_size, model.graph.outputs[len(cuts) :])):
        raise _untrainable(name, is_open=opening is not None)
    normal = normal_form(import_graph(model, name, node_names, refusals), name, refusals)
    results, counts = normal.outputs[: len(cuts)], normal.outputs[len(cuts) :]
    graph = model.graph
    input_variables = normal.module["main"].params[: len(model.graph.inputs)]
    inputs = tuple(
        _value_info(value.name or "", variable, value, labels_of(value))
        for value, variable in zip(graph.inputs, input_variables, strict=True)
    )
    own = len(inputs) - (0 if opening is None else len(opening.dimensions))
    return ImportedModel(
        module=normal.module,
        weights=normal.weights,
        inputs=inputs[:own],
        outputs=tuple(
            replace(_value_info(n, variable, value), cuts=cut)
            for n, variable, value, cut in zip(output_names, results, graph.outputs, cuts, strict=False)
        ),
        origins=normal.origins,
        source=loaded.source,
        parameters=promoted,
        counts=tuple(_value_info(f"count {i}", v, None) for i, v in enumerate(counts)),
        sizes=inputs[own:],
    )


def _inputs_of(
    checked: Loaded,
    interface: onnx.ModelProto,
    fixed: tuple[Mapping[str, FixedShape], Mapping[str, int]],
    values: Mapping[str, np.ndarray],
) -> Sequence[onnx.ValueInfoProto]:
    """Inputs of a model that is checked, at other sizes: those that are `fixed`, by input and by dimension.
    `interface` is what the model's own was, before parameters became inputs."""
    name, own = checked.source.name, onnx.ModelProto()
    own.CopyFrom(interface)
    known = {value.name for value in own.graph.input}
    own.graph.input.extend(value for value in checked.proto.graph.input if value.name not in known)
    named = fix_values(own, name, values, fixed[1])
    fix_shapes(own, name, fixed[0], named, codes.Refusals())
    return list(own.graph.input)


def _shapes_of(inputs: Sequence[onnx.ValueInfoProto]) -> Mapping[str, Sequence[int]]:
    return {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in inputs}


def find_refusals(
    source: Source,
    *,
    shapes: Mapping[str, Shape] = {},
    dims: Mapping[str, Size] = {},
    values: Mapping[str, np.ndarray] = {},
    bounds: Mapping[str, int] = {},
    dimensions: tuple[Dimension, ...] = (),
    bucket: Bucket = (),
    reads_weights: bool = True,
) -> tuple[ModelError, ...]:
    """Everything that `read_model` refuses in a model, not only what it refuses first; none if it is taken.

    What can only be looked at once something else is mended is left out: the nodes, where types or shapes of
    inputs are refused, and those of whose operands nothing is known as another node is refused. Raises
    UsageError HC527 or HC528.
    """
    refusals = codes.Refusals(all_of_them=True)
    try:
        read_model(
            source,
            shapes=shapes,
            dims=dims,
            values=values,
            bounds=bounds,
            refusals=refusals,
            dimensions=dimensions,
            bucket=bucket,
            reads_weights=reads_weights,
        )
    except ModelError as error:
        refusals.found.append(error)
    return tuple({str(error): error for error in refusals.found}.values())


def _name_nodes(loaded: Loaded) -> dict[str, str]:
    """Give every node of the file a name of its own; returns the name of the node of each value."""
    graph = loaded.proto.graph
    names = unique_names(node.name or f"{node.op_type}_{i}" for i, node in enumerate(graph.node))
    for node, name in zip(graph.node, names, strict=True):
        node.name = name
    for function in loaded.proto.functions:
        for i, node in enumerate(function.node):
            node.name = node.name or f"{node.op_type}_{i}"
    return {output: node.name for node in graph.node for output in node.output if output}


def _is_size(count: ir.Value) -> bool:
    """Whether a count of elements is the size of an open dimension."""
    return count.is_graph_input()


def _untrainable(name: str, *, is_open: bool) -> ModelError:
    if is_open:
        what = "an output has not one entry for each example"
        remedy = "train on whole batches alone: give --batch one number"
    else:
        what = "data determine the extent of an output, which training does not support"
        remedy = "export the network without the steps behind its last layer"
    return ModelError(codes.WRONG_RESULT, what, where=name, remedy=remedy)


def _value_info(
    name: str, variable: relax.Var, value: ir.Value | None, labels: tuple[Labels, ...] = ()
) -> ValueInfo:
    shape = tuple(int(dim) for dim in variable.ty.shape)
    dtype = str(variable.ty.dtype)
    if value is not None and value.dtype in NARROW_TYPES:
        dtype = dtype_name(value)
    return ValueInfo(name, variable.name, shape, dtype, labels)
