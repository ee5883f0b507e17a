import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config.train_config import HealthSettings
from trainer.health.events import ADVICE, Action, Kind
from trainer.health.monitor import NO_LIMITS, HealthMonitor, Limits

CLIP = 1.0


def monitor(**changes):
    return HealthMonitor(HealthSettings(**changes), CLIP)


def look(health, step, loss=2.0, grad_norm=0.5, *, applied=True):
    return health.check(step, loss=loss, grad_norm=grad_norm, applied=applied)


def as_the_device(health, step, loss=2.0, grad_norm=0.5, limits=None):
    """A step as the device takes it, or leaves it out."""
    limits = limits or health.limits()
    applied = (
        math.isfinite(loss)
        and math.isfinite(grad_norm)
        and loss <= limits.loss
        and grad_norm <= limits.grad_norm
    )
    return look(health, step, loss, grad_norm, applied=applied)


def noisy(seed):
    """Ordinary losses and norms without end."""
    scatter = random.Random(seed)
    while True:
        yield 2 * (1 + scatter.gauss(0, 0.02)), 0.5 * math.exp(scatter.gauss(0, 0.3))


def ready(steps=100, seed=0, **changes):
    """A monitor that knows what is usual."""
    health = monitor(**changes)
    for step, (loss, norm) in zip(range(1, steps + 1), noisy(seed), strict=False):
        assert as_the_device(health, step, loss, norm) == []
    return health


def actions(findings):
    return [one.action for one in findings]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", ["warn", "skip", "rollback"])
@pytest.mark.parametrize(
    ("steps", "fall_steps", "lag"),
    [
        (5000, 2000, 1),
        (1500, 300, 1),
        (3000, 600, 4),
    ],
    ids=["slow", "fast", "limits lag"],
)
def test_a_noisy_falling_loss_is_no_trouble(seed, policy, steps, fall_steps, lag):
    """From 10 to 2 with 5 % noise and norms that scatter by a third; it ends before it
    stands still."""
    scatter = random.Random(seed)
    health = monitor(on_spike=policy, on_explosion=policy)
    limits = [health.limits()] * lag
    for step in range(1, steps + 1):
        loss = (2 + 8 * math.exp(-step / fall_steps)) * (1 + scatter.gauss(0, 0.05))
        norm = 20 * math.exp(-step / 50) * (policy == "warn") + math.exp(
            scatter.gauss(0, 0.3)
        )
        assert as_the_device(health, step, loss, norm, limits[-lag]) == []
        assert health.calm
        limits.append(health.limits())


@pytest.mark.parametrize("seed", range(4))
def test_a_jump_back_is_a_spike_though_the_loss_was_as_high_not_long_before(seed):
    scatter = random.Random(seed)
    health = monitor()
    for step in range(1, 100):
        assert (
            look(
                health, step, 6.2 + 4.3 * math.exp(-step / 60) + scatter.gauss(0, 0.03)
            )
            == []
        )
    assert [one.kind for one in look(health, 100, 9.5)] == [Kind.SPIKE]


def test_what_is_unusual_is_found_at_once_with_the_values_that_show_it():
    (spike,) = look(ready(), 101, 3.5)
    assert (spike.values["loss"], spike.values["median"]) == (
        3.5,
        pytest.approx(2.0, rel=0.02),
    )
    assert spike.values["median"] < spike.values["limit"] < 3.5
    assert "the loss of step 101 is 3.5" in spike.message
    assert "train.learning_rate" in spike.next_step
    (explosion,) = look(ready(), 101, grad_norm=10.1)
    assert explosion.values["clip"] == CLIP
    assert "train.max_grad_norm" in explosion.next_step


