"""Accept or refuse the plan of a group. Of what makes it this shares no code, and of `verify` all."""

from __future__ import annotations

from bisect import bisect_right

from hybridc.errors import PlanError
from hybridc.group.make import GroupPlan, Member
from hybridc.ir import Buffer, BufferKind, Device, Lane, Plan, Run
from hybridc.ir.verify import verify


def verify_group(group: GroupPlan) -> None:
    """Check every promise of a group: the plans may be anything.

    Each of a member's plans must be one that `verify` accepts, within the group's budget. Raises PlanError as
    that does, naming the member, and

        HC223  an arena beyond the budget, arenas that differ, a first run that runs other kernels than
               further ones or does not leave their weights where they expect them, or a weight that stays
               where others have bytes
    """
    if group.arena_bytes > group.budget_bytes:
        what = f"needs {group.arena_bytes:,} bytes of {group.budget_bytes:,}"
        raise _refuse(what, "the group")
    for member in group.members:
        for plan in (member.turn.first, member.turn.again):
            _verify_plan(member, plan)
            if plan.arena_bytes(Device.GPU) not in (0, group.arena_bytes):
                raise _refuse("has an arena of another size", _named(member))
        _check_turn(member)
    for member in group.members:
        stay = _weights(member.turn.first, resident=True)
        for other in group.members:
            if other is not member:
                _check_apart(member, stay, other)


def _verify_plan(member: Member, plan: Plan) -> None:
    try:
        verify(member.graph, plan)
    except PlanError as error:
        error.where = f"{_named(member)}: {error.where}"
        raise


def _refuse(what: str, where: str) -> PlanError:
    remedy = "this is a bug in hybridc: please report it"
    return PlanError("HC223", f"the plan of a group {what}", where=where, remedy=remedy)


def _named(member: Member) -> str:
    return f"member {member.name!r}"


def _check_turn(member: Member) -> None:
    """Further runs find their weights where the first leaves them, and run what it runs."""
    first, again = member.turn.first, member.turn.again
    for lane in (Lane.GPU, Lane.CPU):
        runs = [
            [step.kernel for step in plan.steps if isinstance(step, Run) and step.lane is lane]
            for plan in (first, again)
        ]
        if runs[0] != runs[1]:
            raise _refuse(f"runs other kernels on the {lane} in the first run of a turn", _named(member))
    lasting = {
        (b.tensor, b.offset_bytes, b.size_bytes)
        for b in _weights(first, resident=False)
        if b.last_step == len(first.steps)
    }
    for wanted in _weights(again, resident=True):
        if (wanted.tensor, wanted.offset_bytes, wanted.size_bytes) not in lasting:
            raise _refuse(f"does not leave {wanted.tensor!r} where further runs expect it", _named(member))


def _check_apart(member: Member, stay: list[Buffer], other: Member) -> None:
    """No buffer of another member has bytes of the weights that stay."""
    kept = sorted((b.offset_bytes, b.end_bytes, b.tensor) for b in stay if b.size_bytes)
    ends = [end for _, end, _ in kept]  # which increase, too: they are apart, as the plan is verified
    for plan in (other.turn.first, other.turn.again):
        for buffer in plan.buffers:
            if buffer.device is Device.GPU and buffer.size_bytes:
                nearest = bisect_right(ends, buffer.offset_bytes)
                if nearest < len(kept) and kept[nearest][0] < buffer.end_bytes:
                    what = f"gives bytes of its {kept[nearest][2]!r} to {buffer.tensor!r} of {other.name!r}"
                    raise _refuse(what, _named(member))


def _weights(plan: Plan, *, resident: bool) -> list[Buffer]:
    """Buffers of weights on the GPU; with `resident` those alone that are there before the first step."""
    return [
        buffer
        for buffer in plan.buffers
        if buffer.device is Device.GPU
        and buffer.kind is BufferKind.WEIGHT
        and (buffer.first_step < 0 or not resident)
    ]
