"""Which rule schedules a function for a device: ordered rules, the first that accepts it wins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hybridc.ir import Device
from hybridc.targets import Target

if TYPE_CHECKING:
    from tvm import tirx


@dataclass(frozen=True, slots=True)
class Packing:
    """How a constant argument is laid out for the device that reads it.

    The array is zero-padded at its end to `padded`, reshaped to `shape`, and its axes permuted.
    """

    padded: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[int, ...]

    def apply(self, array: np.ndarray) -> np.ndarray:
        pad = [(0, big - small) for small, big in zip(array.shape, self.padded, strict=True)]
        return np.ascontiguousarray(np.pad(array, pad).reshape(self.shape).transpose(self.axes))


@dataclass(frozen=True, slots=True)
class Request:
    """A function to schedule. `constants` are the positions of parameters known at compile time,
    which a rule may ask to be packed differently."""

    function: tirx.PrimFunc
    constants: frozenset[int]
    target: Target


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A function ready for code generation on one device.

    Its parameters are those of the request, packed ones with the packed shape, and behind them one
    for each of `workspace_bytes`: scratch buffers that were global allocations of the function.
    """

    function: tirx.PrimFunc
    rule: str
    packings: tuple[tuple[int, Packing], ...] = ()
    workspace_bytes: tuple[int, ...] = ()


Rule = Callable[[Request], Scheduled | None]
"""Returns None for "not mine". The name of the rule in reports is its `__name__`."""


def rules(device: Device) -> tuple[Rule, ...]:
    """The rules of a device, in the order they are tried."""
    if device is Device.GPU:
        from hybridc.schedules.cuda import RULES
    else:
        from hybridc.schedules.cpu import RULES
    return RULES


def schedule(request: Request, device: Device) -> Scheduled | None:
    """Schedule by the first rule that accepts; None if the function cannot run on the device at all.

    A GPU cannot launch a kernel of no threads: functions of empty tensors are left to the CPU.
    """
    if device is Device.GPU and any(int(e) == 0 for p in request.function.params for e in p.shape):
        return None
    found = (rule(request) for rule in rules(device))
    return next((scheduled for scheduled in found if scheduled is not None), None)
