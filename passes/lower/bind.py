"""Which bytes each step of a plan works on: arena views for buffers, layouts for weights.

Pure functions from graph, plan and scheduled functions to frozen types; `lower` turns them into calls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridc.errors import InternalError
from hybridc.ir import Buffer, BufferKind, Copy, Device, Graph, Plan, Role, Run
from hybridc.ir.graph import dtype_bits
from hybridc.ir.plan import align
from hybridc.schedules.packing import Packing
from hybridc.schedules.rule import Scheduled

if TYPE_CHECKING:
    from tvm import tirx

Functions = Mapping[tuple[str, Device], Scheduled]
"""(Kernel.function, device) -> its code."""


@dataclass(frozen=True, slots=True)
class View:
    """Bytes of an arena as a kernel or copy sees them."""

    device: Device
    offset_bytes: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """A weight as one device's kernels read it: the tensor, how it is packed, and the parameter's type."""

    tensor: str
    packing: Packing | None
    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        return size_bytes(self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class ResidentWeight:
    """A weight that lies in the GPU's arena from load to unload."""

    layout: WeightLayout
    offset_bytes: int


Operand = View | WeightLayout


@dataclass(frozen=True, slots=True)
class Binding:
    """Every step's operands, and the weights that must be there when a run begins."""

    operands: tuple[tuple[Operand, ...], ...]
    """For each step: the kernel's parameters in order, or the copy's source and target."""
    host_weights: tuple[WeightLayout, ...]
    """What CPU kernels read, and weights that are outputs."""
    streamed_weights: tuple[WeightLayout, ...]
    """What is copied to the GPU in the run."""
    resident_weights: tuple[ResidentWeight, ...]


def size_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of an array."""
    return (math.prod(shape) * dtype_bits(dtype) + 7) // 8


def parameters(function: tirx.PrimFunc) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Shape and dtype of each buffer that a PrimFunc of static shapes is called with."""
    return tuple((tuple(int(n) for n in p.shape), str(p.dtype)) for p in function.params)


def bind(graph: Graph, plan: Plan, functions: Functions) -> Binding:
    """Find the bytes of every operand.

    Requires: a verified plan; `functions` holds every (kernel.function, device) that the plan runs.
    Raises: InternalError HC911 where a kernel's buffers do not fit what the plan reserved for them.
    """
    binder = _Binder(graph, plan, functions)
    operands = tuple(
        binder.run_operands(i, step) if isinstance(step, Run) else binder.copy_operands(i, step)
        for i, step in enumerate(plan.steps)
    )
    read, streamed = (
        dict.fromkeys(
            o
            for step, used in zip(plan.steps, operands, strict=True)
            for o in used
            if isinstance(o, WeightLayout) and isinstance(step, kind)
        )
        for kind in (Run, Copy)
    )
    for tensor in (graph.tensor[name] for name in graph.outputs):
        if tensor.role is Role.WEIGHT:
            read[WeightLayout(tensor.name, None, tensor.shape, tensor.dtype)] = None
    return Binding(operands, tuple(read), tuple(streamed), binder.resident_weights())


