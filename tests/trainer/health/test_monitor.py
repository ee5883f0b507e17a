"""Findings of a monitor, which checks the loss and the gradient norm of each step."""

import itertools
import math
import random
from dataclasses import dataclass, field

import pytest

from tests.trainer.health.monitors import (
    EXPLOSION_LIMIT,
    EXPLOSION_NORM,
    MAX_GRAD_NORM,
    NEXT_STEP,
    SPIKE_LOSS,
    USUAL_LOSS,
    USUAL_NORM,
    check,
    check_as_device,
    experienced_monitor,
    monitor_of,
    usual_values,
)
from trainer.health.findings import Kind


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", ["warn", "skip", "rollback"])
@pytest.mark.parametrize(
    ("steps", "fall_steps", "lag_steps"),
    [
        pytest.param(5000, 2000, 1, id="slow fall"),
        pytest.param(1500, 300, 1, id="fast fall"),
        pytest.param(3000, 600, 4, id="limits lag"),
    ],
)
def test_noisy_falling_loss_is_usual(seed, policy, steps, fall_steps, lag_steps):
    # The loss falls from 10 to 2 with 5 % noise, and norms scatter by a third. The run
    # ends before the loss stands still. The device has the limits of ``lag_steps`` ago.
    rng = random.Random(seed)
    monitor = monitor_of(on_spike=policy, on_explosion=policy)
    limits = [monitor.limits()] * lag_steps
    for step in range(1, steps + 1):
        loss = (2 + 8 * math.exp(-step / fall_steps)) * (1 + rng.gauss(0, 0.05))
        norm = math.exp(rng.gauss(0, 0.3))
        if policy == "warn":
            # Norms fall too, from 20 at the start.
            norm += 20 * math.exp(-step / 50)
        findings = check_as_device(monitor, step, loss, norm, limits[-lag_steps])
        assert findings == []
        assert monitor.is_rollback_target
        limits.append(monitor.limits())


@pytest.mark.parametrize("seed", range(4))
def test_jump_back_to_earlier_loss_is_spike(seed):
    rng = random.Random(seed)
    monitor = monitor_of()
    # The loss falls from 10.5 to 7.
    for step in range(1, 100):
        loss = 6.2 + 4.3 * math.exp(-step / 60) + rng.gauss(0, 0.03)
        assert check(monitor, step, loss) == []
    loss_of_step_16 = 9.5
    (finding,) = check(monitor, 100, loss_of_step_16)
    assert finding.kind is Kind.SPIKE


def test_spike_is_found_with_its_values():
    (spike,) = check(experienced_monitor(), NEXT_STEP, SPIKE_LOSS)
    assert spike.values["loss"] == SPIKE_LOSS
    # Losses scatter by 2 %, and their median by sqrt(pi / 2 / USUAL_STEPS) of that, an
    # eighth. The tolerance is four times as much.
    assert spike.values["median"] == pytest.approx(USUAL_LOSS, rel=4 * 0.02 / 8)
    assert spike.values["median"] < spike.values["limit"] < SPIKE_LOSS
    assert "the loss of step 101 is 3.5" in spike.message
    assert "train.learning_rate" in spike.next_step


def test_explosion_is_found_with_its_values():
    (explosion,) = check(experienced_monitor(), NEXT_STEP, norm=EXPLOSION_NORM)
    assert explosion.values["grad_norm"] == EXPLOSION_NORM
    assert explosion.values["limit"] == EXPLOSION_LIMIT
    assert explosion.values["clip"] == MAX_GRAD_NORM
    assert "train.max_grad_norm" in explosion.next_step


@dataclass(frozen=True)
class Step:
    """Step after usual ones."""

    loss: float = USUAL_LOSS
    norm: float = USUAL_NORM
    applied: bool | None = None
    """Whether the update was applied; None if the device decides by current limits."""


def check_step(monitor, number, step):
    """Check a step, and return its findings."""
    if step.applied is None:
        return check_as_device(monitor, number, step.loss, step.norm)
    return check(monitor, number, step.loss, step.norm, applied=step.applied)


