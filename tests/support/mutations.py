"""Ways to damage a plan: some break a promise, some happen to do no harm."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
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


def repeat_step(plan: Plan, random: Random) -> Plan:
    order = list(range(len(plan.steps)))
    repeated = random.choice(order)
    order.insert(random.randint(repeated + 1, len(order)), repeated)
    return _reorder(plan, order)


def swap_offsets(plan: Plan, random: Random) -> Plan:
    """Two buffers of one size and device change places."""
    first = random.randrange(len(plan.buffers))
    one = plan.buffers[first]
    same = [i for i, b in enumerate(plan.buffers) if (b.size_bytes, b.device) == (one.size_bytes, one.device)]
    second = random.choice(same)
    swapped = _with_buffer(plan, first, offset_bytes=plan.buffers[second].offset_bytes)
    return _with_buffer(swapped, second, offset_bytes=one.offset_bytes)


def merge_stays(plan: Plan, random: Random) -> Plan:
    """One buffer for two stays of a tensor."""
    pairs = [
        (i, j)
        for i, one in enumerate(plan.buffers)
        for j, other in enumerate(plan.buffers)
        if (one.tensor, one.kind, one.device) == (other.tensor, other.kind, other.device)
        and one.first_step < other.first_step
    ]
    if not pairs:
        return plan
    early, late = random.choice(pairs)
    merged = _with_buffer(plan, early, last_step=plan.buffers[late].last_step)
    return replace(merged, buffers=(*merged.buffers[:late], *merged.buffers[late + 1 :]))


def extend_lifetime(plan: Plan, random: Random) -> Plan:
    index = random.randrange(len(plan.buffers))
    last_step = random.randint(plan.buffers[index].last_step, len(plan.steps))
    return _with_buffer(plan, index, last_step=last_step)


def free_at_the_end(plan: Plan, random: Random) -> Plan:
    """Frees a buffer that is held to the end one step early: an output, a state, a resident weight."""
    held = [i for i, buffer in enumerate(plan.buffers) if buffer.last_step == len(plan.steps)]
    return _with_buffer(plan, random.choice(held), last_step=len(plan.steps) - 1) if held else plan


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
    repeat_step,
    swap_offsets,
    merge_stays,
    extend_lifetime,
    free_at_the_end,
    shrink_arena,
)


Place = tuple[str | int, ...]
"""Keys and positions that lead to a value inside JSON data."""
HOSTILE_VALUES: tuple[Any, ...] = (
    [],
    {},
    None,
    True,
    "x",
    "gpu",
    0,
    -1,
    0.5,
    float("inf"),
    float("nan"),
    10**400,
    [[], {"x": [None]}],
    {"run": {"waits": [-1]}},
)
"""Of every type that JSON has, with numbers out of range; a file's 1e400 is read as infinity."""


def places(data: Any, place: Place = ()) -> Iterator[Place]:
    """Of every value inside JSON data, containers included."""
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inside:
        yield (*place, key)
        yield from places(value, (*place, key))


def with_value(data: Any, place: Place, value: Any) -> Any:
    """A copy of JSON data with another value at a place."""
    changed = copy.deepcopy(data)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return changed


def _other(device: Device) -> Device:
    return Device.CPU if device is Device.GPU else Device.GPU


def _with_step(plan: Plan, position: int, step: Step) -> Plan:
    return replace(plan, steps=(*plan.steps[:position], step, *plan.steps[position + 1 :]))


def _with_buffer(plan: Plan, index: int, **changes: Any) -> Plan:
    buffer = replace(plan.buffers[index], **changes)
    return replace(plan, buffers=(*plan.buffers[:index], buffer, *plan.buffers[index + 1 :]))


def _reorder(plan: Plan, order: list[int]) -> Plan:
    """The steps in another order, fewer, or some again, with everything that names a position renumbered.

    A buffer that began or ended with a dropped step begins or ends with the next one kept.
    """
    place: dict[int, int] = {}
    for new, old in enumerate(order):
        place.setdefault(old, new)

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
