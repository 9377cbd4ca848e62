"""Several artifacts in one GPU budget: sessions that take turns in one arena."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from hybridc.artifact.load import Artifact, open_artifact
from hybridc.errors import DeviceError, HybridcError, UsageError, drop_locals
from hybridc.group import GroupPlan, candidates, plan_group, verify_group, with_turn
from hybridc.options import check_threads
from hybridc.runtime.code import Library, open_library
from hybridc.runtime.forks import claim_gpu
from hybridc.runtime.memory import GPU_INDEX, Memory, free_gpu_bytes
from hybridc.runtime.session import Session, verify_plans
from hybridc.runtime.turns import MemberSession, Turns
from hybridc.targets import available_threads


def open_members(
    paths: Mapping[str, str | Path] | Sequence[str | Path],
    *,
    check_weights: bool = True,
    check_host: bool = True,
    trusted_keys: Sequence[str | Path] | None = None,
) -> dict[str, Artifact]:
    """Open and verify the artifacts of a group, by the names of members: those of a mapping, else of files.

    What is checked is as for `open_artifact`, which says what it raises. Raises UsageError HC566 for
    no members, or a name that stands for two.
    """
    named = list(paths.items()) if isinstance(paths, Mapping) else [(Path(path).stem, path) for path in paths]
    names = [name for name, _ in named]
    twice = next((name for name in names if names.count(name) > 1), None)
    if not names or twice is not None:
        what = "a group needs a member" if twice is None else f"two members of the group are called {twice!r}"
        raise UsageError("HC566", what, remedy="give the paths of artifacts whose names differ")
    opened: dict[str, Artifact] = {}
    with ExitStack() as after_failure:
        for name, path in named:
            with _of_member(name):
                opened[name] = open_artifact(
                    path, check_weights=check_weights, check_host=check_host, trusted_keys=trusted_keys
                )
                after_failure.callback(opened[name].close)
                verify_plans(opened[name])
        after_failure.pop_all()
    return opened


class SessionGroup:
    """Sessions of several artifacts that take turns in one allocation on the GPU.

    The allocation has what the largest of them needs in its turn, and the weights that stay there in the
    turns of others: `plan` says which. Weights that do not stay are copied to the GPU again when their member
    has its next turn. The members of a pipeline are given in its order; they may run in any.

    Runs of different members are done one after the other, from whatever threads.
    """

    def __init__(
        self,
        paths: Mapping[str, str | Path] | Sequence[str | Path],
        *,
        gpu_memory_bytes: int,
        runs: Mapping[str, int] | None = None,
        threads: int | None = None,
        host_memory_bytes: int | None = None,
        check_weights: bool = True,
        trusted_keys: Sequence[str | Path] | None = None,
    ) -> None:
        wanted = None if threads is None else check_threads(threads)
        artifacts = open_members(paths, check_weights=check_weights, trusted_keys=trusted_keys)
        self._sessions: dict[str, MemberSession] = {}
        try:
            self._plan = plan_group(candidates(artifacts, runs), gpu_memory_bytes)
            verify_group(self._plan)
            self._open(artifacts, wanted, host_memory_bytes)
        except BaseException as error:
            self.close()
            drop_locals(error)
            for artifact in artifacts.values():
                artifact.close()
            raise

    def _open(
        self, artifacts: Mapping[str, Artifact], threads: int | None, host_memory_bytes: int | None
    ) -> None:
        """Take the memory, and have all members ready to run."""
        turns, arena = Turns(), None
        for member in self._plan.members:
            with _of_member(member.name):
                artifact = artifacts[member.name]
                first, again = with_turn(artifact, member)
                library = open_library(artifact)
                if arena is None and first.needs_gpu:
                    arena = _allocate(library, self._plan)
                manifest = artifact.manifest
                limit_bytes = manifest.host_memory_bytes if host_memory_bytes is None else host_memory_bytes
                reserve = functools.partial(Memory, (again, first), library, limit_bytes, arena)
                count = check_threads(threads or manifest.threads or available_threads())
                self._sessions[member.name] = MemberSession(first, again, reserve, turns, count)

    def __repr__(self) -> str:
        return f"<SessionGroup: {', '.join(self._sessions)} in {self._plan.arena_bytes:,} bytes>"

    @property
    def plan(self) -> GroupPlan:
        """What each member has of the memory, and predicted times."""
        return self._plan

    def __getitem__(self, name: str) -> Session:
        """The session of a member. Raises UsageError HC566 if there is none of that name."""
        if name not in self._sessions:
            remedy = f"members are {', '.join(map(repr, self._sessions)) or 'none: the group is closed'}"
            raise UsageError("HC566", f"the group has no member {name!r}", remedy=remedy)
        return self._sessions[name]

    def __iter__(self) -> Iterator[str]:
        """Names of members."""
        return iter(self._sessions)

    def run(
        self, name: str, output_names: Sequence[str] | None, feeds: Mapping[str, np.ndarray]
    ) -> list[np.ndarray]:
        """Run a member, as `Session.run` does; errors name it. Raises UsageError HC566 for another name."""
        session = self[name]
        with _of_member(name):
            return session.run(output_names, feeds)

    def close(self) -> None:
        """Free everything; closing twice does no harm."""
        for session in self._sessions.values():
            session.close()
        self._sessions = {}

    def __enter__(self) -> SessionGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def _of_member(name: str) -> Iterator[None]:
    """Errors say which member they are about."""
    try:
        yield
    except HybridcError as error:
        error.where = f"member {name!r}" + f": {error.where}" * bool(error.where)
        raise


def _allocate(library: Library, plan: GroupPlan) -> Any:
    """The arena. Raises DeviceError HC405."""
    claim_gpu()
    free_bytes = free_gpu_bytes(library)
    try:
        return library.helper("device_arena")(GPU_INDEX, plan.arena_bytes)
    except RuntimeError as error:
        what = f"the group needs {plan.arena_bytes:,} bytes of GPU memory, but {free_bytes:,} are free"
        remedy = "stop other programs on the GPU, or give the group a smaller --gpu-memory"
        raise DeviceError("HC405", what, remedy=remedy) from error
