"""Figures of GPUs on pages: kept ones, else those measured by hand."""

import json
import shutil

import pytest

from benchmarks.gpu.quotes import BY_HAND, WORDS, GpuQuotes
from benchmarks.gpu.results import KEPT
from benchmarks.gpu.stages import TRAINERS

BY_HAND_RATIOS = {"fastest": 555 / 221.6, "defaults": 555 / 21.8, "paper": 555 / 46.5}


@pytest.fixture
def kept(tmp_path):
    (tmp_path / BY_HAND).parent.mkdir(parents=True)
    shutil.copyfile(KEPT / BY_HAND, tmp_path / BY_HAND)
    return tmp_path


def add_check(kept, **figures):
    directory = kept / "h200/2026-12-24"
    directory.mkdir(parents=True)
    check = {
        "name": "h200",
        "started_utc": "2026-12-24T00:00:00+00:00",
        "figures": figures,
    }
    (directory / "check.json").write_text(json.dumps(check))


def trainer(name, rate, ratio):
    return {"trainer": name, "tokens_per_s": rate, "ours_to_theirs_ratio": ratio}


def test_unmeasured_figures_are_quoted_as_measured_by_hand(kept):
    quotes = GpuQuotes(kept)
    for trainer_name, ratio in BY_HAND_RATIOS.items():
        assert quotes.against(trainer_name) == pytest.approx(ratio)
    assert quotes.conditions() == "measured by hand on one H100 on 2026-11-27"
    assert {row["measured"] for row in quotes.trainer_rows()} == {"not measured"}
    [row] = quotes.rows("step")
    assert (row["name"], row["step_ms"]) == ("not measured", "n/a")


def test_kept_figures_replace_those_by_hand(kept):
    add_check(
        kept,
        trainers=[trainer("compiled", 2e5, 3.5), trainer("paper", 4e4, 17.0)],
        step=[{"step": "fa4, 64 sequences, with it", "step_ms": 50.0}],
    )
    quotes = GpuQuotes(kept)
    assert quotes.against("fastest") == 3.5
    assert quotes.against("paper") == 17.0
    assert quotes.against("defaults") == pytest.approx(BY_HAND_RATIOS["defaults"])
    assert quotes.conditions() == "measured on one h200 on 2026-12-24"
    rows = {row["name"]: row["measured"] for row in quotes.trainer_rows()}
    assert rows[WORDS["compiled"]].startswith("200,000, ours 3.5")
    [row] = quotes.rows("step")
    assert (row["name"], row["step_ms"], row["where"]) == (
        "fa4, 64 sequences, with it",
        "50.0",
        "h200, 2026-12-24",
    )


def test_every_trainer_has_words():
    assert set(WORDS) == set(TRAINERS)
