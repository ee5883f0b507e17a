from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.base.estimates import Estimate, estimate_single
from autotune.base.interval import Interval
from autotune.base.window_statistics import estimate_windows
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
from trainer.formats.nested_tables import flatten_table

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
    ids=[
        "same",
        "barely faster",
        "faster",
        "slower",
        "slightly slower",
        "few noisy windows",
        "noisy windows",
        "around the limit",
        "one window",
        "no windows",
        "another dataset",
        "steps and windows",
    ],
)
def test_gate_fails_only_beyond_noise(b, verdict, state):
    comparison = compare(_side(), b)
    assert (comparison.headline.verdict if comparison.headline else None) == verdict
    assert gate(comparison, 0.05).state == state


CIRCUMSTANCES = {
    "model": "another ",
    "dataset": "another ",
    "machine": "another ",
    "global batch": "another ",
    "row length": "another ",
    "processors": "other ",
    "ranks": "another number of ",
}


@pytest.mark.parametrize(("circumstance", "word"), CIRCUMSTANCES.items())
def test_different_work_is_not_comparable(circumstance, word):
    headline = compare(_side(), _side(**{circumstance: "other"})).headline
    assert (headline.verdict, headline.why) == ("not comparable", word + circumstance)
    assert headline.change.value == pytest.approx(1.0)


@pytest.mark.parametrize("circumstance", [*CIRCUMSTANCES])
def test_unknown_circumstance_does_not_prevent_comparison(circumstance):
    unknown = {name: value for name, value in WORK.items() if name != circumstance}
    assert (
        compare(_side(), replace(_side(), circumstances=unknown)).headline.verdict
        == "the same within noise"
    )


def test_layout_changes_padded_rates():
    slots = [
        Measurement(metric=STEP_RATE, of="2 rows", estimate=estimate_windows(STEADY))
    ]
    comparison = compare(_side(slots), _side(slots, layout="padded"))
    assert (comparison.headline.verdict, comparison.figures[0].verdict) == (
        "the same within noise",
        "not comparable",
    )


def test_single_measurement_is_not_judged():
    sides = []
    for peak, largest in ((100, 8), (120, 9)):
        memory = Measurement(
            metric=decide.PEAK_MEMORY, of="run", estimate=estimate_single(peak)
        )
        rows = Measurement(
            metric=decide.LARGEST,
            of="budget",
            estimate=estimate_single(largest),
            exact=True,
        )
        sides.append(_side([memory, rows]))
    memory, rows = compare(*sides).figures
    assert (memory.verdict, memory.why) == ("not judged", "one figure shows no spread")
    assert rows.verdict == "more"
    assert compare(sides[0], sides[0]).figures[1].verdict == "the same"


def test_names_figures_of_one_side():
    figure = Measurement(metric=STEP_RATE, of="2 rows", estimate=estimate_single(1.0))
    comparison = compare(
        _side([figure]), replace(_side(rates=[]), settings={"max_steps": 20})
    )
    assert (comparison.only_a, comparison.headline) == (
        ("tokens/s including padding, 2 rows",),
        None,
    )
    assert [change.key for change in comparison.settings] == ["max_steps"]


def test_judges_losses_of_the_same_work():
    # Losses are judged where the work is the same.
    change = Interval(value=1.1, low=1.05, high=1.15)
    losses = [Estimate(value=value, n=10) for value in (3.0, 3.3)]
    loss = (
        *(
            Measurement(metric=decide.LOSS, of="steps 1 to 9", estimate=estimate)
            for estimate in losses
        ),
        change,
    )
    assert compare(_side(), _side(machine="other"), loss).figures[-1].verdict == "more"
    assert (
        compare(_side(), _side(dataset="other"), loss).figures[-1].verdict
        == "not comparable"
    )
    assert compare(_side(), _side(), loss).figures[-1].metric is decide.LOSS


def test_compares_settings_by_dotted_key():
    old = example_profile().train.model_dump(mode="json")
    model = old["model"] | {
        "config": {"model_type": "bert", "hidden_size": 128, "new": 1}
    }
    assert changes(
        flatten_table(old), flatten_table(old | {"model": model, "tf32": False})
    ) == (
        Change(key="model.config.hidden_size", old=64, new=128),
        Change(key="tf32", old=True, new=False),
        Change(key="model.config.new", old=None, new=1),
    )


def test_flat_table_stops_at_a_depth():
    table: dict = {}
    for _ in range(900):
        table = {"a": table}
    assert list(flatten_table(table).values()) == ["nested too deep"]


values = st.one_of(st.none(), st.booleans(), st.integers(), st.text())


@given(st.dictionaries(st.text(), values), st.dictionaries(st.text(), values))
def test_both_directions_see_the_same_changes(old, new):
    forward = {(change.key, change.old, change.new) for change in changes(old, new)}
    assert forward == {
        (change.key, change.new, change.old) for change in changes(new, old)
    }
    assert {key for key, _, _ in forward} == {
        key for key in old | new if old.get(key) != new.get(key)
    }


def test_change_has_ratio_of_numbers_only():
    ratios = [
        Change(key="a", old=old_value, new=3).ratio for old_value in (2, True, 0, "x")
    ]
    assert ratios == [1.5, None, None, None]  # of figures only
