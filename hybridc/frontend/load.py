"""Read a model's bytes without trusting them, and know where they came from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError, EncodeError

from hybridc.errors import ModelError
from hybridc.frontend import codes
from hybridc.frontend.model import ModelFile

MAX_MODEL_BYTES = 2**31 - 1
"""Protobuf's own limit. Larger models keep their weights in other files, as external data."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A parsed model that belongs to hybridc: it may be changed in place."""

    proto: onnx.ModelProto
    source: ModelFile
    folder: Path | None
    """Where external data may lie; None if the model did not come from a file."""
    unread: frozenset[str] = frozenset()
    """Initializers of which only shape and type count (`tensors.without_weights`)."""
    weights: Mapping[str, ir.TensorProtocol] = field(default_factory=dict)
    """Checked contents of initializers that `proto` has without (`tensors.with_weights_apart`)."""

    def copy(self) -> Loaded:
        """The same model, of which the other one keeps its own when this is changed. Weights are shared."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        return replace(self, proto=proto)


def load(source: str | Path | bytes | onnx.ModelProto) -> Loaded:
    """Parse a model. Raises ModelError HC101 if it is not one, HC102 if it cannot be read or is too large."""
    if isinstance(source, onnx.ModelProto):
        proto = onnx.ModelProto()
        proto.CopyFrom(source)
        return _loaded(proto, _serialized(source), "<ModelProto>", None)
    if isinstance(source, bytes):
        return _loaded(_parse(source, "<bytes>"), source, "<bytes>", None)
    path = Path(source)
    data = _read(path)
    return _loaded(_parse(data, path.name), data, path.name, path.resolve().parent)


def _read(path: Path) -> bytes:
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_MODEL_BYTES:
            raise ModelError(
                codes.UNREADABLE,
                f"the file has {size_bytes} bytes, but an ONNX file can have at most {MAX_MODEL_BYTES}",
                where=str(path),
                remedy="save its weights as external data: onnx.save(..., save_as_external_data=True)",
            )
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelError(
            codes.UNREADABLE, f"cannot read the model: {reason}", where=str(path), remedy="check the path"
        ) from error


def _parse(data: bytes, name: str) -> onnx.ModelProto:
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except (DecodeError, RuntimeError, ValueError) as error:
        raise _not_onnx(name, "the content is not valid protobuf") from error
    return proto


def _serialized(proto: onnx.ModelProto) -> bytes:
    try:
        return proto.SerializeToString(deterministic=True)
    except (EncodeError, ValueError) as error:
        raise ModelError(
            codes.UNREADABLE,
            "the model is larger than protobuf can hold",
            where="<ModelProto>",
            remedy="save it with external data and give the file's path",
        ) from error


def _loaded(proto: onnx.ModelProto, data: bytes, name: str, folder: Path | None) -> Loaded:
    if not proto.HasField("graph") or not proto.opset_import:
        raise _not_onnx(name, "it has no graph or no opset")
    if not proto.graph.output:
        raise _not_onnx(name, "its graph has no outputs")
    opset = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 0)
    producer = f"{proto.producer_name} {proto.producer_version}".strip()
    sha256 = hashlib.sha256(data).hexdigest()
    return Loaded(proto, ModelFile(name, sha256, proto.ir_version, opset, producer), folder)


def _not_onnx(name: str, why: str) -> ModelError:
    return ModelError(
        codes.NOT_ONNX,
        f"not an ONNX model: {why}",
        where=name,
        remedy="export the network again, or check that the download is complete",
    )
