"""KServe's data plane and model repository, changed where they are for other servers than this."""

from __future__ import annotations

from typing import Any, NoReturn

from kserve import InferRequest, InferResponse
from kserve.constants.constants import INFERENCE_CONTENT_LENGTH_HEADER
from kserve.protocol.dataplane import DataPlane
from kserve.protocol.model_repository_extension import ModelRepositoryExtension

from hybridc.serving.bodies import read_body
from hybridc.version import __version__


class ServedPlane(DataPlane):
    """What both protocols ask for."""

    is_stopping = False
    """From the signal to stop on: requests are still answered, but no more should be sent here."""

    def metadata(self) -> dict[str, Any]:
        return {"name": "hybridc", "version": __version__, "extensions": ["binary_tensor_data"]}

    async def model_metadata(self, model_name: str) -> dict[str, Any]:
        return {**await super().model_metadata(model_name), "platform": "hybridc"}

    async def ready(self) -> bool:
        return not self.is_stopping

    def decode(
        self, body: Any, headers: dict[str, str], *others: Any, **more: Any
    ) -> tuple[InferRequest, dict]:
        """The request in a body. Raises InvalidInput."""
        if isinstance(body, bytes):
            return read_body(body, headers.get(INFERENCE_CONTENT_LENGTH_HEADER), more["model_name"]), {}
        return super().decode(body, {}, *others, **more)

    def encode(
        self, model_name: str, response: InferResponse, headers: dict[str, str], req_attributes: dict
    ) -> tuple[Any, dict[str, str]]:
        """The response, whatever the request's headers say of cloud events."""
        return super().encode(model_name, response, {}, req_attributes)


class FixedModels(ModelRepositoryExtension):
    """Clients neither load nor unload models: their memory is promised when the server starts."""

    async def load(self, model_name: str) -> NoReturn:
        raise NotImplementedError("models are loaded when the server starts")

    async def unload(self, model_name: str) -> NoReturn:
        raise NotImplementedError("models stay loaded until the server is stopped")
