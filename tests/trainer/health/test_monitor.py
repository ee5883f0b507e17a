import itertools
import json
import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config.train_config import HealthSettings
from trainer.health.events import ADVICE, Action, Kind
from trainer.health.monitor import NO_LIMITS, HealthMonitor, Limits

MAX_GRAD_NORM = 1.0
USUAL_LOSS = 2.0
USUAL_NORM = 0.5


def monitor_of(**changes):
    return HealthMonitor(HealthSettings(**changes), MAX_GRAD_NORM)


def check(monitor, step, loss=USUAL_LOSS, norm=USUAL_NORM, *, applied=True):
    return monitor.check(step, loss=loss, grad_norm=norm, applied=applied)


def check_as_device(monitor, step, loss=USUAL_LOSS, norm=USUAL_NORM, limits=None):
    """Check a step that the device applies or skips according to limits."""
    if limits is None:
        limits = monitor.limits()
    is_finite = math.isfinite(loss) and math.isfinite(norm)
    is_within_limits = loss <= limits.loss and norm <= limits.grad_norm
    return check(monitor, step, loss, norm, applied=is_finite and is_within_limits)


def usual_values(seed):
    """Yield usual losses and norms without end."""
    rng = random.Random(seed)
    while True:
        loss = USUAL_LOSS * (1 + rng.gauss(0, 0.02))
        norm = USUAL_NORM * math.exp(rng.gauss(0, 0.3))
        yield loss, norm


def experienced_monitor(steps=100, seed=0, **changes):
    """Return a monitor that has seen usual steps."""
    monitor = monitor_of(**changes)
    values = itertools.islice(usual_values(seed), steps)
    for step, (loss, norm) in enumerate(values, start=1):
        assert check_as_device(monitor, step, loss, norm) == []
    return monitor


def actions_of(findings):
    return [finding.action for finding in findings]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", ["warn", "skip", "rollback"])
@pytest.mark.parametrize(
    ("steps", "fall_steps", "lag_steps"),
    [
        pytest.param(5000, 2000, 1, id="slow"),
        pytest.param(1500, 300, 1, id="fast"),
        pytest.param(3000, 600, 4, id="limits lag"),
    ],
)
def test_noisy_falling_loss_is_usual(seed, policy, steps, fall_steps, lag_steps):
    # The loss falls from 10 to 2 with 5 % noise, and norms scatter by a third; the run
    # ends before the loss stands still.
    rng = random.Random(seed)
    monitor = monitor_of(on_spike=policy, on_explosion=policy)
    limits = [monitor.limits()] * lag_steps
    for step in range(1, steps + 1):
        loss = (2 + 8 * math.exp(-step / fall_steps)) * (1 + rng.gauss(0, 0.05))
        norm = math.exp(rng.gauss(0, 0.3))
        if policy == "warn":
            norm += 20 * math.exp(-step / 50)
        findings = check_as_device(monitor, step, loss, norm, limits[-lag_steps])
        assert findings == []
        assert monitor.calm
        limits.append(monitor.limits())


@pytest.mark.parametrize("seed", range(4))
def test_jump_back_to_an_earlier_loss_is_a_spike(seed):
    rng = random.Random(seed)
    monitor = monitor_of()
    for step in range(1, 100):
        loss = 6.2 + 4.3 * math.exp(-step / 60) + rng.gauss(0, 0.03)
        assert check(monitor, step, loss) == []
    (finding,) = check(monitor, 100, 9.5)
    assert finding.kind is Kind.SPIKE


def test_spike_is_found_with_its_values():
    (spike,) = check(experienced_monitor(), 101, 3.5)
    assert spike.values["loss"] == 3.5
    assert spike.values["median"] == pytest.approx(2.0, rel=0.02)
    assert spike.values["median"] < spike.values["limit"] < 3.5
    assert "the loss of step 101 is 3.5" in spike.message
    assert "train.learning_rate" in spike.next_step


def test_explosion_is_found_with_its_values():
    (explosion,) = check(experienced_monitor(), 101, norm=10.1)
    assert explosion.values["clip"] == MAX_GRAD_NORM
    assert "train.max_grad_norm" in explosion.next_step


