from autotune.show.exploration import (
    ROW_HEADERS,
    candidate_ratio,
    exploration_lines,
    exploration_text,
    row_cells,
)
from tests.autotune.show.report.example import example_profile


def found_of(**changes):
    return example_profile("d").evidence.explore.model_copy(update=changes)


def test_every_fact_has_its_line():
    assert list(exploration_lines(found_of())) == [
        "settings of the step: 64 packed rows, bf16, compiled is not proven to be faster, so 64 packed rows, bf16 "
        "stays",
        "1.01 (0.99 to 1.03, 98 %) times the real tokens/s of 64 packed rows, bf16, by 64 packed rows, bf16, compiled",
        "loss: not checked",
        "tried: 4 of 107 other ways to train, 1 of them for one short window; 30 windows in 6 min 52 s",
        "the search stopped because nothing is expected to win more than 0.2%, which is below the noise",
        "not explored: precision: bf16 was asked for",
    ]


def test_what_there_was_nothing_to_say_of_has_no_line():
    found = found_of(equal_loss=None, left_out=[], pruned=0, candidate=found_of().unexplored)
    lines = list(exploration_lines(found))
    assert len(lines) == 3
    assert lines[1].startswith("tried: 4 of 107 other ways to train; 30 windows")


def test_a_ratio_without_bounds_says_that_windows_are_not_enough():
    assert candidate_ratio(found_of(ratio_low=None, ratio_high=None)) == "1.01 (not enough windows) times"


def test_each_trial_has_its_row():
    rows = [row_cells(row) for row in found_of().rows]
    assert {len(row) for row in rows} == {len(ROW_HEADERS)}
    assert rows[0] == ["64 packed rows, bf16", "18", "342,000", None, "ran"]
    assert rows[3][3:] == ["0.720", "pruned"]
    assert rows[4][2:] == [None, None, "crashed"]


def test_what_strangers_wrote_steers_no_terminal():
    assert "\x1b" not in exploration_text(found_of(choice="a\x1b[2Jb"))
