"""Artifacts as candidates of a group, and what of an artifact runs there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hybridc.artifact.load import Artifact
from hybridc.artifact.manifest import StoredPlan
from hybridc.errors import UsageError
from hybridc.group.make import Candidate, Member
from hybridc.ir import BufferKind, Device, Plan


def candidates(
    artifacts: Mapping[str, Artifact], runs: Mapping[str, int] | None = None
) -> tuple[Candidate, ...]:
    """Artifacts by the names of members; `runs` says how often one runs in a turn, if more than once.

    Raises UsageError HC565 for an artifact that cannot be a member, HC566 for runs of another name.
    """
    counts = dict(runs or {})
    unknown = next((name for name in counts if name not in artifacts), None)
    if unknown is not None:
        remedy = f"members are {', '.join(map(repr, artifacts))}"
        raise UsageError("HC566", f"the group has no member {unknown!r}", remedy=remedy)
    for name, artifact in artifacts.items():
        _check_member(name, artifact)
    return tuple(
        Candidate(
            name,
            artifact.graphs,
            artifact.plans,
            artifact.manifest.machine.link,
            counts.get(name, 1),
            str(artifact.path),
        )
        for name, artifact in artifacts.items()
    )


def _check_member(name: str, artifact: Artifact) -> None:
    """Raise UsageError HC565 for open dimensions, and for states or caches that stay on the GPU from run to
    run."""
    where = f"member {name!r}: {artifact.path}"
    if artifact.manifest.dimensions:
        what = "an artifact with open dimensions cannot be in a group"
        remedy = "compile it with one size for each dimension"
        raise UsageError("HC565", what, where=where, remedy=remedy)
    buffers = (buffer for plan in artifact.plans for buffer in plan.buffers)
    if any(b.device is Device.GPU and b.kind is BufferKind.TENSOR and b.first_step < 0 for b in buffers):
        kinds = "caches" if any(graph.caches for graph in artifact.graphs) else "states"
        what = (
            f"an artifact whose {kinds} stay on the GPU cannot be in a group, whose members share that memory"
        )
        raise UsageError("HC565", what, where=where, remedy="run it in a session of its own")


def with_turn(artifact: Artifact, member: Member) -> tuple[Artifact, Artifact]:
    """The artifact with the plan of the first run of a turn, and with that of further ones."""
    chosen = replace(artifact, number=member.number)
    return _with_plan(chosen, member.turn.first), _with_plan(chosen, member.turn.again)


def _with_plan(artifact: Artifact, plan: Plan) -> Artifact:
    """With this plan alone, in place of the chosen one."""
    stored = _stored(artifact.stored_plan, plan)
    return replace(
        artifact,
        manifest=replace(artifact.manifest, plans=(stored,)),
        graphs=(artifact.graph,),
        plans=(plan,),
        number=0,
    )


def _stored(stored: StoredPlan, plan: Plan) -> StoredPlan:
    """Which weights are uploaded where, and which are streamed, now that the plan's buffers are elsewhere."""
    places = {
        buffer.tensor: buffer.offset_bytes
        for buffer in plan.buffers
        if buffer.device is Device.GPU and buffer.kind is BufferKind.WEIGHT and buffer.first_step < 0
    }
    moved = [replace(w, arena_offset_bytes=places.get(w.tensor)) for w in stored.gpu_weights]
    return replace(
        stored,
        gpu_weights=tuple(weight for weight in moved if weight.tensor in places),
        streamed_weights=(*stored.streamed_weights, *(w for w in moved if w.tensor not in places)),
    )
