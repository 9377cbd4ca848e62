"""A session as a model of KServe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from kserve import InferOutput, InferRequest, InferResponse
from kserve.model import InferenceModel, InferenceVerb
from kserve.protocol.infer_type import RequestedOutput
from kserve.utils.utils import generate_uuid

from hybridc.errors import HybridcError, UsageError
from hybridc.serving.batching import Feeds, Outputs, Queue, Sizes
from hybridc.serving.metrics import PREDICT_HIST_TIME
from hybridc.serving.refusals import told_to_client
from hybridc.serving.settings import Settings
from hybridc.serving.tensors import Tensor, feeds, requested, tensor


class Port(Protocol):
    """An input or output of a session: `hybridc.runtime.NodeArg` is one."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def shape(self) -> list[int]: ...
    @property
    def open(self) -> dict[int, str]: ...


class Runner(Protocol):
    """What is served: `hybridc.runtime.Session` is one."""

    def get_inputs(self) -> Sequence[Any]: ...
    def get_outputs(self) -> Sequence[Any]: ...
    def buckets(self) -> Sequence[Any]: ...
    def memory(self) -> Mapping[Any, Any]: ...
    def run(self, output_names: Sequence[str] | None, feeds: Mapping[str, np.ndarray], /) -> Outputs: ...


class ServedModel(InferenceModel):
    """Answers requests by runs of a session, which a queue does in turn."""

    def __init__(self, name: str, runner: Runner, settings: Settings) -> None:
        """Raises UsageError HC598 for inputs and outputs that the protocol does not have."""
        super().__init__(name)
        self._runner = runner
        self.sizes = _joined_sizes(runner, settings.batch)
        lows = {each: min(low for low, _ in spans) for each, spans in _open_sizes(runner).items()}
        if self.sizes is not None and settings.batch is not None:
            lows[settings.batch] = 1  # smaller ones are padded
        self.inputs = [_tensor(port, lows) for port in runner.get_inputs()]
        self.outputs = [_tensor(port, lows) for port in runner.get_outputs()]
        timeout_s, delay_s = settings.timeout_s, settings.batch_delay_s
        self._queue = Queue(name, self._run, settings.queue, timeout_s, self.sizes, delay_s)
        self._is_open = True

    @property
    def largest_bytes(self) -> int:
        """Of the inputs of one request."""
        return sum(each.largest_bytes for each in self.inputs)

    async def healthy(self) -> bool:
        return self._is_open

    def get_input_types(self) -> list[dict[str, Any]]:
        return [each.metadata() for each in self.inputs]

    def get_output_types(self) -> list[dict[str, Any]]:
        return [each.metadata() for each in self.outputs]

    async def close(self, grace_s: float) -> None:
        """Refuse further requests, and answer those that were taken within `grace_s`."""
        self._is_open = False
        await self._queue.close(grace_s)

    async def __call__(
        self,
        body: InferRequest,
        headers: dict[str, str] | None = None,
        verb: InferenceVerb = InferenceVerb.PREDICT,
    ) -> tuple[InferResponse, dict[str, str]]:
        """Answer a request. Raises the exceptions of `refusals.STATUSES`."""
        if verb is not InferenceVerb.PREDICT:
            raise NotImplementedError("models are not explained here")
        if body.model_version:
            raise NotImplementedError(f"model {self.name!r} has no version but the one that is served")
        wanted = requested(body, self.outputs)
        arrays = feeds(body, self.inputs)
        try:
            with PREDICT_HIST_TIME.labels(model_name=self.name).time():
                results = await self._queue.submit(arrays)
        except HybridcError as error:
            raise told_to_client(error) from None
        return self._response(body, wanted, results), {}

    def _run(self, arrays: Feeds) -> Outputs:
        return self._runner.run(None, arrays)

    def _response(
        self, request: InferRequest, wanted: list[RequestedOutput], results: Outputs
    ) -> InferResponse:
        known = {each.name: (each.datatype, array) for each, array in zip(self.outputs, results, strict=True)}
        outputs = []
        for name in (each.name for each in wanted):
            datatype, array = known[name]
            outputs.append(InferOutput(name, list(array.shape), datatype, array))
            if request.from_grpc:  # else KServe asks for the truth of an array, where it looks for a list
                outputs[-1].set_data_from_numpy(array)
        return InferResponse(request.id or generate_uuid(), self.name, outputs, requested_outputs=wanted)


def _tensor(port: Port, lows: dict[str, int]) -> Tensor:
    return tensor(port.name, port.type, port.shape, port.open, lows)


def _open_sizes(runner: Runner) -> dict[str, set[tuple[int, int]]]:
    """Of each open dimension the ranges of its buckets."""
    found: dict[str, set[tuple[int, int]]] = {}
    for bucket in runner.buckets():
        for name, interval in bucket.sizes.items():
            found.setdefault(name, set()).add(interval)
    return found


def _joined_sizes(runner: Runner, dimension: str | None) -> Sizes | None:
    """Sizes of the dimension along which requests are joined, if the model has it.

    Raises UsageError HC598 where it is not the first axis of all inputs and outputs.
    """
    sizes = _open_sizes(runner)
    if dimension is None or dimension not in sizes:
        return None
    for port in (*runner.get_inputs(), *runner.get_outputs()):
        if {axis for axis, name in port.open.items() if name == dimension} != {0}:
            what = f"{dimension} is not the first axis, and only that, of {port.name!r}"
            raise UsageError("HC598", f"requests cannot be joined: {what}", remedy="serve it without --batch")
    return Sizes(tuple(sorted(sizes[dimension])))
