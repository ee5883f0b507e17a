from pathlib import Path

from autotune.core.evidence import BaselineEvidence, RecipeRow
from autotune.show.baseline import baseline_text

PAPER = RecipeRow(
    name="paper-style", differences=["head: dense instead of masked"], real_tokens_per_s=[240.0, 250.0, 260.0],
    ratio_to_tuned=0.25, ratio_low=0.2, ratio_high=0.5, data_wait_share=0.01, outcome="ran",
)  # fmt: skip
DEFAULT = RecipeRow(name="default", differences=[], real_tokens_per_s=[], outcome="out of memory, even with one row")
TUNED = RecipeRow(
    name="tuned", differences=[], real_tokens_per_s=[1000.0] * 3, ratio_to_tuned=1.0, data_wait_share=0.0, outcome="ran"
)
FOUND = BaselineEvidence(rows=[PAPER, DEFAULT, TUNED], local_ranks=2, window_s=2.0, windows=6, seconds=60.0)


def lines(found: BaselineEvidence) -> list[str]:
    return baseline_text(found, Path("p.toml")).splitlines()


def test_the_gain_is_told_the_other_way_round_with_its_bounds():
    assert "tuned, against paper-style: 4.00 (2.00 to 5.00, 95 %) times the real tokens per second" in lines(FOUND)
    single = PAPER.model_copy(update={"ratio_low": None, "ratio_high": None})
    told = lines(FOUND.model_copy(update={"rows": [single, TUNED]}))
    assert "tuned, against paper-style: 4.00 (not enough windows) times the real tokens per second" in told


def test_what_did_not_run_says_why_and_has_no_figures():
    told = lines(FOUND)
    assert "tuned, against default: n/a (out of memory, even with one row)" in told
    (row,) = [line for line in told if line.startswith("default  ")]
    assert row.split() == ["default", *["n/a"] * 4, "0", "out", "of", "memory,", "even", "with", "one", "row"]


def test_each_recipe_says_how_it_differs_and_the_tuned_one_needs_no_bounds():
    told = lines(FOUND)
    assert told[told.index("paper-style:") + 1] == "  head: dense instead of masked"
    assert "default: nothing differs from the tuned settings" in told
    (row,) = [line for line in told if line.startswith("tuned  ")]
    assert row.split() == ["tuned", "1,000", "1.000", "1", "0.0", "%", "3", "ran"]


def test_what_to_run_next_comes_last():
    assert lines(FOUND)[-2:] == ["profile: p.toml", "next: autotune report build p.toml"]
