"""Small graphs for tests of the planner: by hand, and drawn at random by hypothesis."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from hybridc.ir import Device, Graph, Kernel, Role, Tensor
from hybridc.ir.plan import ALIGNMENT_BYTES
from hybridc.machine import Link, Machine, Processor


@dataclass
class GraphBuilder:
    """Builds a graph kernel by kernel; sizes in units of `bytes_each`, by default one aligned unit."""

    bytes_each: int = ALIGNMENT_BYTES
    tensors: list[Tensor] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)

    def tensor(self, name: str, size: int, role: Role = Role.ACTIVATION) -> str:
        self.tensors.append(Tensor(name, (size * self.bytes_each,), "uint8", role))
        return name

    def input(self, name: str, size: int) -> str:
        return self.tensor(name, size, Role.INPUT)

    def weight(self, name: str, size: int) -> str:
        return self.tensor(name, size, Role.WEIGHT)

    def kernel(
        self,
        inputs: tuple[str, ...],
        outputs: dict[str, int],
        *,
        overwrite: tuple[tuple[str, str], ...] = (),
        workspace: int = 0,
        devices: tuple[Device, ...] = (Device.GPU, Device.CPU),
        flops: int = 1_000_000,
    ) -> str:
        """Append a kernel `k0`, `k1`, ... that makes `outputs` of given sizes; returns its first output."""
        for name, size in outputs.items():
            self.tensor(name, size)
        size_bytes = {t.name: t.size_bytes for t in self.tensors}
        index = len(self.kernels)
        self.kernels.append(
            Kernel(
                name=f"k{index}",
                function=f"f{index}",
                inputs=inputs,
                outputs=tuple(outputs),
                may_overwrite=overwrite,
                flops=flops,
                bytes_moved=sum(size_bytes[name] for name in (*inputs, *outputs)),
                gpu_workspace_bytes=workspace * self.bytes_each,
                cpu_workspace_bytes=workspace * self.bytes_each // 2,
                devices=devices,
                origins=(f"node{index}",),
            )
        )
        return next(iter(outputs), "")

    def graph(self, *outputs: str) -> Graph:
        inputs = tuple(t.name for t in self.tensors if t.role is Role.INPUT)
        return Graph(tuple(self.kernels), tuple(self.tensors), inputs, outputs)


def chain(count: int, size: int = 4, weight: int = 2) -> Graph:
    """x -> k0 -> ... -> k{count-1}, each with a weight of its own."""
    build = GraphBuilder()
    value = build.input("x", size)
    for i in range(count):
        value = build.kernel((value, build.weight(f"w{i}", weight)), {f"t{i}": size})
    return build.graph(value)


def machine(gpu_gflops: float = 3000, link_gb_s: float = 12, launch_us: float = 1) -> Machine:
    """A machine with the proportions of a laptop."""
    gpu = Processor("gpu", gpu_gflops, 128, launch_us, 4 << 30)
    cpu = Processor("cpu", 400, 40, launch_us, 16 << 30)
    return Machine("test", gpu, cpu, Link(link_gb_s, link_gb_s, launch_us))


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Machines from a GPU slower than the CPU to one far faster, over slow and fast links."""
    speed = st.sampled_from([1.0, 30.0, 1000.0, 50_000.0])
    delay = st.sampled_from([0.0, 3.0, 50.0])
    gpu = Processor("gpu", draw(speed), draw(speed), draw(delay), 1 << 32)
    cpu = Processor("cpu", draw(speed), draw(speed), draw(delay), 1 << 34)
    return Machine("drawn", gpu, cpu, Link(draw(speed), draw(speed), draw(delay)))


@st.composite
def graphs(draw: st.DrawFn, largest: int = 12) -> Graph:
    """Chains, branches, residuals, shared weights, several or no inputs and outputs, zero-size tensors,
    workspace, overwriting in place, kernels bound to a device, unused inputs, outputs that are inputs,
    weights or named twice."""
    sizes = st.sampled_from([0, 1, 100, 256, 257, 512, 1000, 3000])
    build = GraphBuilder(bytes_each=1)
    for i in range(draw(st.integers(1, 3))):
        build.input(f"x{i}", draw(sizes))
    if draw(st.booleans()):
        build.tensor("state", draw(sizes), Role.STATE)
    for i in range(draw(st.integers(0, 3))):
        build.weight(f"w{i}", draw(sizes))
    for i in range(draw(st.integers(1, largest))):
        _draw_kernel(draw, build, i, sizes)
    names = [t.name for t in build.tensors]
    return build.graph(*draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)), names[-1])


def with_updates(graph: Graph) -> Graph:
    """A kernel more for each input, which makes of it and of the last result what the next run takes."""
    build = GraphBuilder(1, list(graph.tensors), list(graph.kernels))
    size = {t.name: t.size_bytes for t in graph.tensors}
    last = graph.kernels[-1].outputs[0]
    made = {
        name: build.kernel((name, last), {f"new_{name}": size[name]}, overwrite=((f"new_{name}", name),))
        for name in graph.inputs
        if name not in graph.outputs
    }
    return replace(build.graph(*graph.outputs, *made.values()), loop_carried=tuple(made.items()))


def _draw_kernel(draw: st.DrawFn, build: GraphBuilder, i: int, sizes: st.SearchStrategy[int]) -> None:
    # the latest tensors are drawn most, which makes chains with branches and residuals
    names = [t.name for t in build.tensors]
    recent = st.sampled_from(names[-3:])
    inputs = tuple(draw(st.lists(recent | st.sampled_from(names), max_size=3)))
    size_of = {t.name: t.size_bytes for t in build.tensors}
    outputs: dict[str, int] = {}
    overwrite: list[tuple[str, str]] = []
    for j in range(draw(st.sampled_from([1, 1, 1, 2]))):
        name = f"t{i}_{j}"
        outputs[name] = draw(sizes)
        if draw(st.booleans()) and inputs:
            source = draw(st.sampled_from(inputs))
            outputs[name] = size_of[source]
            overwrite.append((name, source))
    both = (Device.GPU, Device.CPU)
    devices: list[tuple[Device, ...]] = [both] * 6 + [(Device.GPU,), (Device.CPU,)]
    build.kernel(
        inputs,
        outputs,
        overwrite=tuple(overwrite),
        workspace=draw(st.sampled_from([0, 0, 0, 300, 2000])),
        devices=draw(st.sampled_from(devices)),
        flops=draw(st.sampled_from([0, 10_000, 10_000_000])),
    )
