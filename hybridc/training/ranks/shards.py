"""States of the optimizer that the ranks share: each has, and updates, those of some parameters.

This is the first stage of ZeRO (Rajbhandari et al., ZeRO: memory optimizations toward training trillion
parameter models, 2020), by whole parameters, as PyTorch's ZeroRedundancyOptimizer shares them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hybridc.artifact.load import Artifact
from hybridc.errors import UsageError
from hybridc.passes.training.spec import NEW
from hybridc.training.artifact import StoredState, TrainingManifest
from hybridc.training.ranks.exchange import Ranks, shared
from hybridc.training.ranks.part import part_of


def owners(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Of each parameter the rank that has its states: the largest first, to whoever has least."""
    held, found = [0] * ranks, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        found[name] = min(range(ranks), key=lambda rank: held[rank])
        held[found[name]] += sizes[name]
    return found


def _parameter_of(state: str) -> str:
    """Whose moment or sum of gradients it is."""
    return state.rpartition("#")[0]


@dataclass(frozen=True, slots=True)
class Shards:
    """Which rank has which states. What is told to be collective, all ranks call; it raises as
    `Ranks.exchange`."""

    ranks: Ranks
    states: tuple[StoredState, ...]
    owner: Mapping[str, int]
    """By parameter."""

    @staticmethod
    def of(ranks: Ranks, manifest: TrainingManifest) -> Shards:
        """Raises UsageError HC587 on all ranks if each of them needs all states."""
        if manifest.spec.ema is not None:
            what = "ranks cannot share averages of parameters: each evaluates with all of them"
            remedy = "train without --shard-states, or compile without --ema"
            raise shared(UsageError("HC587", what, remedy=remedy))
        sizes = {_parameter_of(s.name): s.size_bytes for s in manifest.states if s.kind == "sum"}
        return Shards(ranks, manifest.states, owners(sizes, ranks.count))

    @property
    def own(self) -> frozenset[str]:
        """The parameters whose states this rank has."""
        return frozenset(name for name, rank in self.owner.items() if rank == self.ranks.rank)

    @property
    def owner_of_sums(self) -> dict[str, int]:
        """By names of sums of gradients."""
        sums = [state.name for state in self.states if state.kind == "sum"]
        return {name: self.owner[_parameter_of(name)] for name in sums}

    def kept(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Without moments that other ranks have."""
        others = {s.name for s in self._moments if self.owner[_parameter_of(s.name)] != self.ranks.rank}
        return {name: value for name, value in values.items() if name not in others}

    def parameters(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Those of all ranks, of which each has renewed its own. Collective."""
        parameters = [state for state in self.states if state.name in self.owner]
        return self._gathered(values, [(state, self.owner[state.name]) for state in parameters], None)

    def moments(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """On rank 0 those of all ranks, on the others none. Collective."""
        of_ranks = [(state, self.owner[_parameter_of(state.name)]) for state in self._moments]
        return self._gathered(values, of_ranks, 0)

    @property
    def _moments(self) -> list[StoredState]:
        return [state for state in self.states if state.kind == "moment"]

    def _gathered(
        self, values: Mapping[str, np.ndarray], owned: Sequence[tuple[StoredState, int]], target: int | None
    ) -> dict[str, np.ndarray]:
        """Arrays, each from the rank that owns it: on the `target`, or on all ranks."""
        count, own = self.ranks.count, self.ranks.rank
        of_ranks = [[state for state, rank in owned if rank == each] for each in range(count)]
        mine = [
            np.ascontiguousarray(values[state.name]).reshape(-1).view(np.uint8) for state in of_ranks[own]
        ]
        packed = np.concatenate([np.empty(0, np.uint8), *mine])
        room = [np.empty(sum(state.size_bytes for state in states), np.uint8) for states in of_ranks]
        is_target = target in (None, own)
        self.ranks.exchange(
            [packed if target in (None, rank) else None for rank in range(count)],
            room if is_target else [None] * count,
        )
        room[own] = packed
        found: dict[str, np.ndarray] = {}
        for states, data in zip(of_ranks, room, strict=True):
            offset = 0
            for state in states:
                flat = data[offset : offset + state.size_bytes].view(state.dtype)
                found[state.name], offset = flat.reshape(state.shape), offset + state.size_bytes
        return found if is_target else {}


@dataclass(frozen=True, slots=True)
class OwnUpdate:
    """Of an update what makes the new states of one rank's own parameters."""

    own: Collection[str]
    """Names of parameters."""

    def added_to(self, artifact: Artifact) -> Artifact:
        """With the part of the chosen plan that makes them, and no memory for the others."""
        number, interface = artifact.number, artifact.interface
        results = zip(interface.outputs, artifact.graph.outputs, strict=True)
        wanted = [(port, tensor) for port, tensor in results if self._is_own(port.name.removesuffix(NEW))]
        graph, plan = part_of(artifact.graph, artifact.plan, [tensor for _, tensor in wanted])
        fed = zip(interface.inputs, artifact.graph.inputs, strict=True)
        manifest = replace(
            artifact.manifest,
            inputs=tuple(port for port, tensor in fed if tensor in graph.inputs),
            outputs=tuple(port for port, _ in wanted),
        )
        return replace(
            artifact,
            manifest=manifest,
            graphs=(*artifact.graphs[:number], graph, *artifact.graphs[number + 1 :]),
            plans=(*artifact.plans[:number], plan, *artifact.plans[number + 1 :]),
        )

    def _is_own(self, state: str) -> bool:
        return state in self.own or _parameter_of(state) in self.own

    def make(self, function: str, arrays: Sequence[np.ndarray]) -> None:
        """There are no collectives in it."""

    def take_failure(self) -> BaseException | None:
        return None
