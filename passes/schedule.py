"""Stage `schedule`: each distinct PrimFunc once for each device of the target."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import tvm
from tvm import relax, s_tir

from hybridc.compile_cache import Cache, NoCache, content_of, remembered
from hybridc.ir import Device
from hybridc.machine import Processor
from hybridc.passes.program.program import Program, is_op
from hybridc.schedules.packing import Packing
from hybridc.schedules.rule import Request, Scheduled
from hybridc.schedules.select import schedule
from hybridc.targets import DEFAULT_THREADS, Target


@dataclass(frozen=True, slots=True)
class Tunable:
    """A function of the CPU that its rule can schedule in more than one way."""

    name: str
    request: Request
    scheduled: Scheduled
    """With the tile that is predicted to be best."""
    flops: int
    """Of all its calls in a run together."""

    def version(self, label: str) -> Scheduled:
        """The function with another one of `scheduled.choices`."""
        made = schedule(replace(self.request, choice=label), Device.CPU)
        assert made is not None
        return made


Chooser = Callable[[Sequence[Tunable]], Mapping[str, str]]
"""Labels to use, by function; a function without one keeps the tile that is predicted to be best."""


def schedule_requests(
    program: Program,
    target: Target,
    known: Container[tuple[str, Device]] = (),
    *,
    winograd: bool = True,
    int8_activations: bool = True,
    threads: int = DEFAULT_THREADS,
    gpu: Processor | None = None,
    many_sizes: bool = False,
    open_dimensions: bool = False,
) -> dict[str, Request]:
    """A request for each function of the program, by name, except those that are `known` already.

    Requires: `program` fused, so that calls of one function agree on which arguments are weights.
    """
    constants = constant_arguments(program)
    functions = {g.name_hint: f for g, f in program.functions.items()}
    return {
        name: Request(
            function,
            constants[name],
            target,
            winograd=winograd,
            int8_activations=int8_activations,
            threads=threads,
            gpu=gpu,
            many_sizes=many_sizes,
            open_dimensions=open_dimensions,
        )
        for name, function in functions.items()
        if all((name, device) not in known for device in Device)
    }


def schedule_functions(
    requests: Mapping[str, Request],
    devices: Sequence[Device],
    progress: Callable[[int, int], None] = lambda done, total: None,
    cache: Cache = NoCache(),  # noqa: B008 - it has no state
) -> dict[tuple[str, Device], Scheduled]:
    """The scheduled form of each function on each device, by name and device; from `cache` where it is there.

    Ensures: a function that no rule of a device accepts (because it calls into the host, for example) has no
    entry for that device, and its kernels run on the other one.
    """
    scheduled: dict[tuple[str, Device], Scheduled] = {}
    work = [(device, name) for device in devices for name in requests]
    for done, (device, name) in enumerate(work):
        progress(done, len(work))
        made = _schedule(requests[name], device, cache)
        if made is not None:
            scheduled[name, device] = made
    progress(len(work), len(work))
    return scheduled


def _schedule(request: Request, device: Device, cache: Cache) -> Scheduled | None:
    def parts() -> Iterator[str]:
        rest = replace(request, function=None, constants=frozenset())  # type: ignore[arg-type]
        if device is Device.CPU:
            rest = replace(rest, gpu=None, shared_constants=frozenset())
        yield from ("schedule", tvm.ir.save_json(request.function))
        yield content_of((request.constants, rest, device))

    return remembered(cache, lambda: schedule(request, device), parts())


def choose_tiles(
    program: Program,
    requests: Mapping[str, Request],
    scheduled: Mapping[tuple[str, Device], Scheduled],
    chooser: Chooser,
) -> dict[tuple[str, Device], Scheduled]:
    """`scheduled` with the tiles that `chooser` prefers, for functions of the CPU with several of them."""
    calls = Counter(b.value.args[0].name_hint for b in program.bindings if is_op(b.value, "call_tir"))
    tunables = {}
    for (name, device), made in scheduled.items():
        if device is Device.CPU and len(made.choices) > 1:
            flops = int(s_tir.analysis.estimate_tir_flops(tvm.IRModule({"main": requests[name].function})))
            tunables[name] = Tunable(name, requests[name], made, flops * calls[name])
    chosen = chooser(list(tunables.values())).items()
    return {**scheduled, **{(name, Device.CPU): tunables[name].version(label) for name, label in chosen}}


def constant_arguments(program: Program) -> Mapping[str, frozenset[int]]:
    """Positions of the arguments that are weights, by function."""
    found = {}
    for binding in program.bindings:
        if is_op(binding.value, "call_tir"):
            function, arguments = binding.value.args[:2]
            found[function.name_hint] = frozenset(
                i
                for i, argument in enumerate(arguments.fields)
                if isinstance(argument, relax.Var) and argument.name in program.weights
            )
    return found


def with_agreed_layouts(
    program: Program,
    requests: Mapping[str, Request],
    scheduled: Mapping[tuple[str, Device], Scheduled],
    cache: Cache = NoCache(),  # noqa: B008 - it has no state
) -> Mapping[tuple[str, Device], Scheduled]:
    """`scheduled` with functions that leave a weight on the GPU as it is where its readers want it in several
    layouts: those that have a request are scheduled again.

    Most often tiles of one convolution agree, and share the layout that the whole one would have.
    """
    asked, made = dict(requests), dict(scheduled)
    while True:
        disputed = defaultdict[str, set[int]](set)
        for readers in _layouts(program, made).values():
            is_disputed = len({layout for _, _, layout in readers}) > 1
            for name, position, layout in readers if is_disputed else ():
                if layout is not None and name in asked:
                    disputed[name].add(position)
        if not disputed:
            return made
        for name, positions in disputed.items():
            shared = asked[name].shared_constants | positions
            asked[name] = replace(asked[name], shared_constants=shared)
            again = _schedule(asked[name], Device.GPU, cache)
            if again is None or positions & {position for position, _ in again.packings}:
                del made[name, Device.GPU]  # it has no other way to read the weight
            else:
                made[name, Device.GPU] = again


def with_one_layout(
    program: Program, scheduled: Mapping[tuple[str, Device], Scheduled]
) -> Mapping[tuple[str, Device], Scheduled]:
    """`scheduled` without functions that want a weight in another layout on the GPU than most of its readers.

    A function that was scheduled for another way to cut the network up, or another size, may have been alone
    with a weight there, and packed it.
    """
    refused = set()
    for readers in _layouts(program, scheduled).values():
        counts = Counter(layout for _, _, layout in readers)
        most = max(counts, key=counts.__getitem__)
        refused |= {(name, Device.GPU) for name, _, layout in readers if layout != most}
    return {key: made for key, made in scheduled.items() if key not in refused} if refused else scheduled


Reader = tuple[str, int, Packing | None]
"""A function, the position of a weight among its parameters, and its layout there."""


def _layouts(
    program: Program, scheduled: Mapping[tuple[str, Device], Scheduled]
) -> Mapping[str, Sequence[Reader]]:
    """What the calls of functions that the GPU has want of each weight."""
    readers = defaultdict[str, list[Reader]](list)
    constants = constant_arguments(program)
    for binding in program.bindings:
        if is_op(binding.value, "call_tir"):
            function, arguments = binding.value.args[:2]
            made = scheduled.get((function.name_hint, Device.GPU))
            packings = {} if made is None else dict(made.packings)
            for i in constants[function.name_hint] if made is not None else ():
                readers[arguments.fields[i].name].append((function.name_hint, i, packings.get(i)))
    return readers
