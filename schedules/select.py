"""Which rule schedules a function for a device: ordered rules, the first that accepts it wins."""

from __future__ import annotations

from dataclasses import replace

from hybridc.ir import Device
from hybridc.schedules import cpu, cuda
from hybridc.schedules.cpu.elementwise.elementwise import elementwise
from hybridc.schedules.cuda.core.launch import cuda_target
from hybridc.schedules.rule import Request, Rule, Scheduled
from hybridc.schedules.safety.guard import made_safe
from hybridc.schedules.storage import widened, with_storage
from hybridc.targets import architecture_number, oldest


def rules(device: Device) -> tuple[Rule, ...]:
    """The rules of a device, in the order they are tried."""
    return cuda.RULES if device is Device.GPU else cpu.RULES


def schedule(request: Request, device: Device) -> Scheduled | None:
    """Schedule by the first rule that accepts; None if the function cannot run on the device at all.

    Whatever the rule made of it, the function touches nothing outside of its buffers (`schedules/safety/`).
    A GPU cannot launch a kernel of no threads: functions of empty tensors are left to the CPU, and so are
    those of bfloat16 if the target begins before sm_80, where TVM's code of it was wrong (arg-max).
    Raises: AttributeError for a rule that declares no family (`schedule_rule`).
    """
    if device is Device.GPU and (_is_empty(request) or not _has_types(request)):
        return None
    wide = widened(request.function) if device is Device.CPU else None
    asked = request if wide is None else replace(request, function=wide.function)
    for rule in rules(device):
        scheduled = rule(asked)
        if scheduled is not None:
            if wide is not None:
                scheduled = with_storage(scheduled, wide.dtypes, asked, elementwise)
            gpu = cuda_target(request.target) if device is Device.GPU else None
            return replace(made_safe(scheduled, gpu), family=rule.family)
    return None


def _is_empty(request: Request) -> bool:
    return any(int(e) == 0 for p in request.function.params for e in p.shape)


def _has_types(request: Request) -> bool:
    """Whether the oldest architecture of the target has the types of all parameters."""
    types = {str(parameter.dtype) for parameter in request.function.params}
    return "bfloat16" not in types or architecture_number(oldest(request.target.cuda_architectures)) >= 80
