"""Counts for the closed form, read off the loops that TVM lowered for a GPU: milliseconds a function.

The compiler is taken to do what nvcc does: it unrolls small loops, keeps in registers what it has read
once, and joins neighbouring reads of shared memory to 128 bits.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm_ffi
from tvm import ir, tirx

from hybridc.gpu_model import memory
from hybridc.gpu_model.architecture import WARP
from hybridc.gpu_model.expressions import evaluate, float_cost, variables
from hybridc.gpu_model.fast import Work
from hybridc.ir.graph import dtype_bits

_UNROLLED = 512
"""Turns of a nest of small loops that the compiler unrolls as a whole; roughly so."""
_PARTLY_UNROLLED = 4
"""Turns at a time of any other innermost loop."""
_WIDEST = 16
"""Bytes of an access."""
_SAMPLES = 8192
"""Addresses of an access that are looked at to count distinct sectors."""
_OWN_REGISTERS = 32
"""Of a thread, beside what it keeps of arrays. Roughly."""
_MOST_REGISTERS, _REGISTERS = 255, 65536
"""Of a thread, and of all threads of a multiprocessor."""
_INSTRUCTIONS = 3
"""Of an access, with the arithmetic of its address."""
_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")
_DEVICE_FUNCTION = "tirx.cuda.func_call"
"""A call of one of the functions in hybridc/codegen/native, named by its first argument."""
_INTEGERS = re.compile(r"_[su]8_[su]8$")
_TRANSPOSITION = 8
"""Instructions that transpose 4x4 bytes."""
_COPY = re.compile(r"copy_async_(\d+)")


@dataclass(frozen=True, slots=True)
class _Loop:
    variable: tirx.Var
    extent: int
    is_vector: bool
    waits: bool
    """Whether threads exchange data through shared memory in each turn, so that turns follow one another."""


@dataclass
class _Counts:
    """Of one launch so far; the totals are of one block."""

    grid: int = 1
    block: tuple[int, ...] = ()
    instructions: float = 0.0
    fp32: float = 0.0
    special: float = 0.0
    tensor_multiplies: float = 0.0
    integer_multiplies: float = 0.0
    lsu_cycles: float = 0.0
    l2_sectors: float = 0.0
    local_words: int = 0
    shared_bytes: int = 0
    waits: dict[tuple[tirx.Var, ...], float] = field(default_factory=dict)
    """Turns in which global memory is read, by the loops around."""
    buffers: dict[Any, int] = field(default_factory=dict)
    """Bytes of global buffers that are read or written."""


def work_of_function(function: tirx.PrimFunc) -> list[Work]:
    """One for each launch of a lowered function of static shapes, in their order."""
    return [_work(launch) for launch in _launches(function.body)]


def _launches(statement: Any) -> Iterator[tirx.AttrStmt]:
    if isinstance(statement, tirx.SeqStmt):
        for part in statement.seq:
            yield from _launches(part)
    elif isinstance(statement, tirx.AttrStmt) and statement.attr_key == "thread_extent":
        yield statement
    elif hasattr(statement, "body"):
        yield from _launches(statement.body)


def _work(launch: tirx.AttrStmt) -> Work:
    walk = _Walk(launch)
    walk.statement(launch, ())
    counts = walk.counts
    # TVM tells the compiler how many threads a block has, for which registers then suffice
    most = min(_MOST_REGISTERS, _REGISTERS // (walk.warps * WARP) // 8 * 8)
    return Work(
        blocks=counts.grid,
        threads=walk.threads,
        registers=min(most, _OWN_REGISTERS + 3 * counts.local_words // 2),
        shared_bytes=counts.shared_bytes,
        instructions=counts.instructions,
        fp32=counts.fp32,
        special=counts.special,
        tensor_multiplies=counts.tensor_multiplies,
        lsu_cycles=counts.lsu_cycles,
        l2_sectors=counts.l2_sectors,
        rounds=1.0 + sum(counts.waits.values()),
        memory_bytes=float(sum(counts.buffers.values())),
        integer_multiplies=counts.integer_multiplies,
    )


class _Walk:
    """Goes through the statements of one launch, as the threads of a block in the middle of the grid."""

    def __init__(self, launch: tirx.AttrStmt) -> None:
        self.counts = _Counts()
        extents: dict[str, int] = {}
        owners: dict[str, tirx.Var] = {}

        def note(attribute: tirx.AttrStmt) -> None:
            if attribute.attr_key in ("thread_extent", "virtual_thread"):
                extents[attribute.node.thread_tag] = int(attribute.value)
                owners[attribute.node.thread_tag] = attribute.node.var

        tvm_ffi.structural_walk(launch, (tirx.AttrStmt, note))
        x, y, z = (extents.get(f"threadIdx.{axis}", 1) for axis in "xyz")
        self.threads = x * y * z
        self.warps = -(-self.threads // WARP)
        number = np.arange(self.threads)
        places = number % x, number // x % y, number // (x * y)
        of_thread = {f"threadIdx.{axis}": place for axis, place in zip("xyz", places, strict=True)}
        self.copied_ahead = _copied_ahead(launch)
        self.values: dict[tirx.Var, Any] = {}
        for tag, variable in owners.items():
            self.values[variable] = of_thread.get(tag, extents[tag] // 2)
            if tag.startswith("blockIdx"):
                self.counts.grid *= extents[tag]

    def statement(self, statement: Any, loops: tuple[_Loop, ...]) -> None:
        if isinstance(statement, tirx.SeqStmt):
            for part in statement.seq:
                self.statement(part, loops)
        elif isinstance(statement, tirx.For):
            is_vector = statement.kind == tirx.ForKind.VECTORIZED
            loop = _Loop(
                statement.loop_var, _most_turns(statement.extent), is_vector, _exchanges(statement.body)
            )
            self.statement(statement.body, (*loops, loop) if loop.extent > 1 else loops)
        elif isinstance(statement, tirx.IfThenElse):
            self.statement(statement.then_case, loops)
        elif isinstance(statement, tirx.BufferStore):
            self._store(statement, loops)
        elif isinstance(statement, tirx.Evaluate):
            self._call(statement.value, loops)
        elif isinstance(statement, tirx.Bind):
            self.values[statement.var] = evaluate(statement.value, self.values)
        elif isinstance(statement, tirx.AllocBuffer):
            self._allocation(statement.buffer)
        elif isinstance(statement, tirx.AttrStmt) or hasattr(statement, "body"):
            self.statement(statement.body, loops)

    def _allocation(self, buffer: tirx.Buffer) -> None:
        size = _size_bytes(buffer)
        if buffer.scope().startswith("shared"):
            self.counts.shared_bytes += size
        else:
            self.counts.local_words += -(-size // 4)

    def _store(self, store: tirx.BufferStore, loops: tuple[_Loop, ...]) -> None:
        turns = math.prod(loop.extent for loop in loops)
        plain, special = float_cost(store.value)
        self._count_instructions(plain * turns, special * turns)
        self._access(store.buffer, store.indices, loops, writes=True)
        self._reads(store.value, loops)

    def _count_instructions(self, plain: float, special: float) -> None:
        self.counts.fp32 += plain * self.warps
        self.counts.special += special * self.warps
        self.counts.instructions += (plain + special) * self.warps

    def _reads(self, value: Any, loops: tuple[_Loop, ...]) -> None:
        found: list[ir.TensorLoad] = []
        tvm_ffi.structural_walk(value, (ir.TensorLoad, found.append), order="post")
        for load in found:
            self._access(load.source, load.indices, loops, writes=False)

    def _call(self, value: Any, loops: tuple[_Loop, ...]) -> None:
        """A product on tensor cores, a load of its operands, or a reduction by all threads, which takes five
        exchanges."""
        name = getattr(getattr(value, "op", None), "name", "")
        turns = math.prod(loop.extent for loop in loops)
        if name == _DEVICE_FUNCTION:
            name = str(value.args[0].value)
            if name.startswith("ldmatrix_x"):
                # a wavefront for each matrix where rows lie in different banks
                matrices = int(name.removeprefix("ldmatrix_x")[0])
                self.counts.lsu_cycles += max(2, matrices) * turns * self.warps
                self.counts.instructions += _INSTRUCTIONS * turns * self.warps
            elif name == "transpose_bytes":
                self.counts.instructions += _TRANSPOSITION * turns * self.warps
            elif name.startswith("round_"):
                self.counts.instructions += turns * self.warps
            elif match := _COPY.match(name):
                for place in value.args[1:3]:
                    load, width = place.args[0], int(match[1])
                    self._access(load.source, load.indices, loops, writes=False, copied_bytes=width)
        if "mma" in name and "load" not in name and "store" not in name and "fill" not in name:
            shapes = (_SHAPE.search(str(argument)) for argument in value.args)
            shape = next((match for match in shapes if match), None)
            products = math.prod(map(int, shape.groups())) if shape else WARP // 2 * 16 * 16
            products *= turns * self.warps
            if _INTEGERS.search(name):
                self.counts.integer_multiplies += products
            else:
                # data sheets give tf32 half the rate of fp16
                self.counts.tensor_multiplies += products * (2 if name.endswith("tf32") else 1)
            self.counts.instructions += turns * self.warps
        elif "allreduce" in name:
            self._count_instructions(5 * turns, 0)
            self.counts.lsu_cycles += 10 * turns * self.warps
        # functions of the device are given addresses, of which they read what their names say
        if isinstance(value, ir.Call) and value.op.name != _DEVICE_FUNCTION:
            self._reads(value, loops)

    def _access(
        self,
        buffer: tirx.Buffer,
        indices: Any,
        loops: tuple[_Loop, ...],
        *,
        writes: bool,
        copied_bytes: int = 0,
    ) -> None:
        """Count one access and what it costs, as often as a compiler cannot do without. `copied_bytes` are
        those of one end of an asynchronous copy, an instruction that costs what accesses to both ends do."""
        scope = buffer.scope()
        if scope not in ("global", "shared", "shared.dyn") or len(indices) != 1:
            return
        used = variables(indices[0])
        small = _unrolled(loops)
        counted = [
            loop for number, loop in enumerate(loops) if loop.variable in used or number < len(loops) - small
        ]
        if copied_bytes:
            width, count = copied_bytes, float(math.prod(loop.extent for loop in counted))
        else:
            joins = scope != "global" and not writes
            width, count = self._width(buffer, indices[0], counted, loops, joins=joins)
        addresses = self._addresses(indices[0], {}) * (_bits(buffer) // 8)
        rows, mask = self._by_warp(addresses)
        if scope == "global":
            sectors = memory.sectors_of(rows, width, mask)
            cycles = np.maximum(memory.lines_of(sectors), max(2.0, width / 4))
            touched = self._sectors(buffer, indices[0], [loop for loop in loops if loop.variable in used])
            self.counts.l2_sectors += touched
            moved = self.counts.buffers.get(buffer, 0) + round(touched) * memory.SECTOR * self.counts.grid
            self.counts.buffers[buffer] = min(_size_bytes(buffer), moved)
            if not writes:
                self._wait(loops, small, self.copied_ahead if copied_bytes else 1)
        else:
            cycles = np.maximum(memory.wavefronts(rows, width, mask), 2)
        self.counts.lsu_cycles += count * float(cycles.sum())
        if scope == "global" or not copied_bytes:
            self.counts.instructions += count * _INSTRUCTIONS * self.warps

    def _wait(self, loops: tuple[_Loop, ...], small: int, ahead: int) -> None:
        """Count the turns of a loop that reads global memory, of which `ahead` wait at the same time."""
        outer = loops[: len(loops) - small]
        turns = float(math.prod(loop.extent for loop in outer))
        if outer and not small and not outer[-1].waits:
            turns = math.ceil(turns / _PARTLY_UNROLLED)
        key = tuple(loop.variable for loop in outer)
        self.counts.waits[key] = max(self.counts.waits.get(key, 0.0), turns / ahead)

    def _width(
        self, buffer: tirx.Buffer, index: Any, counted: list[_Loop], loops: tuple[_Loop, ...], *, joins: bool
    ) -> tuple[int, float]:
        """Bytes of an access and how often a thread makes it."""
        item = _bits(buffer) // 8
        count = float(math.prod(loop.extent for loop in counted))
        for loop in counted:
            joined = loop.is_vector or (joins and loop in loops[len(loops) - _unrolled(loops) :])
            if joined and self._step(index, loop) == 1:
                width = math.gcd(loop.extent, max(1, _WIDEST // item))
                return item * width, count / width
        return item, count

    def _step(self, index: Any, loop: _Loop) -> int:
        """By how much an index grows from one turn to the next."""
        first, second = (self._addresses(index, {loop.variable: turn})[0] for turn in (0, 1))
        return int(second - first)

    def _addresses(self, index: Any, values: dict[tirx.Var, Any]) -> np.ndarray[Any, Any]:
        found = evaluate(index, {**self.values, **values})
        return np.broadcast_to(np.asarray(found, np.int64), (self.threads,))

    def _by_warp(self, addresses: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        missing = self.warps * WARP - self.threads
        mask = np.pad(np.ones(self.threads, bool), (0, missing)).reshape(-1, WARP)
        return np.pad(addresses, (0, missing), "edge").reshape(-1, WARP), mask

    def _sectors(self, buffer: tirx.Buffer, index: Any, loops: list[_Loop]) -> float:
        """Distinct sectors that a block touches: inner loops are tried in full, outer ones taken to reach
        others."""
        item, factor, tried = _bits(buffer) // 8, 1.0, self.threads
        inner: list[_Loop] = []
        for loop in reversed(loops):
            if factor == 1.0 and tried * loop.extent <= _SAMPLES:
                tried *= loop.extent
                inner.append(loop)
            else:
                factor *= loop.extent
        turns = itertools.product(*(range(loop.extent) for loop in inner))
        names = [loop.variable for loop in inner]
        found = [self._addresses(index, dict(zip(names, turn, strict=True))) for turn in turns]
        return factor * len(np.unique(np.concatenate(found) * item // memory.SECTOR))


def _unrolled(loops: tuple[_Loop, ...]) -> int:
    """How many of the innermost loops are unrolled together."""
    total, count = 1, 0
    for loop in reversed(loops):
        total *= loop.extent
        if total > _UNROLLED or loop.waits:
            break
        count += 1
    return count


def _most_turns(extent: ir.Expr) -> int:
    """Of a loop that a run may end earlier: its extent is the lesser of two then, and the second is known."""
    return int(extent.b if isinstance(extent, tirx.Min) else extent)


def _exchanges(body: Any) -> bool:
    """Whether some shared memory is written and read."""
    written: set[Any] = set()
    read: Counter[Any] = Counter()

    def note(access: tirx.BufferStore | ir.TensorLoad) -> None:
        is_store = isinstance(access, tirx.BufferStore)
        buffer = access.buffer if is_store else access.source
        if buffer.scope().startswith("shared"):
            if is_store:
                written.add(buffer)
            else:
                read[buffer] += 1

    def note_copy(call: ir.Call) -> None:
        if call.op.name == _DEVICE_FUNCTION and _COPY.match(str(call.args[0].value)):
            target = call.args[1].args[0].source
            written.add(target)
            read[target] -= 1  # the address that it goes to looks like a read

    accesses = (tirx.BufferStore, ir.TensorLoad)
    tvm_ffi.structural_walk(body, [(accesses, note), (ir.Call, note_copy)])
    return any(read[buffer] > 0 for buffer in written)


def _copied_ahead(launch: tirx.AttrStmt) -> int:
    """How many groups of asynchronous copies are on their way at once while a loop turns."""
    remaining = [0]

    def note(call: ir.Call) -> None:
        if call.op.name == _DEVICE_FUNCTION and str(call.args[0].value) == "await_copies":
            remaining.append(int(call.args[1]))

    tvm_ffi.structural_walk(launch, (ir.Call, note))
    return 1 + max(remaining)


def _bits(buffer: tirx.Buffer) -> int:
    return dtype_bits(str(buffer.dtype))


def _size_bytes(buffer: tirx.Buffer) -> int:
    return math.prod(int(extent) for extent in buffer.shape) * _bits(buffer) // 8