SKIP_BOTH = {"on_spike": "skip", "on_explosion": "skip"}
COURSES = {
    "an excursion is said once and again after a usual value": (
        {},
        [(3.5,), (math.nan,), (3.5,), (3.5,), (2.0,), (3.5,)],
        ["spike:warn", "non_finite:skip", "", "", "", "spike:warn"],
        "update was applied",
    ),
    "an explosion is far above the clip": (
        {},
        [(2.0, 9.9), (2.0, 10.1)],
        ["", "explosion:warn"],
        "update was applied",
    ),
    "a spike and an explosion come together": (
        {"on_spike": "skip", "on_explosion": "rollback"},
        [(5.0, 50.0)],
        ["spike:skip explosion:rollback"],
        "training rolls back",
    ),
    **{
        f"only what is not finite is named, {loss} {norm}": (
            {},
            [(loss, norm)],
            ["non_finite:skip"],
            message,
        )
        for loss, norm, message in (
            (math.nan, 0.5, "loss is nan in step 101"),
            (2.0, math.inf, "gradient norm is inf in step 101"),
            (math.inf, math.nan, "loss is inf and gradient norm is nan in step 101"),
        )
    },
    "a value that is not finite rolls back": (
        {"on_non_finite": "rollback"},
        [(math.nan,)],
        ["non_finite:rollback"],
        "training rolls back",
    ),
    "skipping for too long rolls back whatever was the reason": (
        SKIP_BOTH | {"patience_steps": 4},
        [(math.nan,), (3.5,), (2.0, 30.0), (math.inf,)],
        ["non_finite:skip", "spike:skip", "explosion:skip", "non_finite:rollback"],
        "4 in a row were; training rolls back",
    ),
    "a step that is taken ends a row of skipped ones": (
        {"on_spike": "skip", "patience_steps": 2},
        [(3.5,), (2.0,), (3.5,)],
        ["spike:skip", "", "spike:skip"],
        "update was skipped",
    ),
    "no rollback is allowed": (
        {"on_spike": "skip", "patience_steps": 2, "max_rollbacks": 0},
        [(3.5,)] * 2,
        ["spike:skip", "spike:give_up"],
        "train.health.max_rollbacks",
    ),
    "a limit that lags lets a spike through, which is said": (
        {"on_spike": "skip"},
        [(3.5, 0.5, True)],
        ["spike:warn"],
        "update was applied",
    ),
    "or undone": (
        {"on_spike": "rollback"},
        [(3.5, 0.5, True)],
        ["spike:rollback"],
        "update was applied",
    ),
    **{
        f"a step that a lagging limit left out counts as skipped, {loss} {norm}": (
            SKIP_BOTH | {"patience_steps": 2},
            [(loss, norm, False)] * 2,
            [f"{kind}:skip", f"{kind}:rollback"],
            "limit of an earlier step",
        )
        for loss, norm, kind in (
            (2.2, 0.5, "spike"),
            (2.0, 9.8, "explosion"),
            (0.1, 0.1, "spike"),
        )
    },
    "only what is skipped is blamed": (
        {"on_explosion": "skip"},
        [(3.5, 0.5, False), (2.0, 30.0, False)],
        ["spike:warn explosion:skip", "explosion:skip"],
        "update was skipped",
    ),
}


@pytest.mark.parametrize(
    ("changes", "course", "expected", "message"), COURSES.values(), ids=list(COURSES)
)
def test_what_is_found_in_steps_after_a_hundred_usual_ones(
    changes, course, expected, message
):
    health = ready(**changes)
    found = []
    for step, vitals in enumerate(course, start=101):
        loss, norm, *applied = vitals if len(vitals) > 1 else (*vitals, 0.5)
        found.append(
            look(health, step, loss, norm, applied=applied[0])
            if applied
            else as_the_device(health, step, loss, norm)
        )
    assert [
        " ".join(f"{one.kind}:{one.action}" for one in of_step) for of_step in found
    ] == expected
    assert message in found[-1][-1].message
    assert not health.calm
    assert as_the_device(health, 101 + len(course)) == []
    assert health.calm


