"""Monitors for tests, and steps that they check."""

import itertools
import math
import random
from collections.abc import Iterator

from trainer.formats.train_config import HealthSettings
from trainer.health.findings import Action, Finding
from trainer.health.monitor import HealthMonitor, Limits

MAX_GRAD_NORM = 1.0
EXPLOSION_LIMIT = 10 * MAX_GRAD_NORM
"""Least gradient norm that is an explosion: the default ``explosion_ratio`` is 10."""
EXPLOSION_NORM = EXPLOSION_LIMIT + 0.1
USUAL_LOSS = 2.0
USUAL_NORM = 0.5
SPIKE_LOSS = 3.5
"""Loss far above the limit after usual steps."""
USUAL_STEPS = 100
"""Steps that an experienced monitor has seen."""
NEXT_STEP = USUAL_STEPS + 1
"""Step that an experienced monitor checks next."""


def monitor_of(**changes) -> HealthMonitor:
    """Return a monitor with some settings that are not defaults."""
    return HealthMonitor(HealthSettings(**changes), MAX_GRAD_NORM)


def check(
    monitor: HealthMonitor,
    step: int,
    loss: float = USUAL_LOSS,
    norm: float = USUAL_NORM,
    *,
    applied: bool = True,
) -> list[Finding]:
    """Check a step, which by default was applied."""
    return monitor.check(step, loss=loss, grad_norm=norm, applied=applied)


def check_as_device(
    monitor: HealthMonitor,
    step: int,
    loss: float = USUAL_LOSS,
    norm: float = USUAL_NORM,
    limits: Limits | None = None,
) -> list[Finding]:
    """Check a step that the device applies or skips according to limits.

    The limits are the monitor's present ones, unless others are given.
    """
    if limits is None:
        limits = monitor.limits()
    is_finite = math.isfinite(loss) and math.isfinite(norm)
    is_within_limits = loss <= limits.loss and norm <= limits.grad_norm
    return check(monitor, step, loss, norm, applied=is_finite and is_within_limits)


def usual_values(seed: int) -> Iterator[tuple[float, float]]:
    """Yield usual losses and norms without end.

    Losses scatter by 2 %, and the logarithm of norms by 0.3.
    """
    rng = random.Random(seed)
    while True:
        loss = USUAL_LOSS * (1 + rng.gauss(0, 0.02))
        norm = USUAL_NORM * math.exp(rng.gauss(0, 0.3))
        yield loss, norm


def experienced_monitor(**changes) -> HealthMonitor:
    """Return a monitor that has seen usual steps."""
    monitor = monitor_of(**changes)
    values = itertools.islice(usual_values(seed=0), USUAL_STEPS)
    for step, (loss, norm) in enumerate(values, start=1):
        assert check_as_device(monitor, step, loss, norm) == []
    return monitor


def actions_of(findings: list[Finding]) -> list[Action]:
    return [finding.action for finding in findings]
