"""Which errors of TVM mean that a schedule does not apply. Any other error is a bug of ours, and surfaces."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from tvm.error import InternalError
from tvm.s_tir.schedule import ScheduleError

_PACKAGE, _DLIGHT = __name__.partition(".")[0], "tvm.s_tir.dlight."
_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


def attempt(what: str, make: Callable[[], _Result]) -> _Result | None:
    """The result of `make`, which calls TVM; None where TVM refuses, which is logged under the name `what`.

    A refusal is a `ScheduleError` (a schedule primitive that does not apply), an `InternalError` (a check of
    TVM's C++) or what dlight's Python code raises itself: its rules are meant for language models, and assert
    what they expect of a function, and read the `value` of extents that are not constant.

    Raises: every other exception, and those of our own code.
    """
    try:
        return make()
    except (ScheduleError, InternalError) as error:
        _note(what, error)
    except (AssertionError, ValueError, NotImplementedError) as error:
        if _raiser(error).partition(".")[0] == _PACKAGE:
            raise
        _note(what, error)
    except AttributeError as error:
        if not _raiser(error).startswith(_DLIGHT):
            raise
        _note(what, error)
    return None


def _note(what: str, error: Exception) -> None:
    last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    _log.info("%s does not apply: %s", what, last)


def _raiser(error: Exception) -> str:
    """The module of the innermost frame; frames of TVM's C++ belong to none."""
    traceback = error.__traceback__
    module = ""
    while traceback is not None:
        module = str(traceback.tb_frame.f_globals.get("__name__", ""))
        traceback = traceback.tb_next
    return module
