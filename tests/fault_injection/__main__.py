"""Fail every call once, those of CUDA once more with the device lost: `python -m tests.fault_injection`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hybridc.report.table import Column, render_table
from tests.fault_injection.faults import KINDS, kind_of
from tests.fault_injection.networks import compiled_network, small_networks
from tests.fault_injection.trial import Network, Outcome, all_faults, try_fault


def main() -> int:
    """Returns 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.fault_injection", description=__doc__)
    parser.add_argument("--verbose", action="store_true", help="print every error that was raised")
    given = parser.parse_args()
    broken = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for network in (*small_networks(folder), compiled_network(folder)):
            outcomes, failures = _try_all(network)
            broken += len(failures)
            print(f"{network.name}: {len(outcomes) + len(failures)} faults, {len(failures)} broken promises")
            print("\n".join(_table(outcomes)))
            if given.verbose:
                print("\n".join(f"{each.fault}: {'; '.join(each.messages)}" for each in outcomes))
            print("\n".join(failures), end="\n\n")
            sys.stdout.flush()
    return int(broken > 0)


def _try_all(network: Network) -> tuple[list[Outcome], list[str]]:
    outcomes, failures = [], []
    for fault in all_faults(network):
        try:
            outcomes.append(try_fault(network, fault))
        except Exception as error:  # an error that is not hybridc's is a fault, too
            failures.append(f"{fault}: {type(error).__name__}: {error}")
    return outcomes, failures


def _table(outcomes: Sequence[Outcome]) -> list[str]:
    """For each kind of call how many failed, and what sessions said."""
    columns = [
        Column("kind"),
        *(Column(each, numeric=True) for each in ("once", "lasting", "unseen")),
        Column("codes"),
    ]
    rows = []
    for kind in KINDS:
        own = [each for each in outcomes if kind_of(each.fault.function) == kind]
        codes = Counter(code for each in own for code in each.codes)
        lasting = sum(each.fault.is_lasting for each in own)
        unseen = sum(not each.codes for each in own)
        told = ", ".join(f"{code} {count}" for code, count in sorted(codes.items()))
        rows.append([kind, str(len(own) - lasting), str(lasting), str(unseen), told])
    return render_table(columns, rows)


if __name__ == "__main__":
    raise SystemExit(main())
