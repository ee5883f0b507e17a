from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from autotune.show.report.names import MOST_LETTERS, named, told_apart
from tests.autotune.show.report.examples import reported, reported_run

LONG = "a-very-long-name-of-a-run-that-nobody-reads-to-its-end"


def test_names_are_as_short_as_they_can_be():
    assert told_apart([("x", "runs", "a"), ("y", "runs", "b")]) == ("a", "b")


def test_what_shares_a_name_has_the_directories_that_tell_it_apart():
    assert told_apart([("x", "runs", "r"), ("y", "runs", "r"), ("y", "runs", "s")]) == ("x/runs/r", "y/runs/r", "s")
    assert told_apart([("r",), ("x", "r")]) == ("r", "x/r")


def test_what_is_the_same_to_the_end_is_counted():
    assert told_apart([("x", "r")] * 3) == ("x/r", "x/r (2)", "x/r (3)")
    assert told_apart([("r",), ("r",), ("r (2)",)]) == ("r", "r (3)", "r (2)")


def test_long_names_keep_both_ends():
    (name,) = told_apart([(LONG,)])
    assert name == f"{LONG[:18]}…{LONG[-17:]}"
    assert len(name) == MOST_LETTERS


def test_a_name_that_says_nothing_has_one():
    assert told_apart([(), ("",)]) == ("unnamed", "unnamed (2)")


PARTS = st.lists(st.sampled_from(["a", "b", "runs", LONG, f"{LONG}2", f"x{LONG}", "\u202e", "a (2)"]), max_size=4)


@given(st.lists(PARTS, max_size=12))
def test_no_two_are_alike_and_all_are_short_and_steer_nothing(paths):
    names = told_apart(paths)
    assert len(set(names)) == len(names) == len(paths)
    assert all(len(name) <= MOST_LETTERS and name.isprintable() for name in names)


def test_profiles_and_runs_are_told_apart_from_each_other_too():
    profiles, runs = named((reported("profiles/m.toml"),), (reported_run(name="m"),))
    assert (profiles[0].title, runs[0].name) == ("profiles/m", "runs/m")
    assert named(profiles, runs) == (profiles, runs)
    assert profiles[0].path == Path("profiles/m.toml")
