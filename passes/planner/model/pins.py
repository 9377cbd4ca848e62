"""The user's wishes where kernels run, checked and spelled out for every kernel."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType

from hybridc.errors import PlanError
from hybridc.ir import Device, Graph, Kernel

Pins = Mapping[str, Device]
"""Device of each kernel that must run on a given one."""
EVERYTHING = "*"
"""Pattern that matches all kernels, also where there are none: a network may hand on what it is fed."""
NO_PINS: Pins = MappingProxyType({})


def resolve_pins(graph: Graph, wishes: Sequence[tuple[str, Device]]) -> Pins:
    """Spell out patterns, each with a device, as devices of kernels.

    A pattern is the name of an ONNX node, or of a kernel, with `*`, `?` and `[...]` as in a shell; it pins
    every kernel that computes one of the nodes it matches. Raises PlanError: HC205 if a pattern matches
    nothing, HC206 if two patterns want different devices of one kernel, HC207 if a kernel has no code for
    the device it is pinned to.
    """
    chosen: dict[str, tuple[str, Device]] = {}
    for pattern, device in wishes:
        kernels = [kernel for kernel in graph.kernels if _matches(kernel, pattern)]
        if not kernels and (graph.kernels or pattern != EVERYTHING):
            raise _unknown(graph, pattern, device)
        for kernel in kernels:
            # the first pattern that matches stays, to be named if another contradicts it
            other, wanted = chosen.setdefault(kernel.name, (pattern, device))
            if wanted is not device:
                raise PlanError(
                    "HC206",
                    f"the pins {_text(other, wanted)} and {_text(pattern, device)} contradict each other",
                    where=describe_kernel(kernel),
                    remedy="use a more specific pattern; nodes that are fused into one kernel run on one"
                    " device",
                )
            if device not in kernel.devices:
                raise PlanError(
                    "HC207",
                    f"the pin {_text(pattern, device)} cannot be met: there is no code for the {device}",
                    where=describe_kernel(kernel),
                    remedy="remove the pin, or use a more specific pattern",
                )
    return {name: device for name, (_, device) in chosen.items()}


def carried_pins(graph: Graph, pins: Pins, other: Graph) -> Pins | None:
    """The pins of a graph for another one of the same network; None if they cannot be met there.

    A kernel is pinned that computes a node which a pinned kernel computes.
    """
    device_of = {
        node: pins[kernel.name] for kernel in graph.kernels if kernel.name in pins for node in kernel.origins
    }
    wanted = {k: {device_of[node] for node in k.origins if node in device_of} for k in other.kernels}
    # fused otherwise: two nodes pinned apart may be one kernel there
    if any(len(devices) > 1 or not devices <= set(k.devices) for k, devices in wanted.items()):
        return None
    return {kernel.name: device for kernel, devices in wanted.items() for device in devices}


def _matches(kernel: Kernel, pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in (kernel.name, *kernel.origins))


def _unknown(graph: Graph, pattern: str, device: Device) -> PlanError:
    names = dict.fromkeys(name for kernel in graph.kernels for name in (*kernel.origins, kernel.name))
    close = difflib.get_close_matches(pattern, names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "`hybridc plan MODEL --all` lists the nodes"
    return PlanError("HC205", f"the pin {_text(pattern, device)} matches no node", remedy=hint)


def _text(pattern: str, device: Device) -> str:
    return f"'{pattern}={device.value}'"


def describe_kernel(kernel: Kernel) -> str:
    """What an error calls a kernel: its name, and the ONNX nodes it computes."""
    return f"kernel {kernel.name!r} ({', '.join(kernel.origins) or kernel.function})"
