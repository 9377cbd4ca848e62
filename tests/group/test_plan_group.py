"""Plans of groups of random graphs: within the budget, right in every order, and never slower with more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridc.errors import PlanError
from hybridc.group import Candidate, GroupPlan, Member, plan_group, verify_group
from hybridc.group.place import makespan_us
from hybridc.ir import BufferKind, Copy, Device, Graph, Plan
from hybridc.ir.plan import align
from hybridc.machine import Machine
from hybridc.passes.planner.emit.reuse_buffers import reuse_buffers
from hybridc.passes.planner.make_plans import assemble, make_plan
from hybridc.passes.planner.model.context import Effort
from hybridc.passes.planner.search.partition import all_gpu_peak_bytes, smallest_budget_bytes
from tests.support.graphs import chain, graphs, machine, machines
from tests.support.placements import steps_of
from tests.support.random_examples import random_examples
from tests.support.verdicts import runs_right

GPU, CPU = Device.GPU, Device.CPU
BRIEF = Effort(seconds=0.001)
quick = random_examples(10)


def planned(graph: Graph, machine: Machine, fraction: float) -> Plan:
    """A plan for a fraction of what the graph needs on the GPU, or for the least that can be planned."""
    least_bytes = smallest_budget_bytes(graph, machine)
    budget_bytes = max(int(fraction * all_gpu_peak_bytes(graph, machine)), least_bytes)
    return make_plan(graph, machine, budget_bytes, (GPU, CPU), effort=BRIEF)


@st.composite
def groups(draw: st.DrawFn) -> tuple[Candidate, ...]:
    """Two to four graphs on one machine, each with a plan for one or two budgets."""
    drawn = draw(machines())
    found = []
    for number in range(draw(st.integers(2, 4))):
        graph = draw(graphs(largest=6))
        plans = tuple(planned(graph, drawn, fraction) for fraction in draw(st.sampled_from(((1,), (0.4, 1)))))
        runs = draw(st.integers(1, 3))
        found.append(Candidate(f"m{number}", (graph,) * len(plans), plans, drawn.link, runs))
    return tuple(found)


def least_bytes(candidates: Sequence[Candidate]) -> int:
    return max(min(plan.arena_bytes(GPU) for plan in each.plans) for each in candidates)


def most_bytes(candidates: Sequence[Candidate]) -> int:
    return sum(max(plan.arena_bytes(GPU) for plan in each.plans) for each in candidates)


@quick
@given(groups(), st.floats(0, 1))
def test_a_group_keeps_the_budget_and_each_of_its_runs_is_right(
    candidates: tuple[Candidate, ...], share: float
) -> None:
    least, most = least_bytes(candidates), most_bytes(candidates)
    group = plan_group(candidates, least + int(share * (most - least)))
    verify_group(group)
    assert group.arena_bytes <= group.budget_bytes
    for member, candidate in zip(group.members, candidates, strict=True):
        plan = candidate.plans[member.number]
        others = sum(other.kept_bytes for other in group.members if other is not member)
        assert member.kept_bytes + member.restored_bytes + member.working_bytes == plan.arena_bytes(GPU)
        assert others + plan.arena_bytes(GPU) <= group.budget_bytes
        assert member.again_us == pytest.approx(plan.makespan_us)
        assert member.first_us >= member.again_us or member.first_us == pytest.approx(member.again_us)
        for each in (member.turn.first, member.turn.again):
            assert runs_right(member.graph, each, random_orders=2)
            assert each.makespan_us == pytest.approx(makespan_us(each.steps, each.step_us))


@quick
@given(groups(), st.floats(0, 1), st.floats(0, 1))
def test_more_memory_is_never_slower(
    candidates: tuple[Candidate, ...], share: float, other_share: float
) -> None:
    least, most = least_bytes(candidates), most_bytes(candidates)
    small, large = sorted(least + int(each * (most - least)) for each in (share, other_share))
    assert plan_group(candidates, large).round_us <= plan_group(candidates, small).round_us


def weighty(count: int, weight: int) -> Candidate:
    """All on the GPU, a weight of its own for each of `count` kernels."""
    graph = chain(count, size=1, weight=weight)
    plan = assemble(graph, machine(), None, *reuse_buffers(graph, steps_of(graph, [GPU] * count), (GPU, CPU)))
    return Candidate(f"chain{count}", (graph,), (plan,), machine().link)


CANDIDATES = weighty(6, 2048), weighty(5, 4096)
MOST_BYTES = most_bytes(CANDIDATES)


def test_with_room_for_all_weights_nothing_is_copied_again() -> None:
    group = plan_group(CANDIDATES, MOST_BYTES)
    assert [member.restored_bytes for member in group.members] == [0, 0]
    assert all(member.turn.first == member.turn.again for member in group.members)
    assert group.arena_bytes == MOST_BYTES - min(m.working_bytes for m in group.members)


def test_without_room_for_another_weight_all_that_must_go_is_copied_again() -> None:
    group = plan_group(CANDIDATES, least_bytes(CANDIDATES))
    assert group.arena_bytes == least_bytes(CANDIDATES)
    for member in group.members:
        weights = {t for t in member.graph.tensor if t.startswith("w")}
        copied = [s.tensor for s in member.turn.first.steps if isinstance(s, Copy) and s.tensor in weights]
        assert sum(align(member.graph.tensor[name].size_bytes) for name in copied) == member.restored_bytes
        assert len(set(copied)) == len(copied)
    assert sum(member.restored_bytes for member in group.members) > 0


def test_copies_run_beside_kernels_that_do_not_need_them() -> None:
    slow = replace(CANDIDATES[0], plans=tuple(_slowed(plan) for plan in CANDIDATES[0].plans))
    group = plan_group((slow, CANDIDATES[1]), least_bytes(CANDIDATES))
    [member, _] = group.members
    assert member.restored_bytes > 0
    copies_us = member.restored_bytes / (machine().link.h2d_gb_s * 1e3)
    assert member.first_us < member.again_us + copies_us


def _slowed(plan: Plan) -> Plan:
    times_us = tuple(
        us if isinstance(s, Copy) else 1000.0 for s, us in zip(plan.steps, plan.step_us, strict=True)
    )
    return replace(plan, step_us=times_us, makespan_us=makespan_us(plan.steps, times_us), time_bound_us=0.0)


def test_a_budget_that_is_too_small_for_one_member_names_it() -> None:
    with pytest.raises(PlanError, match="member 'chain5' alone needs") as error:
        plan_group(CANDIDATES, least_bytes(CANDIDATES) - 1)
    assert error.value.code == "HC208"
    assert error.value.smallest_budget_bytes == least_bytes(CANDIDATES)


GROUP = plan_group(CANDIDATES, least_bytes(CANDIDATES) + (4 << 20))


def with_member(group: GroupPlan, number: int, member: Member) -> GroupPlan:
    return replace(group, members=(*group.members[:number], member, *group.members[number + 1 :]))


def refused(group: GroupPlan, what: str) -> None:
    with pytest.raises(PlanError, match=what) as error:
        verify_group(group)
    assert error.value.code == "HC223"


def test_a_plan_is_accepted_before_it_is_damaged() -> None:
    verify_group(GROUP)


def test_a_weight_that_stays_where_another_member_has_bytes_is_refused() -> None:
    other = plan_group(CANDIDATES[::-1], GROUP.budget_bytes)
    assert other.arena_bytes == GROUP.arena_bytes
    # in either group the weights of the first member stay from byte 0 on
    refused(replace(GROUP, members=(GROUP.members[0], other.members[0])), "gives bytes of its")


def test_a_weight_that_further_runs_expect_elsewhere_is_refused() -> None:
    member = next(each for each in GROUP.members if each.restored_bytes)
    number = GROUP.members.index(member)
    turn = replace(member.turn, first=with_weights_swapped(member.turn.first))
    refused(with_member(GROUP, number, replace(member, turn=turn)), "does not leave")


def with_weights_swapped(plan: Plan) -> Plan:
    """With two resident weights of one size in each other's places."""
    weights = [b for b in plan.buffers if b.kind is BufferKind.WEIGHT and b.first_step < 0][:2]
    places = {weights[0]: weights[1].offset_bytes, weights[1]: weights[0].offset_bytes}
    return replace(
        plan,
        buffers=tuple(replace(b, offset_bytes=places.get(b, b.offset_bytes)) for b in plan.buffers),
    )


def test_a_first_run_that_leaves_a_kernel_out_is_refused() -> None:
    member = GROUP.members[0]
    shorter = weighty(4, 2048).plans[0]
    group = with_member(GROUP, 0, replace(member, turn=replace(member.turn, first=shorter)))
    with pytest.raises(PlanError):
        verify_group(group)


def test_an_arena_beyond_the_budget_is_refused() -> None:
    refused(replace(GROUP, budget_bytes=GROUP.arena_bytes - 1), "needs")


def test_refusals_of_a_plan_name_the_member() -> None:
    member = GROUP.members[1]
    cut = replace(member.turn.first, steps=member.turn.first.steps[:-1])
    group = with_member(GROUP, 1, replace(member, turn=replace(member.turn, first=cut)))
    with pytest.raises(PlanError, match="step") as error:
        verify_group(group)
    assert "member 'chain5'" in error.value.where
