"""Starting the emulated GPU, and what the runtime tells it."""

from __future__ import annotations

from hybridc.emulator.device import ThreadOrder, configure, guards_tensors, provide_kernels
from hybridc.emulator.guards import guard_plan
from hybridc.ir import Graph, Plan
from hybridc.ir.plan import ALIGNMENT_BYTES
from hybridc.runtime import emulation


class _ThisProcess:
    """The emulated GPU as the runtime sees it."""

    page_bytes = ALIGNMENT_BYTES  # its memory is counted to the byte, in the granularity of plans

    def provide_kernels(self, image_key: str, source: str) -> None:
        provide_kernels(image_key, source)

    def guard_plan(self, graph: Graph, plan: Plan, address: int) -> None:
        if guards_tensors():
            guard_plan(graph, plan, address)


def start(
    memory_bytes: int,
    *,
    thread_order: ThreadOrder = ThreadOrder.FORWARD,
    lazy_streams: bool = False,
    guard_tensors: bool = False,
    refuse_graphs: bool = False,
    compute_capability: tuple[int, int] = (9, 0),
) -> None:
    """Give this process an emulated NVIDIA GPU with `memory_bytes` of memory, as `tvm.cuda(0)`.

    Works before and after `import tvm`. A second call changes the running device. With `lazy_streams`
    the work of a stream waits, like on a slow GPU, until something waits for it, so that a forgotten
    event shows as wrong data. Guard pages stand around allocations, and all tensors of a session lie in one.
    With `guard_tensors`, for tests, a kernel of a session that is loaded afterwards works on copies of its
    tensors with guard pages around each: it can neither read nor write what else the arena holds. With
    `refuse_graphs` CUDA graphs cannot be made, as where a driver has no memory left for them.
    `compute_capability` says which code can be loaded, and how much shared memory a block may have.

    Raises DeviceError HC420 where a real GPU driver is loaded, HC421 to HC423 where the device cannot
    be built, HC424 if more than `memory_bytes` is in use; UsageError HC559 if a process that forked this one
    uses the GPU.
    """
    configure(
        memory_bytes,
        thread_order=thread_order,
        lazy_streams=lazy_streams,
        guard_tensors=guard_tensors,
        refuse_graphs=refuse_graphs,
        compute_capability=compute_capability,
    )
    emulation.register(_ThisProcess())