def test_a_lasting_change_becomes_usual_when_it_is_only_warned_of():
    health = ready(window_steps=32)
    assert [
        (step, one.kind) for step in range(101, 141) for one in look(health, step, 3.5)
    ] == [(101, Kind.SPIKE)]
    assert health.calm


@pytest.mark.parametrize(
    ("window_steps", "enough"), [(8, 8), (12, 12), (16, 16), (128, 16)]
)
def test_nothing_is_judged_before_enough_values_are_there(window_steps, enough):
    health = monitor(window_steps=window_steps, on_spike="skip")
    for step in range(1, enough + 1):
        assert health.limits() == NO_LIMITS
        assert look(health, step, 100.0 if step == enough else 2.0) == []
    assert health.limits().loss == pytest.approx(2.2)


def test_norms_that_were_always_large_are_no_explosion():
    health = monitor()
    for step, (_, norm) in zip(range(1, 200), noisy(1), strict=False):
        assert look(health, step, grad_norm=60 * norm) == []


def test_there_is_advice_on_every_kind_and_actions_have_an_order():
    assert set(ADVICE) == set(Kind)
    assert all(
        causes and "train." in next_step for causes, next_step in ADVICE.values()
    )
    assert list(Action) == [Action.WARN, Action.SKIP, Action.ROLL_BACK, Action.GIVE_UP]


@given(
    losses=st.lists(
        st.floats(min_value=0, allow_nan=False, allow_infinity=False),
        min_size=1,
        max_size=60,
    )
)
def test_no_finite_loss_breaks_it_and_the_limit_lies_above_the_median(losses):
    health = monitor(window_steps=8, on_spike="rollback")
    for step, loss in enumerate(losses, start=1):
        for one in look(health, step, loss):
            if one.kind is Kind.SPIKE:
                assert loss > one.values["limit"] >= one.values["median"]
    assert health.limits().loss >= 0


def test_limits_are_only_for_what_is_not_merely_warned_of():
    assert ready().limits() == NO_LIMITS
    for policy in ("skip", "rollback"):
        assert ready(on_spike=policy).limits().grad_norm == math.inf
        assert ready(on_spike=policy).limits().loss < 3
        assert ready(on_explosion=policy).limits() == Limits(
            loss=math.inf, grad_norm=10 * CLIP
        )


@pytest.mark.parametrize(("loss", "norm"), [(3.5, 0.5), (math.nan, 7.0)])
def test_a_skipped_value_does_not_become_usual(loss, norm):
    health = ready(on_spike="skip", patience_steps=100)
    limits = health.limits()
    for step in range(101, 151):
        assert actions(as_the_device(health, step, loss, norm)) == [Action.SKIP]
    assert health.limits() == limits


def test_after_a_rollback_it_looks_back_as_at_the_checkpoint():
    health = ready(on_spike="rollback")
    saved, limits = health.to_json(), health.limits()
    for step in range(101, 131):
        look(health, step, 1.2)
    assert health.limits() != limits
    health.roll_back(json.loads(json.dumps(saved)), at_step=131, to_step=100)
    assert health.limits() == limits
    assert health.calm
    assert health.recovery.rollbacks == 1


def test_training_gives_up_when_rollbacks_do_not_help_until_they_are_forgiven():
    health = ready(on_spike="rollback", max_rollbacks=2)
    saved = health.to_json()
    for _ in range(2):
        for _ in range(2):
            assert actions(as_the_device(health, 101, 3.5)) == [Action.ROLL_BACK]
            health.roll_back(saved, at_step=101, to_step=100)
        (found,) = as_the_device(health, 101, 3.5)
        assert found.action is Action.GIVE_UP
        assert "2 earlier rollbacks did not help" in found.message
        health.reset_rollback_count()
    # Checkpoints are named for it, and no name may come twice.
    assert health.recovery.rollbacks == 4


