from pathlib import Path

import pytest

from autotune.search.standing import find_standings, standing_of_run, standing_of_tuning
from autotune.show.tuning import standings_text
from autotune.store import Ledger
from tests.autotune.trials import record
from tests.trainer.checkpoints import end_of, header_of


@pytest.fixture
def run(tmp_path) -> Path:
    place = tmp_path / "runs" / "one"
    place.mkdir(parents=True)
    header = header_of(job="slurm-12").model_copy(update={"config": {"max_steps": 50}})
    (place / "run.json").write_text(header.model_dump_json())
    return place


@pytest.mark.parametrize(
    ("code", "jobs", "state"),
    [
        (None, {"train-one": ("12", "RUNNING")}, "running"),
        (None, {}, "killed"),
        (None, None, "running, or killed"),
        (0, {}, "finished"),
        (75, {"train-one": ("12", "PENDING")}, "saved, goes on when started again, queued again"),
        (76, {}, "gave up"),
        (3, None, "ended with code 3"),
    ],
)
def test_a_runs_state_follows_from_its_record_and_its_job_and_the_text_says_why_it_ended(run, code, jobs, state):
    if code is not None:
        (run / "exit.json").write_text(end_of(code, reason="so it is").model_dump_json())
    found = standing_of_run(run, jobs)
    assert (found.state, found.max_steps) == (state, 50)
    assert found.job == (jobs or {}).get("train-one", (None,))[0]
    text = standings_text([found], [], asked=jobs is not None)
    assert state in text
    assert ("so it is" in text) == (code in (75, 76, 3))
    assert ("SLURM cannot be asked" in text) == (jobs is None)


def test_a_run_that_has_not_begun_and_one_that_cannot_be_read_are_told_apart(tmp_path, run):
    (tmp_path / "runs" / "two").mkdir()
    assert standing_of_run(tmp_path / "runs" / "two", {"train-two": ("13", "PENDING")}).state == "queued"
    assert standing_of_run(tmp_path / "runs" / "two", None).state == "not begun"
    (run / "run.json").write_text("{")
    assert standing_of_run(run, None).state == "cannot be read"


def test_a_tuning_is_told_by_its_ledger_and_without_names_everything_here_is_found(tmp_path, run):
    runs, reports = tmp_path / "runs", tmp_path / "reports"
    place = reports / "p"
    Ledger(place / "ledger", "w").append(record().model_dump(mode="json"))
    with next((place / "ledger").glob("*.jsonl")).open("a") as file:
        file.write("torn")
    found = standing_of_tuning(place)
    assert (found.trials, found.outcomes, found.newest, found.damaged_lines) == (1, {"measured": 1}, "x", 1)
    (reports / "jobs").mkdir()
    assert find_standings([], runs, reports) == find_standings([place, run], runs, reports) == ([run], [place])
    assert standings_text([], [], asked=True) == "no runs and no tunings here"
