"""Schedule rules for AVX2 and AVX-512, most special first."""

from hybridc.schedules.cpu.conv2d import conv2d
from hybridc.schedules.cpu.depthwise import depthwise
from hybridc.schedules.cpu.elementwise import elementwise
from hybridc.schedules.cpu.fallback import fallback
from hybridc.schedules.cpu.intrinsics import install
from hybridc.schedules.cpu.matmul import matmul
from hybridc.schedules.cpu.reduction import reduction
from hybridc.schedules.registry import Rule

RULES: tuple[Rule, ...] = (conv2d, depthwise, matmul, elementwise, reduction, fallback)

__all__ = ["RULES", "install"]