def test_only_progress_past_the_furthest_trouble_makes_earlier_rollbacks_count_no_more():
    health = ready(on_spike="rollback", max_rollbacks=2, easing_steps=50)
    saved = health.to_json()
    for at_step in (120, 105):  # what comes sooner brings progress no nearer
        health.roll_back(saved, at_step=at_step, to_step=100)
    for step in range(101, 170):
        assert as_the_device(health, step) == []
    assert actions(as_the_device(health, 170, 3.5)) == [Action.GIVE_UP]
    assert as_the_device(health, 171) == []
    assert actions(as_the_device(health, 172, 3.5)) == [Action.ROLL_BACK]
    health.roll_back(saved, at_step=172, to_step=100)
    assert (health.recovery.rollbacks, health.learning_rate_share(100)) == (3, 0.5)


@given(
    share=st.floats(0.01, 1),
    easing_steps=st.integers(1, 500),
    rollbacks=st.integers(0, 5),
)
def test_the_learning_rate_is_eased_after_each_rollback_and_comes_back_linearly(
    share, easing_steps, rollbacks
):
    health = monitor(eased_learning_rate_share=share, easing_steps=easing_steps)
    for _ in range(rollbacks):
        health.roll_back({}, at_step=20, to_step=10)
    for step in range(12 + easing_steps):
        left = min(1, (step - 10) / easing_steps) if step >= 10 else 1
        assert health.learning_rate_share(step) == pytest.approx(
            share**rollbacks * (1 - left) + left
        )


def plateau_findings(losses, **changes):
    health = monitor(**{"plateau_window_steps": 400} | changes)
    found = [
        (step, one.kind)
        for step, loss in enumerate(losses, start=1)
        for one in look(health, step, loss)
    ]
    return [(step, kind) for step, kind in found if kind in {Kind.PLATEAU, Kind.RISE}]


@pytest.mark.parametrize("seed", range(5))
def test_noise_hides_neither_a_plateau_nor_a_fall_nor_a_rise(seed):
    """2 % of noise, and a fall by 0.03 in half a window, whose error is 0.005."""
    scatter = random.Random(seed)
    noise = [scatter.gauss(0, 0.04) for _ in range(4000)]
    # By chance alone, flat noise looks like a fall now and then, and a plateau is said
    # again after it.
    at_step, kind = plateau_findings([2 + one for one in noise[:1000]])[0]
    assert (at_step <= 600, kind) == (True, Kind.PLATEAU)
    assert (
        plateau_findings([4 - 0.00015 * step + one for step, one in enumerate(noise)])
        == []
    )
    rises = plateau_findings(
        [2 + 0.0005 * step + one for step, one in enumerate(noise[:800])]
    )
    assert rises == [(400, Kind.RISE), (600, Kind.RISE), (800, Kind.RISE)]


@pytest.mark.parametrize(
    ("losses", "at_steps"),
    [
        ([2.0] * 3000, [400]),
        ([2.0] * 1000 + [1.0] * 1000, [400, 1920]),
        ([2 + 1e-6 * step for step in range(400)], [400]),
    ],
    ids=["said once", "said again after a fall", "a rise too small to tell"],
)
def test_a_loss_that_stands_still_is_said(losses, at_steps):
    assert plateau_findings(losses) == [(step, Kind.PLATEAU) for step in at_steps]


@pytest.mark.parametrize("seed", range(2))
def test_a_loss_that_falls_as_a_power_of_time_neither_stands_still_nor_rises(seed):
    """What 2,000 steps gain at the end of it, 0.009, is a fifth of the noise."""
    scatter = random.Random(seed)
    losses = (
        1.4 + 9 * step**-0.3 + scatter.gauss(0, 0.05) for step in range(1, 30_001)
    )
    # A short window of spikes is of no use here, and faster.
    assert (
        plateau_findings(
            losses,
            window_steps=8,
            plateau_window_steps=HealthSettings().plateau_window_steps,
        )
        == []
    )


