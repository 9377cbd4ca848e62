"""What is computed: kernels and the tensors between them."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from hybridc.json_values import count, each, flag, member, shape, size, text, whole


class Device(StrEnum):
    """A place where kernels run and buffers live."""

    GPU = "gpu"
    CPU = "cpu"


class Role(StrEnum):
    """What a tensor is to the user of the model."""

    INPUT = "input"
    WEIGHT = "weight"
    ACTIVATION = "activation"
    STATE = "state"
    OUTPUT = "output"


OTHER_FAMILY = "other"
COLLECTIVE_FAMILY = "collective"
"""Of kernels that replace each input by its sum or mean over all ranks: all ranks run them together, in one
order."""
FAMILIES = (
    "conv2d",
    "winograd",
    "depthwise",
    "matmul",
    "elementwise",
    "pooling",
    "reduction",
    OTHER_FAMILY,
)
"""Kinds of computation that kernels are told apart by."""


_DTYPE_BITS = {
    "bool": 8,
    "bfloat16": 16,
    **{f"float{bits}": bits for bits in (16, 32, 64)},
    **{f"{sign}int{bits}": bits for sign in ("", "u") for bits in (4, 8, 16, 32, 64)},
}


_NARROW_DTYPES = (
    *("int2", "int4", "uint2", "uint4", "float4_e2m1fn", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)


def stored_dtype(dtype: str) -> str:
    """The type of a tensor that holds what a user sees as `dtype`: of elements of at most 8 bits, as the
    package ml_dtypes names them, there are the codes, each in the lowest bits of a byte."""
    return "uint8" if dtype in _NARROW_DTYPES else dtype


def port_dtype_from_json(data: Any) -> str:
    """Reads the name of the element type of an input or output. Raises ValueError."""
    return text(data) if data in _NARROW_DTYPES else dtype_from_json(data)


def dtype_bits(dtype: str) -> int:
    """Bits of one element: `bool` has a byte. Raises ValueError for a name that no tensor may have."""
    if dtype not in _DTYPE_BITS:
        raise ValueError(f"{reprlib.repr(dtype)} is not the type of a tensor")
    return _DTYPE_BITS[dtype]


def dtype_from_json(data: Any) -> str:
    """Reads the name of an element type of whole bytes. Raises ValueError."""
    if dtype_bits(text(data)) % 8:
        raise ValueError(f"elements of type {data} have no address")
    return str(data)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One value with storage of its own. Reshapes of it are views, not tensors."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    channels_last: bool = False
    """Whether its shape is `[N, H, W, C]`, where the model has `[N, C, H, W]`."""

    @property
    def size_bytes(self) -> int:
        return (math.prod(self.shape) * dtype_bits(self.dtype) + 7) // 8


class CheckKind(StrEnum):
    """What a kernel looks at while it runs."""

    INDEX = "index"
    DIVISOR = "divisor"
    TRIPS = "trips"


@dataclass(frozen=True, slots=True)
class Check:
    """A value that a kernel looks at before it uses it, as it is fed, or computed from what is fed.

    It must be at least `lower` and at most `upper`; a divisor, whose limits are both 0, must not be 0. The
    trips of a loop are those that it has made, and the one more that it asks for.
    """

    node: str
    """The ONNX node."""
    operator: str
    kind: CheckKind
    lower: int
    upper: int
    tensor: str = ""
    """The kernel's input whose elements, all of them, are the values; empty if they are computed."""


@dataclass(frozen=True, slots=True)
class Guard:
    """A kernel runs only if a condition, a tensor of one bool in the host's memory, has this value."""

    tensor: str
    value: bool


