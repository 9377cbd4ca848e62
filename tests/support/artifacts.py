"""Artifacts of small hand-made graphs and plans, built by the real back end."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from tvm import s_tir, te, tirx

from hybridc import emulator
from hybridc.artifact import Contents, Port, Source, store
from hybridc.codegen.cuda import compile_fatbin
from hybridc.codegen.library import BuiltLibrary, build_library
from hybridc.ir import Arena, Buffer, BufferKind, Copy, Device, Graph, Kernel, Plan, Role, Run, Step, Tensor
from hybridc.ir.plan import align
from hybridc.machine import load_machine
from hybridc.passes.lower.lower import Lowered, lower
from hybridc.passes.planner.emit.timeline import timeline
from hybridc.schedules.packing import Packing
from hybridc.schedules.rule import Scheduled
from hybridc.targets import Target, parse_target

CPU, GPU = Device.CPU, Device.GPU
CPU_TARGET = parse_target("avx2")
GPU_TARGET = parse_target("cuda:sm_80+avx2")
SHAPE = (4, 8)


def scheduled(function: tirx.PrimFunc, device: Device) -> Scheduled:
    """As it is on the CPU; on the GPU with the loops of its only block spread over threads."""
    if device is CPU:
        return Scheduled(function, "as_is")
    schedule = s_tir.Schedule(function)
    for block in schedule.get_child_blocks(schedule.get_sblock("root")):
        spatial = [
            loop
            for loop, var in zip(schedule.get_loops(block), schedule.get(block).iter_vars, strict=True)
            if var.iter_type == tirx.IterVar.DataPar
        ]
        blocks, threads = schedule.split(schedule.fuse(*spatial), [None, 16])
        schedule.bind(blocks, "blockIdx.x")
        schedule.bind(threads, "threadIdx.x")
    return Scheduled(schedule.mod["main"], "spread")


def relu(shape: tuple[int, ...] = SHAPE) -> tirx.PrimFunc:
    x = te.placeholder(shape, name="x")
    return te.create_prim_func([x, te.compute(shape, lambda *i: te.max(x(*i), 0.0), name="y")])


def add(shape: tuple[int, ...] = SHAPE) -> tirx.PrimFunc:
    a, b = te.placeholder(shape, name="a"), te.placeholder(shape, name="b")
    return te.create_prim_func([a, b, te.compute(shape, lambda *i: a(*i) + b(*i), name="y")])


def negate(shape: tuple[int, ...] = SHAPE) -> tirx.PrimFunc:
    x = te.placeholder(shape, name="x")
    return te.create_prim_func([x, te.compute(shape, lambda *i: -x(*i), name="y")])


def matmul(m: int, k: int, n: int) -> tirx.PrimFunc:
    a, b = te.placeholder((m, k), name="a"), te.placeholder((k, n), name="b")
    axis = te.reduce_axis((0, k), name="k")
    product = te.compute((m, n), lambda i, j: te.sum(a[i, axis] * b[axis, j], axis=axis), name="y")
    return te.create_prim_func([a, b, product])


def matmul_transposed(m: int, k: int, n: int) -> tirx.PrimFunc:
    """Matmul whose second operand is packed as (n, k)."""
    a, b = te.placeholder((m, k), name="a"), te.placeholder((n, k), name="b")
    axis = te.reduce_axis((0, k), name="k")
    product = te.compute((m, n), lambda i, j: te.sum(a[i, axis] * b[j, axis], axis=axis), name="y")
    return te.create_prim_func([a, b, product])


def transposing(shape: tuple[int, int]) -> Packing:
    return Packing(padded=shape, shape=shape, axes=(1, 0))


@dataclass
class PlanBuilder:
    """Steps and buffers by hand; offsets default to fresh bytes, so that nothing shares by accident."""

    steps: list[Step] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    ends: dict[Device, int] = field(default_factory=lambda: {GPU: 0, CPU: 0})

    def run(self, kernel: str, device: Device, *waits: int) -> int:
        self.steps.append(Run(kernel, device, waits))
        return len(self.steps) - 1

    def copy(self, tensor: str, target: Device, *waits: int) -> int:
        self.steps.append(Copy(tensor, CPU if target is GPU else GPU, target, waits))
        return len(self.steps) - 1

    def hold(
        self,
        tensor: Tensor,
        device: Device,
        first_step: int,
        last_step: int,
        *,
        at: int | None = None,
    ) -> int:
        """Reserve bytes for a tensor; returns their offset."""
        offset = self.ends[device] if at is None else at
        kind = BufferKind.WEIGHT if tensor.role is Role.WEIGHT else BufferKind.TENSOR
        self.buffers.append(
            Buffer(tensor.name, kind, device, offset, tensor.size_bytes, first_step, last_step)
        )
        self.ends[device] = max(self.ends[device], align(offset + tensor.size_bytes))
        return offset

    def plan(self) -> Plan:
        devices = [GPU, CPU] if self.ends[GPU] else [CPU]
        arenas = tuple(Arena(d, self.ends[d], self.ends[d]) for d in devices)
        times_us = (1.0,) * len(self.steps)
        makespan_us, _ = timeline(self.steps, times_us)
        return Plan(tuple(self.steps), tuple(self.buffers), arenas, None, times_us, makespan_us)


@dataclass(frozen=True)
class Model:
    """A graph with its plan, code and weights."""

    graph: Graph
    plan: Plan
    functions: dict[tuple[str, Device], Scheduled]
    target: Target
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    larger: tuple[Plan, ...] = ()
    """Plans for larger budgets."""

    @property
    def plans(self) -> tuple[Plan, ...]:
        return self.plan, *self.larger

    def lower(self) -> Lowered:
        return lower([self.graph] * len(self.plans), self.plans, self.functions, self.target)

    def write(self, path: Path) -> Path:
        """Build and store the artifact."""
        lowered = self.lower()
        store(path, self.weights, lambda folder: self._contents(lowered, self._build(lowered, folder)))
        return path

    def _contents(self, lowered: Lowered, library: BuiltLibrary) -> Contents:
        image = library.cuda_image
        return Contents(
            graphs=(self.graph,) * len(self.plans),
            plans=self.plans,
            pins=({},) * len(self.plans),
            lowered=lowered,
            target=self.target,
            inputs=tuple(
                self._port(f"the/{names[0]}", names) for names in self.graph.ports(self.graph.inputs)
            ),
            outputs=tuple(
                self._port(f"out/{i}", names) for i, names in enumerate(self.graph.ports(self.graph.outputs))
            ),
            source=Source("hand.onnx", "0" * 64, 18),
            machine=load_machine(),
            cuda_source=library.cuda_source,
            cuda_image_key=None if image is None else emulator.image_key(image),
            cuda_image_bytes=library.cuda_image_bytes,
        )

    def _build(self, lowered: Lowered, folder: Path) -> BuiltLibrary:
        if self.target.has_gpu:
            emulator.preload()
        compile_cuda = partial(compile_fatbin, architectures=self.target.cuda_architectures)
        return build_library(lowered.module, self.target, folder, cuda_compile=compile_cuda)

    def _port(self, name: str, names: tuple[str, ...]) -> Port:
        """Of a tensor, or of parts that are joined along the last axis."""
        first, *others = (self.graph.tensor[each] for each in names)
        if not others:
            return Port(name, first.shape, first.dtype)
        extent = first.shape[-1] + sum(each.shape[-1] for each in others)
        return Port(name, (*first.shape[:-1], extent), first.dtype)


def tensor(name: str, role: Role = Role.ACTIVATION, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return Tensor(name, shape, "float32", role)


def model_in_parts() -> Model:
    """-x of the first three columns, which stay on the GPU, and relu of the others on the CPU."""
    first, second = (SHAPE[0], 3), (SHAPE[0], SHAPE[1] - 3)
    x, x_behind = tensor("x", Role.INPUT, first), tensor("x_behind", Role.INPUT, second)
    y, y_behind = tensor("y", Role.OUTPUT, first), tensor("y_behind", Role.OUTPUT, second)
    a, b = tensor("a", Role.INPUT), tensor("b", Role.OUTPUT)
    graph = Graph(
        (
            Kernel("k0", "negate", ("x",), ("y",), may_overwrite=(("y", "x"),), appends=True),
            Kernel("k1", "relu", ("x_behind",), ("y_behind",)),
            Kernel("k2", "relu_whole", ("a",), ("b",)),
        ),
        (x, x_behind, a, y, y_behind, b),
        ("x", "a", "x_behind"),
        ("b", "y", "y_behind"),
        loop_carried=(("x", "y"),),
        parts=(("x", "x_behind"), ("y", "y_behind")),
    )
    builder = PlanBuilder()
    on_gpu, on_cpu, whole = builder.run("k0", GPU), builder.run("k1", CPU), builder.run("k2", CPU)
    offset = builder.hold(x, GPU, -1, on_gpu)
    builder.hold(y, GPU, on_gpu, 3, at=offset)
    for each, other, step in ((x_behind, y_behind, on_cpu), (a, b, whole)):
        builder.hold(each, CPU, -1, step)
        builder.hold(other, CPU, step, 3)
    functions = {
        ("negate", GPU): scheduled(negate(first), GPU),
        ("relu", CPU): scheduled(relu(second), CPU),
        ("relu_whole", CPU): scheduled(relu(), CPU),
    }
    return Model(graph, builder.plan(), functions, GPU_TARGET)


def cpu_model() -> Model:
    """y = relu(x @ w), in place on the CPU, with w packed; and w itself as a second output."""
    x, h, y = tensor("x", Role.INPUT), tensor("h", shape=(4, 6)), tensor("y", Role.OUTPUT, (4, 6))
    w = tensor("w", Role.WEIGHT, (8, 6))
    graph = Graph(
        (
            Kernel("k0", "matmul", ("x", "w"), ("h",), flops=2 * math.prod((4, 8, 6))),
            Kernel("k1", "relu", ("h",), ("y",), may_overwrite=(("y", "h"),)),
        ),
        (x, w, h, y),
        ("x",),
        ("y", "w", "x"),
    )
    builder = PlanBuilder()
    first, second = builder.run("k0", CPU), builder.run("k1", CPU)
    builder.hold(x, CPU, -1, 2)
    offset = builder.hold(h, CPU, first, second)
    builder.hold(y, CPU, second, 2, at=offset)
    functions = {
        ("matmul", CPU): Scheduled(matmul_transposed(4, 8, 6), "packed", ((1, transposing((8, 6))),)),
        ("relu", CPU): scheduled(relu((4, 6)), CPU),
    }
    return Model(graph, builder.plan(), functions, CPU_TARGET, {"w": weight_array((8, 6))})


def weight_array(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape, dtype=np.float32)


def hybrid_model(*, drop_waits: bool = False) -> Model:
    """a = x @ w on the GPU, b = relu(a) on the CPU, y = -(a + b) on the GPU: copies in both directions."""
    x, y = tensor("x", Role.INPUT), tensor("y", Role.OUTPUT)
    w = tensor("w", Role.WEIGHT, (8, 8))
    a, b = tensor("a"), tensor("b")
    graph = Graph(
        (
            Kernel("k0", "matmul", ("x", "w"), ("a",)),
            Kernel("k1", "relu", ("a",), ("b",)),
            Kernel("k2", "add", ("b", "a"), ("s",), may_overwrite=(("s", "b"),)),
            Kernel("k3", "negate", ("s",), ("y",)),
        ),
        (x, w, a, b, tensor("s"), y),
        ("x",),
        ("y",),
    )
    builder = PlanBuilder()
    builder.copy("x", GPU)  # 0
    builder.run("k0", GPU, 0)  # 1
    builder.copy("a", CPU, *(() if drop_waits else (1,)))  # 2
    builder.run("k1", CPU, 2)  # 3
    builder.copy("b", GPU, 3)  # 4
    builder.run("k2", GPU, 4)  # 5
    builder.run("k3", GPU)  # 6
    builder.copy("y", CPU, 6)  # 7
    end = 8
    builder.hold(w, GPU, -1, end)
    builder.hold(x, CPU, -1, 0)
    builder.hold(x, GPU, 0, 1)
    builder.hold(a, GPU, 1, 5)
    builder.hold(a, CPU, 2, 3)
    builder.hold(b, CPU, 3, 4)
    offset = builder.hold(b, GPU, 4, 5)
    builder.hold(tensor("s"), GPU, 5, 6, at=offset)
    builder.hold(y, GPU, 6, 7)
    builder.hold(y, CPU, 7, end)
    functions = {
        ("matmul", GPU): scheduled(matmul(4, 8, 8), GPU),
        ("relu", CPU): scheduled(relu(), CPU),
        ("add", GPU): scheduled(add(), GPU),
        ("negate", GPU): scheduled(negate(), GPU),
    }
    return Model(graph, builder.plan(), functions, GPU_TARGET, {"w": weight_array((8, 8))})


def streaming_model() -> Model:
    """b = a @ w @ w on the GPU, a = relu(x) on the CPU: w is packed, and comes to the GPU twice."""
    x, y = tensor("x", Role.INPUT), tensor("y", Role.OUTPUT)
    w, a, b = tensor("w", Role.WEIGHT, (8, 8)), tensor("a"), tensor("b")
    graph = Graph(
        (
            Kernel("k0", "relu", ("x",), ("a",)),
            Kernel("k1", "matmul", ("a", "w"), ("b",)),
            Kernel("k2", "matmul", ("b", "w"), ("y",)),
        ),
        (x, w, a, b, y),
        ("x",),
        ("y",),
    )
    builder = PlanBuilder()
    builder.copy("w", GPU)  # 0
    builder.run("k0", CPU)  # 1
    builder.copy("a", GPU, 1)  # 2
    builder.run("k1", GPU, 2)  # 3
    builder.copy("w", GPU)  # 4
    builder.run("k2", GPU, 4)  # 5
    builder.copy("y", CPU, 5)  # 6
    builder.hold(w, GPU, 0, 3)
    builder.hold(w, GPU, 4, 5)
    builder.hold(x, CPU, -1, 1)
    builder.hold(a, CPU, 1, 2)
    builder.hold(a, GPU, 2, 3)
    builder.hold(b, GPU, 3, 5)
    builder.hold(y, GPU, 5, 6)
    builder.hold(y, CPU, 6, 7)
    product = scheduled(matmul_transposed(4, 8, 8), GPU).function
    functions = {
        ("relu", CPU): scheduled(relu(), CPU),
        ("matmul", GPU): Scheduled(product, "packed", ((1, transposing((8, 8))),)),
    }
    return Model(graph, builder.plan(), functions, GPU_TARGET, {"w": weight_array((8, 8))})


def model_for_two_budgets() -> Model:
    """`streaming_model` with 4 KiB; with 2 KiB only the last kernel is on the GPU. The CPU reads w plain."""
    model = streaming_model()
    w, x, a, b, y = (model.graph.tensor[name] for name in ("w", "x", "a", "b", "y"))
    builder = PlanBuilder()
    builder.copy("w", GPU)  # 0
    builder.run("k0", CPU)  # 1
    builder.run("k1", CPU)  # 2
    builder.copy("b", GPU, 2)  # 3
    builder.run("k2", GPU, 3)  # 4
    builder.copy("y", CPU, 4)  # 5
    builder.hold(w, GPU, 0, 4)
    builder.hold(x, CPU, -1, 1)
    builder.hold(a, CPU, 1, 2)
    builder.hold(b, CPU, 2, 3)
    builder.hold(b, GPU, 3, 4)
    builder.hold(y, GPU, 4, 5)
    builder.hold(y, CPU, 5, 6)
    functions = {**model.functions, ("matmul", CPU): scheduled(matmul(4, 8, 8), CPU)}
    plan, larger = replace(builder.plan(), budget_bytes=2048), replace(model.plan, budget_bytes=4096)
    return replace(model, plan=plan, larger=(larger,), functions=functions)


def parallel_scale(factor: int, shape: tuple[int, ...] = SHAPE) -> tirx.PrimFunc:
    """factor * x over threads."""
    x = te.placeholder(shape, name="x")
    function = te.create_prim_func([x, te.compute(shape, lambda *i: x(*i) * float(factor), name="y")])
    schedule = s_tir.Schedule(function)
    schedule.parallel(schedule.get_loops(schedule.get_sblock("y"))[0])
    return schedule.mod["main"]
