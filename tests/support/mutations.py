"""Ways to damage a plan: some break a promise, some happen to do no harm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from hybridc.ir import Copy, Device, Plan, Run, Step
from hybridc.ir.plan import ALIGNMENT_BYTES

Mutation = Callable[[Plan, Random], Plan]
"""Returns the plan itself where there is nothing of the kind to damage."""


def drop_wait(plan: Plan, random: Random) -> Plan:
    waits = [(i, wait) for i, step in enumerate(plan.steps) for wait in step.waits]
    return without_wait(plan, *random.choice(waits)) if waits else plan


def without_wait(plan: Plan, position: int, wait: int) -> Plan:
    step = plan.steps[position]
    return _with_step(plan, position, replace(step, waits=tuple(w for w in step.waits if w != wait)))


def shift_offset(plan: Plan, random: Random) -> Plan:
    def shift(buffer_offset: int) -> int:
        return buffer_offset + random.choice([-2, -1, 1, 2]) * ALIGNMENT_BYTES

    index = random.randrange(len(plan.buffers))
    return _with_buffer(plan, index, offset_bytes=shift(plan.buffers[index].offset_bytes))


def share_offset(plan: Plan, random: Random) -> Plan:
    index = random.randrange(len(plan.buffers))
    return _with_buffer(plan, index, offset_bytes=random.choice(plan.buffers).offset_bytes)


def shorten_lifetime(plan: Plan, random: Random) -> Plan:
    index = random.randrange(len(plan.buffers))
    buffer = plan.buffers[index]
    if random.random() < 0.5:
        return _with_buffer(plan, index, first_step=buffer.first_step + 1)
    return _with_buffer(plan, index, last_step=buffer.last_step - 1)


def change_device(plan: Plan, random: Random) -> Plan:
    runs = [i for i, step in enumerate(plan.steps) if isinstance(step, Run)]
    position = random.choice(runs)
    step = plan.steps[position]
    assert isinstance(step, Run)
    return _with_step(plan, position, replace(step, device=_other(step.device)))


def change_kernel(plan: Plan, random: Random) -> Plan:
    runs = [i for i, step in enumerate(plan.steps) if isinstance(step, Run)]
    position = random.choice(runs)
    one, other = plan.steps[position], plan.steps[random.choice(runs)]
    assert isinstance(one, Run) and isinstance(other, Run)
    return _with_step(plan, position, replace(one, kernel=other.kernel))


def drop_copy(plan: Plan, random: Random) -> Plan:
    copies = [i for i, step in enumerate(plan.steps) if isinstance(step, Copy)]
    if not copies:
        return plan
    dropped = random.choice(copies)
    return _reorder(plan, [i for i in range(len(plan.steps)) if i != dropped])


def swap_steps(plan: Plan, random: Random) -> Plan:
    order = list(range(len(plan.steps)))
    if len(order) > 1:
        i = random.randrange(len(order) - 1)
        order[i], order[i + 1] = order[i + 1], order[i]
    return _reorder(plan, order)


def shrink_arena(plan: Plan, random: Random) -> Plan:
    i = random.randrange(len(plan.arenas))
    arena = replace(plan.arenas[i], size_bytes=plan.arenas[i].size_bytes - ALIGNMENT_BYTES)
    return replace(plan, arenas=(*plan.arenas[:i], arena, *plan.arenas[i + 1 :]))


MUTATIONS: tuple[Mutation, ...] = (
    drop_wait,
    shift_offset,
    share_offset,
    shorten_lifetime,
    change_device,
    change_kernel,
    drop_copy,
    swap_steps,
    shrink_arena,
)


def _other(device: Device) -> Device:
    return Device.CPU if device is Device.GPU else Device.GPU


def _with_step(plan: Plan, position: int, step: Step) -> Plan:
    return replace(plan, steps=(*plan.steps[:position], step, *plan.steps[position + 1 :]))


def _with_buffer(plan: Plan, index: int, **changes: Any) -> Plan:
    buffer = replace(plan.buffers[index], **changes)
    return replace(plan, buffers=(*plan.buffers[:index], buffer, *plan.buffers[index + 1 :]))


def _reorder(plan: Plan, order: list[int]) -> Plan:
    """The steps in another order or fewer, with everything that names a position renumbered.

    A buffer that began or ended with a dropped step begins or ends with the next one kept.
    """
    place = {old: new for new, old in enumerate(order)}

    def moved(old: int) -> int:
        if old < 0:
            return old
        return next((place[i] for i in range(old, len(plan.steps)) if i in place), len(order))

    steps = tuple(
        replace(plan.steps[old], waits=tuple(sorted(place[w] for w in plan.steps[old].waits if w in place)))
        for old in order
    )
    buffers = (replace(b, first_step=moved(b.first_step), last_step=moved(b.last_step)) for b in plan.buffers)
    return replace(plan, steps=steps, buffers=tuple(buffers), step_us=tuple(plan.step_us[i] for i in order))
