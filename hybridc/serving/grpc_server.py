"""The protocol over gRPC: KServe's service, behind limits on messages and their number."""

from __future__ import annotations

from typing import Any, NoReturn

from grpc import aio
from grpc_interceptor import AsyncExceptionToStatusInterceptor
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from kserve.protocol.grpc.servicer import InferenceServicer

from hybridc.errors import UsageError
from hybridc.serving.metrics import REFUSED
from hybridc.serving.protocol import FixedModels, ServedPlane
from hybridc.serving.refusals import refusal
from hybridc.serving.settings import Limits, Settings

_HEALTH_CALLS = 64
"""Beside the requests that fill all queues."""


class _Refusals(AsyncExceptionToStatusInterceptor):
    """Errors as the protocol has them; KServe's own interceptor logs a traceback of each."""

    async def handle_exception(
        self, ex: Exception, request_or_iterator: Any, context: Any, method_name: str
    ) -> NoReturn:
        found = refusal(ex)
        REFUSED.labels("grpc", found.grpc_status.name).inc()
        await context.abort(found.grpc_status, found.text)
        raise ex  # not reached: abort has raised


class GrpcServer:
    """Answers requests until it is stopped."""

    def __init__(self, plane: ServedPlane, limits: Limits, settings: Settings) -> None:
        """Raises UsageError HC599 where the port is not free. To be made within the event loop."""
        self._grace_s = settings.grace_s
        self._server = aio.server(
            interceptors=(_Refusals(),),
            options=[
                ("grpc.max_receive_message_length", limits.request_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),  # else two servers may have one port, and each some of the requests
            ],
            maximum_concurrent_rpcs=limits.requests + _HEALTH_CALLS,
        )
        servicer = InferenceServicer(plane, FixedModels(plane.model_registry))
        add_GRPCInferenceServiceServicer_to_server(servicer, self._server)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        try:
            self.port = self._server.add_insecure_port(f"{host}:{settings.grpc_port}")
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            what = f"the gRPC server cannot listen at {host}:{settings.grpc_port}"
            raise UsageError("HC599", what, remedy="choose another --host or --grpc-port")

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        """Take no more requests, and answer those that were taken."""
        await self._server.stop(self._grace_s)
