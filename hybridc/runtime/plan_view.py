"""One plan of a session: where its inputs and outputs are, and what they must be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import or_

import numpy as np

from hybridc.artifact.load import Artifact
from hybridc.artifact.manifest import Port
from hybridc.errors import ArtifactError
from hybridc.ir import Check, Device
from hybridc.ir.bind import Binding, BindingError, bind
from hybridc.labels import check_labels
from hybridc.runtime.faults import check_fed
from hybridc.runtime.memory import HostPlace, Memory
from hybridc.runtime.places import PortTensor, fed_tensors, places, result_tensors
from hybridc.runtime.ports import as_port, port_dtype


class PlanView:
    """The chosen plan of an artifact as a session sees it. Has no memory of its own.

    Raises ArtifactError HC306 where the plan does not fit functions and weights. Requires: it is verified.
    """

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        self.binding = bind_plan(artifact)
        self._interface = artifact.interface
        self._inputs, self._sizes = fed_tensors(artifact)
        self._results = result_tensors(artifact)
        self._input_checks = _input_checks(artifact)
        self._places = places(artifact, Device.CPU)
        self._gpu_places = places(artifact, Device.GPU)
        sizes = [PortTensor(name, Port("", (1,), "int64")) for name in self._sizes]
        fed = (*(tensor for tensors in self._inputs.values() for tensor in tensors), *sizes)
        self._fed = tuple((t, self._host_place(t, True), self._gpu_places.get((t.name, True))) for t in fed)
        """What may be fed, and where on the host or the GPU a run reads it."""
        self._result_places = {
            port: tuple(self._host_place(tensor, False) for tensor in tensors)
            for port, tensors in self._results.items()
        }
        """Where results and counts are on the host, by name; None: they are elsewhere."""

    def checked(self, fed: Mapping[str, np.ndarray], sizes: Sequence[int]) -> dict[str, np.ndarray]:
        """By tensor what is fed, and the sizes. Raises UsageError HC560 or HC581 for values that are not
        allowed."""
        arrays = {}
        for port in self._interface.inputs:
            if port.name in fed:
                array = fed[port.name]
                check_labels(port.name, array, port.labels)
                for tensor in self._inputs[port.name]:
                    part = tensor.of(array) if len(self._inputs[port.name]) > 1 else array
                    check_fed(part, self._input_checks.get(tensor.name, ()))
                    arrays[tensor.name] = part
        numbers = np.array(sizes, np.int64)
        return arrays | {t: numbers[i : i + 1] for i, t in enumerate(self._sizes)}

    def put(self, memory: Memory, arrays: Mapping[str, np.ndarray]) -> None:
        """Write what is fed to where the plan reads it, with zeros behind it up to the largest sizes."""
        for tensor, place, gpu_place in self._fed:
            if tensor.name not in arrays:
                continue
            if place is not None:
                _fill(memory.array(place), arrays[tensor.name])
            elif gpu_place is not None:
                memory.put_on_gpu(gpu_place.start, _padded(arrays[tensor.name], tensor.port))

    def output(self, position: int, memory: Memory, fed: Mapping[str, np.ndarray]) -> np.ndarray:
        """The elements that there are, where sizes or data determine how many: valid until another run."""
        port, counts = self._interface.outputs[position], self._interface.counts
        array = self._output(port, memory, fed)
        for cut in port.cuts:
            count = int(self._output(counts[cut.count], memory, fed).item())
            if count < array.shape[cut.axis]:
                # a damaged artifact may compute anything
                array = array[(slice(None),) * cut.axis + (slice(max(count, 0)),)]
        return array

    def _output(self, port: Port, memory: Memory, fed: Mapping[str, np.ndarray]) -> np.ndarray:
        """In its largest size."""
        tensors = zip(self._results[port.name], self._result_places[port.name], strict=True)
        arrays = [self._result(tensor, place, memory, fed) for tensor, place in tensors]
        return _joined(arrays, self._results[port.name])

    def _result(
        self, tensor: PortTensor, place: HostPlace | None, memory: Memory, fed: Mapping[str, np.ndarray]
    ) -> np.ndarray:
        """It may be an input, whose place may be taken by now, or a weight."""
        name, port = tensor.name, tensor.port
        if name in fed:
            sources = (each.port for each, _, _ in self._fed if each.name == name)
            return _padded(fed[name], next(sources, port)).reshape(port.shape)
        if place is not None:
            return memory.array(place)
        if (name, False) in self._gpu_places:
            return self._from_gpu(memory, tensor, is_before=False)
        stored = self.artifact.stored_plan.host_weights
        weight = next(w for w in stored if w.tensor == name and not w.layout)
        return as_port(memory.weight_bytes(weight), port)

    def shared_places(self, memory: Memory, outputs: Mapping[str, str]) -> dict[str, np.ndarray]:
        """What `Session.places` returns."""
        found = {name: self._shared(name, output) for name, output in outputs.items()}
        return {
            name: as_port(memory.host_bytes[places[0]], self._inputs[name][0].port)
            for name, places in found.items()
            if len(places) == 1 and places[0] is not None
        }

    def _shared(self, name: str, output: str) -> list[slice | None]:
        """Where on the host a run finds each part of an input, and leaves that of the output in its place;
        None: it is elsewhere, or the two are not in one place."""
        pairs = zip(self._inputs[name], self._results[output], strict=False)
        places = [(self._places.get((o.name, True)), self._places.get((n.name, False))) for o, n in pairs]
        return [before if before == after else None for before, after in places]

    @property
    def inputs(self) -> tuple[Port, ...]:
        """In their largest sizes."""
        return self._interface.inputs

    @property
    def outputs(self) -> tuple[Port, ...]:
        """In their largest sizes."""
        return self._interface.outputs

    def residents(self, outputs: Mapping[str, str]) -> frozenset[str]:
        """What `Session.residents` returns."""
        before = {t for t, is_before in self._gpu_places if is_before}
        carried = dict(self.artifact.graph.loop_carried)

        def stays(name: str, output: str) -> bool:
            pairs = zip(self._inputs[name], self._results[output], strict=False)
            on_gpu = [old.name in before and carried.get(old.name) == new.name for old, new in pairs]
            on_host = [place is not None for place in self._shared(name, output)]
            return (any(on_gpu) or len(on_gpu) > 1) and all(map(or_, on_gpu, on_host))

        return frozenset(name for name, output in outputs.items() if stays(name, output))

    def resident(self, memory: Memory, port: Port) -> np.ndarray:
        """A copy of what is on the GPU of an input, with its part that is on the host."""
        tensors = self._inputs[port.name]
        arrays = [self._kept(memory, tensor) for tensor in tensors]
        return _joined(arrays, tensors)

    def _kept(self, memory: Memory, tensor: PortTensor) -> np.ndarray:
        """What the next run finds of an input that is not fed again."""
        place = self._host_place(tensor, is_before=True)
        if place is None or (tensor.name, True) in self._gpu_places:
            return self._from_gpu(memory, tensor, is_before=True)
        return memory.array(place)

    def _host_place(self, tensor: PortTensor, is_before: bool) -> HostPlace | None:
        """Where a tensor is on the host before or after a run, if it is there, as users know it."""
        place, port = self._places.get((tensor.name, is_before)), tensor.port
        return None if place is None else (place.start, place.stop, port_dtype(port.dtype), port.shape)

    def _from_gpu(self, memory: Memory, tensor: PortTensor, *, is_before: bool) -> np.ndarray:
        place = self._gpu_places[tensor.name, is_before]
        return as_port(memory.get_from_gpu(place.start, place.stop - place.start), tensor.port)


def _joined(arrays: Sequence[np.ndarray], tensors: Sequence[PortTensor]) -> np.ndarray:
    """The array as users know it of its parts."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=tensors[0].axis)