class _Binder:
    """Look-up tables of one graph and plan."""

    def __init__(self, graph: Graph, plan: Plan, functions: Functions) -> None:
        self.graph = graph
        self.plan = plan
        self.functions = functions
        self.parameters = {key: parameters(scheduled.function) for key, scheduled in functions.items()}
        self.packings = {key: dict(scheduled.packings) for key, scheduled in functions.items()}
        self.stays: dict[tuple[str, Device, bool], list[Buffer]] = {}
        for buffer in sorted(plan.buffers, key=lambda b: b.first_step):
            key = (buffer.tensor, buffer.device, buffer.kind is BufferKind.WORKSPACE)
            self.stays.setdefault(key, []).append(buffer)
        self.gpu_layouts = self._gpu_layouts()

    def _gpu_layouts(self) -> dict[str, WeightLayout]:
        """The one layout that each weight has in the GPU's arena, and on the way there."""
        chosen: dict[str, WeightLayout] = {}
        for step in self.plan.steps:
            if isinstance(step, Run) and step.device is Device.GPU:
                for position, name in enumerate(self.graph.kernel[step.kernel].inputs):
                    if self.graph.tensor[name].role is Role.WEIGHT:
                        layout = self.weight_layout(step, position)
                        if chosen.setdefault(name, layout).packing != layout.packing:
                            raise InternalError(
                                "HC911", "GPU kernels want one weight packed in two ways", where=name
                            )
        return chosen

    def weight_layout(self, step: Run, position: int) -> WeightLayout:
        kernel = self.graph.kernel[step.kernel]
        key = (kernel.function, step.device)
        return WeightLayout(
            kernel.inputs[position], self.packings[key].get(position), *self.parameters[key][position]
        )

    def resident_weights(self) -> tuple[ResidentWeight, ...]:
        found = []
        for buffer in self.plan.buffers:
            if buffer.device is Device.GPU and buffer.kind is BufferKind.WEIGHT and buffer.first_step < 0:
                layout = self.gpu_layouts.get(buffer.tensor)
                if layout is not None:
                    found.append(ResidentWeight(layout, buffer.offset_bytes))
        return tuple(found)

    def copy_operands(self, position: int, step: Copy) -> tuple[Operand, ...]:
        target = self.stay(step.tensor, step.target, position)
        shape = (self.graph.tensor[step.tensor].size_bytes,)
        if self.graph.tensor[step.tensor].role is Role.WEIGHT:
            return self.gpu_layouts[step.tensor], self.view(target, 0, shape, "uint8")
        source = self.stay(step.tensor, step.source, position)
        return self.view(source, 0, shape, "uint8"), self.view(target, 0, shape, "uint8")

    def run_operands(self, position: int, step: Run) -> tuple[Operand, ...]:
        kernel = self.graph.kernel[step.kernel]
        wanted = self.parameters[kernel.function, step.device]
        named = kernel.inputs + kernel.outputs
        workspaces = self.functions[kernel.function, step.device].workspace_bytes
        if len(wanted) != len(named) + len(workspaces):
            what = f"{kernel.function} has {len(wanted)} parameters, its kernel {len(named)} tensors"
            raise InternalError("HC911", what, where=kernel.name)
        operands: list[Operand] = []
        for i, (name, (shape, dtype)) in enumerate(zip(named, wanted, strict=False)):
            if step.device is Device.CPU and self.graph.tensor[name].role is Role.WEIGHT:
                operands.append(self.weight_layout(step, i))
            else:
                operands.append(self.view(self.stay(name, step.device, position), 0, shape, dtype))
        if workspaces:
            scratch = self.stay(kernel.name, step.device, position, workspace=True)
            offset = 0
            for shape, dtype in wanted[len(named) :]:
                operands.append(self.view(scratch, offset, shape, dtype))
                offset += align(size_bytes(shape, dtype))
        return tuple(operands)

    def view(self, buffer: Buffer, offset_bytes: int, shape: tuple[int, ...], dtype: str) -> View:
        if offset_bytes + size_bytes(shape, dtype) > buffer.size_bytes:
            what = (
                f"{dtype}{list(shape)} at {offset_bytes} does not fit the {buffer.size_bytes} bytes planned"
            )
            raise InternalError("HC911", what, where=f"{buffer.tensor} on the {buffer.device}")
        return View(buffer.device, buffer.offset_bytes + offset_bytes, shape, dtype)

    def stay(self, name: str, device: Device, position: int, *, workspace: bool = False) -> Buffer:
        """The buffer that holds a tensor on a device at a step: of its stays the one begun last."""
        for buffer in reversed(self.stays.get((name, device, workspace), [])):
            if buffer.first_step <= position <= buffer.last_step:
                return buffer
        raise InternalError("HC911", f"step {position} finds no buffer on the {device}", where=name)