@dataclass(frozen=True)
class Step:
    """Step after usual ones."""

    loss: float = USUAL_LOSS
    norm: float = USUAL_NORM
    applied: bool | None = None
    """Whether the update was applied; None as the device decides by current limits."""


def check_step(monitor, number, step):
    """Check a step, and return its findings."""
    if step.applied is None:
        return check_as_device(monitor, number, step.loss, step.norm)
    return check(monitor, number, step.loss, step.norm, applied=step.applied)


USUAL = Step()
SPIKE = Step(loss=3.5)
NAN = Step(loss=math.nan)
SKIP_BOTH = {"on_spike": "skip", "on_explosion": "skip"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Steps after 100 usual ones, and what a monitor says about them."""

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
                steps=[SPIKE, NAN, SPIKE, SPIKE, USUAL, SPIKE],
                findings=["spike:warn", "non_finite:skip", "", "", "", "spike:warn"],
                message="update was applied",
            ),
            id="excursion is reported once, and again after a usual value",
        ),
        pytest.param(
            Case(
                steps=[Step(norm=9.9), Step(norm=10.1)],
                findings=["", "explosion:warn"],
                message="update was applied",
            ),
            id="explosion is far above max_grad_norm",
        ),
        pytest.param(
            Case(
                settings={"on_spike": "skip", "on_explosion": "rollback"},
                steps=[Step(loss=5.0, norm=50.0)],
                findings=["spike:skip explosion:rollback"],
                message="training rolls back",
            ),
            id="spike and explosion together",
        ),
        pytest.param(
            Case(
                steps=[NAN],
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
                steps=[NAN],
                findings=["non_finite:rollback"],
                message="training rolls back",
            ),
            id="rollback for a value that is not finite",
        ),
        pytest.param(
            Case(
                settings=SKIP_BOTH | {"patience_steps": 4},
                steps=[NAN, SPIKE, Step(norm=30.0), Step(loss=math.inf)],
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
                steps=[Step(loss=3.5, applied=True)],
                findings=["spike:warn"],
                message="update was applied",
            ),
            id="older limit lets a spike through",
        ),
        pytest.param(
            Case(
                settings={"on_spike": "rollback"},
                steps=[Step(loss=3.5, applied=True)],
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
                steps=[Step(norm=9.8, applied=False)] * 2,
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
                steps=[Step(loss=3.5, applied=False), Step(norm=30.0, applied=False)],
                findings=["spike:warn explosion:skip", "explosion:skip"],
                message="update was skipped",
            ),
            id="only a metric that is skipped is blamed",
        ),
    ],
)
def test_findings_after_usual_steps(case):
    monitor = experienced_monitor(steps=100, **case.settings)
    findings_by_step = [
        check_step(monitor, number, step)
        for number, step in enumerate(case.steps, start=101)
    ]
    shown = [
        " ".join(f"{finding.kind}:{finding.action}" for finding in findings)
        for findings in findings_by_step
    ]
    assert shown == case.findings
    assert case.message in findings_by_step[-1][-1].message
    assert not monitor.calm
    # A usual step follows.
    assert check_as_device(monitor, 101 + len(case.steps)) == []
    assert monitor.calm


def test_lasting_change_becomes_usual_with_warn():
    monitor = experienced_monitor(window_steps=32)
    (spike,) = check(monitor, 101, 3.5)
    assert spike.kind is Kind.SPIKE
    for step in range(102, 141):
        assert check(monitor, step, 3.5) == []
    assert monitor.calm


@pytest.mark.parametrize(
    ("window_steps", "required_values"),
    [
        pytest.param(8, 8, id="shortest window"),
        pytest.param(12, 12, id="short window"),
        pytest.param(16, 16, id="window of as many values"),
        pytest.param(128, 16, id="default window"),
    ],
)
def test_nothing_is_judged_before_enough_values(window_steps, required_values):
    monitor = monitor_of(window_steps=window_steps, on_spike="skip")
    for step in range(1, required_values + 1):
        assert monitor.limits() == NO_LIMITS
        loss = 100.0 if step == required_values else USUAL_LOSS
        assert check(monitor, step, loss) == []
    # A tenth above the median, which is the least.
    assert monitor.limits().loss == pytest.approx(1.1 * USUAL_LOSS)


def test_always_large_norms_are_no_explosion():
    monitor = monitor_of()
    values = itertools.islice(usual_values(1), 199)
    for step, (_, norm) in enumerate(values, start=1):
        assert check(monitor, step, norm=60 * norm) == []


def test_every_kind_has_advice():
    assert set(ADVICE) == set(Kind)
    for advice in ADVICE.values():
        assert advice.causes
        assert "train." in advice.next_step


def test_actions_are_ordered_by_severity():
    assert list(Action) == [Action.WARN, Action.SKIP, Action.ROLL_BACK, Action.GIVE_UP]


@given(
    losses=st.lists(
        st.floats(min_value=0, allow_nan=False, allow_infinity=False),
        min_size=1,
        max_size=60,
    )
)
def test_limit_is_above_the_median_for_any_loss(losses):
    monitor = monitor_of(window_steps=8, on_spike="rollback")
    for step, loss in enumerate(losses, start=1):
        for finding in check(monitor, step, loss):
            if finding.kind is Kind.SPIKE:
                limit = finding.values["limit"]
                assert loss > limit >= finding.values["median"]
    assert monitor.limits().loss >= 0


def test_warn_has_no_limits():
    assert experienced_monitor().limits() == NO_LIMITS


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_limits_are_those_of_guarded_metrics(policy):
    loss_limits = experienced_monitor(on_spike=policy).limits()
    assert loss_limits.grad_norm == math.inf
    assert loss_limits.loss < 3
    norm_limits = experienced_monitor(on_explosion=policy).limits()
    assert norm_limits == Limits(loss=math.inf, grad_norm=10 * MAX_GRAD_NORM)


@pytest.mark.parametrize(
    ("loss", "norm"),
    [
        pytest.param(3.5, USUAL_NORM, id="spike"),
        pytest.param(math.nan, 7.0, id="not finite"),
    ],
)
def test_skipped_values_do_not_become_usual(loss, norm):
    monitor = experienced_monitor(on_spike="skip", patience_steps=100)
    limits = monitor.limits()
    for step in range(101, 151):
        findings = check_as_device(monitor, step, loss, norm)
        assert actions_of(findings) == [Action.SKIP]
    assert monitor.limits() == limits


def test_rollback_restores_the_history():
    monitor = experienced_monitor(on_spike="rollback")
    saved = monitor.to_json()
    limits = monitor.limits()
    for step in range(101, 131):
        check(monitor, step, 1.2)
    assert monitor.limits() != limits
    monitor.roll_back(json.loads(json.dumps(saved)), at_step=131, to_step=100)
    assert monitor.limits() == limits
    assert monitor.calm
    assert monitor.recovery.rollbacks == 1


def test_training_gives_up_after_too_many_rollbacks():
    monitor = experienced_monitor(on_spike="rollback", max_rollbacks=2)
    saved = monitor.to_json()
    for _ in range(2):
        for _ in range(2):
            findings = check_as_device(monitor, 101, 3.5)
            assert actions_of(findings) == [Action.ROLL_BACK]
            monitor.roll_back(saved, at_step=101, to_step=100)
        (finding,) = check_as_device(monitor, 101, 3.5)
        assert finding.action is Action.GIVE_UP
        assert "2 earlier rollbacks did not help" in finding.message
        monitor.reset_rollback_count()
    # Checkpoints are named for it, and no name may come twice.
    assert monitor.recovery.rollbacks == 4


def test_progress_past_the_furthest_trouble_resets_rollbacks():
    monitor = experienced_monitor(on_spike="rollback", max_rollbacks=2, easing_steps=50)
    saved = monitor.to_json()
    for at_step in (120, 105):  # trouble at an earlier step does not count
        monitor.roll_back(saved, at_step=at_step, to_step=100)
    for step in range(101, 170):
        assert check_as_device(monitor, step) == []
    assert actions_of(check_as_device(monitor, 170, 3.5)) == [Action.GIVE_UP]
    assert check_as_device(monitor, 171) == []
    assert actions_of(check_as_device(monitor, 172, 3.5)) == [Action.ROLL_BACK]
    monitor.roll_back(saved, at_step=172, to_step=100)
    assert monitor.recovery.rollbacks == 3
    assert monitor.learning_rate_share(100) == 0.5


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
    for _ in range(rollbacks):
        monitor.roll_back({}, at_step=20, to_step=10)
    for step in range(12 + easing_steps):
        progress = min(1, (step - 10) / easing_steps) if step >= 10 else 1
        expected = eased_share**rollbacks * (1 - progress) + progress
        assert monitor.learning_rate_share(step) == pytest.approx(expected)


VITALS = st.tuples(
    st.one_of(
        st.floats(1.9, 2.1), st.floats(0, 20), st.sampled_from([math.nan, math.inf])
    ),
    st.one_of(
        st.floats(0.1, 2), st.floats(0, 200), st.sampled_from([math.nan, math.inf])
    ),
    st.sampled_from([True, True, True, False]),
)
"""Loss and norm of a step, and whether it is applied if they are finite."""
POLICIES = st.sampled_from(["warn", "skip", "rollback"])


def run_steps(monitor, first_step, steps, saved):
    """Return all that a monitor shows while steps come and rollbacks are made."""
    shown = []
    for step, (loss, norm, may_apply) in enumerate(steps, start=first_step):
        applied = may_apply and math.isfinite(loss) and math.isfinite(norm)
        findings = check(monitor, step, loss, norm, applied=applied)
        actions = actions_of(findings)
        if Action.ROLL_BACK in actions and Action.GIVE_UP not in actions:
            monitor.roll_back(saved, at_step=step, to_step=1)
        state = (
            findings,
            monitor.calm,
            monitor.limits(),
            monitor.recovery.rollbacks,
            monitor.learning_rate_share(step),
        )
        shown.append(repr(state))  # text, because nan does not equal itself
    return shown


@settings(max_examples=200, deadline=None)
@given(
    before=st.lists(VITALS, max_size=60),
    after=st.lists(VITALS, max_size=60),
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
    run_steps(monitor, 1, before, {})
    saved = json.loads(json.dumps(monitor.to_json(), allow_nan=False))
    restored = HealthMonitor(HealthSettings(**changes), MAX_GRAD_NORM, saved)
    assert restored.to_json() == saved == monitor.to_json()
    first_step = len(before) + 1
    shown_by_restored = run_steps(restored, first_step, after, saved)
    assert shown_by_restored == run_steps(monitor, first_step, after, saved)
    assert restored.to_json() == monitor.to_json()


OLDER_STATES = [
    {},
    {"unknown": 1},
    {"loss": {}, "recovery": {"unknown": 2}, "plateau": {}},
]


@pytest.mark.parametrize("saved", OLDER_STATES)
def test_older_checkpoint_gives_an_empty_history(saved):
    restored = HealthMonitor(HealthSettings(), MAX_GRAD_NORM, saved)
    assert restored.to_json() == monitor_of().to_json()


@pytest.mark.parametrize("saved", OLDER_STATES)
def test_rollback_to_an_older_checkpoint_counts(saved):
    monitor = experienced_monitor()
    monitor.roll_back(saved, at_step=101, to_step=0)
    assert monitor.calm
    assert monitor.recovery.rollbacks == 1


def test_shorter_window_keeps_the_newest_values():
    saved = experienced_monitor(
        on_spike="skip", window_steps=64, plateau_window_steps=400
    ).to_json()
    shorter = HealthSettings(on_spike="skip", window_steps=8, plateau_window_steps=20)
    restored = HealthMonitor(shorter, MAX_GRAD_NORM, saved)
    assert restored.to_json()["loss"]["window"] == saved["loss"]["window"][-8:]
    assert check(restored, 101) == []
