"""The network, or a tiling of it, with channels last where a GPU gains by that."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace

from hybridc.ir import Device
from hybridc.passes.estimate import estimated_us
from hybridc.passes.layout.channels_last import Origins, Us, choose_channels_last, in_layout, lay_out
from hybridc.passes.phases import FusedNetwork, GraphedNetwork, Times
from hybridc.passes.planner.model.cost import kernel_us
from hybridc.passes.schedule import schedule_functions
from hybridc.passes.stages.kernels import requests_of
from hybridc.progress import Progress
from hybridc.schedules.cuda.tensor_core.tensor_core import multiplied_factors
from hybridc.schedules.rule import Request

_CONVOLUTIONS = ("tensor_core_conv", "tensor_core_winograd")
"""Rules of the GPU whose products are of images."""
FromFused = Callable[[FusedNetwork, Progress], GraphedNetwork]
"""The stages behind `precision`."""


def with_channels_last(c: GraphedNetwork, from_fused: FromFused, progress: Progress) -> GraphedNetwork | None:
    """The network with other layouts; None where the GPU gains nothing by them.

    Its library has the functions of both.
    """
    if not c.job.options.target.has_gpu or c.job.many_sizes or c.job.open_axes:
        return None  # kernels of several sizes read the same weights, packed alike
    requests = requests_of(c.job, c.program)
    convolutions = {
        name: factors
        for name, request in requests.items()
        if _rule(c, name) in _CONVOLUTIONS and (factors := multiplied_factors(request))
    }
    if not convolutions:
        return None
    us = _Estimates(c, requests)
    last = choose_channels_last(c.program, convolutions, us)
    if not last:
        return None
    program, origins = lay_out(c.program, last)
    made = from_fused(FusedNetwork(c.job, program, c.library, c.narrow, unfused=c.unfused), progress)
    return replace(made, library=replace(made.library, estimated_us=_with_times(made, c, origins, us)))


def _rule(c: GraphedNetwork, function: str) -> str:
    made = c.scheduled.get((function, Device.GPU))
    return "" if made is None else made.rule


@dataclass(frozen=True)
class _Estimates:
    """Times of functions of the GPU in other layouts."""

    network: GraphedNetwork
    requests: Mapping[str, Request]
    _known_us: dict[tuple[str, Set[int]], float] = field(default_factory=dict)

    def __call__(self, name: str, positions: frozenset[int]) -> float:
        if (name, positions) not in self._known_us:
            self._known_us[name, positions] = self._us(name, positions)
        return self._known_us[name, positions]

    def _us(self, name: str, positions: frozenset[int]) -> float:
        job, key = self.network.job, (name, Device.GPU)
        known_us = self.network.library.estimated_us.get(key)
        if not positions and known_us is not None:
            return known_us
        made = {key: self.network.scheduled[key]} if key in self.network.scheduled else {}
        if positions:
            function = in_layout(self.requests[name].function, positions)
            if function is None:
                return math.inf
            request = replace(self.requests[name], function=function)
            made = dict(schedule_functions({name: request}, (Device.GPU,), cache=job.cache))
        return estimated_us(made, job.options.machine, job.options.target, job.cache).get(key, math.inf)


def _with_times(made: GraphedNetwork, planes: GraphedNetwork, origins: Origins, us: Us) -> Times:
    """The estimated times with those that follow from the times of functions of planes.

    A CPU transposes what has channels last, as fast as its memory reads and writes it. A GPU whose kernels
    are known by what their families reach gains as much as it is estimated to.
    """
    machine, known = made.machine, dict(made.library.estimated_us)
    for kernel in made.graph.kernels:
        if kernel.function not in origins:
            continue
        name, positions = origins[kernel.function]
        cpu, gpu = ((kernel.function, device) for device in (Device.CPU, Device.GPU))
        of_planes = replace(kernel, function=name)
        if Device.CPU in kernel.devices:
            gb_s = machine.cpu.bandwidth_gb_s * machine.cpu.efficiency(kernel.family).memory
            transposed_us = 2 * _transposed_bytes(made, planes, kernel.function, name) / (gb_s * 1e3)
            known[cpu] = kernel_us(of_planes, machine, Device.CPU) + transposed_us
        if Device.GPU in kernel.devices and gpu not in known:
            share = us(name, positions) / us(name, frozenset())
            known[gpu] = kernel_us(of_planes, machine, Device.GPU) * (share if math.isfinite(share) else 1.0)
    return known


def _transposed_bytes(made: GraphedNetwork, planes: GraphedNetwork, last: str, plane: str) -> int:
    """Of scratch memory that the CPU has for tensors in planes, one for each."""
    own, other = (
        c.scheduled[name, Device.CPU].workspace_bytes for c, name in ((made, last), (planes, plane))
    )
    return sum(own) - sum(other)
