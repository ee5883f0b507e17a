"""Figures are shown with their units, missing and missed ones as such."""

import pytest

from benchmarks.page_figures import cpus, formats, targets

BAR = {
    "name": "x_s",
    "figure": 2.0,
    "unit": "s",
    "bar": 1.0,
    "direction": "<=",
    "holds": False,
}


def test_missed_target_is_shown():
    assert targets.target_rows([BAR]) == [["`x_s`", "2 s", "≤ 1 s", "**short**"]]


def test_unmeasured_target_is_shown():
    bar = {**BAR, "figure": None, "holds": None}
    assert targets.target_rows([bar]) == [["`x_s`", "n/a", "≤ 1 s", "not measured"]]


@pytest.mark.parametrize(
    ("unit", "shown"),
    [("bytes", "2 KiB"), ("share", "204800.00 %"), ("count", "2.05e+03")],
)
def test_target_has_its_unit(unit, shown):
    bar = {**BAR, "figure": 2048.0, "unit": unit}
    assert targets.target_rows([bar])[0][1] == shown


def test_undelivered_promise_is_not_available():
    promise = {
        "name": "BERT",
        "promised_tokens_per_s": 17_940.8,
        "half_width_share": None,
        "delivered_tokens_per_s": None,
        "kept": None,
    }
    row = cpus.promise_row(promise)
    assert row == ["BERT", "17,941", "n/a", "n/a", "n/a", "not known"]


def test_speedup_has_its_interval():
    rows = [{"name": "paper", "speedup": 2.04, "speedup_low": 1, "speedup_high": 3}]
    profile = {"evidence": {"baseline": {"rows": rows}}}
    text = formats.speedup(profile, "paper")
    assert text == f"{formats.times(2.0)} (1.0 to 3.0)"


@pytest.mark.parametrize(
    ("ratio", "digits", "shown"), [(1.07, 0, "+7 %"), (0.9958, 1, "-0.4 %")]
)
def test_difference_has_its_sign(ratio, digits, shown):
    assert formats.difference(ratio, digits) == shown


def test_worst_error_counts_both_directions():
    rows = [{"predicted": 1.5, "measured": 1.0}, {"predicted": 1.0, "measured": 4.0}]
    assert formats.worst_error(rows, "predicted", "measured") == 0.75


@pytest.mark.parametrize(
    ("unit", "shown"),
    [
        ("share", "150.0 %"),
        ("%", "1.5 %"),
        ("ratio", "1.5 \N{MULTIPLICATION SIGN}"),
        ("count", "1.5"),
    ],
)
def test_quoted_figure_has_its_unit(unit, shown):
    assert targets.quoted_figure({"figure": 1.5, "unit": unit}, 1) == shown


def test_unmeasured_figure_is_not_available():
    assert targets.quoted_figure({"figure": None, "unit": "share"}, 1) == "n/a"
