"""Check every tensor of a model before anything is allocated for it, and where its bytes lie."""

from __future__ import annotations

import math
import os
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto

from hybridc.errors import ModelError
from hybridc.frontend import codes
from hybridc.frontend.load import Loaded
from hybridc.placeholders import placeholder

MAX_TENSOR_BYTES = 1 << 40
"""Of one tensor: 1 TiB is more than any machine that hybridc compiles for holds."""

_OF_SHAPES = (TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64)
MOST_DECIDING = 1024
"""Elements up to which a tensor may hold shapes or axes, or choose between nodes."""

# Elements that one entry of a typed field holds; complex numbers and strings are refused before.
_FIELD_OF: dict[int, str] = {
    TensorProto.FLOAT: "float_data",
    TensorProto.DOUBLE: "double_data",
    TensorProto.INT64: "int64_data",
    TensorProto.UINT64: "uint64_data",
    TensorProto.UINT32: "uint64_data",
}
_DATA_FIELDS = ("float_data", "double_data", "int32_data", "int64_data", "uint64_data")
_UNSUPPORTED = (TensorProto.UNDEFINED, TensorProto.STRING, TensorProto.COMPLEX64, TensorProto.COMPLEX128)


def check_tensors(loaded: Loaded) -> None:
    """Check the tensors of all graphs and functions.

    Raises ModelError: HC103 if dimensions and bytes contradict each other, HC104 if external data is
    not a range of a file inside the model's folder, HC110 for sparse, string and complex tensors.
    """
    name = loaded.source.name
    graph = loaded.proto.graph
    for tensor in _initializers(graph, name):
        where = f"{name}: initializer {tensor.name!r}"
        if tensor.name in loaded.unread or tensor.name in loaded.weights:
            _size_bytes(tensor, where)
        else:
            _check_tensor(tensor, where, loaded.folder, is_initializer=True)
    for node in _all_nodes(loaded.proto):
        for attribute in node.attribute:
            where = f"{name}: node {node.name!r} ({node.op_type}), attribute {attribute.name!r}"
            _check_attribute(attribute, where)


def with_weights_apart(loaded: Loaded) -> Loaded:
    """The model, whose protobuf lacks the contents of large initializers: it takes little to copy.

    Changes `loaded`. An initializer that `check_tensors` refuses stays as it is.
    """
    names = Counter(tensor.name for tensor in loaded.proto.graph.initializer)
    large = [t for t in loaded.proto.graph.initializer if names[t.name] == 1 and _is_large(t, loaded.folder)]
    weights = {tensor.name: _contents(tensor, loaded.folder) for tensor in large}
    for tensor in large:
        for field in ("raw_data", *_DATA_FIELDS):
            tensor.ClearField(field)
    return replace(loaded.copy(), weights=weights)  # the copy leaves behind what was cleared


def _is_large(tensor: TensorProto, folder: Path | None) -> bool:
    """Whether a tensor is valid, has more elements than may decide shapes, and each is of whole bytes."""
    try:
        _check_tensor(tensor, "", folder, is_initializer=True)
    except ModelError:
        return False
    return math.prod(tensor.dims) > MOST_DECIDING and ir.DataType(tensor.data_type).bitwidth >= 8


def _contents(tensor: TensorProto, folder: Path | None) -> ir.TensorProtocol:
    """Without the protobuf, of external data as a map of the file."""
    stored = ir.serde.deserialize_tensor(tensor)
    if isinstance(stored, ir.ExternalTensor):
        assert folder is not None
        stored.base_dir = folder
        return stored
    return ir.Tensor(stored.numpy(), dtype=stored.dtype, name=stored.name)


def put_weights(graph: ir.Graph, weights: Mapping[str, ir.TensorProtocol]) -> None:
    """Give initializers the contents that `with_weights_apart` set apart."""
    for name, tensor in weights.items():
        if name in graph.initializers:
            graph.initializers[name].const_value = tensor


def without_weights(loaded: Loaded) -> Loaded:
    """The model, of whose external data no weights are read: the files need not be there.

    Small integers and single numbers, which decide shapes and nodes, are not weights: `check_tensors` looks
    for them as ever.
    """
    external = (t for t in loaded.proto.graph.initializer if t.data_location == TensorProto.EXTERNAL)
    return replace(loaded, unread=frozenset(t.name for t in external if not _may_decide(t)))


def _may_decide(tensor: TensorProto) -> bool:
    known = tensor.data_type in TensorProto.DataType.values()
    if not known or tensor.data_type in _UNSUPPORTED or any(dim < 0 for dim in tensor.dims):
        return True  # to be refused
    elements = math.prod(tensor.dims)
    return elements <= 1 or (tensor.data_type in _OF_SHAPES and elements <= MOST_DECIDING)


def leave_unread(graph: ir.Graph, names: frozenset[str]) -> None:
    """Put placeholders in the place of initializers. Requires: their shapes and types are checked."""
    for name in names:
        value = graph.initializers.get(name)
        if value is not None and value.const_value is not None:
            tensor = value.const_value
            array = placeholder(tensor.shape.numpy(), tensor.dtype.numpy())
            value.const_value = ir.Tensor(array, dtype=tensor.dtype, name=name)


def _initializers(graph: GraphProto, name: str) -> Iterable[TensorProto]:
    if graph.sparse_initializer:
        raise ModelError(
            codes.UNSUPPORTED_TYPE,
            "sparse initializers are not supported",
            where=name,
            remedy="make them dense",
        )
    return graph.initializer


