"""What there was before a compilation is not looked at meanwhile, and is afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from hybridc.garbage import collected_anew


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """Without what `conftest.py` put aside for all tests."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_objects_are_looked_at_again_afterwards() -> None:
    kept: list[list[int]] = [[]]
    thresholds = gc.get_threshold()
    with pytest.raises(ValueError, match="ends"), collected_anew():
        assert gc.get_freeze_count()
        assert gc.get_threshold() > thresholds
        assert not any(each is kept for each in gc.get_objects())
        raise ValueError("ends")
    assert not gc.get_freeze_count()
    assert gc.get_threshold() == thresholds
    assert any(each is kept for each in gc.get_objects())


def test_what_another_one_put_aside_stays_there() -> None:
    gc.freeze()
    with collected_anew():
        pass
    assert gc.get_freeze_count()
