"""What the machine can do at most: multiply-adds in registers, and copies of memory, on a number of threads.

python benchmarks/peak.py [--isa avx512] [--threads 2]
"""

from __future__ import annotations

import argparse
import sys

from hybridc.calibrate.peaks import copy_gb_s, peak_gflops
from hybridc.targets import ISAS, available_threads, native_isa
from hybridc.tuning.measure import use_threads


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--isa", choices=ISAS, default=native_isa().name)
    parser.add_argument("--threads", type=int, default=available_threads())
    arguments = parser.parse_args()
    use_threads(arguments.threads)
    print(f"{peak_gflops(ISAS[arguments.isa], arguments.threads):.0f} GFLOP/s")
    for size_bytes in (1 << 16, 1 << 20, 1 << 24, 1 << 27):
        print(f"copy of {size_bytes:,} bytes: {copy_gb_s(size_bytes, arguments.threads):.1f} GB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