def _all_nodes(model: onnx.ModelProto) -> Iterator[NodeProto]:
    yield from model.graph.node
    for function in model.functions:
        yield from function.node


def _check_attribute(attribute: AttributeProto, where: str) -> None:
    if attribute.HasField("sparse_tensor") or attribute.sparse_tensors:
        raise ModelError(
            codes.UNSUPPORTED_TYPE, "sparse tensors are not supported", where=where, remedy="make them dense"
        )
    for tensor in (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors):
        _check_tensor(tensor, where, None, is_initializer=False)
    for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
        for tensor in _initializers(graph, where):
            _check_tensor(tensor, f"{where}: initializer {tensor.name!r}", None, is_initializer=False)
        for node in graph.node:
            for inner in node.attribute:
                _check_attribute(inner, f"{where}: node {node.name!r} ({node.op_type})")


def _check_tensor(tensor: TensorProto, where: str, folder: Path | None, *, is_initializer: bool) -> None:
    size_bytes = _size_bytes(tensor, where)
    if tensor.HasField("segment"):
        raise _malformed("it is split into segments, which is not supported", where)
    if tensor.data_location == TensorProto.EXTERNAL:
        if not is_initializer:
            raise _external("only initializers of the main graph may have external data", where)
        _check_external(tensor, size_bytes, where, folder)
    elif tensor.HasField("raw_data"):
        if len(tensor.raw_data) != size_bytes:
            raise _malformed(f"its shape needs {size_bytes} bytes, but it has {len(tensor.raw_data)}", where)
    else:
        _check_typed_data(tensor, where)


def _size_bytes(tensor: TensorProto, where: str) -> int:
    """Bytes of the tensor. Raises ModelError if they are absurd or its type has no fixed size."""
    known = tensor.data_type in TensorProto.DataType.values()
    if not known or tensor.data_type in _UNSUPPORTED:
        kind = TensorProto.DataType.Name(tensor.data_type) if known else str(tensor.data_type)
        raise ModelError(
            codes.UNSUPPORTED_TYPE,
            f"tensors of type {kind} are not supported",
            where=where,
            remedy="use floating point, integer or bool tensors",
        )
    if any(dim < 0 for dim in tensor.dims):
        raise _malformed(f"its shape {list(tensor.dims)} has a negative dimension", where)
    # Python's integers do not overflow; neither may what is computed from them later.
    size_bytes = (math.prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth + 7) // 8
    if size_bytes > MAX_TENSOR_BYTES:
        raise _malformed(f"its shape {list(tensor.dims)} needs {size_bytes} bytes", where)
    return size_bytes


def _check_typed_data(tensor: TensorProto, where: str) -> None:
    """The values must lie in the one field that belongs to the type, as many as the shape says."""
    field = _FIELD_OF.get(tensor.data_type, "int32_data")
    elements = math.prod(tensor.dims)
    bits = ir.DataType(tensor.data_type).bitwidth
    expected = elements if bits >= 8 else -(-elements * bits // 8)
    lengths = {name: len(getattr(tensor, name)) for name in _DATA_FIELDS}
    if any(length for name, length in lengths.items() if name != field):
        raise _malformed(
            f"values of type {ir.DataType(tensor.data_type).name} must be stored in {field}", where
        )
    if lengths[field] != expected:
        raise _malformed(
            f"its shape {list(tensor.dims)} needs {expected} values, but it has {lengths[field]}", where
        )


def _check_external(tensor: TensorProto, size_bytes: int, where: str, folder: Path | None) -> None:
    """The bytes must be a range of a regular file that really lies inside the model's folder."""
    if folder is None:
        raise _external("the model has external data, but it was not read from a file", where)
    entries = {entry.key: entry.value for entry in tensor.external_data}
    path = _resolve_inside(folder, entries.get("location", ""), where)
    try:
        offset = int(entries.get("offset", "0"))
        length = int(entries.get("length", str(size_bytes)))
    except ValueError as error:
        raise _external(f"its offset or length is not a number: {error}", where) from error
    if length != size_bytes:
        raise _malformed(f"its shape needs {size_bytes} bytes, but its external data has {length}", where)
    file_bytes = path.stat().st_size
    if offset < 0 or offset + length > file_bytes:
        raise _external(
            f"it refers to bytes {offset} to {offset + length}, but {path.name} has {file_bytes}", where
        )


def _resolve_inside(folder: Path, location: str, where: str) -> Path:
    """The regular file at `location`, links followed, if it lies inside `folder`."""
    if not location or "\0" in location or os.path.isabs(location) or ".." in Path(location).parts:
        raise _external(f"location {location!r} is not a path inside the model's folder", where)
    root = folder.resolve()
    try:
        path = Path(os.path.realpath(root / location))
        is_file = path.is_file()
    except OSError as error:  # a name that is longer than names may be
        raise _external(f"location {reprlib.repr(location)}: {error.strerror}", where) from None
    if not path.is_relative_to(root):
        raise _external(f"location {location!r} is a link that leads outside the model's folder", where)
    if not is_file:
        raise _external(
            f"file {location!r} is missing from the model's folder",
            where,
            "keep the model's data files in its folder; `hybridc plan --no-weights` plans without them",
        )
    return path


def _malformed(why: str, where: str) -> ModelError:
    return ModelError(
        codes.MALFORMED_TENSOR, f"malformed tensor: {why}", where=where, remedy="export the network again"
    )


def _external(
    why: str, where: str, remedy: str = "give the model's path and keep its data files in the same folder"
) -> ModelError:
    return ModelError(codes.EXTERNAL_DATA, f"external data rejected: {why}", where=where, remedy=remedy)
