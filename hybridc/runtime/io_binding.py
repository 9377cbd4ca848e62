"""Arrays of the caller that runs read and write, bound once: numpy's, or those of any library with DLPack."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import tvm_ffi

from hybridc.artifact.manifest import Port
from hybridc.errors import UsageError

_CPU, _CUDA, _PINNED = 1, 2, 3  # kDLCPU, kDLCUDA, kDLCUDAHost: the host's memory, which CUDA may copy from


class Copies(Protocol):
    """What copies between host and GPU."""

    def copy(self, source: Any, target: Any) -> None:
        """Bytes of one array of tvm_ffi to another of the same size."""


class IoBinding:
    """What runs of a session read and write: `session.io_binding()` makes one.

    Arrays may be numpy's or those of any library with DLPack, such as PyTorch, in host memory or on the GPU
    of a session that uses it. They are bound without a copy: a run reads what they hold when it begins, and
    fills the outputs when it ends. An output must not be bound to the memory of an input that is an output
    itself. What fills an array on the GPU must have ended before a run begins: CUDA does not wait for streams
    that do not wait for its default stream. A binding belongs to one thread at a time.
    """

    def __init__(self) -> None:
        self._inputs: dict[str, Any] = {}
        self._outputs: dict[str, Any] = {}
        self._results: dict[str, np.ndarray] = {}

    def bind_input(self, name: str, array: Any) -> None:
        """Read an input from this array. Raises UsageError HC553 if it is no array in reach."""
        self._inputs[name] = _bound(array, f"input {name!r}")

    bind_cpu_input = bind_input  # as onnxruntime calls it

    def bind_output(self, name: str, array: Any = None) -> None:
        """Compute an output, into this array if there is one, else into a fresh one of each run.

        Raises UsageError HC553 if it is no array in reach, or one that may not be written.
        """
        bound = None if array is None else _bound(array, f"output {name!r}")
        if isinstance(bound, np.ndarray) and not (bound.flags.writeable and bound.dtype.isnative):
            what = f"the array for output {name!r} cannot be written in the machine's byte order"
            raise UsageError("HC553", what, remedy="bind a writeable array")
        self._outputs[name] = bound
        self._results.pop(name, None)  # which is another array's

    def clear_binding_inputs(self) -> None:
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        self._outputs.clear()
        self._results.clear()

    def get_outputs(self) -> list[Any]:
        """The arrays that the last run has filled, in the order in which they were bound.

        Those on a GPU are tensors of tvm_ffi, which have `__dlpack__`. Raises UsageError HC555 before a run.
        """
        return [self._result(name) for name in self._outputs]

    def copy_outputs_to_cpu(self) -> list[np.ndarray]:
        """Likewise as numpy arrays in host memory, which those of get_outputs may be themselves.

        Raises UsageError HC555 before a run.
        """
        self.get_outputs()
        return [self._results[name] for name in self._outputs]

    @property
    def output_names(self) -> list[str]:
        """In the order in which they were bound."""
        return list(self._outputs)

    def feeds(self, program: Copies) -> dict[str, np.ndarray]:
        """The inputs in host memory; those on a GPU are copied now."""
        return {name: _on_host(array, program) for name, array in self._inputs.items()}

    def target(self, port: Port, dtype: np.dtype) -> np.ndarray | None:
        """The caller's array in host memory for an output; None if there is none.

        Raises UsageError HC553 for one of another type, HC554 for one of another shape, and for any where the
        size of the output follows from data.
        """
        bound = self._outputs[port.name]
        if bound is None:
            return None
        what, remedy = f"the array for output {port.name!r}", f"bind {dtype.name}{list(port.shape)}"
        if port.cuts:
            raise UsageError("HC554", f"{what} may be too large", remedy="bind the output without an array")
        if str(bound.dtype) != dtype.name:
            raise UsageError("HC553", f"{what} has dtype {bound.dtype}", remedy=remedy)
        if tuple(bound.shape) != port.shape:
            raise UsageError("HC554", f"{what} has shape {list(bound.shape)}", remedy=remedy)
        return bound if isinstance(bound, np.ndarray) else None

    def put(self, name: str, result: np.ndarray, program: Copies) -> None:
        """Keep the result of an output, and copy it to the GPU if it is wanted there."""
        self._results[name] = result
        bound = self._outputs[name]
        if bound is not None and not isinstance(bound, np.ndarray):
            program.copy(tvm_ffi.from_dlpack(np.ascontiguousarray(result)), bound)

    def _result(self, name: str) -> Any:
        if name not in self._results:
            raise UsageError("HC555", f"output {name!r} was not computed yet", remedy="run the session first")
        bound = self._outputs[name]
        return self._results[name] if bound is None or isinstance(bound, np.ndarray) else bound


def _bound(array: Any, what: str) -> Any:
    """The array without a copy: numpy's in host memory, tvm_ffi's on a GPU."""
    if isinstance(array, np.ndarray):
        return array
    try:
        device, _ = array.__dlpack_device__()
        if device in (_CPU, _PINNED):
            return np.from_dlpack(array)
        tensor = tvm_ffi.from_dlpack(array)
    except (AttributeError, TypeError, ValueError, RuntimeError, BufferError) as error:
        reason = " ".join(str(error).split())
        remedy = "bind an array of numpy, or one of DLPack whose type numpy has"
        raise UsageError("HC553", f"{what} cannot be bound: {reason}", remedy=remedy) from None
    if device != _CUDA or not tensor.is_contiguous():
        remedy = "bind a contiguous array in host memory or on an NVIDIA GPU"
        raise UsageError("HC553", f"{what} is not where a session can reach it", remedy=remedy)
    return tensor


def _on_host(array: Any, program: Copies) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return array
    host = np.empty(array.shape, str(array.dtype))
    program.copy(array, tvm_ffi.from_dlpack(host))
    return host
