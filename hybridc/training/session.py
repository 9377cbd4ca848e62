"""Run a compiled training step, and keep its states from one step to the next.

On several ranks each goes through some parts of a batch; then the sums of gradients are added up over the
ranks, and every rank makes the same new states. Or each makes those of its own parameters, whose optimizer
states no other has, and gets the new parameters of the others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from hybridc.artifact.manifest import Port
from hybridc.errors import UsageError, exhaustion_told
from hybridc.passes.training.spec import TrainingSpec
from hybridc.passes.training.splits import joined
from hybridc.runtime.collectives import Collectives
from hybridc.training.artifact import (
    ACCUMULATE,
    EVALUATE,
    MANIFEST,
    STEP,
    UPDATE,
    TrainingArtifact,
    hash_of,
    named,
    open_training,
)
from hybridc.training.batches import (
    Part,
    check_arrays,
    count_examples,
    padded_parts,
    part_sizes,
    whole_parts,
)
from hybridc.training.interrupts import uninterrupted
from hybridc.training.programs import Programs
from hybridc.training.ranks.agreement import (
    check_agreement,
    check_whole_batch,
    parts_of_rank,
    threads_of_rank,
)
from hybridc.training.ranks.allreduce import AllReduce
from hybridc.training.ranks.exchange import Ranks
from hybridc.training.ranks.overlap import Overlap
from hybridc.training.ranks.shards import OwnUpdate, Shards
from hybridc.training.states import States, refusal
from hybridc.version import __version__

Arrays = np.ndarray | Mapping[str, np.ndarray]
"""By name; or the array itself where there is only one."""
STEP_COUNT = "step"
"""In the optimizer's states: how many steps were made."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Loss and outputs of a network in inference."""

    loss: float
    outputs: dict[str, np.ndarray]


