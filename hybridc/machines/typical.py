"""What kernels reach of a data sheet's peaks, by family, for profiles that say nothing of it.

CPU: medians over the kernels of ResNet-50 and BERT in `benchmarks/results/cpu_avx512.json`, the table
`kernels` (two cores of an AMD EPYC with AVX-512): of those that arithmetic bounds the share of the peak of
multiply-adds, of those that memory bounds the share of what a copy reaches, at most one. A copy reaches 77 to
78 % of the wire rate of DDR4 (STREAM on three processors of Texas Instruments, SPRAD45A and SPRACV1B). They
stand for `avx2`, too: the record of that instruction set has whole networks only. Beside a GPU convolutions
convert plain data to blocks of channels and back, and reach a little less.

GPU, where a profile does not say how it is built, so that no kernel can be estimated: medians of the
estimates of our float32 kernels for a GTX 1650 in `benchmarks/results/gpu_model_suite.json`, in hundredths;
shares of the peak are those of convolutions and products alone.

A family of which nothing is known, such as depthwise convolutions, takes the median of all kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from hybridc.ir.graph import FAMILIES
from hybridc.machine import Efficiency, Machine, Processor

COPY_SHARE = 0.78
"""Of a CPU's nominal bandwidth, what a copy reaches."""
_GPU_COPY_SHARE = 0.85
"""The same of a GPU: what the model of GPU times takes memory to reach."""
# so far as there are kernels in the record; the rest are medians over all of them
_CPU = {
    "conv2d": Efficiency(0.922, COPY_SHARE),
    "winograd": Efficiency(1.986, COPY_SHARE),
    "matmul": Efficiency(0.938, 0.973 * COPY_SHARE),
    "reduction": Efficiency(0.938, 0.9995 * COPY_SHARE),
}
_GPU = {
    "conv2d": Efficiency(0.47, 0.79),
    "winograd": Efficiency(1.18, _GPU_COPY_SHARE),
    "matmul": Efficiency(0.5, 0.79),
}


def _all_families(known: Mapping[str, Efficiency], rest: Efficiency) -> dict[str, Efficiency]:
    return {family: known.get(family, rest) for family in FAMILIES}


TYPICAL_CPU = _all_families(_CPU, Efficiency(0.938, COPY_SHARE))
TYPICAL_GPU = _all_families(_GPU, Efficiency(0.58, _GPU_COPY_SHARE))
"""By family. `tests/test_machine.py` derives them from the records."""


def with_typical_shares(machine: Machine) -> Machine:
    """The machine with efficiencies of all families, and of what its memories reach for several at once.

    What was measured stays; of a processor of which some families were measured the others take the median.
    """
    return replace(
        machine,
        gpu=_completed(machine.gpu, TYPICAL_GPU, _GPU_COPY_SHARE),
        cpu=_completed(machine.cpu, TYPICAL_CPU, COPY_SHARE),
    )


def _completed(processor: Processor, typical: Mapping[str, Efficiency], copy_share: float) -> Processor:
    known = processor.efficiencies
    if known:
        shares = ([getattr(one, name) for one in known.values()] for name in ("compute", "memory"))
        return replace(processor, efficiencies=_all_families(known, Efficiency(*map(median, shares))))
    together_gb_s = processor.shared_gb_s or copy_share * processor.bandwidth_gb_s
    return replace(processor, efficiencies=typical, shared_gb_s=together_gb_s)
