"""Which rule schedules a function for a device: ordered rules, the first that accepts it wins."""

from __future__ import annotations

from hybridc.ir import Device
from hybridc.schedules import cpu, cuda
from hybridc.schedules.rule import Request, Rule, Scheduled


def rules(device: Device) -> tuple[Rule, ...]:
    """The rules of a device, in the order they are tried."""
    return cuda.RULES if device is Device.GPU else cpu.RULES


def schedule(request: Request, device: Device) -> Scheduled | None:
    """Schedule by the first rule that accepts; None if the function cannot run on the device at all.

    A GPU cannot launch a kernel of no threads: functions of empty tensors are left to the CPU.
    """
    if device is Device.GPU and any(int(e) == 0 for p in request.function.params for e in p.shape):
        return None
    # lazily: a rule is asked only if those before it refuse
    found = (rule(request) for rule in rules(device))
    return next((scheduled for scheduled in found if scheduled is not None), None)
