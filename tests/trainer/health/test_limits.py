"""Limits of a monitor, above which the device skips the update of a step."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.trainer.health.monitors import (
    EXPLOSION_LIMIT,
    NEXT_STEP,
    SPIKE_LOSS,
    USUAL_LOSS,
    USUAL_NORM,
    actions_of,
    check,
    check_as_device,
    experienced_monitor,
    monitor_of,
)
from trainer.health.findings import Action, Kind
from trainer.health.monitor import NO_LIMITS, Limits


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
    # The least room above the median is a tenth of it.
    assert monitor.limits().loss == pytest.approx(1.1 * USUAL_LOSS)


@given(
    losses=st.lists(
        st.floats(min_value=0, allow_nan=False, allow_infinity=False),
        min_size=1,
        max_size=60,
    )
)
def test_limit_is_never_negative(losses):
    monitor = monitor_of(window_steps=8, on_spike="rollback")
    for step, loss in enumerate(losses, start=1):
        check(monitor, step, loss)
    assert monitor.limits().loss >= 0


@given(
    losses=st.lists(
        st.floats(min_value=0, allow_nan=False, allow_infinity=False),
        min_size=1,
        max_size=60,
    )
)
# Few series that are drawn have a spike.
@example(losses=[1.0] * 8 + [100.0])
def test_spike_is_above_its_limit_and_the_median(losses):
    monitor = monitor_of(window_steps=8, on_spike="rollback")
    spikes = []
    for step, loss in enumerate(losses, start=1):
        findings = check(monitor, step, loss)
        spikes += [finding for finding in findings if finding.kind is Kind.SPIKE]
    for spike in spikes:
        assert spike.values["loss"] > spike.values["limit"] >= spike.values["median"]


def test_warn_has_no_limits():
    assert experienced_monitor().limits() == NO_LIMITS


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_limits_are_those_of_guarded_metrics(policy):
    loss_limits = experienced_monitor(on_spike=policy).limits()
    assert loss_limits.grad_norm == math.inf
    assert USUAL_LOSS < loss_limits.loss < SPIKE_LOSS
    norm_limits = experienced_monitor(on_explosion=policy).limits()
    assert norm_limits == Limits(loss=math.inf, grad_norm=EXPLOSION_LIMIT)


@pytest.mark.parametrize(
    ("loss", "norm"),
    [
        pytest.param(SPIKE_LOSS, USUAL_NORM, id="spike"),
        pytest.param(math.nan, 7.0, id="not finite"),
    ],
)
def test_skipped_values_do_not_become_usual(loss, norm):
    monitor = experienced_monitor(on_spike="skip", patience_steps=100)
    limits = monitor.limits()
    for step in range(NEXT_STEP, NEXT_STEP + 50):
        findings = check_as_device(monitor, step, loss, norm)
        assert actions_of(findings) == [Action.SKIP]
    assert monitor.limits() == limits
