"""The two data types everything hangs on, `Graph` and `Plan`: frozen, and no TVM inside."""

from hybridc.ir.graph import Check, CheckKind, Device, Graph, Guard, Kernel, Role, Tensor
from hybridc.ir.plan import Arena, Buffer, BufferKind, Copy, Lane, Plan, Run, Step

__all__ = [
    "Arena",
    "Buffer",
    "BufferKind",
    "Check",
    "CheckKind",
    "Copy",
    "Device",
    "Graph",
    "Guard",
    "Kernel",
    "Lane",
    "Plan",
    "Role",
    "Run",
    "Step",
    "Tensor",
]
