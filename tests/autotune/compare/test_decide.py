from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.base.interval import Interval
from autotune.base.statistics import Estimate, estimate_single, estimate_windows
from autotune.compare import decide
from autotune.compare.decide import (
    STEP_RATE,
    Change,
    Measurement,
    Side,
    changes,
    compare,
    gate,
)
from testbed.examples.profiles import example_profile
from trainer.config.tables import flat_table

WORK = {
    "model": "m",
    "dataset": "d",
    "machine": "cpu",
    "processors": "2 of A CPU",
    "ranks": "1",
    "global batch": "8 rows",
    "row length": "128",
    "layout": "packed",
}
STEADY = [100.0, 101.0, 99.0, 100.5, 99.5]


def _side(measurements=(), *, rates=STEADY, of="windows", **circumstances):
    headline = (
        [
            Measurement(
                metric=decide.TRAINING_RATE, of=of, estimate=estimate_windows(rates)
            )
        ]
        if rates
        else []
    )
    return Side(
        kind="run",
        name="x",
        settings={"max_steps": 10},
        circumstances=WORK | circumstances,
        facts={"torch": "2"},
        measurements=tuple(measurements),
        headlines=tuple(headline),
    )


def _rates(factor):
    return [factor * rate for rate in STEADY]


@pytest.mark.parametrize(
    ("b", "verdict", "state"),
    [
        (_side(), "the same within noise", "passes"),
        (_side(rates=_rates(1.002)), "the same within noise", "passes"),
        (_side(rates=_rates(1.1)), "faster", "passes"),
        (_side(rates=_rates(0.9)), "slower", "slower"),
        # Beyond noise, and perhaps too much so.
        (_side(rates=_rates(0.96)), "slower", "undecided"),
        # Too noisy for so few measurements.
        (_side(rates=[60.0, 120.0, 80.0]), "not judged", "undecided"),
        (
            _side(rates=[60.0, 120.0, 80.0, 90.0, 100.0]),
            "the same within noise",
            "undecided",
        ),
        # Above 0.95, and perhaps not.
        (_side(rates=[96.0, 99.0, 97.0, 94.0]), "slower", "undecided"),
        (_side(rates=[80.0]), "not judged", "undecided"),  # of unknown noise
        (_side(rates=[]), None, "not comparable"),
        (_side(dataset="other"), "not comparable", "not comparable"),
        (_side(of="steps"), "the same within noise", "passes"),  # read in another way
    ],
)
def test_speeds_differ_only_beyond_noise_and_the_gate_fails_only_what_is_proven(
    b, verdict, state
):
    found = compare(_side(), b)
    assert (found.headline.verdict if found.headline else None) == verdict
    assert gate(found, 0.05).state == state


@pytest.mark.parametrize(
    ("circumstance", "word"),
    [
        *(
            (name, "another ")
            for name in ("model", "dataset", "machine", "global batch", "row length")
        ),
        ("processors", "other "),
        ("ranks", "another number of "),
    ],
)
def test_what_trained_otherwise_is_not_comparable_and_says_why(circumstance, word):
    found = compare(_side(), _side(**{circumstance: "other"})).headline
    assert (found.verdict, found.why) == ("not comparable", word + circumstance)
    assert found.change.value == pytest.approx(1.0)
    unknown = {name: said for name, said in WORK.items() if name != circumstance}
    assert (
        compare(_side(), replace(_side(), circumstances=unknown)).headline.verdict
        == "the same within noise"
    )


def test_another_layout_spoils_slots_a_figure_without_spread_is_not_judged_and_a_proven_count_is():
    slots = [
        Measurement(metric=STEP_RATE, of="2 rows", estimate=estimate_windows(STEADY))
    ]
    found = compare(_side(slots), _side(slots, layout="padded"))
    assert (found.headline.verdict, found.figures[0].verdict) == (
        "the same within noise",
        "not comparable",
    )
    sides = []
    for peak, most in ((100, 8), (120, 9)):
        memory = Measurement(
            metric=decide.PEAK_MEMORY, of="run", estimate=estimate_single(peak)
        )
        rows = Measurement(
            metric=decide.LARGEST,
            of="budget",
            estimate=estimate_single(most),
            exact=True,
        )
        sides.append(_side([memory, rows]))
    memory, rows = compare(*sides).figures
    assert (memory.verdict, memory.why) == ("not judged", "one figure shows no spread")
    assert rows.verdict == "more"
    assert compare(sides[0], sides[0]).figures[1].verdict == "the same"


def test_figures_of_one_side_are_named_settings_told_and_losses_judged():
    figure = Measurement(metric=STEP_RATE, of="2 rows", estimate=estimate_single(1.0))
    found = compare(
        _side([figure]), replace(_side(rates=[]), settings={"max_steps": 20})
    )
    assert (found.only_a, found.headline) == (
        ("tokens/s including padding, 2 rows",),
        None,
    )
    assert [change.key for change in found.settings] == ["max_steps"]
    # Losses are judged where the work is the same.
    change = Interval(value=1.1, low=1.05, high=1.15)
    losses = [Estimate(value=value, n=10) for value in (3.0, 3.3)]
    loss = (
        *(
            Measurement(metric=decide.LOSS, of="steps 1 to 9", estimate=one)
            for one in losses
        ),
        change,
    )
    assert compare(_side(), _side(machine="other"), loss).figures[-1].verdict == "more"
    assert (
        compare(_side(), _side(dataset="other"), loss).figures[-1].verdict
        == "not comparable"
    )
    assert compare(_side(), _side(), loss).figures[-1].metric is decide.LOSS


def test_settings_differ_by_their_dotted_keys_to_a_depth_and_the_models_config_key_by_key():
    old = example_profile().train.model_dump(mode="json")
    model = old["model"] | {
        "config": {"model_type": "bert", "hidden_size": 128, "new": 1}
    }
    assert changes(
        flat_table(old), flat_table(old | {"model": model, "tf32": False})
    ) == (
        Change(key="model.config.hidden_size", old=64, new=128),
        Change(key="tf32", old=True, new=False),
        Change(key="model.config.new", old=None, new=1),
    )
    table: dict = {}
    for _ in range(900):
        table = {"a": table}
    assert list(flat_table(table).values()) == ["nested too deep"]


values = st.one_of(st.none(), st.booleans(), st.integers(), st.text())


@given(st.dictionaries(st.text(), values), st.dictionaries(st.text(), values))
def test_both_directions_see_the_same_differences(old, new):
    forward = {(change.key, change.old, change.new) for change in changes(old, new)}
    assert forward == {
        (change.key, change.new, change.old) for change in changes(new, old)
    }
    assert {key for key, _, _ in forward} == {
        key for key in old | new if old.get(key) != new.get(key)
    }
    ratios = [Change(key="a", old=one, new=3).ratio for one in (2, True, 0, "x")]
    assert ratios == [1.5, None, None, None]  # of figures only
