"""hybridc behind ONNX's own interface of backends, `onnx.backend.base`, through which its test suite runs.

    from hybridc.backend import HybridcBackend
    [y] = HybridcBackend.run_model(model, [x])

A model is compiled at its first run, for the shapes that are fed, and for the values of inputs that shapes
are computed from; feeds of other shapes, or other such values, compile it again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import onnx
from onnx import helper
from onnx.backend.base import Backend, BackendRep

import hybridc
from hybridc.errors import UsageError
from hybridc.frontend.inputs.shape_inputs import shape_inputs

if TYPE_CHECKING:
    from hybridc.keywords import CompileKeywords
    from hybridc.runtime import Session

_TARGETS = {"CPU": "native", "CUDA": "cuda+native"}
_DRIVER = Path("/proc/driver/nvidia/version")


class HybridcBackend(Backend):
    """Compiles for this computer's CPU, or with device `CUDA` for its GPU, too.

    A subclass may set `options`, those of `hybridc.compile`, and the size of an emulated GPU.
    """

    options: ClassVar[CompileKeywords] = {}
    emulate_gpu: ClassVar[str | int | None] = None

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **options: Any) -> HybridcModel:
        """The model, to be compiled when it is first run. `options` are those of `hybridc.compile`."""
        target = _TARGETS.get(device.partition(":")[0])
        if target is None:
            raise UsageError("HC500", f"unknown device {device!r}", remedy="use CPU or CUDA")
        known = {"target": target, **cls.options, **options}
        return HybridcModel(model, cast("CompileKeywords", known), cls.emulate_gpu)

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Sequence[np.ndarray] | Mapping[str, np.ndarray],
        device: str = "CPU",
        outputs_info: Sequence[tuple[np.dtype, tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> tuple[np.ndarray, ...]:
        """Run one operator; `inputs` by name, or in the order of those that the node has.

        `opset_version` is that of the node, the newest that onnx knows unless given; other keywords are
        options of `hybridc.compile`. Raises HybridcError.
        """
        opset = int(kwargs.pop("opset_version", onnx.defs.onnx_opset_version()))
        names = [name for name in dict.fromkeys(node.input) if name]
        feeds = dict(inputs) if isinstance(inputs, Mapping) else dict(zip(names, inputs, strict=True))
        graph = helper.make_graph(
            [node],
            node.name or node.op_type,
            [_info(name, np.asarray(feeds[name])) for name in names],
            [onnx.ValueInfoProto(name=name) for name in node.output if name],
        )
        domains = {"": opset} if node.domain in ("", "ai.onnx") else {"": opset, node.domain: 1}
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid(*each) for each in domains.items()]
        )
        return cls.prepare(model, device, **kwargs).run(feeds)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        kind = device.partition(":")[0]
        return kind == "CPU" or (kind == "CUDA" and (cls.emulate_gpu is not None or _DRIVER.exists()))


class HybridcModel(BackendRep):
    """A model that is compiled for what it is fed."""

    def __init__(
        self, model: onnx.ModelProto, options: CompileKeywords, emulate_gpu: str | int | None = None
    ) -> None:
        self._model, self._options, self._emulate_gpu = model, options, emulate_gpu
        self._constants = shape_inputs(model)
        self._sessions: dict[tuple[object, ...], Session] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="hybridc-backend-")

    def run(
        self, inputs: Sequence[np.ndarray] | Mapping[str, np.ndarray], **kwargs: Any
    ) -> tuple[np.ndarray, ...]:
        """The outputs in order, for inputs by name or in the model's order.

        Inputs with a default may be left out. Raises HybridcError, or ValueError for another number of inputs
        than the model has.
        """
        feeds = self._named(inputs)
        values = {name: array for name, array in feeds.items() if name in self._constants}
        shapes = {name: array.shape for name, array in feeds.items() if name not in values}
        key = (*((n, a.shape, a.tobytes()) for n, a in values.items()), *shapes.items())
        if key not in self._sessions:
            self._sessions[key] = self._compiled(shapes, values)
        return tuple(self._sessions[key].run(None, {name: feeds[name] for name in shapes}))

    def _named(self, inputs: Sequence[np.ndarray] | Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if isinstance(inputs, Mapping):
            return {name: _array(name, value) for name, value in inputs.items()}
        names = [value.name for value in self._model.graph.input]
        weights = {tensor.name for tensor in self._model.graph.initializer}
        if len(inputs) != len(names):
            names = [name for name in names if name not in weights]
        return {name: _array(name, value) for name, value in zip(names, inputs, strict=True)}

    def _compiled(self, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, np.ndarray]) -> Session:
        folder = Path(self._folder.name) / f"{len(self._sessions)}.hyb"
        options: CompileKeywords = {**self._options, "shapes": dict(shapes), "values": dict(values)}
        hybridc.compile(self._model, folder, **options)
        return hybridc.load(folder, emulate_gpu=self._emulate_gpu)


def _array(name: str, value: object) -> np.ndarray:
    if value is None or isinstance(value, list | tuple | dict):  # sequences, optionals and maps of ONNX
        what = f"the value of input {name!r} is not a tensor"
        raise UsageError("HC553", what, remedy="give an array: sequences and optionals are not supported")
    return np.asarray(value)


def _info(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
