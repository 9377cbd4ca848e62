"""Bodies of HTTP requests as KServe's requests: JSON, and tensors in binary behind it."""

from __future__ import annotations

from typing import Any

from kserve import InferInput, InferRequest
from kserve.errors import InvalidInput
from kserve.protocol.infer_type import RequestedOutput
from kserve.protocol.rest.v2_datamodels import InferenceRequest, RequestInput
from pydantic import ValidationError

from hybridc.serving.refusals import malformed


class _Input(RequestInput):
    """An input whose data may stand behind the JSON."""

    data: list[Any] | None = None


class _Request(InferenceRequest):
    inputs: list[_Input]


def read_body(body: bytes, json_length: str | None, model_name: str) -> InferRequest:
    """A request of JSON, behind which there are tensors if `json_length`, a header, says where it ends.

    KServe's own reader makes Python's objects of all elements of binary tensors, and trusts their sizes.
    Raises InvalidInput.
    """
    length = _length(json_length, len(body))
    try:
        request = _Request.model_validate_json(body[:length])
    except ValidationError as error:
        raise InvalidInput(malformed(error.errors(include_input=False, include_url=False))) from None
    raw = _raw_tensors(request.inputs, body, length)
    return InferRequest(
        model_name,
        [InferInput(it.name, it.shape, it.datatype, it.data, it.parameters) for it in request.inputs],
        request_id=request.id,
        raw_inputs=raw,
        parameters=request.parameters,
        request_outputs=[RequestedOutput(it.name, it.parameters) for it in request.outputs or ()],
    )


def _length(json_length: str | None, body_bytes: int) -> int:
    if json_length is None:
        return body_bytes
    if not (json_length.isascii() and json_length.isdigit() and int(json_length) <= body_bytes):
        raise InvalidInput(f"Inference-Header-Content-Length is {json_length[:20]!r} of {body_bytes:,} bytes")
    return int(json_length)


def _raw_tensors(inputs: list[_Input], body: bytes, begin: int) -> list[bytes | None]:
    """The bytes of each input, or None of those in JSON."""
    raw: list[bytes | None] = []
    for each in inputs:
        size = (each.parameters or {}).get("binary_data_size")
        if size is None:
            raw.append(None)
            continue
        if each.data is not None:
            raise InvalidInput(f"input {each.name!r} has data and binary_data_size")
        if type(size) is not int or not 0 <= size <= len(body) - begin:
            raise InvalidInput(f"input {each.name!r} has binary_data_size {size}, which is not there")
        raw.append(body[begin : begin + size])
        begin += size
    if begin != len(body):
        raise InvalidInput(f"{len(body) - begin:,} bytes behind the request belong to no input")
    return raw
