"""Errors a user can meet: a stable code, what happened, where, and what to do about it.

Codes group by cause, and each group has the exit code the CLI ends with:

    HC1xx  the model was refused                 exit 3
    HC2xx  no plan fits the budget               exit 4
    HC3xx  the artifact was refused              exit 3
    HC4xx  a device, driver or ISA is missing    exit 5
    HC5xx  wrong use: options, feeds, files      exit 2
    HC9xx  a fault of hybridc itself             exit 1
"""

from __future__ import annotations


class HybridcError(Exception):
    """Base of every error that hybridc raises on purpose."""

    exit_code = 1

    def __init__(self, code: str, what: str, *, where: str = "", remedy: str = "") -> None:
        super().__init__(what)
        self.code = code
        self.what = what
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        lines = [f"error[{self.code}]: {self.what}"]
        if self.where:
            lines.append(f"  --> {self.where}")
        if self.remedy:
            lines.append(f"  = help: {self.remedy}")
        return "\n".join(lines)


class ModelError(HybridcError):
    """HC1xx: the ONNX model is malformed, unsafe or not supported."""

    exit_code = 3


class PlanError(HybridcError):
    """HC2xx: no plan keeps the promise asked for.

    `smallest_budget_bytes` is the smallest GPU budget that the planner can meet, if there is one.
    """

    exit_code = 4

    def __init__(
        self,
        code: str,
        what: str,
        *,
        where: str = "",
        remedy: str = "",
        smallest_budget_bytes: int | None = None,
    ) -> None:
        super().__init__(code, what, where=where, remedy=remedy)
        self.smallest_budget_bytes = smallest_budget_bytes


class ArtifactError(HybridcError):
    """HC3xx: the compiled artifact is damaged, incomplete or of another version."""

    exit_code = 3


class DeviceError(HybridcError):
    """HC4xx: a GPU, driver, compiler or instruction set is missing."""

    exit_code = 5


class UsageError(HybridcError):
    """HC5xx: an option, file or feed is not what was expected."""

    exit_code = 2


class InternalError(HybridcError):
    """HC9xx: hybridc broke its own promise; please report it."""

    exit_code = 1
