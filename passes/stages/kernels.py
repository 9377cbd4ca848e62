"""Code, times and the graph of kernels."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from hybridc.ir import Device
from hybridc.passes.estimate import estimated_us
from hybridc.passes.guards import with_guards
from hybridc.passes.lower.lower import cuda_target
from hybridc.passes.padding import without_padding
from hybridc.passes.phases import (
    FusedNetwork,
    GraphedNetwork,
    Job,
    ScheduledNetwork,
    Times,
)
from hybridc.passes.program.program import Program, with_own_names
from hybridc.passes.read_graph import read_graph
from hybridc.passes.schedule import (
    choose_tiles,
    schedule_functions,
    schedule_requests,
    with_agreed_layouts,
    with_one_layout,
)
from hybridc.progress import Progress
from hybridc.schedules.rule import Request


def requests_of(job: Job, program: Program, known: Container[tuple[str, Device]] = ()) -> dict[str, Request]:
    """What a job asks of the functions of a program, but for those that are `known`."""
    options = job.options
    return schedule_requests(
        program,
        options.target,
        known,
        winograd=options.fast_algorithms,
        int8_activations=options.int8_activations,
        threads=options.cpu_threads,
        gpu=options.machine.gpu,
        many_sizes=job.many_sizes,
        open_dimensions=any(job.open_axes.values()),
    )


def schedule_network(c: FusedNetwork, progress: Progress) -> ScheduledNetwork:
    """Schedule the functions that the library has no code for, for each device of the target."""
    known = c.library.scheduled
    program = with_own_names(c.program, c.library.weights)
    requests = requests_of(c.job, program, known)
    scheduled = schedule_functions(requests, c.job.devices, progress.kernels, c.job.cache)
    if c.job.chooser is not None:
        scheduled = choose_tiles(program, requests, scheduled, c.job.chooser)
    library = replace(
        c.library,
        scheduled=with_agreed_layouts(program, requests, {**known, **scheduled}, c.job.cache),
        weights={**c.library.weights, **program.weights},
    )
    return ScheduledNetwork(c.job, program, library, c.narrow, unfused=c.unfused)


def read_network_graph(c: ScheduledNetwork, _: Progress) -> GraphedNetwork:
    """Kernels and tensors with their costs; from here on no stage but `tile` and `lower` needs TVM."""
    graph = with_guards(read_graph(c.program, with_one_layout(c.program, c.scheduled), c.job.loop_carried))
    return GraphedNetwork(c.job, c.program, c.library, c.narrow, unfused=c.unfused, graph=graph)


def estimate_network(c: GraphedNetwork, _: Progress) -> GraphedNetwork:
    """Estimate the times of the GPU functions that the kernels call, those that have none yet."""
    options, known = c.job.options, c.library.estimated_us
    calibrated = options.machine.gpu.efficiencies
    called = {kernel.function for kernel in c.graph.kernels if kernel.family not in calibrated}
    new = {key: made for key, made in c.scheduled.items() if key[0] in called and key not in known}
    found = estimated_us(new, options.machine, options.target, c.job.cache)
    return replace(c, library=replace(c.library, estimated_us={**known, **found}))


def profile_network(c: GraphedNetwork, _: Progress) -> GraphedNetwork:
    """Measure the functions that the kernels call, those that are not measured yet, if the job says so."""
    called = {kernel.function for kernel in c.graph.kernels} - c.library.profiled
    if c.job.profiler is None or not called:
        return c
    measured_us = c.job.profiler({key: made for key, made in c.scheduled.items() if key[0] in called})
    library = replace(
        c.library,
        profiled=c.library.profiled | called,
        measured_us={**c.library.measured_us, **measured_us},
    )
    return replace(c, library=library)


def skip_padding(c: GraphedNetwork, _: Progress) -> GraphedNetwork:
    """Kernels that compute no more than a run's sizes need, where dimensions are open."""
    target, library = c.job.options.target, c.library
    functions = {g.name_hint: f for g, f in c.program.functions.items()}
    gpu = cuda_target(target) if target.has_gpu else None
    graph, made, origins = without_padding(c.graph, functions, c.scheduled, c.job.open_axes, gpu)
    if not made:
        return c

    def known(times: Times) -> Times:
        """Those of the largest sizes hold for the functions that skip padding, too."""
        return {**times, **{(n, d): times[origins[n], d] for n, d in made if (origins[n], d) in times}}

    library = replace(
        library,
        scheduled={**library.scheduled, **made},
        measured_us=known(library.measured_us),
        estimated_us=known(library.estimated_us),
    )
    return replace(c, graph=graph, library=library)
