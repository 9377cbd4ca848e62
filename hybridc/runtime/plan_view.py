"""One plan of a session: where its inputs and outputs are, and what they must be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from hybridc.artifact.load import Artifact
from hybridc.artifact.manifest import Port
from hybridc.errors import ArtifactError
from hybridc.ir import Check, Device
from hybridc.ir.bind import Binding, BindingError, bind
from hybridc.labels import check_labels
from hybridc.runtime.faults import check_fed
from hybridc.runtime.memory import HostPlace, Memory
from hybridc.runtime.places import fed_tensors, places, result_tensors
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
        sizes = [Port("", (1,), "int64") for _ in self._sizes]
        fed = zip((*self._interface.inputs, *sizes), (*self._inputs.values(), *self._sizes), strict=True)
        self._fed = tuple(
            (t, p, self._host_place(t, p, True), self._gpu_places.get((t, True))) for p, t in fed
        )
        """What may be fed: a tensor, how users know it, and where on the host or the GPU a run reads it."""
        ports = self._interface.outputs + self._interface.counts
        self._result_places = {p.name: self._host_place(self._results[p.name], p, False) for p in ports}
        """Where results and counts are on the host, by name; None: they are elsewhere."""

    def checked(self, fed: Mapping[str, np.ndarray], sizes: Sequence[int]) -> dict[str, np.ndarray]:
        """By tensor what is fed, and the sizes. Raises UsageError HC560 or HC581 for values that are not
        allowed."""
        arrays = {}
        for port in self._interface.inputs:
            if port.name in fed:
                array, tensor = fed[port.name], self._inputs[port.name]
                check_labels(port.name, array, port.labels)
                check_fed(array, self._input_checks.get(tensor, ()))
                arrays[tensor] = array
        numbers = np.array(sizes, np.int64)
        return arrays | {t: numbers[i : i + 1] for i, t in enumerate(self._sizes)}

    def put(self, memory: Memory, arrays: Mapping[str, np.ndarray]) -> None:
        """Write what is fed to where the plan reads it, with zeros behind it up to the largest sizes."""
        for tensor, port, place, gpu_place in self._fed:
            if tensor not in arrays:
                continue
            if place is not None:
                _fill(memory.array(place), arrays[tensor])
            elif gpu_place is not None:
                memory.put_on_gpu(gpu_place.start, _padded(arrays[tensor], port))

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
        """In its largest size. An output may be an input, whose place may be taken by now, or a weight."""
        tensor = self._results[port.name]
        if tensor in fed:
            source = next((p for p in self._interface.inputs if self._inputs[p.name] == tensor), port)
            return _padded(fed[tensor], source).reshape(port.shape)
        place = self._result_places[port.name]
        if place is not None:
            return memory.array(place)
        if (tensor, False) in self._gpu_places:
            return self._from_gpu(memory, tensor, port, is_before=False)
        stored = self.artifact.stored_plan.host_weights
        weight = next(w for w in stored if w.tensor == tensor and not w.layout)
        return as_port(memory.weight_bytes(weight), port)

    def shared_places(self, memory: Memory, outputs: Mapping[str, str]) -> dict[str, np.ndarray]:
        """What `Session.places` returns."""
        ports = {port.name: port for port in self._interface.inputs}
        found = {name: self._places.get((self._inputs[name], True)) for name in outputs}
        return {
            name: as_port(memory.host_bytes[place], ports[name])
            for name, place in found.items()
            if place is not None and place == self._places.get((self._results[outputs[name]], False))
        }

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
        pairs = ((name, self._inputs[name], self._results[output]) for name, output in outputs.items())
        return frozenset(name for name, old, new in pairs if old in before and carried.get(old) == new)

    def resident(self, memory: Memory, port: Port) -> np.ndarray:
        """A copy of what is on the GPU of an input."""
        return self._from_gpu(memory, self._inputs[port.name], port, is_before=True)

    def _host_place(self, tensor: str, port: Port, is_before: bool) -> HostPlace | None:
        """Where a tensor is on the host before or after a run, if it is there, as users know it."""
        place = self._places.get((tensor, is_before))
        return None if place is None else (place.start, place.stop, port_dtype(port.dtype), port.shape)

    def _from_gpu(self, memory: Memory, tensor: str, port: Port, *, is_before: bool) -> np.ndarray:
        place = self._gpu_places[tensor, is_before]
        return as_port(memory.get_from_gpu(place.start, place.stop - place.start), port)


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
