"""What every CUDA rule shares: the target it schedules for, and the proof that a GPU can run the result."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir import Call
from tvm.ir.transform import Sequential
from tvm.s_tir.analysis import verify_gpu_code
from tvm.s_tir.dlight.gpu.base import GPUScheduleRule
from tvm_ffi import WalkResult

from hybridc.schedules.cuda.core.refusal import attempt
from hybridc.schedules.rule import Request, Scheduled
from hybridc.schedules.workspace import lift_workspace
from hybridc.targets import Target

MAX_THREADS = 1024
"""Threads of a block, the limit of every CUDA GPU."""
MAX_SHARED_BYTES = 48 << 10
"""Shared memory a block may take on every CUDA GPU without asking for more."""
MAX_GRID_YZ = 65535
WARP = 32
BLOCK_THREADS = 256
"""Threads of a block where no data is shared: enough blocks for every multiprocessor, full occupancy."""

_LIMITS = {
    "max_threads_per_block": MAX_THREADS,
    "max_shared_memory_per_block": MAX_SHARED_BYTES,
    "max_thread_x": MAX_THREADS,
    "max_thread_y": MAX_THREADS,
    # CUDA's own limit, less than those of x and y
    "max_thread_z": 64,
}

_LOWER = Sequential(
    [
        s_tir.transform.CanonicalizeLoop(),
        s_tir.transform.LowerCrossThreadReduction(),
        s_tir.transform.LowerInitBlock(),
        s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
        s_tir.transform.ConvertBlocksToOpaque(),
        s_tir.transform.LiftThreadBinding(),
        s_tir.transform.CompactBufferAllocation(),
        s_tir.transform.UnifyThreadBinding(),
        s_tir.transform.LowerMatchBuffer(),
        s_tir.transform.LowerOpaqueBlock(),
        tirx.transform.FlattenBuffer(),
    ]
)
"""TVM's own lowering, as far as the loops, thread extents and allocations of the kernels are final."""

_KEPT_FUNCTIONS = 256
"""Lowering takes long. The rule that made a function asks for it, and the model of
GPU times asks again once all functions of a network, or of a way to tile it, are scheduled."""


def cuda_target(target: Target, **attributes: object) -> tvm.target.Target:
    """TVM's target for the oldest of the architectures: what runs there runs on the newer ones."""
    # sm_90a and sm_100f are numbers with a suffix
    arch = min(target.cuda_architectures, key=lambda name: int(name.strip("sm_af")))
    return tvm.target.Target(
        {
            "kind": "cuda",
            "arch": arch,
            "max_threads_per_block": MAX_THREADS,
            "max_shared_memory_per_block": MAX_SHARED_BYTES,
            "thread_warp_size": WARP,
            **attributes,
        }
    )


def lowered_for_gpu(function: tirx.PrimFunc, target: tvm.target.Target) -> tirx.PrimFunc:
    """A scheduled function with its loops, threads and buffers as they will be. Raises what TVM raises.

    Its attributes are those of the function that was first lowered with this body.
    """
    return _lowered(_Lowering(function.body, tuple(function.params), str(target), function, target))


@dataclass(frozen=True, slots=True)
class _Lowering:
    """What is lowered, known by the very objects: no rule's result has the body of another."""

    body: tirx.Stmt
    parameters: tuple[ir.Var, ...]
    target_text: str
    function: tirx.PrimFunc = field(compare=False)
    target: tvm.target.Target = field(compare=False)


@functools.lru_cache(maxsize=_KEPT_FUNCTIONS)
def _lowered(asked: _Lowering) -> tirx.PrimFunc:
    named = asked.function.with_attr("global_symbol", "kernel").with_attr("target", asked.target)
    return _LOWER(tvm.IRModule({"kernel": named}))["kernel"]


def runs_on_gpu(function: tirx.PrimFunc, target: tvm.target.Target) -> bool:
    """Whether every access is made by a bound thread, and every launch stays within the limits."""
    lowered = attempt("lowering for a GPU", lambda: lowered_for_gpu(function, target))
    if lowered is None:
        return False
    return _leaves_nothing_to_the_host(lowered) and verify_gpu_code(lowered, _LIMITS) and _fits_grid(lowered)


