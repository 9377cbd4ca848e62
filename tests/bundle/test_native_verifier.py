"""The verifier and the binding of bundles do what those of hybridc.ir do, on damaged plans, too."""

from __future__ import annotations

import json
import math
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tvm_ffi import libinfo

from hybridc.bundle.build import NATIVE_FOLDER
from hybridc.errors import PlanError
from hybridc.ir import Check, Device, Graph, Guard, Kernel, Plan, Role
from hybridc.ir.bind import FAULT_DTYPE, BoundStep, FaultRows, Operand, Parameter, Signatures, View, bind
from hybridc.ir.graph import CheckKind, graph_to_json
from hybridc.ir.plan import plan_from_json, plan_to_json, resident_pairs
from hybridc.ir.verify import verify
from hybridc.json_values import LARGEST_SIZE
from hybridc.passes.guards import with_guards
from hybridc.passes.planner.make_plans import make_plan
from tests.passes.test_guards import drawn
from tests.property.test_plans import fractions, plan_of, planned
from tests.support.file_edits import edited
from tests.support.graphs import GraphBuilder, graphs, machine, machines, with_updates
from tests.support.mutations import MUTATIONS
from tests.support.random_examples import random_examples
from tests.support.random_steps import random_steps

some = random_examples(60)
carrying = st.one_of(graphs(), graphs().map(with_updates))
"""Half of them with pairs that are carried from run to run."""
Ask = Callable[[dict[str, Any]], str]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """What the native code answers."""
    program = tmp_path_factory.mktemp("native") / "verifier"
    ffi = Path(libinfo.find_libtvm_ffi())
    folders = (str(NATIVE_FOLDER), libinfo.find_include_path(), libinfo.find_dlpack_include_path())
    source = Path(__file__).with_name("native_verifier.cc")
    links = [str(ffi), f"-Wl,-rpath,{ffi.parent}", "-o", str(program)]
    subprocess.run(
        ["g++", "-std=c++20", "-O1", *(f"-I{f}" for f in folders), str(source), *links], check=True
    )
    with subprocess.Popen(
        [str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        given_to, told_by = process.stdin, process.stdout

        def asked(question: dict[str, Any]) -> str:
            given_to.write(json.dumps(question) + "\n")
            given_to.flush()
            return told_by.readline().strip()

        yield asked
        given_to.close()


def verdict(graph: Graph, plan: Plan) -> str:
    try:
        verify(graph, plan)
    except PlanError as error:
        return error.code
    return "ok"


def question(graph: Graph, plan: Plan, **more: Any) -> dict[str, Any]:
    return {"graph": graph_to_json(graph), "plan": plan_to_json(plan), **more}


def test_damaged_plans_are_refused_alike(ask: Ask) -> None:
    """With the same code: by one damage, by two, and by damage to the graph's permissions."""
    codes: Counter[str] = Counter()

    @some
    @given(carrying, machines(), fractions, st.randoms(use_true_random=False))
    def check(graph: Graph, machine: Any, fraction: float, random: Random) -> None:
        plan = planned(graph, machine, fraction)
        if random.random() < 0.5:
            plan = plan_of(graph, random_steps(graph, random))
        assert ask(question(graph, plan)) == verdict(graph, plan) == "ok"
        for mutation in MUTATIONS:
            damaged = mutation(plan, random)
            for each in (damaged, random.choice(MUTATIONS)(damaged, random)):
                expected = verdict(graph, each)
                codes[expected] += 1
                assert ask(question(graph, each)) == expected
        forbidding = replace(graph, kernels=tuple(replace(k, may_overwrite=()) for k in graph.kernels))
        assert ask(question(forbidding, plan)) == verdict(forbidding, plan)
        small = replace(plan, budget_bytes=max(plan.arena_bytes(Device.GPU) - 1, 0))
        assert ask(question(graph, small)) == verdict(graph, small)

    check()
    assert {"ok", "HC211", "HC213", "HC214", "HC215", "HC216", "HC218"} <= codes.keys()


def test_damaged_places_of_what_stays_on_the_gpu_are_refused_alike(ask: Ask) -> None:
    build, random, codes = GraphBuilder(), Random(0), Counter[str]()
    x, state, cache = build.input("x", 4), build.input("state", 3), build.input("cache", 5)
    y = build.kernel((x, state), {"y": 4}, devices=(Device.GPU,))
    build.kernel((state, y), {"state2": 3}, overwrite=(("state2", "state"),), devices=(Device.GPU,))
    build.kernel((cache, y), {"cache2": 5}, overwrite=(("cache2", "cache"),), devices=(Device.GPU,))
    z = build.kernel(("cache2", y), {"z": 4})
    pairs = (("state", "state2"), ("cache", "cache2"))
    graph = replace(build.graph(z, "state2", "cache2"), loop_carried=pairs)
    plan = make_plan(graph, machine(), None, (Device.GPU, Device.CPU))
    assert resident_pairs(graph, plan.steps) == dict(pairs)
    for mutation in 40 * MUTATIONS:
        damaged = mutation(plan, random)
        expected = verdict(graph, damaged)
        codes[expected] += 1
        assert ask(question(graph, damaged)) == expected
    assert {"ok", "HC213", "HC216", "HC218", "HC220"} <= codes.keys()
    for wrong in ((("x", "z"),), (*pairs, ("state", "z")), (("y", "z"),), (("cache", "state2"),)):
        impossible = replace(graph, loop_carried=wrong)
        assert ask(question(impossible, plan)) == verdict(impossible, plan) != "ok"


def test_impossible_parts_are_refused_alike(ask: Ask) -> None:
    build = GraphBuilder()
    x, x_behind, z = build.input("x", 3), build.input("x_behind", 5), build.input("z", 4)
    y = build.kernel((x, z), {"y": 3})
    y_behind = build.kernel((x_behind, z), {"y_behind": 5})
    known = build.graph(y, z, y_behind)
    graph = replace(known, inputs=(x, z, x_behind), parts=((x, x_behind), (y, y_behind)))
    plan = make_plan(graph, machine(), None, (Device.GPU, Device.CPU))
    assert ask(question(graph, plan)) == verdict(graph, plan) == "ok"
    one, other = graph.parts
    for wrong in (
        (one, other[::-1]),
        (one, one),
        (one, (x, y)),
        ((x, y_behind),),
        ((z, x_behind),),
        ((x, "none"),),
        ((x, x),),
    ):
        damaged = replace(graph, parts=wrong)
        assert ask(question(damaged, plan)) == verdict(damaged, plan), wrong
    for change in ({"inputs": (x, x_behind, z)}, {"inputs": (x, z, x_behind, x_behind)}):
        damaged = replace(graph, **change)
        assert ask(question(damaged, plan)) == verdict(damaged, plan) == "HC210", change


def test_edited_values_are_refused_alike(ask: Ask) -> None:
    """Any value of a plan may be another of its type, or of none that it may have."""
    codes: Counter[str] = Counter()

    @some
    @given(carrying, machines(), fractions, st.randoms(use_true_random=False))
    def check(graph: Graph, machine: Any, fraction: float, random: Random) -> None:
        plan = plan_to_json(planned(graph, machine, fraction))
        for _ in range(10):
            data = edited(plan, random)
            try:
                expected = verdict(graph, plan_from_json(data))
            except ValueError:
                expected = "HC303"
            told = ask({"graph": graph_to_json(graph), "plan": data})
            codes[expected] += told == expected
            # versions and lower bounds are not read; numbers that no memory holds are not even read
            assert told == expected or "HC303" in (told, expected), data

    check()
    assert sum(number > 0 for number in codes.values()) > 6, codes


def signatures_of(graph: Graph) -> Signatures:
    """Functions whose arrays are the tensors, with weights packed for the GPU, workspaces and faults."""

    def parameters(kernel: Kernel, device: Device) -> tuple[Parameter, ...]:
        tensors = [graph.tensor[name] for name in (*kernel.inputs, *kernel.outputs)]
        layouts = [int(device is Device.GPU and tensor.role is Role.WEIGHT) for tensor in tensors]
        named = [Parameter(t.shape, t.dtype, layout) for t, layout in zip(tensors, layouts, strict=True)]
        size_bytes = kernel.workspace_bytes(device)
        workspaces = [Parameter((size_bytes,), "uint8")] * (size_bytes > 0)
        faults = [Parameter((len(kernel.checks), 2), FAULT_DTYPE)] * bool(kernel.checks)
        return (*named, *workspaces, *faults)

    return {(k.function, d): parameters(k, d) for k in graph.kernels for d in k.devices}


def with_checks(graph: Graph) -> Graph:
    check = Check("node", "Gather", CheckKind.INDEX, -1, 1)
    kernels = (replace(kernel, checks=(check,) * (i % 3)) for i, kernel in enumerate(graph.kernels))
    return replace(graph, kernels=tuple(kernels))


def told(steps: tuple[BoundStep, ...], uploads: str, offsets: dict[Any, int]) -> str:
    """As the native code tells it."""

    def operand_text(operand: Operand) -> str:
        extents = ",".join(map(str, operand.shape))
        if isinstance(operand, View):
            return f"{operand.device}[{operand.offset_bytes}] {operand.dtype}[{extents}]"
        if isinstance(operand, FaultRows):
            place = "@gpu" * (operand.device is Device.GPU)
            return f"faults[{operand.offset_bytes}] {FAULT_DTYPE}[{extents}]{place}"
        return f"weights[{offsets[operand]}] {operand.dtype}[{extents}]"

    def step_text(step: BoundStep) -> str:
        waits = "".join(f" wait {event}" for event in sorted(step.waits))
        operands = "".join(f" {operand_text(operand)}" for operand in step.operands)
        event = -1 if step.event is None else step.event
        guards = "".join(f" if {operand_text(view)} is {value}" for view, value in step.guards)
        return f"{step.lane.number}:{waits}{guards} {step.function or 'copy'}{operands} record {event};"

    return "".join(map(step_text, steps)) + uploads


def test_plans_are_bound_alike(ask: Ask) -> None:
    @some
    @given(carrying, machines(), fractions, st.randoms(use_true_random=False))
    def check(graph: Graph, machine: Any, fraction: float, random: Random) -> None:
        graph = with_checks(graph)
        plan = planned(graph, machine, fraction)
        if random.random() < 0.5:
            plan = plan_of(graph, random_steps(graph, random))
        signatures = signatures_of(graph)
        binding = bind(graph, plan, signatures)
        residents = [each.weight for each in binding.resident_weights]
        stored = dict.fromkeys((*binding.host_weights, *binding.streamed_weights, *residents))
        offsets = {weight: 64 * number for number, weight in enumerate(stored)}
        weights = [asdict(weight) | {"offset_bytes": offset} for weight, offset in offsets.items()]
        functions = [
            {"name": name, "device": device.value, "parameters": [asdict(each) for each in parameters]}
            for (name, device), parameters in signatures.items()
        ]
        uploads = "".join(
            f" upload {offsets[each.weight]} to {each.offset_bytes};" for each in binding.resident_weights
        )
        asked = question(graph, plan, functions=functions, weights=weights)
        assert ask(asked) == told(binding.steps, uploads, offsets)
        for lacking in ("functions", "weights"):
            if asked[lacking]:
                assert ask({**asked, lacking: []}) == "HC306"

    check()


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 20))]
)
def test_guards_are_verified_and_bound_alike(ask: Ask, seed: int) -> None:
    random = Random(seed)
    graph = with_guards(drawn(seed))
    plan = planned(graph, machine(), random.random())
    signatures = signatures_of(graph)
    functions = [
        {"name": name, "device": device.value, "parameters": [asdict(each) for each in parameters]}
        for (name, device), parameters in signatures.items()
    ]
    bound = told(bind(graph, plan, signatures).steps, "", {})
    assert ask(question(graph, plan, functions=functions, weights=[])) == bound
    for position, kernel in enumerate(graph.kernels):
        changes: list[dict[str, Any]] = [{"guards": (Guard(graph.inputs[0], True),)}]
        for guard in kernel.guards:
            others = tuple(each for each in kernel.guards if each != guard)
            changes += [{"guards": others}, {"guards": (*others, replace(guard, value=not guard.value))}]
        if kernel.choice:
            changes += [{"choice": kernel.choice[:2]}, {"choice": ()}, {"choice": kernel.choice[::-1]}]
        for change in changes:
            kernels = list(graph.kernels)
            kernels[position] = replace(kernel, **change)
            damaged = replace(graph, kernels=tuple(kernels))
            assert ask(question(damaged, plan)) == verdict(damaged, plan), change


def test_shapes_and_sizes_are_limited_as_they_are_read(ask: Ask) -> None:
    graph: dict[str, list[Any]] = {"tensors": [], "kernels": [], "inputs": [], "outputs": []}
    plan = plan_to_json(Plan((), (), (), None, (), 0.0))
    for shape, code in (
        ([], "ok"),
        ([0, LARGEST_SIZE], "ok"),
        ([LARGEST_SIZE // 4], "ok"),
        ([LARGEST_SIZE // 2], "HC303"),
        ([LARGEST_SIZE, LARGEST_SIZE], "HC303"),
        ([0, LARGEST_SIZE, LARGEST_SIZE], "HC303"),
        ([1] * 33, "HC303"),
        ([-1], "HC303"),
        ([math.pi], "HC303"),
    ):
        tensor = {"name": "w", "shape": shape, "dtype": "float32", "role": "weight"}
        assert ask({"graph": {**graph, "tensors": [tensor]}, "plan": plan}) == code, shape
