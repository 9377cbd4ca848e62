"""What CPU kernels reach of the peaks, for profiles that were written from data sheets.

Medians by family over the kernels of ResNet-50 and BERT in `benchmarks/results/cpu_avx512.json`, the table
`kernels` (two cores of an AMD EPYC with AVX-512): of those that arithmetic bounds the share of the peak of
multiply-adds, of those that memory bounds the share of what a copy reaches, at most one. They stand for
`avx2`, too: the record of that instruction set has whole networks only. Beside a GPU kernels read plain data,
not blocks of channels, and may reach less. Nothing is known of depthwise convolutions.
"""

from __future__ import annotations

from dataclasses import replace

from hybridc.machine import Efficiency, Machine

TYPICAL_CPU = {
    "conv2d": Efficiency(compute=0.922),
    "winograd": Efficiency(compute=1.986),
    "matmul": Efficiency(compute=0.938, memory=0.973),
    "reduction": Efficiency(memory=0.9995),
    "pooling": Efficiency(),
    "elementwise": Efficiency(),
}
"""By family. `tests/test_machine.py` derives them from the record."""


def with_typical_cpu(machine: Machine) -> Machine:
    """The machine with these efficiencies of its CPU, unless it was calibrated."""
    if machine.cpu.efficiencies:
        return machine
    return replace(machine, cpu=replace(machine.cpu, efficiencies=TYPICAL_CPU))