def _leaves_nothing_to_the_host(lowered: tirx.PrimFunc) -> bool:
    """Whether no store or loop is outside of a thread, and no packed function called anywhere."""
    host_calls: list[Call] = []
    on_host: list[tirx.Stmt] = []

    def note_call(call: Call) -> None:
        if getattr(call.op, "name", "").startswith("tirx.tvm_call_"):
            host_calls.append(call)

    def enter(attribute: tirx.AttrStmt) -> WalkResult:
        return WalkResult.SKIP if attribute.attr_key == "thread_extent" else WalkResult.ADVANCE

    tvm_ffi.structural_walk(lowered.body, (Call, note_call), order="post")
    outside = [(tirx.AttrStmt, enter), ((tirx.BufferStore, tirx.For), on_host.append)]
    tvm_ffi.structural_walk(lowered.body, outside, order="pre")
    return not host_calls and not on_host


def _fits_grid(lowered: tirx.PrimFunc) -> bool:
    """CUDA's limit on blocks along y and z, which TVM's check leaves out."""
    extents: list[int] = []

    def note(attribute: tirx.AttrStmt) -> None:
        if attribute.attr_key == "thread_extent" and attribute.node.thread_tag in (
            "blockIdx.y",
            "blockIdx.z",
        ):
            extents.append(int(attribute.value))

    tvm_ffi.structural_walk(lowered.body, (tirx.AttrStmt, note), order="post")
    return max(extents, default=1) <= MAX_GRID_YZ


def finish(schedule: s_tir.Schedule, rule: str, target: tvm.target.Target) -> Scheduled | None:
    """The scheduled function with its workspace as parameters; None if a GPU cannot run it."""
    return finish_function(schedule.mod["main"], rule, target)


def finish_function(function: tirx.PrimFunc, rule: str, target: tvm.target.Target) -> Scheduled | None:
    """`finish` for a function that was scheduled by hand."""
    lifted, workspace_bytes = lift_workspace(function)
    if not runs_on_gpu(lifted, target):
        return None
    return Scheduled(lifted.with_attr("tirx.is_scheduled", True), rule, workspace_bytes=workspace_bytes)


def reduces_nothing(function: tirx.PrimFunc) -> bool:
    """Whether a reduction has a single step (a 1x1 convolution of one channel).

    TVM takes such a block for an element-wise one and inlines its epilogue into it, but applies the
    epilogue to the initial value too: relu(x + b) becomes relu(relu(b) + x).
    """
    found: list[s_tir.SBlock] = []

    def note(block: s_tir.SBlock) -> None:
        steps = [i.dom.extent for i in block.iter_vars if i.iter_type == tirx.IterVar.CommReduce]
        # how many steps a pool of fed regions has, only a run knows
        if block.init is not None and all(isinstance(step, tirx.IntImm) and int(step) == 1 for step in steps):
            found.append(block)

    tvm_ffi.structural_walk(function.body, (s_tir.SBlock, note), order="post")
    return bool(found)


def by_dlight(candidates: tuple[GPUScheduleRule, ...], request: Request, rule: str) -> Scheduled | None:
    """The first of TVM's dlight rules that accepts the function and whose result a GPU can run.

    dlight means its rules for language models; on other functions they may raise instead of
    returning None, which is "not mine" too (`attempt`).
    """
    # dlight would inline the epilogue into the initial value, too
    if reduces_nothing(request.function):
        return None
    target = cuda_target(request.target)
    for candidate in candidates:
        schedule = apply_dlight(candidate, request.function, target)
        scheduled = None if schedule is None else finish(schedule, rule, target)
        if scheduled is not None:
            return scheduled
    return None


def apply_dlight(
    rule: GPUScheduleRule, function: tirx.PrimFunc, target: tvm.target.Target
) -> s_tir.Schedule | None:
    """The function as one of dlight's rules schedules it; None where it does not apply."""

    def apply() -> object:
        with target:
            return rule.apply(function, target, False)

    schedule = attempt(type(rule).__name__, apply)
    return schedule if isinstance(schedule, s_tir.Schedule) else None