class TrainingSession:
    """A loaded training step. Nothing that is interrupted or refused leaves it with half a step's states.

    Not for several threads at once.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        threads: int | None = None,
        gpu_memory_bytes: int | None = None,
        host_memory_bytes: int | None = None,
        seed: int = 0,
        all_reduce: AllReduce | None = None,
        shard_states: bool = False,
    ) -> None:
        """`seed` is what dropout draws from, with the number of the step; the rest is as in `load`.

        With `all_reduce` the session is one of those of its ranks, and `step` is called on all of them.
        With `shard_states` each has the optimizer's states of some parameters alone.
        Raises UsageError HC589 if their artifacts or seeds differ, HC587 if they cannot share a batch, or
        the states.
        """
        self._shards: Shards | None = None
        self._all_reduce = None if all_reduce is None or all_reduce.ranks.count == 1 else all_reduce
        if self._all_reduce is None:
            self._artifact = open_training(path)
            self._own_parts = range(self.spec.accumulate)
        else:
            ranks = self._all_reduce.ranks
            self._artifact = ranks.together(lambda: open_training(path))
            _check_ranks(self._all_reduce, self._artifact, seed, is_sharded=shard_states)
            self._own_parts = parts_of_rank(ranks, self.spec.accumulate)
            threads = threads or threads_of_rank(ranks)
            self._shards = Shards.of(ranks, self._artifact.manifest) if shard_states else None
        check_whole_batch(self.spec, self.ranks)
        self._overlap = self._overlapped()
        collectives = self._collectives()
        self._programs = Programs(self._artifact, threads, gpu_memory_bytes, host_memory_bytes, collectives)
        self._seed = seed
        self._step_count = 0
        manifest = self._artifact.manifest
        stepping = {kind: self._programs[kind].artifact.manifest for kind in self._stepping()}
        ports = next(iter(stepping.values())).inputs
        values = self._artifact.initial_values()  # of shapes that the programs' have been found to be
        kept = values if self._shards is None else self._shards.kept(values)
        self._states = States(self._programs, manifest, kept, stepping)
        self._inputs, self._targets = named(ports, manifest.inputs), named(ports, manifest.targets)

    def __repr__(self) -> str:
        inputs = ", ".join(f"{port.name} {list(port.shape)}" for port in (*self.inputs, *self.targets))
        return f"<TrainingSession {self._artifact.path.name}: {inputs}, {self.step_count} steps made>"

    @property
    def artifact(self) -> TrainingArtifact:
        return self._artifact

    @property
    def spec(self) -> TrainingSpec:
        return self._artifact.manifest.spec

    @property
    def inputs(self) -> tuple[Port, ...]:
        """The model's inputs, as the device sees them: of `accumulate` parts of a batch, one."""
        return self._inputs

    @property
    def targets(self) -> tuple[Port, ...]:
        return self._targets

    @property
    def batch(self) -> int:
        """Examples of a step, or the most of one."""
        return self.spec.accumulate * self._size

    @property
    def _size(self) -> int:
        """Examples that the device sees at a time."""
        first = next((port for port in (*self._inputs, *self._targets) if port.shape), None)
        return first.shape[0] if first is not None else 1

    @property
    def ranks(self) -> Ranks | None:
        """None where there is only one."""
        return None if self._all_reduce is None else self._all_reduce.ranks

    @property
    def share(self) -> slice:
        """The examples of a batch that `step` takes on this rank."""
        return self.share_of(self.batch)

    def share_of(self, examples: int) -> slice:
        """The examples that `step` takes on this rank of a batch of so many, which need not be whole."""
        sizes, parts = part_sizes(examples, self.spec.accumulate), self._own_parts
        return slice(sum(sizes[: parts.start]), sum(sizes[: parts.stop]))

    @property
    def are_states_shared(self) -> bool:
        """Whether the optimizer's states are divided among the ranks."""
        return self._shards is not None

    @property
    def optimizer_state_bytes(self) -> int:
        """Of the optimizer's states that this rank has."""
        states = self._artifact.manifest.states
        return sum(s.size_bytes for s in states if s.kind == "moment" and s.name in self._states.values)

    @property
    def dropout_seed(self) -> int | None:
        """None where nothing is drawn."""
        return None if self._artifact.manifest.seed is None else self._seed

    @property
    def step_count(self) -> int:
        """Steps made so far."""
        return self._step_count

    @exhaustion_told()
    def step(self, inputs: Arrays, targets: Arrays | None = None, lr: float | None = None) -> float:
        """Train on one batch; returns its loss before the step. `lr` overrides the optimizer's.

        On several ranks each gives its `share` of the batch, and gets the loss of all of it. Of a batch that
        need not be whole there may be fewer examples: on several ranks each gives its `share_of` them.

        Raises UsageError HC577 for a batch of another size, HC581 for a label that the loss has no class for,
        or as `Session.run` does: HC551 and HC552 for names of other arrays; and DeviceError HC434 if a rank
        does not answer.
        """
        parts = self._parts(inputs, targets)
        number = self._step_count + 1
        learning_rate = self.spec.optimizer.lr if lr is None else lr
        names = self._artifact.manifest.scalars
        found = self.spec.scalar_values(learning_rate, number)
        scalars = {names[name]: np.array(value, np.float32) for name, value in found.items()}
        # sums of gradients and running statistics of the parts so far: they are no states of the session
        # before the whole step is made, and sums never, so that every step begins with zeros
        made: dict[str, np.ndarray] = {}
        losses = []
        for place, feeds in zip(self._own_parts, parts if self._all_reduce else parts[:-1], strict=False):
            if self._overlap is not None:
                self._overlap.is_last_part = place == self._own_parts[-1]
            values = {**self._states.values, **made, **feeds}
            loss, results = self._programs.loss(ACCUMULATE, values, self._draw(place))
            made.update(results)
            losses.append(loss)
        if self._all_reduce is not None:
            losses, made = _reduced(self._all_reduce.ranks, losses, made, self._sums)
        with uninterrupted():
            if self._all_reduce is not None:
                results = made | self._updated({**self._states.values, **made, **scalars})
                results = {name: value for name, value in results.items() if name not in self._sums}
            else:
                draw = self._draw(self._own_parts[-1])
                loss, results = self._states.step({**scalars, **parts[-1]}, made, draw)
                losses.append(loss)
            self._states.put(results)
            self._step_count = number
        return math.fsum(losses) / self.spec.accumulate

    @property
    def _sums(self) -> frozenset[str]:
        return frozenset(state.name for state in self._artifact.manifest.states if state.kind == "sum")

    def _draw(self, part: int) -> int:
        """What dropout draws from."""
        return (self._seed % 2**31 << 32) + self._step_count * self.spec.accumulate + part

    @exhaustion_told()
    def evaluate(self, inputs: Arrays, targets: Arrays | None = None) -> Evaluation:
        """Loss and outputs without dropout and with BatchNorm's running statistics.

        With the averages of parameters where the step keeps them. Of any number of whole parts of a batch, or
        of examples if batches need not be whole.
        Raises UsageError as `step` does.
        """
        arrays, ports = self._arrays(inputs, targets), (*self._inputs, *self._targets)
        if self.spec.is_partial:
            examples = count_examples(arrays, ports, None)
            full, rest = divmod(examples, self._size)
            parts = padded_parts(arrays, ports, (self._size,) * full + (rest,) * bool(rest))
        else:
            parts = whole_parts(arrays, ports, None)
            examples = sum(part.examples for part in parts)
        losses, outputs = [], []
        self._states.evict()  # the evaluation takes the memory
        states = {**self._states.values, **self._averages()}
        for part in parts:
            loss, results = self._programs.loss(EVALUATE, {**states, **self._feeds(part, examples)}, 0)
            losses.append(loss * part.examples / self._size)
            outputs.append({name: self._cut(name, array, part.examples) for name, array in results.items()})
        joined = {name: _join([results[name] for results in outputs]) for name in outputs[0]}
        return Evaluation(math.fsum(losses) / (examples / self._size), joined)

    def _cut(self, name: str, output: np.ndarray, examples: int) -> np.ndarray:
        """What an output has of so many examples."""
        axes = self._artifact.manifest.cuts.get(name, ())
        kept = tuple(slice(examples if axis in axes else None) for axis in range(output.ndim))
        return output[kept]

    # --------------------------------------------------------------------------------------- states

    @exhaustion_told()
    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of parameters and running statistics, named as in the user's model."""
        return self._states.copies(is_of_model=True)

    @exhaustion_told()
    def averaged_state_dict(self) -> dict[str, np.ndarray]:
        """As `state_dict`, but with the moving average of each parameter that has one.

        Running statistics are the present ones. Before the first step a parameter is its own average.
        """
        states = self.state_dict()
        return states | joined(self._averages(), self._artifact.manifest.splits)

    @exhaustion_told()
    def load_state_dict(self, values: Mapping[str, np.ndarray]) -> None:
        """Take over parameters and running statistics: all of them. Raises UsageError HC576."""
        self._states.put(self._states.checked(values, is_of_model=True))

    @exhaustion_told()
    def optimizer_state_dict(self) -> dict[str, np.ndarray]:
        """Copies of the optimizer's states, such as `conv1.weight#momentum`, and the number of steps made.

        Ranks that share them all call it: rank 0 gets all of them, the others that number alone.
        """
        if self._shards is None:
            states = self._states.copies(is_of_model=False)
        else:
            states = joined(self._shards.moments(self._states.values), self._artifact.manifest.splits)
        return {**states, STEP_COUNT: np.array(self._step_count, np.int64)}

    @exhaustion_told()
    def load_optimizer_state_dict(self, values: Mapping[str, np.ndarray]) -> None:
        """Take over what `optimizer_state_dict` gave. Raises UsageError HC576."""
        count = values.get(STEP_COUNT)
        if count is None or count.shape != () or count.dtype.kind not in "iu" or count < 0:
            raise refusal(f"the optimizer's states have no count {STEP_COUNT!r}")
        given = {name: value for name, value in values.items() if name != STEP_COUNT}
        moments = self._states.checked(given, is_of_model=False)
        self._states.put(moments if self._shards is None else self._shards.kept(moments))
        self._step_count = int(count)

    @exhaustion_told()
    def export_onnx(self, path: str | Path, *, for_training: bool = False) -> None:
        """Write the user's model for inference, with the present parameters and statistics.

        If the step keeps averages of parameters, with these, but not with `for_training`.
        BatchNorm uses the running statistics, Dropout is off, and a loss that is an output of the model is
        left out with its labels. With `for_training` the graph is the user's own. Raises UsageError HC562.
        """
        from hybridc.training.export import export_onnx

        states = self.state_dict() if for_training else self.averaged_state_dict()
        export_onnx(self._artifact, states, Path(path), for_training=for_training)

    def close(self) -> None:
        """Free the memory of all devices; closing twice does no harm."""
        self._states.close()
        self._programs.close()

    def __enter__(self) -> TrainingSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------------- the rest

    def _overlapped(self) -> Overlap | None:
        if self._all_reduce is None:
            return None
        # the norm of the gradient, by which it is clipped, is of all sums
        is_divided = self._shards is not None and self.spec.clip_norm is None
        owner = self._shards.owner_of_sums if self._shards is not None and is_divided else {}
        return Overlap(self._all_reduce, self._sums, owner)

    def _collectives(self) -> dict[str, Collectives]:
        """By program."""
        found: dict[str, Collectives] = {} if self._overlap is None else {ACCUMULATE: self._overlap}
        return found if self._shards is None else found | {UPDATE: OwnUpdate(self._shards.own)}

    def _stepping(self) -> tuple[str, ...]:
        """The programs of a step on this rank; one that has no parameters of its own updates none."""
        if self._all_reduce is None:
            return (STEP,)
        return (ACCUMULATE,) if self._shards is not None and not self._shards.own else (ACCUMULATE, UPDATE)

    def _updated(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """New states of parameters, of the sums of their gradients over all ranks."""
        made = self._programs.results(UPDATE, values) if UPDATE in self._stepping() else {}
        return made if self._shards is None else made | self._shards.parameters({**values, **made})

    def _parts(self, inputs: Arrays, targets: Arrays | None) -> list[dict[str, np.ndarray]]:
        """What programs read of a batch in the parts of this rank."""
        arrays, ports = self._arrays(inputs, targets), (*self._inputs, *self._targets)
        if not self.spec.is_partial:
            return [dict(part.arrays) for part in whole_parts(arrays, ports, len(self._own_parts))]
        total = examples = count_examples(arrays, ports, self._size * len(self._own_parts))
        parts = self.spec.accumulate
        if self._all_reduce is not None:
            total = sum(self._all_reduce.ranks.gather(examples))
        elif examples < parts:
            parts = examples
        sizes = part_sizes(total, parts)[self._own_parts.start : self._own_parts.stop]
        if sum(sizes) != examples or not min(sizes):
            what = (
                f"a batch of {total} examples in {parts} parts gives this rank {sum(sizes)}, not {examples}"
            )
            remedy = "give each rank its `share_of` a batch, which has an example for each part"
            raise UsageError("HC577", what, remedy=remedy)
        return [self._feeds(part, total) for part in padded_parts(arrays, ports, sizes)]

    def _arrays(self, inputs: Arrays, targets: Arrays | None) -> dict[str, np.ndarray]:
        arrays = _named(inputs, self._inputs, "inputs") | _named(targets, self._targets, "targets")
        check_arrays(arrays, (*self._inputs, *self._targets))
        return arrays

    def _feeds(self, part: Part, examples: int) -> dict[str, np.ndarray]:
        """What programs read of a part of so many examples in all parts."""
        manifest, feeds = self._artifact.manifest, dict(part.arrays)
        feeds |= dict.fromkeys(manifest.sizes, np.array([part.examples], np.int64))
        if manifest.share is not None:
            share = part.examples * self.spec.accumulate / examples
            feeds[manifest.share] = np.array(share, np.float32)
        return feeds

    def _averages(self) -> dict[str, np.ndarray]:
        """By names of parameters, as the step has them; of states that were fetched."""
        return {} if self.spec.ema is None or self._step_count == 0 else self._states.averages()


def _check_ranks(all_reduce: AllReduce, artifact: TrainingArtifact, seed: int, *, is_sharded: bool) -> None:
    """The manifest has the hashes of everything in the artifact, the initial states among it."""
    found = {
        "compiled step": hash_of(artifact.path / MANIFEST),
        "seed": seed,
        "wire": all_reduce.wire,
        "--shard-states": is_sharded,
        "hybridc version": __version__,
    }
    check_agreement(all_reduce.ranks, found)


def _reduced(
    ranks: Ranks, losses: list[float], made: Mapping[str, np.ndarray], sums: Collection[str]
) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses of all ranks' parts, the sums, already those of all, and rank 0's running statistics.

    BatchNorm is by the statistics of each part, wherever it is gone through; those that it keeps for
    inference are of rank 0, as with PyTorch's DistributedDataParallel.
    """
    added = {name: value for name, value in made.items() if name in sums}
    statistics = {name: value for name, value in made.items() if name not in sums}
    found = ranks.gather(losses)
    more = ranks.from_first(statistics) if statistics else {}
    return [loss for part in found for loss in part], {**added, **more}


def _named(arrays: Arrays | None, ports: Sequence[Port], what: str) -> dict[str, np.ndarray]:
    if isinstance(arrays, Mapping):
        return dict(arrays)
    if arrays is None:
        return {}
    if len(ports) != 1:
        names = ", ".join(repr(port.name) for port in ports) or "none"
        raise UsageError("HC577", f"{what} must be passed by name", remedy=f"{what} are {names}")
    return {ports[0].name: np.asarray(arrays)}


def _join(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays[0].ndim and len(arrays) > 1 else arrays[0]
