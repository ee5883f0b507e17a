import json
from pathlib import Path

import pytest

from autotune.core.outcome import Measured
from autotune.core.trial import Trial
from autotune.search.standing import find_standings, standing_of_run, standing_of_tuning
from autotune.search.trials import TrialRunner
from autotune.show.tuning import standings_text
from autotune.store import Ledger
from tests.fakes import FakeClock, FakeMachine

HEADER = {
    "schema_version": 3, "name": "tiny", "attempt": 1, "resumed_from": None, "resumed_step": 0, "job": "slurm-12",
    "started_utc": "2026-01-01T00:00:00Z", "config": {"max_steps": 50}, "sources": {}, "config_sha256": "c",
    "profile_sha256": "p", "dataset_hash": "d", "world_size": 2, "accumulation_steps": 1,
    "rows_per_microbatch_per_rank": 2, "global_batch_rows": 4, "parameters": 10, "layout": "packed",
    "attention": "sdpa", "attention_reason": "so", "recipe_changes": [], "device": "cpu", "peak_flops_per_s": None,
    "versions": {},
}  # fmt: skip


@pytest.fixture
def run(tmp_path) -> Path:
    place = tmp_path / "runs" / "one"
    place.mkdir(parents=True)
    (place / "run.json").write_text(json.dumps(HEADER))
    return place


def put_exit(run: Path, code: int) -> None:
    end = {"exit_code": code, "reason": "so it is", "requeue": code == 75, "steps": 7, "checkpoint": None,
           "seconds": 1.0, "finished_utc": "2026-01-01T00:00:00Z"}  # fmt: skip
    (run / "exit.json").write_text(json.dumps(end))


@pytest.mark.parametrize(
    ("code", "jobs", "state"),
    [
        (None, {"train-one": ("12", "RUNNING")}, "running"),
        (None, {}, "killed"),
        (None, None, "running, or killed"),
        (0, {}, "finished"),
        (75, {"train-one": ("12", "PENDING")}, "saved, goes on when started again, queued again"),
        (76, {}, "gave up"),
        (3, {}, "ended with code 3"),
    ],
)
def test_a_runs_state_follows_from_its_record_and_its_job(run, code, jobs, state):
    if code is not None:
        put_exit(run, code)
    found = standing_of_run(run, jobs)
    assert found.state == state
    assert found.max_steps == 50
    assert found.job == (jobs or {}).get("train-one", (None,))[0]


def test_a_run_that_has_not_begun_and_one_that_cannot_be_read_are_told_apart(tmp_path, run):
    (tmp_path / "runs" / "two").mkdir()
    assert standing_of_run(tmp_path / "runs" / "two", {"train-two": ("13", "PENDING")}).state == "queued"
    assert standing_of_run(tmp_path / "runs" / "two", None).state == "not begun"
    (run / "run.json").write_text("{")
    assert standing_of_run(run, None).state == "cannot be read"


def test_a_tuning_is_told_by_its_ledger(tmp_path):
    place = tmp_path / "reports" / "p"
    runner = TrialRunner(
        machine=FakeMachine(lambda trial: Measured(figures={"x": 1.0})),
        ledger=Ledger(place / "ledger", "w"), site="s", clock=FakeClock(),
    )  # fmt: skip
    runner.run(Trial(job="trace", measured={"n": 1}, timeout_s=1.0), "first")
    with next((place / "ledger").glob("*.jsonl")).open("a") as file:
        file.write("torn")
    found = standing_of_tuning(place)
    assert (found.trials, found.outcomes, found.newest, found.damaged_lines) == (1, {"measured": 1}, "first", 1)


def test_without_names_everything_here_is_found(tmp_path, run):
    (tmp_path / "reports" / "p" / "ledger").mkdir(parents=True)
    (tmp_path / "reports" / "jobs").mkdir()
    runs, reports = tmp_path / "runs", tmp_path / "reports"
    assert find_standings([], runs, reports) == ([run], [reports / "p"])
    assert find_standings([reports / "p", run], runs, reports) == ([run], [reports / "p"])


def test_the_text_says_why_a_run_ended_and_whether_slurm_was_asked(run):
    put_exit(run, 76)
    text = standings_text([standing_of_run(run, None)], [], asked=False)
    assert "gave up" in text
    assert "so it is" in text
    assert "SLURM cannot be asked" in text
    assert standings_text([], [], asked=True) == "no runs and no tunings here"
