"""All-reduce beside the backward pass: what the network's lane of an accumulation does."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hybridc.artifact.load import Artifact
from hybridc.artifact.manifest import StoredFunction
from hybridc.ir import Device
from hybridc.ir.bind import symbol
from hybridc.machine import Network
from hybridc.passes.training.spec import NEW
from hybridc.training.ranks.agreement import check_agreement
from hybridc.training.ranks.allreduce import AllReduce
from hybridc.training.ranks.collectives import (
    Summing,
    choose_buckets,
    collectives_of,
    parameters_of,
    with_collectives,
    with_means,
)


@dataclass
class Overlap:
    """Sums of gradients over the ranks, each as soon as the last part of a batch has it.

    `all_reduce` is used by the lane's thread during a run, and by nobody else meanwhile.
    """

    all_reduce: AllReduce
    summed: Collection[str]
    """States whose new values are summed over the ranks."""
    owner: Mapping[str, int] = field(default_factory=dict)
    """Of each of them the rank that alone gets the sum; empty: all do."""
    is_last_part: bool = False
    """Sums over the parts of this rank alone are no use to others: before the last part nothing is sent."""
    _buckets: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = field(default_factory=dict)
    """By function: names of states, and where the parts of the ranks end."""
    _failure: BaseException | None = None

    def added_to(self, artifact: Artifact) -> Artifact:
        """Rank 0 chooses the buckets: with other GPU memory a plan may have gradients in another order."""
        ranks = self.all_reduce.ranks
        network = self.all_reduce.network or artifact.manifest.machine.network or Network()
        graph, plan = with_means(artifact.graph, artifact.plan, ranks.count, network)
        ports = zip(artifact.interface.outputs, graph.outputs, strict=False)
        tensors = {p.name: tensor for p, tensor in ports if p.name.removesuffix(NEW) in self.summed}
        names = {tensor: name for name, tensor in tensors.items()}
        owner = {tensor: self.owner[name.removesuffix(NEW)] for tensor, name in names.items() if self.owner}
        summing = Summing(ranks.count, network, owner)
        chosen = choose_buckets(graph, plan, list(names), summing)
        told = ranks.from_first([[names[tensor] for tensor in bucket] for bucket in chosen])
        buckets = tuple(tuple(tensors[name] for name in bucket) for bucket in told)
        more_graph, more_plan = with_collectives(graph, plan, buckets, summing)
        check_agreement(ranks, {"order of sums and means": collectives_of(more_plan)})
        functions = [
            StoredFunction(f"all_reduce_{i}", Device.CPU, parameters_of(graph, bucket, summing))
            for i, bucket in enumerate(buckets)
        ]
        self._buckets = {
            symbol(function.name, Device.CPU): (tuple(states), summing.ends(graph, bucket))
            for function, states, bucket in zip(functions, told, buckets, strict=True)
        }
        number = artifact.number
        return replace(
            artifact,
            manifest=replace(artifact.manifest, functions=(*artifact.manifest.functions, *functions)),
            graphs=(*artifact.graphs[:number], more_graph, *artifact.graphs[number + 1 :]),
            plans=(*artifact.plans[:number], more_plan, *artifact.plans[number + 1 :]),
        )

    def make(self, function: str, arrays: Sequence[np.ndarray]) -> None:
        """Sums in place, or means of BatchNorm. Raises DeviceError HC434 as `Ranks.exchange`."""
        try:
            if function not in self._buckets:
                count = len(arrays) // 2
                self.all_reduce.mean_into(arrays[count:], arrays[:count])
            elif self.is_last_part:
                names, ends = self._buckets[function]
                packed, room = arrays[-2:]
                sums = arrays[len(names) : -2]
                self.all_reduce.sum_into(sums, names, packed, room, ends, gather=not self.owner)
        except BaseException as error:
            self._failure = error
            raise

    def take_failure(self) -> BaseException | None:
        failure, self._failure = self._failure, None
        return failure
