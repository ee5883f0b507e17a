from dataclasses import replace
from pathlib import Path

import pytest

from autotune.advice.read_context import data_facts, profile_of_run
from autotune.launch.sections import status_text
from autotune.launch.status import find_runs_and_tunings, run_status, tuning_status
from autotune.memory.estimate import assumed_contents, contents_of
from autotune.profiles.store import read_profile
from autotune.profiles.values import profile_to_toml
from autotune.trials.trial_log import TrialLog
from testbed.examples.checkpoints import end_of, header_of
from testbed.examples.profiles import but, example_profile
from testbed.examples.trials import record
from testbed.fakes import FakeHost
from testbed.simulators.worlds import World, run_of, settings
from trainer.config.resolve import profile_sha256, read_profile_tables, resolve
from trainer.data.dataset import read_manifest


def test_a_dataset_is_prepared_and_raw_files_are_told_by_kind_the_largest_first(
    make_dataset, tmp_path
):
    facts = data_facts(make_dataset([[5, 6, 7]] * 4), FakeHost())
    assert (facts.prepared, facts.raw_bytes, facts.vocab_size) == (True, 1000, 512)
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "a.jsonl").write_text('{"text": "words"}\n' * 100)
    (raw / "b.txt").write_text("words\n" * 10)
    facts = data_facts(raw, FakeHost())
    assert (facts.prepared, facts.kinds[0], facts.raw_bytes) == (
        False,
        "jsonl",
        100 * 18 + 60,
    )
    assert data_facts(tmp_path / "none", FakeHost()) is None


def test_the_profile_of_a_run_is_found_by_what_it_says_whatever_was_overridden(
    tmp_path,
):
    other, own, broken = (tmp_path / f"{name}.toml" for name in ("a", "b", "broken"))
    other.write_text(profile_to_toml(but(example_profile(), train={"seed": 7})))
    own.write_text(profile_to_toml(example_profile()))
    broken.write_text("nothing = [")
    told = resolve(own, assignments=["train.max_steps=3"], data=tmp_path).profile_sha256
    assert told == profile_sha256(read_profile_tables(own))
    world = World()
    run = run_of(world, settings(world))
    mine = replace(run, header=run.header.model_copy(update={"profile_sha256": told}))
    found = profile_of_run(mine, [other, own, broken])
    assert (found.path, found.profile) == (own, read_profile(own).profile)
    assert profile_of_run(run, [other, own, broken]) is None


def test_without_a_dataset_packed_rows_are_nearly_full_and_others_hold_a_sample():
    packed, padded = (
        assumed_contents(500, layout, 512) for layout in ("packed", "padded")
    )
    assert (
        packed.assumed,
        packed.dataset_hash,
        packed.vocab_size,
        packed.mean_samples,
    ) == (True, None, 500, 1.0)
    assert (packed.mean_non_padding_tokens, packed.documents) == (0.997 * 512, 4.0)
    assert (padded.mean_non_padding_tokens, padded.documents) == (512, 1.0)


def test_a_dataset_is_laid_out_and_named(patterned_dataset):
    found = contents_of(patterned_dataset, "packed", 64)
    manifest = read_manifest(patterned_dataset)
    assert not found.assumed
    assert (found.dataset_hash, found.vocab_size) == (
        manifest.dataset_hash,
        manifest.vocab_size,
    )
    assert 32 < found.mean_non_padding_tokens <= 64
    assert found.documents >= found.mean_samples > 1


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
        (75, {"train-one": ("12", "PENDING")}, "saved, run again to resume, requeued"),
        (76, {}, "gave up"),
        (3, None, "exited with code 3"),
    ],
)
def test_a_runs_state_follows_from_its_record_and_its_job_and_the_text_says_why_it_ended(
    run, code, jobs, state
):
    if code is not None:
        (run / "exit.json").write_text(
            end_of(code, reason="so it is").model_dump_json()
        )
    found = run_status(run, jobs)
    assert (found.state, found.max_steps, found.job) == (
        state,
        50,
        (jobs or {}).get("train-one", (None,))[0],
    )
    text = status_text([found], [], asked=jobs is not None)
    assert state in text
    assert ("so it is" in text) == (code in (75, 76, 3))
    assert ("SLURM cannot be queried" in text) == (jobs is None)


def test_a_run_that_has_not_begun_and_one_that_cannot_be_read_are_told_apart(
    tmp_path, run
):
    (tmp_path / "runs" / "two").mkdir()
    assert (
        run_status(tmp_path / "runs" / "two", {"train-two": ("13", "PENDING")}).state
        == "queued"
    )
    assert run_status(tmp_path / "runs" / "two", None).state == "not started"
    (run / "run.json").write_text("{")
    assert run_status(run, None).state == "unreadable"


def test_a_tuning_is_told_by_its_ledger_and_without_names_everything_here_is_found(
    tmp_path, run
):
    runs, reports = tmp_path / "runs", tmp_path / "reports"
    place = reports / "p"
    TrialLog(place / "trials", "w").append(record().model_dump(mode="json"))
    with next((place / "trials").glob("*.jsonl")).open("a") as file:
        file.write("torn")
    found = tuning_status(place)
    assert (found.trials, found.outcomes, found.newest, found.corrupt_lines) == (
        1,
        {"measured": 1},
        "x",
        1,
    )
    (reports / "jobs").mkdir()
    for named in ([], [place, run]):
        assert find_runs_and_tunings(named, runs, reports) == ([run], [place])
    assert status_text([], [], asked=True) == "no runs and no tunings found"
