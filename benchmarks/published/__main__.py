"""Published experiments with their authors' constants, and each paper's own figures beside ours.

python benchmarks/published [--seconds 5]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import write_result

from published import checkmate, flexgen

# What each would take is said, so that nobody looks for the figure.
NOT_REPEATED = {
    "Checkmate MobileNet and U-Net: largest batch at 16 GB": "the layers of their Keras graphs, which costs"
    " and sizes come from, have not been written down here yet; VGG19's have",
    "OLLA and MODeL: memory reductions": "they are against PyTorch's order and allocator, which are not here",
    "MOCCASIN: random layered graphs": "its generator has not been written yet",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of search, on the nominal machine")
    seconds = parser.parse_args().seconds
    rows = [*flexgen.rows(seconds), *checkmate.rows(seconds)]
    rows += [{"experiment": name, "not_repeated": reason} for name, reason in NOT_REPEATED.items()]
    for row in rows:
        print(row)
    print("written to", write_result("published", rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
