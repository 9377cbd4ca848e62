"""Arrays of the caller that runs read and write, bound once: numpy's, or those of any library with DLPack."""

from __future__ import annotations

from typing import Any

import numpy as np

from .errors import UsageError
from .ports import Port

_CPU, _PINNED = 1, 3  # kDLCPU, kDLCUDAHost


class IoBinding:
    """What runs of a session read and write: `session.io_binding()` makes one.

    Arrays may be numpy's or those of any library with DLPack, such as PyTorch, in host memory. They are bound
    without a copy: a run reads what they hold when it begins, and fills the outputs when it ends. Contiguous
    arrays of the machine's byte order are what the run itself works on. An output must not be bound to the
    memory of an input that is an output itself. A binding belongs to one thread at a time.
    """

    def __init__(self) -> None:
        self._inputs: dict[str, np.ndarray] = {}
        self._outputs: dict[str, Any] = {}
        """What the caller has bound; None: a fresh array of each run."""
        self._targets: dict[str, np.ndarray] = {}
        """The same memory as numpy's array."""
        self._results: dict[str, np.ndarray] = {}

    def bind_input(self, name: str, array: Any) -> None:
        """Read an input from this array. Raises UsageError HC553 if it is no array in reach."""
        self._inputs[name] = _on_host(array, f"input {name!r}")

    bind_cpu_input = bind_input  # as onnxruntime calls it

    def bind_output(self, name: str, array: Any = None) -> None:
        """Compute an output, into this array if there is one, else into a fresh one of each run.

        Raises UsageError HC553 if it is no array in reach, or one that may not be written.
        """
        if array is not None:
            target = _on_host(array, f"output {name!r}")
            if not (target.flags.writeable and target.dtype.isnative):
                what = f"the array for output {name!r} cannot be written in the machine's byte order"
                raise UsageError("HC553", what, remedy="bind a writeable array")
            self._targets[name] = target
        else:
            self._targets.pop(name, None)
        self._outputs[name] = array
        self._results.pop(name, None)  # which is another array's

    def clear_binding_inputs(self) -> None:
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        self._outputs.clear()
        self._targets.clear()
        self._results.clear()

    def get_outputs(self) -> list[Any]:
        """The arrays that the last run has filled, in the order in which they were bound.

        Raises UsageError HC555 before a run.
        """
        for name in self._outputs:
            if name not in self._results:
                what = f"output {name!r} was not computed yet"
                raise UsageError("HC555", what, remedy="run the session first")
        return [self._results[name] for name in self._outputs]

    def copy_outputs_to_cpu(self) -> list[np.ndarray]:
        """Likewise as numpy arrays, which those of get_outputs may be themselves."""
        return self.get_outputs()

    @property
    def output_names(self) -> list[str]:
        """In the order in which they were bound."""
        return list(self._outputs)

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        return dict(self._inputs)

    def target(self, port: Port) -> np.ndarray | None:
        """The caller's array for an output; None if there is none.

        Raises UsageError HC553 for one of another type, HC554 for one of another shape, and for any where the
        size of the output follows from data.
        """
        bound = self._targets.get(port.name)
        if bound is None:
            return None
        what, remedy = f"the array for output {port.name!r}", f"bind {port.type}"
        if port.varies:
            raise UsageError("HC554", f"{what} may be too large", remedy="bind the output without an array")
        if bound.dtype.name != port.dtype:
            raise UsageError("HC553", f"{what} has dtype {bound.dtype}", remedy=remedy)
        if bound.shape != port.shape:
            raise UsageError("HC554", f"{what} has shape {list(bound.shape)}", remedy=remedy)
        return bound

    def put(self, name: str, result: np.ndarray) -> None:
        """Keep the result of an output, in the array that is bound if there is one."""
        bound = self._targets.get(name)
        if bound is not None and bound is not result:
            np.copyto(bound, result)
        self._results[name] = result if bound is None else bound


def _on_host(array: Any, what: str) -> np.ndarray:
    """The array without a copy."""
    if isinstance(array, np.ndarray):
        return array
    try:
        device, _ = array.__dlpack_device__()
        if device in (_CPU, _PINNED):
            return np.from_dlpack(array)
    except (AttributeError, TypeError, ValueError, RuntimeError, BufferError) as error:
        reason = " ".join(str(error).split())
        remedy = "bind an array of numpy, or one of DLPack whose type numpy has"
        raise UsageError("HC553", f"{what} cannot be bound: {reason}", remedy=remedy) from None
    remedy = "bind an array in host memory"
    raise UsageError("HC553", f"{what} is not where a session can reach it", remedy=remedy)