@dataclass(frozen=True, slots=True)
class Kernel:
    """One call of a compiled function.

    `may_overwrite` pairs an output with an input whose bytes it may take, if that input is not
    needed afterwards: every element is read by the very iteration that writes its place.
    `workspace_bytes` and `devices` tell, per device, the scratch memory and whether the kernel has code.
    """

    name: str
    function: str
    """Name of the distinct function; kernels of the same shapes share one."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    may_overwrite: tuple[tuple[str, str], ...] = ()
    flops: int = 0
    bytes_moved: int = 0
    gpu_workspace_bytes: int = 0
    cpu_workspace_bytes: int = 0
    devices: tuple[Device, ...] = (Device.GPU, Device.CPU)
    origins: tuple[str, ...] = ()
    """Names of the ONNX nodes it computes."""
    family: str = OTHER_FAMILY
    """Kind of computation, one of FAMILIES: how much of a processor's peaks it reaches depends on it."""
    precision: str = "fp32"
    """In which one of the devices multiplies: the GPU in tf32, the CPU in any other."""
    precision_note: str = ""
    """Why it multiplies in fp32 although less was asked for; empty if it was not, or nothing is
    multiplied."""
    checks: tuple[Check, ...] = ()
    """Its function then has one more parameter, the last, int64[len(checks), 2]: where a check fails, the
    function writes a number that is not 0, and the value, into the check's row, and touches no other memory
    than it may."""
    choice: tuple[str, ...] = ()
    """Of a kernel that computes `where(condition, taken, other)` for one condition: these three inputs. It
    needs `taken` only if the condition is true, and `other` only if it is not. Empty for other kernels."""
    appends: bool = False
    """Its only output is its first input with some rows replaced: where it may have that one's bytes it
    writes these rows, and nothing else. So a decoder's keys and values are kept."""
    is_mean_of_ranks: bool = False
    """Where several ranks train together its outputs are the means over all ranks of its inputs, in their
    order; on one rank, their copies."""
    guards: tuple[Guard, ...] = ()
    """It runs only if all of them hold, looked at in order: where one does not, later conditions need not
    have been computed."""

    @property
    def reads(self) -> tuple[str, ...]:
        """What must be there before the kernel runs: its inputs, and the conditions of its guards."""
        conditions = dict.fromkeys(guard.tensor for guard in self.guards)
        return (*self.inputs, *(name for name in conditions if name not in self.inputs))

    def workspace_bytes(self, device: Device) -> int:
        return self.gpu_workspace_bytes if device is Device.GPU else self.cpu_workspace_bytes