def test_a_plateau_warns_with_both_medians_of_the_steps_that_were_taken():
    health = monitor(plateau_window_steps=20)
    assert [look(health, step, applied=step % 2 == 0) for step in range(1, 40)] == [
        []
    ] * 39
    (plateau,) = look(health, 40)
    assert (plateau.kind, plateau.action, health.calm) == (
        Kind.PLATEAU,
        Action.WARN,
        True,
    )
    assert plateau.values == {
        "first_median": 2.0,
        "second_median": 2.0,
        "improvement": 0.0,
        "error": 0.0,
    }


VITALS = st.tuples(
    st.one_of(
        st.floats(1.9, 2.1), st.floats(0, 20), st.sampled_from([math.nan, math.inf])
    ),
    st.one_of(
        st.floats(0.1, 2), st.floats(0, 200), st.sampled_from([math.nan, math.inf])
    ),
    st.sampled_from([True, True, True, False]),
)
POLICY = st.sampled_from(["warn", "skip", "rollback"])


def whole_course(health, first_step, course, saved):
    """Everything that can be seen of a monitor while steps come and rollbacks are
    obeyed."""
    seen = []
    for step, (loss, norm, applied) in enumerate(course, start=first_step):
        found = look(
            health,
            step,
            loss,
            norm,
            applied=applied and math.isfinite(loss) and math.isfinite(norm),
        )
        if Action.ROLL_BACK in actions(found) and Action.GIVE_UP not in actions(found):
            health.roll_back(saved, at_step=step, to_step=1)
        share, rollbacks = health.learning_rate_share(step), health.recovery.rollbacks
        # Text, because nan is not itself.
        seen.append(repr((found, health.calm, health.limits(), rollbacks, share)))
    return seen


@settings(max_examples=200, deadline=None)
@given(
    before=st.lists(VITALS, max_size=60),
    after=st.lists(VITALS, max_size=60),
    changes=st.fixed_dictionaries(
        {
            "on_spike": POLICY,
            "on_explosion": POLICY,
            "on_non_finite": st.sampled_from(["skip", "rollback"]),
            "window_steps": st.integers(8, 30),
            "plateau_window_steps": st.integers(20, 41),
            "patience_steps": st.integers(1, 3),
            "easing_steps": st.integers(1, 20),
            "max_rollbacks": st.integers(0, 4),
        }
    ),
)
def test_a_monitor_that_was_saved_goes_on_as_if_nothing_had_happened(
    before, after, changes
):
    health = monitor(**changes)
    whole_course(health, 1, before, {})
    saved = json.loads(json.dumps(health.to_json(), allow_nan=False))
    again = HealthMonitor(HealthSettings(**changes), CLIP, saved)
    assert again.to_json() == saved == health.to_json()
    first = len(before) + 1
    assert whole_course(again, first, after, saved) == whole_course(
        health, first, after, saved
    )
    assert again.to_json() == health.to_json()


@pytest.mark.parametrize(
    "saved",
    [{}, {"unknown": 1}, {"loss": {}, "recovery": {"unknown": 2}, "plateau": {}}],
)
def test_an_older_checkpoint_that_lacks_the_state_starts_it_afresh(saved):
    assert HealthMonitor(HealthSettings(), CLIP, saved).to_json() == monitor().to_json()
    rolled_back = ready()
    rolled_back.roll_back(saved, at_step=101, to_step=0)
    assert rolled_back.calm
    assert rolled_back.recovery.rollbacks == 1


def test_shorter_windows_than_those_saved_keep_the_newest_values():
    saved = ready(on_spike="skip", window_steps=64, plateau_window_steps=400).to_json()
    again = HealthMonitor(
        HealthSettings(on_spike="skip", window_steps=8, plateau_window_steps=20),
        CLIP,
        saved,
    )
    assert again.to_json()["loss"]["window"] == saved["loss"]["window"][-8:]
    assert look(again, 101) == []
