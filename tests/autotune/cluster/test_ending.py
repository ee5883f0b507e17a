import json

import pytest

from autotune.cluster.ending import MOST_FRUITLESS_STARTS, ending_of, goes_on


def put(directory, code: int, steps: int = 7, seconds: float = 1.0) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    end = {"exit_code": code, "reason": f"because of {code}", "requeue": code == 75, "steps": steps,
           "checkpoint": "step-000000007", "seconds": seconds, "finished_utc": "2026-01-01T00:00:00Z"}  # fmt: skip
    text = json.dumps(end)
    (directory / "exit.json").write_text(text)
    return text


def no_waiting(seconds):
    pass


@pytest.mark.parametrize("code", [0, 3, 70, 75, 76])
def test_the_code_is_the_runs_whatever_torchrun_returns(tmp_path, code):
    put(tmp_path, code)
    ending = ending_of(tmp_path, "", 1, sleep=no_waiting)
    assert ending.code == code
    assert f"because of {code}" in ending.words


@pytest.mark.parametrize(("job_code", "expected"), [(1, 1), (6, 6), (75, 70), (143, 143)])
def test_what_an_earlier_start_said_does_not_count(tmp_path, job_code, expected):
    said = put(tmp_path, 75)
    ending = ending_of(tmp_path, said + "\n", job_code, sleep=no_waiting)
    assert ending.code == expected
    assert "left no word" in ending.words


def test_a_run_that_left_nothing_is_never_taken_for_one_that_goes_on(tmp_path):
    assert ending_of(tmp_path / "none", "", 75, sleep=no_waiting).code == 70
    put(tmp_path, 75)
    (tmp_path / "exit.json").write_text("{")
    assert ending_of(tmp_path, "", 1, sleep=no_waiting).code == 70


def test_a_finished_run_that_is_started_again_has_nothing_new_to_say(tmp_path):
    said = put(tmp_path, 0)
    assert ending_of(tmp_path, said, 0, sleep=no_waiting).code == 0


def test_a_file_that_is_seen_late_is_waited_for(tmp_path):
    said = put(tmp_path, 75)
    assert ending_of(tmp_path, said, 1, sleep=lambda seconds: put(tmp_path, 76)).code == 76


def test_starts_that_take_no_step_are_not_repeated_for_ever(tmp_path):
    for number in range(1, MOST_FRUITLESS_STARTS):
        put(tmp_path, 75, seconds=100.0)
        assert ending_of(tmp_path, "", 1, sleep=no_waiting).code == 75
        put(tmp_path / "earlier" / str(number), 75, seconds=float(number))
    put(tmp_path, 75, seconds=100.0)
    ending = ending_of(tmp_path, "", 1, sleep=no_waiting)
    assert (ending.code, "without one more" in ending.words) == (76, True)
    put(tmp_path, 75, steps=8)
    assert ending_of(tmp_path, "", 1, sleep=no_waiting).code == 75


@pytest.mark.parametrize(("code", "expected"), [(75, 75), (0, 0), (76, 76), (3, 3)])
def test_a_later_job_of_a_chain_goes_on_only_where_there_is_something_left(tmp_path, code, expected):
    put(tmp_path, code)
    assert goes_on(tmp_path, 2).code == expected


def test_a_chain_goes_on_after_a_job_that_was_killed(tmp_path):
    assert goes_on(tmp_path, 2).code == 75
