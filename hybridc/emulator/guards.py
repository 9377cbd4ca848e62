"""What each kernel of a plan may touch in the GPU's arena, for `start(guard_tensors=True)`."""

from __future__ import annotations

from hybridc.emulator.device import guard_arena
from hybridc.emulator.kernels import first_kernel_of
from hybridc.ir import Buffer, Device, Graph, Plan, Run


def guard_plan(graph: Graph, plan: Plan, address: int) -> None:
    """Let kernels of this plan, whose arena begins at `address`, touch their own tensors only.

    A kernel reads its inputs, writes its outputs, and has workspace: the buffers that hold these at its step.
    Where in its workspace it lays out which tensor is up to the kernel: that is guarded as a whole.
    """
    held: dict[str, list[Buffer]] = {}
    for buffer in plan.buffers:
        if buffer.device is Device.GPU:
            held.setdefault(buffer.tensor, []).append(buffer)

    def launch(position: int, step: Run) -> tuple[str, list[tuple[int, int, bool]]]:
        kernel = graph.kernel[step.kernel]
        names = (*kernel.inputs, *kernel.outputs, kernel.name)  # workspace goes by the kernel's name
        buffers = [b for name in names for b in held.get(name, ()) if b.first_step <= position <= b.last_step]
        return first_kernel_of(kernel.function), [
            (b.offset_bytes, b.size_bytes, b.tensor == kernel.name) for b in buffers
        ]

    steps = ((i, step) for i, step in enumerate(plan.steps) if isinstance(step, Run))
    guard_arena(address, [launch(i, step) for i, step in steps if step.device is Device.GPU])
