"""Rollbacks of a monitor, and its state in checkpoints."""

import json
import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.health.monitors import (
    MAX_GRAD_NORM,
    NEXT_STEP,
    SPIKE_LOSS,
    USUAL_LOSS,
    USUAL_STEPS,
    actions_of,
    check,
    check_as_device,
    experienced_monitor,
    monitor_of,
)
from trainer.formats.train_config import HealthSettings
from trainer.health.findings import Action
from trainer.health.monitor import HealthMonitor

FURTHEST_TROUBLE_STEP = 120
"""Latest step that led to a rollback in ``monitor_after_rollbacks``."""
EASING_STEPS = 50
"""Steps after that until earlier rollbacks are forgotten."""


def check_spike(monitor, step=NEXT_STEP):
    """Check a step with a spike, which the device skips, and return the actions."""
    return actions_of(check_as_device(monitor, step, SPIKE_LOSS))


def test_rollback_restores_the_history():
    monitor = experienced_monitor(on_spike="rollback")
    saved = monitor.to_json()
    limits = monitor.limits()
    # 30 lower losses, which become usual, lower the limit.
    trouble_step = NEXT_STEP + 30
    for step in range(NEXT_STEP, trouble_step):
        check(monitor, step, 0.6 * USUAL_LOSS)
    assert monitor.limits() != limits
    monitor.roll_back(
        json.loads(json.dumps(saved)), at_step=trouble_step, to_step=USUAL_STEPS
    )
    assert monitor.limits() == limits
    assert monitor.is_rollback_target
    assert monitor.recovery.rollbacks == 1


@pytest.fixture
def monitor_that_gave_up():
    """A monitor that made the two rollbacks that are allowed, and then gave up."""
    monitor = experienced_monitor(on_spike="rollback", max_rollbacks=2)
    saved = monitor.to_json()
    for _ in range(2):
        assert check_spike(monitor) == [Action.ROLL_BACK]
        monitor.roll_back(saved, at_step=NEXT_STEP, to_step=USUAL_STEPS)
    (finding,) = check_as_device(monitor, NEXT_STEP, SPIKE_LOSS)
    assert finding.action is Action.GIVE_UP
    assert "2 earlier rollbacks did not help" in finding.message
    return monitor


def test_monitor_that_gave_up_continues_after_reset(monitor_that_gave_up):
    monitor_that_gave_up.reset_rollback_count()
    saved = monitor_that_gave_up.to_json()
    for _ in range(2):
        assert check_spike(monitor_that_gave_up) == [Action.ROLL_BACK]
        monitor_that_gave_up.roll_back(saved, at_step=NEXT_STEP, to_step=USUAL_STEPS)
    assert check_spike(monitor_that_gave_up) == [Action.GIVE_UP]


def test_reset_does_not_reset_rollbacks_of_the_run(monitor_that_gave_up):
    monitor_that_gave_up.reset_rollback_count()
    # Checkpoints are named by it, and no name may come twice.
    assert monitor_that_gave_up.recovery.rollbacks == 2


@pytest.fixture
def monitor_after_rollbacks():
    """A monitor after the two rollbacks that are allowed."""
    monitor = experienced_monitor(
        on_spike="rollback", max_rollbacks=2, easing_steps=EASING_STEPS
    )
    saved = monitor.to_json()
    # The second trouble is at an earlier step, which does not count.
    earlier_step = 105
    for at_step in (FURTHEST_TROUBLE_STEP, earlier_step):
        monitor.roll_back(saved, at_step=at_step, to_step=USUAL_STEPS)
    return monitor


def check_usual_steps(monitor, *, before_step):
    """Check usual steps, from the one after the rollback on."""
    for step in range(NEXT_STEP, before_step):
        assert check_as_device(monitor, step) == []


def test_rollbacks_count_until_well_past_the_trouble(monitor_after_rollbacks):
    last_step = FURTHEST_TROUBLE_STEP + EASING_STEPS
    check_usual_steps(monitor_after_rollbacks, before_step=last_step)
    assert check_spike(monitor_after_rollbacks, last_step) == [Action.GIVE_UP]


def test_rollbacks_are_forgotten_well_past_the_trouble(monitor_after_rollbacks):
    later_step = FURTHEST_TROUBLE_STEP + EASING_STEPS + 1
    check_usual_steps(monitor_after_rollbacks, before_step=later_step)
    assert check_spike(monitor_after_rollbacks, later_step) == [Action.ROLL_BACK]


def test_rollback_after_progress_eases_like_the_first(monitor_after_rollbacks):
    later_step = FURTHEST_TROUBLE_STEP + EASING_STEPS + 1
    check_usual_steps(monitor_after_rollbacks, before_step=later_step + 1)
    monitor_after_rollbacks.roll_back({}, at_step=later_step, to_step=USUAL_STEPS)
    assert monitor_after_rollbacks.recovery.rollbacks == 3
    eased_share = HealthSettings().eased_learning_rate_share
    assert monitor_after_rollbacks.learning_rate_share(USUAL_STEPS) == eased_share


