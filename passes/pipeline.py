"""The order of the stages: the list `STAGES`, and nothing else, knows it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from hybridc.passes.phases import FusedNetwork, GraphedNetwork, ImportedNetwork, LoweredNetwork
from hybridc.passes.sequence import Stage, StageSequence
from hybridc.passes.stages import kernels, plan, program, show, tile
from hybridc.progress import Progress

FROM_FUSED: StageSequence[FusedNetwork, GraphedNetwork] = (
    # before the graph: only the schedule knows how much workspace a kernel needs, and the budget counts it
    StageSequence.of(Stage("schedule", kernels.schedule_network, show.show_scheduled))
    .then("graph", kernels.read_network_graph, show.show_graph)
    .then("estimate", kernels.estimate_network, show.show_estimates)
    # before anything is chosen, so that tilings, the order of kernels and plans all use measured times
    .then("profile", kernels.profile_network, show.show_times)
    # after all times are known: they are those of the largest sizes
    .then("padding", kernels.skip_padding, show.show_graph)
)
"""From functions to kernels: of a network, and of the same with tensors in other layouts."""

TO_GRAPH: StageSequence[ImportedNetwork, GraphedNetwork] = (
    StageSequence.of(Stage("fuse", program.fuse_network, show.show_program))
    .then("separable", program.fuse_cpu_separable, show.show_program)
    # after fuse and separable, which decide what a kernel is
    .then("precision", program.reduce_network_precision, show.show_program)
    .through(FROM_FUSED)
)
"""From operators to kernels. The whole network takes this way, and then each of its tilings."""

STAGES: StageSequence[ImportedNetwork, LoweredNetwork] = (
    StageSequence.of(Stage("canonicalize", program.canonicalize_network, show.show_program))
    .then("attention", program.fuse_cpu_attention, show.show_program)
    .then("layout", program.choose_cpu_layout, show.show_program)
    .through(TO_GRAPH)
    # after the graph, which says what the whole network needs
    .then(
        "tile",
        partial(tile.tile_network, to_graph=TO_GRAPH.run, from_fused=FROM_FUSED.run),
        show.show_tilings,
    )
    # the passes partition, insert_copies and reuse_buffers, which depend on each other
    .then("plan", plan.plan_network, show.show_plans)
    .then("verify", plan.verify_network, show.show_verdict)
    .then("lower", plan.lower_network, show.show_lowered)
)
"""From an imported network to a module that code is generated for."""


def run_stages(
    network: ImportedNetwork,
    progress: Progress,
    *,
    stop_after: str | None = None,
    dump_ir: Path | None = None,
) -> Any:
    """Run the stages up to and with `stop_after`, or all; the record that the last of them made.

    Writes what each stage made to the folder `dump_ir`. Raises HybridcError: UsageError HC520 if there is no
    stage `stop_after`, HC521 if `dump_ir` cannot be written, and what the stages raise.
    """
    return STAGES.until(stop_after).run(network, progress, dump_ir=dump_ir)