@dataclass(frozen=True)
class Graph:
    """Kernels in an order that can be executed, and every tensor they touch.

    `inputs` and `outputs` name tensors in the order of the model's interface; an output may be an
    input, a weight, or named twice. Inputs, weights and states start on the host; outputs end there.
    """

    kernels: tuple[Kernel, ...]
    tensors: tuple[Tensor, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    loop_carried: tuple[tuple[str, str], ...] = ()
    """Pairs of an input and the output that the next run takes in its place; `carried` in artifacts: states
    of training, and caches."""
    parts: tuple[tuple[str, str], ...] = ()
    """Pairs of tensors that are one input, or output, of the model, joined along one axis: the first has its
    position in `inputs` or `outputs`, all second parts stand behind the others."""

    def __repr__(self) -> str:
        return f"<Graph: {len(self.kernels)} kernels, {len(self.tensors)} tensors>"

    @cached_property
    def tensor(self) -> dict[str, Tensor]:
        return {t.name: t for t in self.tensors}

    @cached_property
    def kernel(self) -> dict[str, Kernel]:
        return {k.name: k for k in self.kernels}

    def precision_on(self, kernel: Kernel, device: Device) -> str:
        """In which a device multiplies: tf32 is for a GPU's tensor cores alone, and what is no bfloat16 in
        memory only a CPU rounds to it."""
        if device is Device.CPU:
            return kernel.precision if kernel.precision != "tf32" else "fp32"
        stored = any(self.tensor[name].dtype == "bfloat16" for name in kernel.inputs)
        return kernel.precision if kernel.precision == "tf32" or stored else "fp32"

    @cached_property
    def caches(self) -> tuple[tuple[str, str], ...]:
        """Those loop-carried pairs of which a run replaces some rows, and leaves the rest as it is."""
        return tuple((old, new) for old, new in self.loop_carried if self.kernels[self.producer[new]].appends)

    def ports(self, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """The tensors of each of the model's inputs, or outputs, of the graph's `inputs` or `outputs`."""
        second = dict(self.parts)
        behind = set(second.values())
        return tuple((n, second[n]) if n in second else (n,) for n in names if n not in behind)

    @cached_property
    def producer(self) -> dict[str, int]:
        """Position of the kernel that writes a tensor; inputs and weights have none."""
        return {name: i for i, kernel in enumerate(self.kernels) for name in kernel.outputs}

    @cached_property
    def consumers(self) -> dict[str, tuple[int, ...]]:
        """Positions of the kernels that read a tensor, or have a guard of it, in order."""
        found: dict[str, list[int]] = {t.name: [] for t in self.tensors}
        for i, kernel in enumerate(self.kernels):
            for name in dict.fromkeys(kernel.reads):
                found[name].append(i)
        return {name: tuple(positions) for name, positions in found.items()}


def graph_to_json(graph: Graph) -> dict[str, Any]:
    """The graph as plain JSON values; `graph_from_json` is its inverse."""
    return {
        "tensors": [
            {
                "name": t.name,
                "shape": list(t.shape),
                "dtype": t.dtype,
                "role": t.role.value,
                **({"channels_last": True} if t.channels_last else {}),
            }
            for t in graph.tensors
        ],
        "kernels": [
            {
                "name": k.name,
                "function": k.function,
                "inputs": list(k.inputs),
                "outputs": list(k.outputs),
                "may_overwrite": [list(pair) for pair in k.may_overwrite],
                "flops": k.flops,
                "bytes_moved": k.bytes_moved,
                "gpu_workspace_bytes": k.gpu_workspace_bytes,
                "cpu_workspace_bytes": k.cpu_workspace_bytes,
                "devices": [d.value for d in k.devices],
                "origins": list(k.origins),
                "family": k.family,
                **_precision_to_json(k),
                **({"checks": [_check_to_json(check) for check in k.checks]} if k.checks else {}),
                **({"choice": list(k.choice)} if k.choice else {}),
                **({"appends": True} if k.appends else {}),
                **({"mean_of_ranks": True} if k.is_mean_of_ranks else {}),
                **({"guards": [asdict(guard) for guard in k.guards]} if k.guards else {}),
            }
            for k in graph.kernels
        ],
        "inputs": list(graph.inputs),
        "outputs": list(graph.outputs),
        **({"carried": [list(pair) for pair in graph.loop_carried]} if graph.loop_carried else {}),
        **({"parts": [list(pair) for pair in graph.parts]} if graph.parts else {}),
    }


def _precision_to_json(kernel: Kernel) -> dict[str, str]:
    """Nothing where nothing but fp32 was asked for."""
    if kernel.precision == "fp32" and not kernel.precision_note:
        return {}
    return {"precision": kernel.precision, "precision_note": kernel.precision_note}


def graph_from_json(data: Any) -> Graph:
    """Read a graph back. Raises JsonValueError, a ValueError, with the path of the first wrong value."""
    return Graph(
        kernels=member(data, "kernels", each(_kernel)),
        tensors=member(data, "tensors", each(_tensor)),
        inputs=member(data, "inputs", each(text)),
        outputs=member(data, "outputs", each(text)),
        loop_carried=member(data, "carried", each(_pair), ()),
        parts=member(data, "parts", each(_pair), ()),
    )


def _tensor(data: Any) -> Tensor:
    return Tensor(
        name=member(data, "name", text),
        shape=member(data, "shape", shape),
        dtype=member(data, "dtype", dtype_from_json),
        role=member(data, "role", Role),
        channels_last=member(data, "channels_last", flag, False),
    )


def _kernel(data: Any) -> Kernel:
    return Kernel(
        name=member(data, "name", text),
        function=member(data, "function", text),
        inputs=member(data, "inputs", each(text)),
        outputs=member(data, "outputs", each(text)),
        may_overwrite=member(data, "may_overwrite", each(_pair)),
        flops=member(data, "flops", count),
        bytes_moved=member(data, "bytes_moved", count),
        gpu_workspace_bytes=member(data, "gpu_workspace_bytes", size),
        cpu_workspace_bytes=member(data, "cpu_workspace_bytes", size),
        devices=member(data, "devices", each(Device)),
        origins=member(data, "origins", each(text)),
        family=member(data, "family", text, OTHER_FAMILY),
        precision=member(data, "precision", text, "fp32"),
        precision_note=member(data, "precision_note", text, ""),
        checks=member(data, "checks", each(_check), ()),
        choice=member(data, "choice", each(text), ()),
        appends=member(data, "appends", flag, False),
        is_mean_of_ranks=member(data, "mean_of_ranks", flag, False),
        guards=member(data, "guards", each(_guard), ()),
    )


def _check_to_json(check: Check) -> dict[str, Any]:
    return {name: value for name, value in asdict(check).items() if name != "tensor" or value}


def _check(data: Any) -> Check:
    lower, upper = (member(data, key, whole) for key in ("lower", "upper"))
    node, operator = member(data, "node", text), member(data, "operator", text)
    kind, tensor = member(data, "kind", CheckKind), member(data, "tensor", text, "")
    return Check(node, operator, kind, lower, upper, tensor)


def _guard(data: Any) -> Guard:
    return Guard(member(data, "tensor", text), member(data, "value", flag))


def _pair(data: Any) -> tuple[str, str]:
    one, other = each(text)(data)
    return one, other