def _input_checks(artifact: Artifact) -> dict[str, tuple[Check, ...]]:
    """By input, as a tensor, what kernels check of it: it is checked before the run writes anything."""
    made = [check for kernel in artifact.graph.kernels for check in kernel.checks]
    found = {name: tuple(check for check in made if check.tensor == name) for name in artifact.graph.inputs}
    return {name: checks for name, checks in found.items() if checks}


def _fill(target: np.ndarray, array: np.ndarray) -> None:
    if array.shape != target.shape:
        target[...] = 0
        target = target[tuple(map(slice, array.shape))]
    target[...] = array


def _padded(array: np.ndarray, port: Port) -> np.ndarray:
    if array.size == math.prod(port.shape):
        return array
    whole = np.zeros(port.shape, array.dtype)
    _fill(whole, array)
    return whole


def bind_plan(artifact: Artifact) -> Binding:
    """What a run of the chosen plan does, with the weights that the artifact stores for it.

    Requires: `verify_plans`. Raises ArtifactError HC306 where the plan does not fit functions and weights.
    """
    stored = artifact.stored_plan
    try:
        binding = bind(artifact.graph, artifact.plan, artifact.manifest.signatures)
        for wanted, found in (
            (binding.host_weights, stored.host_weights),
            (binding.streamed_weights, stored.streamed_weights),
            ([r.weight for r in binding.resident_weights], stored.gpu_weights),
        ):
            missing = set(wanted) - {weight.weight for weight in found}
            if missing:
                raise BindingError(f"{min(map(str, missing))} is not stored as it is read", "weights")
    except BindingError as error:
        what = f"its plan does not fit its functions: {error.what} ({error.where})"
        raise ArtifactError(
            "HC306", what, where=str(artifact.path), remedy="compile the model again"
        ) from error
    return binding
