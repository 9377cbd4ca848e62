"""What kernels on the emulated GPU do to memory: in the events of a trace, and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hybridc.ir import Graph, Plan
from hybridc.report.table import Column, plural, render_table
from hybridc.report.trace import step_name

if TYPE_CHECKING:
    from hybridc.emulator import LaunchCounts

_ROWS = 16
_COLUMNS = (
    Column("function", least=16),
    Column("kernels", numeric=True, dispensable=3),
    Column("launches", numeric=True, dispensable=2),
    Column("sectors read", numeric=True, dispensable=1),
    Column("of least", numeric=True),
    Column("written", numeric=True, dispensable=1),
    Column("of least", numeric=True),
    Column("bank conflicts", numeric=True),
)


@dataclass(frozen=True, slots=True)
class Accesses:
    """Of some launches together. The terms are those of `LaunchCounts`."""

    launches: int
    blocks: int
    counted_blocks: int
    read_sectors: int
    least_read_sectors: int
    written_sectors: int
    least_written_sectors: int
    wavefronts: int
    least_wavefronts: int

    @property
    def read_ratio(self) -> float | None:
        """Sectors read over those that would do, 1 at best; None where nothing is read."""
        return _ratio(self.read_sectors, self.least_read_sectors)

    @property
    def written_ratio(self) -> float | None:
        """The same of sectors written."""
        return _ratio(self.written_sectors, self.least_written_sectors)

    @property
    def bank_conflict_factor(self) -> float | None:
        """Wavefronts over those that would do, 1 at best; None without shared memory."""
        return _ratio(self.wavefronts, self.least_wavefronts)

    def to_json(self) -> dict[str, Any]:
        names = ("read_ratio", "written_ratio", "bank_conflict_factor")
        ratios = {name: getattr(self, name) for name in names}
        return {**asdict(self), **{name: ratio and round(ratio, 3) for name, ratio in ratios.items()}}


@dataclass(frozen=True, slots=True)
class FunctionAccesses:
    """Of all kernels of a plan that run one function."""

    function: str
    kernels: int
    accesses: Accesses

    def to_json(self) -> dict[str, Any]:
        return {"function": self.function, "kernels": self.kernels, **self.accesses.to_json()}


def accesses_of(launches: Sequence[LaunchCounts]) -> Accesses:
    """Sums over launches."""
    names = Accesses.__slots__[1:]
    return Accesses(len(launches), *(round(sum(getattr(each, name) for each in launches)) for name in names))


def by_function(
    graph: Graph, plan: Plan, launches: Mapping[int, Sequence[LaunchCounts]]
) -> list[FunctionAccesses]:
    """Of the launches by the positions of their steps; what moves most sectors comes first."""
    positions: dict[str, list[int]] = {}
    for position in launches:
        positions.setdefault(graph.kernel[step_name(plan.steps[position])].function, []).append(position)
    rows = [
        FunctionAccesses(name, len(own), accesses_of([each for i in own for each in launches[i]]))
        for name, own in positions.items()
    ]
    return sorted(rows, key=lambda row: -row.accesses.read_sectors - row.accesses.written_sectors)


def accesses_text(rows: Sequence[FunctionAccesses], width: int | None = None) -> str:
    """A table of the first rows, in lines of `width` characters if that is possible."""
    cells = [_cells(row) for row in rows[:_ROWS]]
    left_out = [f"({plural(len(rows) - _ROWS, 'more function')})"] if len(rows) > _ROWS else []
    return "\n".join([*render_table(_COLUMNS, cells, width), *left_out])


def _cells(row: FunctionAccesses) -> tuple[str, ...]:
    found = row.accesses
    return (
        row.function,
        f"{row.kernels}",
        f"{found.launches}",
        f"{found.read_sectors:,}",
        _shown(found.read_ratio),
        f"{found.written_sectors:,}",
        _shown(found.written_ratio),
        _shown(found.bank_conflict_factor),
    )


def _shown(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _ratio(count: float, least: float) -> float | None:
    return count / least if least else None
