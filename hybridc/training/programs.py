"""The programs of a training artifact: their sessions, and what they are given and make."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from hybridc.errors import UsageError
from hybridc.passes.training.spec import NEW
from hybridc.runtime import Session
from hybridc.runtime.collectives import Collectives
from hybridc.training.artifact import TrainingArtifact, check_program

Values = Mapping[str, np.ndarray | np.generic]
"""What a program reads, by name; it may have more."""


class Programs:
    """The ordinary sessions of a training artifact, opened when used. Only one holds GPU memory at a time.

    The others keep what they have read, checked and loaded: taking turns costs allocations only.
    """

    def __init__(
        self,
        artifact: TrainingArtifact,
        threads: int | None,
        gpu_memory_bytes: int | None,
        host_memory_bytes: int | None,
        collectives: Mapping[str, Collectives],
    ) -> None:
        self._artifact = artifact
        self._collectives = collectives
        self._threads = threads
        self._gpu_memory_bytes = gpu_memory_bytes
        self._host_memory_bytes = host_memory_bytes
        self._open: dict[str, Session] = {}

    def __getitem__(self, kind: str) -> Session:
        session = self._open.get(kind)
        if session is None or session.artifact.needs_gpu:
            for other in self._open.values():
                if other is not session and other.artifact.needs_gpu:
                    other.release()
        if session is None:
            session = Session(
                self._artifact.path / kind,
                threads=self._threads,
                gpu_memory_bytes=self._gpu_memory_bytes,
                host_memory_bytes=self._host_memory_bytes,
                collectives=self._collectives.get(kind),
            )
            check_program(self._artifact, kind, session.artifact)
            self._open[kind] = session
        return session

    def loss(
        self, kind: str, values: Values, draw: int, *, kept: Collection[str] = (), left: Collection[str] = ()
    ) -> tuple[float, dict[str, np.ndarray]]:
        """The loss that a program computes, and its other `results`; dropout draws from `draw`."""
        manifest = self._artifact.manifest
        seed = {} if manifest.seed is None else {manifest.seed: np.int64(draw)}
        results = self.results(kind, {**values, **seed}, kept=kept, left=left)
        return float(results.pop(manifest.loss).reshape(())), results

    def results(
        self, kind: str, values: Values, *, kept: Collection[str] = (), left: Collection[str] = ()
    ) -> dict[str, np.ndarray]:
        """What a program makes, new values of states by the states' names.

        States that are `kept` are read where the last run of this program left them; the new values of those
        that are `left` stay in their place. Raises UsageError HC552 if an input is missing.
        """
        session = self[kind]
        ports = session.artifact.manifest
        read = [port.name for port in ports.inputs if port.name not in kept]
        for name in read:
            if name not in values:
                raise UsageError("HC552", f"input {name!r} is missing", remedy="pass it, by name")
        feeds = {name: np.asarray(values[name]) for name in read}
        names = [p.name for p in ports.outputs if p.name.removesuffix(NEW) not in left]
        made = zip(names, session.run(names, feeds, kept=kept), strict=True)
        return {name.removesuffix(NEW): array for name, array in made}

    def close(self) -> None:
        """Free the memory of all devices."""
        for session in self._open.values():
            session.close()
        self._open.clear()