USUAL = Step()
SPIKE = Step(loss=SPIKE_LOSS)
NAN_LOSS = Step(loss=math.nan)
NEARLY_EXPLOSION = Step(norm=EXPLOSION_LIMIT - 0.1)
EXPLOSION = Step(norm=EXPLOSION_NORM)
SPIKE_AND_EXPLOSION = Step(loss=SPIKE_LOSS, norm=EXPLOSION_NORM)
SKIP_BOTH = {"on_spike": "skip", "on_explosion": "skip"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Steps after usual ones, and the findings of a monitor."""

    settings: dict[str, object] = field(default_factory=dict)
    """Settings of the monitor that are not defaults."""
    steps: list[Step]
    findings: list[str]
    """Findings of each step, as ``kind:action``, separated by spaces."""
    message: str
    """Part of the message of the last finding."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            Case(
                steps=[SPIKE, NAN_LOSS, SPIKE, SPIKE, USUAL, SPIKE],
                findings=["spike:warn", "non_finite:skip", "", "", "", "spike:warn"],
                message="update was applied",
            ),
            id="excursion is reported once, and again after a usual value",
        ),
        pytest.param(
            Case(
                steps=[NEARLY_EXPLOSION, EXPLOSION],
                findings=["", "explosion:warn"],
                message="update was applied",
            ),
            id="explosion is far above max_grad_norm",
        ),
        pytest.param(
            Case(
                settings={"on_spike": "skip", "on_explosion": "rollback"},
                steps=[SPIKE_AND_EXPLOSION],
                findings=["spike:skip explosion:rollback"],
                message="training rolls back",
            ),
            id="spike and explosion together",
        ),
        pytest.param(
            Case(
                steps=[NAN_LOSS],
                findings=["non_finite:skip"],
                message="loss is nan in step 101",
            ),
            id="loss is not finite",
        ),
        pytest.param(
            Case(
                steps=[Step(norm=math.inf)],
                findings=["non_finite:skip"],
                message="gradient norm is inf in step 101",
            ),
            id="norm is not finite",
        ),
        pytest.param(
            Case(
                steps=[Step(loss=math.inf, norm=math.nan)],
                findings=["non_finite:skip"],
                message="loss is inf and gradient norm is nan in step 101",
            ),
            id="loss and norm are not finite",
        ),
        pytest.param(
            Case(
                settings={"on_non_finite": "rollback"},
                steps=[NAN_LOSS],
                findings=["non_finite:rollback"],
                message="training rolls back",
            ),
            id="rollback for a value that is not finite",
        ),
        pytest.param(
            Case(
                settings=SKIP_BOTH | {"patience_steps": 4},
                steps=[NAN_LOSS, SPIKE, EXPLOSION, Step(loss=math.inf)],
                findings=[
                    "non_finite:skip",
                    "spike:skip",
                    "explosion:skip",
                    "non_finite:rollback",
                ],
                message="4 in a row were; training rolls back",
            ),
            id="rollback after skips for any reason",
        ),
        pytest.param(
            Case(
                settings={"on_spike": "skip", "patience_steps": 2},
                steps=[SPIKE, USUAL, SPIKE],
                findings=["spike:skip", "", "spike:skip"],
                message="update was skipped",
            ),
            id="usual step resets the count of skips",
        ),
        pytest.param(
            Case(
                settings={"on_spike": "skip", "patience_steps": 2, "max_rollbacks": 0},
                steps=[SPIKE, SPIKE],
                findings=["spike:skip", "spike:give_up"],
                message="train.health.max_rollbacks",
            ),
            id="no rollback is allowed",
        ),
        pytest.param(
            Case(
                settings={"on_spike": "skip"},
                steps=[Step(loss=SPIKE_LOSS, applied=True)],
                findings=["spike:warn"],
                message="update was applied",
            ),
            id="older limit lets a spike through",
        ),
        pytest.param(
            Case(
                settings={"on_spike": "rollback"},
                steps=[Step(loss=SPIKE_LOSS, applied=True)],
                findings=["spike:rollback"],
                message="update was applied",
            ),
            id="older limit lets a spike through, and it is undone",
        ),
        pytest.param(
            Case(
                settings=SKIP_BOTH | {"patience_steps": 2},
                steps=[Step(loss=2.2, applied=False)] * 2,
                findings=["spike:skip", "spike:rollback"],
                message="limit of an earlier step",
            ),
            id="older limit of the loss skips a usual step",
        ),
        pytest.param(
            Case(
                settings=SKIP_BOTH | {"patience_steps": 2},
                steps=[Step(norm=EXPLOSION_LIMIT - 0.2, applied=False)] * 2,
                findings=["explosion:skip", "explosion:rollback"],
                message="limit of an earlier step",
            ),
            id="older limit of the norm skips a usual step",
        ),
        pytest.param(
            Case(
                settings=SKIP_BOTH | {"patience_steps": 2},
                steps=[Step(loss=0.1, norm=0.1, applied=False)] * 2,
                findings=["spike:skip", "spike:rollback"],
                message="limit of an earlier step",
            ),
            id="older limit skips a step with low values",
        ),
        pytest.param(
            Case(
                settings={"on_explosion": "skip"},
                # Spikes are only reported, so the norm must be why the first step was
                # skipped.
                steps=[
                    Step(loss=SPIKE_LOSS, applied=False),
                    Step(norm=EXPLOSION_NORM, applied=False),
                ],
                findings=["spike:warn explosion:skip", "explosion:skip"],
                message="update was skipped",
            ),
            id="only a metric with limits is blamed for a skip",
        ),
    ],
)
def test_findings_after_usual_steps(case):
    monitor = experienced_monitor(**case.settings)
    findings_by_step = [
        check_step(monitor, number, step)
        for number, step in enumerate(case.steps, start=NEXT_STEP)
    ]
    shown = [
        " ".join(f"{finding.kind}:{finding.action}" for finding in findings)
        for findings in findings_by_step
    ]
    assert shown == case.findings
    assert case.message in findings_by_step[-1][-1].message
    assert not monitor.is_rollback_target
    # A usual step follows, which ends the trouble.
    assert check_as_device(monitor, NEXT_STEP + len(case.steps)) == []
    assert monitor.is_rollback_target


def test_lasting_change_becomes_usual_with_warn():
    window_steps = 32
    monitor = experienced_monitor(window_steps=window_steps)
    (spike,) = check(monitor, NEXT_STEP, SPIKE_LOSS)
    assert spike.kind is Kind.SPIKE
    for step in range(NEXT_STEP + 1, NEXT_STEP + 1 + window_steps):
        assert check(monitor, step, SPIKE_LOSS) == []
    assert monitor.is_rollback_target


def test_always_large_norms_are_no_explosion():
    monitor = monitor_of()
    values = itertools.islice(usual_values(seed=1), 199)
    # Mostly far above the least norm that is an explosion.
    factor = 3 * EXPLOSION_LIMIT / USUAL_NORM
    for step, (_, norm) in enumerate(values, start=1):
        assert check(monitor, step, norm=factor * norm) == []
