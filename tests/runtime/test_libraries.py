"""How TVM's runtime is set up before it is loaded."""

from __future__ import annotations

import os

import pytest

from hybridc.runtime.libraries import SPINS, load_runtime

VARIABLE = "TVM_THREAD_POOL_SPIN_COUNT"


def test_idle_workers_sleep_soon_unless_the_user_wants_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    load_runtime(cuda=False)
    assert os.environ[VARIABLE] == str(SPINS)
    monkeypatch.setenv(VARIABLE, "7")
    load_runtime(cuda=False)
    assert os.environ[VARIABLE] == "7"