@given(
    eased_share=st.floats(0.01, 1),
    easing_steps=st.integers(1, 500),
    rollbacks=st.integers(0, 5),
)
def test_learning_rate_returns_linearly_after_rollbacks(
    eased_share, easing_steps, rollbacks
):
    monitor = monitor_of(
        eased_learning_rate_share=eased_share, easing_steps=easing_steps
    )
    to_step = 10
    for _ in range(rollbacks):
        monitor.roll_back({}, at_step=20, to_step=to_step)
    for step in range(to_step):
        assert monitor.learning_rate_share(step) == 1
    # Two steps more, to see that it stays at 1.
    for step in range(to_step, to_step + easing_steps + 2):
        progress = min(1, (step - to_step) / easing_steps)
        expected = eased_share**rollbacks * (1 - progress) + progress
        assert monitor.learning_rate_share(step) == pytest.approx(expected)


@dataclass(frozen=True)
class Step:
    """Metrics of a step."""

    loss: float
    norm: float
    is_within_limits: bool
    """Whether the device applies the step if both metrics are finite."""

    @property
    def applied(self) -> bool:
        is_finite = math.isfinite(self.loss) and math.isfinite(self.norm)
        return is_finite and self.is_within_limits


NON_FINITE = st.sampled_from([math.nan, math.inf])
STEPS = st.lists(
    st.builds(
        Step,
        loss=st.one_of(st.floats(1.9, 2.1), st.floats(0, 20), NON_FINITE),
        norm=st.one_of(st.floats(0.1, 2), st.floats(0, 200), NON_FINITE),
        # Three of four.
        is_within_limits=st.sampled_from([True, True, True, False]),
    ),
    max_size=60,
)
"""Usual, unusual and non-finite steps."""
POLICIES = st.sampled_from(["warn", "skip", "rollback"])


def run_steps(monitor, steps, *, first_step, saved):
    """Check steps, with a rollback to ``saved`` whenever the monitor requests one.

    Returns:
        All public answers of the monitor after each step, as text, because NaN does not
        equal itself.
    """
    answers = []
    for number, step in enumerate(steps, start=first_step):
        findings = check(monitor, number, step.loss, step.norm, applied=step.applied)
        actions = actions_of(findings)
        if Action.ROLL_BACK in actions and Action.GIVE_UP not in actions:
            monitor.roll_back(saved, at_step=number, to_step=1)
        answer = (
            findings,
            monitor.is_rollback_target,
            monitor.limits(),
            monitor.recovery.rollbacks,
            monitor.learning_rate_share(number),
        )
        answers.append(repr(answer))
    return answers


@settings(max_examples=200, deadline=None)
@given(
    before=STEPS,
    after=STEPS,
    changes=st.fixed_dictionaries(
        {
            "on_spike": POLICIES,
            "on_explosion": POLICIES,
            "on_non_finite": st.sampled_from(["skip", "rollback"]),
            "window_steps": st.integers(8, 30),
            "plateau_window_steps": st.integers(20, 41),
            "patience_steps": st.integers(1, 3),
            "easing_steps": st.integers(1, 20),
            "max_rollbacks": st.integers(0, 4),
        }
    ),
)
def test_restored_monitor_continues_unchanged(before, after, changes):
    monitor = monitor_of(**changes)
    run_steps(monitor, before, first_step=1, saved={})
    saved = json.loads(json.dumps(monitor.to_json(), allow_nan=False))
    restored = HealthMonitor(HealthSettings(**changes), MAX_GRAD_NORM, saved)
    assert restored.to_json() == saved == monitor.to_json()
    first_step = len(before) + 1
    expected_answers = run_steps(monitor, after, first_step=first_step, saved=saved)
    answers = run_steps(restored, after, first_step=first_step, saved=saved)
    assert answers == expected_answers
    assert restored.to_json() == monitor.to_json()


OLDER_STATES = [
    pytest.param({}, id="no state"),
    pytest.param({"unknown": 1}, id="unknown key"),
    pytest.param(
        {"loss": {}, "recovery": {"unknown": 2}, "plateau": {}}, id="parts without keys"
    ),
]
"""States in checkpoints of older or newer versions."""


@pytest.mark.parametrize("saved", OLDER_STATES)
def test_older_checkpoint_gives_an_empty_history(saved):
    restored = HealthMonitor(HealthSettings(), MAX_GRAD_NORM, saved)
    assert restored.to_json() == monitor_of().to_json()


@pytest.mark.parametrize("saved", OLDER_STATES)
def test_rollback_to_an_older_checkpoint_counts(saved):
    monitor = experienced_monitor()
    monitor.roll_back(saved, at_step=NEXT_STEP, to_step=0)
    assert monitor.is_rollback_target
    assert monitor.recovery.rollbacks == 1


def test_shorter_window_keeps_the_newest_values():
    saved = experienced_monitor(
        on_spike="skip", window_steps=64, plateau_window_steps=400
    ).to_json()
    shorter = HealthSettings(on_spike="skip", window_steps=8, plateau_window_steps=20)
    restored = HealthMonitor(shorter, MAX_GRAD_NORM, saved)
    assert restored.to_json()["loss"]["window"] == saved["loss"]["window"][-8:]
    assert check(restored, NEXT_STEP) == []
