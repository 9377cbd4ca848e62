"""What is refused, and the errors of both protocols that say so."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpc import StatusCode
from kserve.errors import InferenceError, InvalidInput, ModelNotFound, ModelNotReady, ServerNotReady

from hybridc.errors import HybridcError, UsageError

_log = logging.getLogger("hybridc.serving")


class QueueFull(Exception):
    """As many requests wait as may."""

    def __init__(self) -> None:
        super().__init__("too many requests are waiting: try again later")


class TimedOut(Exception):
    """A request was not answered in time."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"the request has no result after {timeout_s:g} s")


class BodyTimedOut(Exception):
    """The body of a request did not come in time."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"the request's body is not there after {timeout_s:g} s")


class TooLarge(Exception):
    """The body of a request is larger than allowed."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"the request is larger than {limit_bytes:,} bytes, which is the limit here")


class UnknownEncoding(Exception):
    """The body of a request is compressed."""

    def __init__(self, encoding: str) -> None:
        super().__init__(f"requests of the content encoding {encoding!r} are not read: send them as they are")


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer other than a result."""

    http_status: int
    grpc_status: StatusCode
    text: str


STATUSES: dict[type[Exception], tuple[int, StatusCode]] = {
    InvalidInput: (400, StatusCode.INVALID_ARGUMENT),
    ModelNotFound: (404, StatusCode.NOT_FOUND),
    BodyTimedOut: (408, StatusCode.DEADLINE_EXCEEDED),
    TooLarge: (413, StatusCode.RESOURCE_EXHAUSTED),
    UnknownEncoding: (415, StatusCode.INVALID_ARGUMENT),
    QueueFull: (429, StatusCode.RESOURCE_EXHAUSTED),
    InferenceError: (500, StatusCode.INTERNAL),
    NotImplementedError: (501, StatusCode.UNIMPLEMENTED),
    ModelNotReady: (503, StatusCode.UNAVAILABLE),
    ServerNotReady: (503, StatusCode.UNAVAILABLE),
    TimedOut: (504, StatusCode.DEADLINE_EXCEEDED),
}
"""Of everything that is refused on purpose, by HTTP and by gRPC."""


def refusal(error: Exception) -> Refusal:
    """How to answer a request that has ended in this error."""
    for kind, (http_status, grpc_status) in STATUSES.items():
        if isinstance(error, kind):
            return Refusal(http_status, grpc_status, str(error))
    _log.error("internal error", exc_info=error)
    return Refusal(500, StatusCode.INTERNAL, f"internal error: {type(error).__name__}")


def told_to_client(error: HybridcError) -> Exception:
    """The error of a run as one of the protocol: the client's fault if what was fed cannot be computed."""
    text = f"{error.what} ({error.code})" + f": {error.remedy}" * bool(error.remedy)
    return InvalidInput(text) if isinstance(error, UsageError) else InferenceError(text)


def malformed(errors: Sequence[Mapping[str, Any]]) -> str:
    """What pydantic finds wrong with a request, in one line: the first of its errors."""
    first = errors[0]
    place = ".".join(str(part) for part in first["loc"] if part not in ("body", "InferenceRequest", "bytes"))
    return f"malformed request: {first['msg']}" + f" at {place}" * bool(place)
