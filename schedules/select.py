"""Which rule schedules a function for a device: ordered rules, the first that accepts it wins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import tvm_ffi
from tvm import s_tir, tirx

from hybridc.appended_rows import is_appended_rows
from hybridc.ir import Device
from hybridc.schedules import cpu, cuda
from hybridc.schedules.channels_last import between_transpositions, channels_last, with_planes
from hybridc.schedules.cpu.elementwise.elementwise import elementwise
from hybridc.schedules.cpu.math.intrinsics import OPERATORS
from hybridc.schedules.cpu.math.nesting import without_nesting
from hybridc.schedules.cpu.math.quantize import with_steps
from hybridc.schedules.cuda.core.launch import cuda_target
from hybridc.schedules.integers import in_floats
from hybridc.schedules.quantized_rows import wide_rows, with_rows
from hybridc.schedules.rule import Request, Rule, Scheduled
from hybridc.schedules.safety.guard import made_safe
from hybridc.schedules.storage import widened, with_storage
from hybridc.targets import architecture_number, oldest


def rules(device: Device) -> tuple[Rule, ...]:
    """The rules of a device, in the order they are tried."""
    return cuda.RULES if device is Device.GPU else (*cpu.INTEGER_RULES, *cpu.RULES)


def schedule(request: Request, device: Device) -> Scheduled | None:
    """Schedule by the first rule that accepts; None if the function cannot run on the device at all.

    Whatever the rule made of it, the function touches nothing outside of its buffers (`schedules/safety/`).
    A GPU cannot launch a kernel of no threads: functions of empty tensors are left to the CPU, and so are
    those of bfloat16 if the target begins before sm_80, where TVM's code of it was wrong (arg-max), and all
    but attention of rows of integers. A CPU multiplies 16-bit floats, and integers that it has no kernel for,
    as float32.
    Raises: AttributeError for a rule that declares no family (`schedule_rule`).
    """
    if device is Device.GPU and (_is_empty(request) or not _has_types(request)):
        return None
    if device is Device.CPU:
        made, gpu = _on_cpu(request), None
        made = made and replace(made, function=without_nesting(with_steps(made.function), OPERATORS))
    else:
        made, gpu = _first(_gpu_rules(request), request), cuda_target(request.target)
    return None if made is None else made_safe(made, gpu)


def _gpu_rules(request: Request) -> Sequence[Rule]:
    """Those that load scales of rows of integers where a GPU can, if there are such rows."""
    return cuda.RULES if wide_rows(request.function) is None else cuda.INTEGER_ROW_RULES


def _on_cpu(request: Request) -> Scheduled | None:
    if channels_last(request.function) and _reduces(request.function):
        made = _on_cpu(replace(request, function=with_planes(request.function)))
        return made and between_transpositions(made, request, elementwise)
    if is_appended_rows(request.function):
        return _first(cpu.RULES, request)  # of caches that stay in place in any type
    rows = wide_rows(request.function)
    if rows is not None:
        made = _on_cpu(replace(request, function=rows.function))
        return made and replace(made, function=with_rows(made.function, rows.positions))
    wide = widened(request.function)
    if wide is None:
        made = _first(cpu.INTEGER_RULES, request)
        if made is not None:
            return made
        wide = in_floats(request.function)
    if wide is None:
        return _first(cpu.RULES, request)
    asked = replace(request, function=wide.function)
    made = _first(cpu.RULES, asked)
    return None if made is None else with_storage(made, wide.dtypes, asked, elementwise)


def _reduces(function: tirx.PrimFunc) -> bool:
    """Whether a function adds up, or takes the largest of, several elements."""
    blocks: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(function.body, (s_tir.SBlock, blocks.append))
    return any(v.iter_type == tirx.IterVar.CommReduce for block in blocks for v in block.iter_vars)


def _first(rules: Sequence[Rule], request: Request) -> Scheduled | None:
    """What the first rule that accepts makes."""
    for rule in rules:
        scheduled = rule(request)
        if scheduled is not None:
            return replace(scheduled, family=rule.family)
    return None


def _is_empty(request: Request) -> bool:
    return any(int(e) == 0 for p in request.function.params for e in p.shape)


def _has_types(request: Request) -> bool:
    """Whether the oldest architecture of the target has the types of all parameters."""
    types = {str(parameter.dtype) for parameter in request.function.params}
    return "bfloat16" not in types or architecture_number(oldest(request.target.cuda_architectures)) >= 80
