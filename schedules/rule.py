"""What a schedule rule takes and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from hybridc.checks import CHECKS
from hybridc.ir.graph import FAMILIES, OTHER_FAMILY
from hybridc.machine import BF16_SPEEDUP, Processor
from hybridc.schedules.packing import Packing
from hybridc.targets import DEFAULT_THREADS, Target

if TYPE_CHECKING:
    from tvm import tirx

_Candidate = TypeVar("_Candidate")

Rows = tuple[tuple[int, int], ...]
"""The axes that a number of a row goes through, the outermost first: places, and how many elements of the
result lie between two of them."""
PRECISION = "precision"
"""Attribute of functions whose products may be computed in less than fp32; or `fp32`, if they are not to be
though factors that tensor cores multiply lie in memory."""
PRECISION_NOTE = "precision_note"
"""Attribute of others: why not."""


@dataclass(frozen=True, slots=True)
class Request:
    """A function to schedule. `constants` are the positions of parameters known at compile time,
    which a rule may ask to be packed differently."""

    function: tirx.PrimFunc
    constants: frozenset[int]
    target: Target
    choice: str | None = None
    """Label of the tile to take, one of `Scheduled.choices`; None takes the one predicted to be best."""
    winograd: bool = True
    """Whether fast convolution and fast matrix products, whose rounding errors are larger, may be used."""
    int8_activations: bool = True
    """Whether rows may be rounded to 8 bits where a product says so (`hybridc/packed/layout.py`)."""
    threads: int = DEFAULT_THREADS
    """Threads that are going to share the tasks of the function on a CPU."""
    gpu: Processor | None = None
    """Whose estimated times decide between tiles of a GPU. None, or one that `hybridc.gpu_model` does not
    know: the GPU of the default profile."""
    shared_constants: frozenset[int] = frozenset()
    """Those of `constants` that other functions want in another layout: a GPU has one of each weight."""
    bf16_speedup: float = BF16_SPEEDUP
    """Of packed lanes of bf16 over multiply-adds of floats on a CPU's vectors."""
    many_sizes: bool = False
    """Whether kernels for other sizes of the data read the constants, too: a rule then packs them in a way
    that does not depend on the data's size, so that they are stored once."""
    open_dimensions: bool = False
    """Whether the data may have dimensions of which a run has less: a rule may name the numbers of rows then,
    so that kernels count those that there are (`padding/rows.py`)."""

    @property
    def own_constants(self) -> frozenset[int]:
        """Positions of constants that a rule of the GPU may ask to be packed differently."""
        return self.constants - self.shared_constants

    @property
    def stays_in_floats(self) -> bool:
        """Whether its products are to be computed in fp32, whatever its tensors are in memory."""
        return str((self.function.attrs or {}).get(PRECISION, "")) == "fp32"

    @property
    def precision(self) -> str:
        """In which its products may be computed: fp32, or what `passes/precision/precision.py` has noted."""
        return str((self.function.attrs or {}).get(PRECISION, "fp32"))


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A function ready for code generation on one device.

    Its parameters are those of the request, packed ones with the packed shape, and behind them one
    for each of `workspace_bytes`: scratch buffers that were global allocations of the function. A function
    with checks has one more, `faults`.
    """

    function: tirx.PrimFunc
    rule: str
    packings: tuple[tuple[int, Packing], ...] = ()
    workspace_bytes: tuple[int, ...] = ()
    choices: tuple[str, ...] = ()
    """Labels of the tiles that a measured search may try, the best predicted first."""
    rows: Rows = ()
    """Of the numbers of rows that the function names (`padding/rows.py`); empty if it names none."""
    family: str = OTHER_FAMILY
    """Kind of computation, one of FAMILIES, as the rule declares it; `select.schedule` sets it."""

    @property
    def has_checks(self) -> bool:
        """Whether the function checks some of what it is fed (`hybridc/checks.py`)."""
        return CHECKS in (self.function.attrs or {})


def pick(request: Request, ranked: Mapping[str, _Candidate]) -> _Candidate:
    """The candidate that the request names, else the first. Labels that are unknown, from a record that an
    older version made, count as not given."""
    return ranked.get(request.choice or "", next(iter(ranked.values())))


class Rule(Protocol):
    """Schedules a function, or returns None for "not mine". `schedule_rule` makes one of a function.

    Its name in reports is its `__name__`.
    """

    __name__: str
    family: str
    """Of all that it schedules: the planner expects another share of a processor's peaks for each family."""

    def __call__(self, request: Request, /) -> Scheduled | None: ...


def schedule_rule(family: str) -> Callable[[Callable[[Request], Scheduled | None]], Rule]:
    """Declare a function to be a rule, and the family of what it schedules, one of FAMILIES.

    Raises: ValueError for any other family.
    """
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}; use one of {', '.join(FAMILIES)}")

    def declare(function: Callable[[Request], Scheduled | None]) -> Rule:
        rule = cast(Rule, function)
        rule.family = family
        return rule

    return declare
