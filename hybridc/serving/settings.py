"""What a server is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """Addresses and limits of a server."""

    host: str
    http_port: int
    """0 lets the system choose; likewise of gRPC."""
    grpc_port: int
    queue: int
    """Requests of one model that may wait."""
    timeout_s: float
    """For which a request may wait for its result, and its body for the client."""
    request_bytes: int | None
    """Of the largest request that is read. None: 64 MiB, or what the largest inputs of a model need."""
    batch: str | None
    """The open dimension along which requests are joined."""
    batch_delay_s: float
    """For which a batch that is not full waits for more requests."""
    grace_s: float
    """What requests have to end when the server is stopped."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What of the requests that clients send is taken."""

    request_bytes: int
    requests: int
    """That are read or wait at the same time: as many as fill all queues and runs."""
    timeout_s: float
    """For which the body of a request may take to come."""
