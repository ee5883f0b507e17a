import pytest

from benchmarks import report
from testbed import browser
from testbed.browser import Visit
from testbed.programs import CannotMeasure

FIGURES = {
    "built": {
        "trials": 3,
        "seconds": [9.0, 1.0, 2.0],
        "bytes": {"html": 1000, "md": 10, "json": 20},
    },
    "browser": {
        "full_bytes": 2_000_000,
        "visits": 8,
        "requests": 0,
        "console_errors": 0,
        "page_errors": 0,
        "overflow_px": 0,
        "hostile": {"scripts": 0, "handlers": 0, "dialogs": 0},
        "violations": [],
        "violations_of_any_impact": 2,
    },
}


def visited(text, **changes):
    values = {
        "requests": (),
        "console_errors": (),
        "page_errors": (),
        "dialogs": (),
        "scripts": 0,
        "handlers": 0,
        "text": text,
        "wider_by_px": 0,
    }
    return Visit(**values | changes)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"requests": 1},
        {"violations": ["color-contrast: <p>"]},
        {"hostile": {"scripts": 1}},
        {"overflow_px": 1},
    ],
    ids=["none", "request", "violation", "hostile script", "overflow"],
)
def test_every_single_fault_counts(change):
    bars = {
        bar.name: bar
        for bar in report.make_bars(FIGURES | {"browser": FIGURES["browser"] | change})
    }
    assert list(bars) == list(report.BARS)
    assert (bars["report_size_bytes"].figure, bars["report_size_bytes"].holds) == (
        2_000_000,
        False,
    )
    assert (bars["report_build_s"].figure, bars["report_build_s"].holds) == (2.0, True)
    assert [bar.holds for bar in bars.values()].count(False) == 1 + len(change)


def test_counts_effects_of_hostile_text():
    quiet = browser.taken_in(visited(" ".join(browser.SHOWN)))
    assert set(quiet.values()) == {0}
    loud = browser.taken_in(
        visited("\u202e" + "A" * browser.LONG, scripts=1, handlers=2, dialogs=("1",))
    )
    counts = {"scripts": 1, "handlers": 2, "dialogs": 1, "steering": 1, "uncut": 1}
    assert loud == counts | {"not_shown": len(browser.SHOWN)}


def test_builds_are_timed(tmp_path, monkeypatch):
    figures = report.built(tmp_path, trials=3, repeats=1)
    assert len(figures["seconds"]) == 1
    assert min(figures["bytes"].values()) > 10_000


def test_failed_build_is_an_error(tmp_path, monkeypatch):
    absent = (tmp_path / "absent.toml", tmp_path, tmp_path)
    monkeypatch.setattr(report, "write_example", lambda directory, trials: absent)
    with pytest.raises(CannotMeasure, match="code 3"):
        report.built(tmp_path, trials=1, repeats=1)
