"""Learning rates against PyTorch's schedulers."""

from __future__ import annotations

from typing import Any

import pytest

from hybridc.errors import UsageError
from hybridc.training.schedule import parse_schedule, schedule_to_text

STEPS, EPOCHS = 5, 6


def rates(text: str) -> list[float]:
    schedule = parse_schedule(text)
    return [schedule.factor_at(step, STEPS, EPOCHS) for step in range(STEPS * EPOCHS)]


def expected(make: Any, **options: Any) -> list[float]:
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = getattr(torch.optim.lr_scheduler, make)(optimizer, **options)
    found = []
    for _ in range(STEPS * EPOCHS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_rates_are_those_of_pytorch() -> None:
    assert rates("step:every=2,factor=0.5") == pytest.approx(
        expected("StepLR", step_size=2 * STEPS, gamma=0.5)
    )
    cosine = expected("CosineAnnealingLR", T_max=STEPS * EPOCHS, eta_min=0.1)
    assert rates("cosine:end=0.1") == pytest.approx(cosine)


def test_warm_up_rises_linearly_and_shifts_what_follows() -> None:
    assert rates("constant:warmup=2")[: 2 * STEPS + 1] == pytest.approx(
        [*((i + 1) / 10 for i in range(10)), 1.0]
    )
    assert rates("cosine:warmup=1")[STEPS] == 1.0
    assert rates("step:every=1,factor=0.1,warmup=1")[STEPS : 3 * STEPS] == pytest.approx(
        [1.0] * 5 + [0.1] * 5
    )


@pytest.mark.parametrize("text", ["constant", "step:every=2,warmup=1", "cosine:end=0.1"])
def test_schedule_is_written_as_it_is_read(text: str) -> None:
    assert parse_schedule(schedule_to_text(parse_schedule(text))) == parse_schedule(text)


@pytest.mark.parametrize("text", ["linear", "step:every=0", "cosine:warmup=-1", "constant:every=2", "step:"])
def test_other_schedules_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_schedule(text)
    assert caught.value.code == "HC570"
