from dataclasses import replace
from pathlib import Path

import pytest

from autotune.advice.read_context import data_facts, profile_of_run
from autotune.launch.sections import status_text
from autotune.launch.status import find_runs_and_tunings, run_status, tuning_status
from autotune.profiles.store import read_profile
from autotune.profiles.toml_file import profile_to_toml
from autotune.subjects.mlm.memory.contents import assumed_contents, contents_of
from autotune.trials.trial_log import TrialLog
from testbed.examples.checkpoints import exit_of, header_of
from testbed.examples.profiles import but, example_profile
from testbed.examples.trials import record
from testbed.fakes import FakeHost
from testbed.simulators.worlds import World, run_of, settings
from trainer.config.resolve import resolve
from trainer.formats.manifest import read_manifest
from trainer.formats.profile_file import profile_sha256, read_profile_tables


def test_recognises_prepared_dataset(make_dataset, tmp_path):
    facts = data_facts(make_dataset([[5, 6, 7]] * 4), FakeHost())
    assert (facts.prepared, facts.raw_bytes, facts.vocab_size) == (True, 1000, 512)


def test_recognises_raw_files_by_kind(tmp_path):
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


def test_no_data_has_no_facts(tmp_path):
    assert data_facts(tmp_path / "none", FakeHost()) is None


def test_finds_profile_of_a_run(tmp_path):
    other_seed, default, broken = (
        tmp_path / f"{name}.toml" for name in ("a", "b", "broken")
    )
    other_seed.write_text(profile_to_toml(but(example_profile(), train={"seed": 7})))
    default.write_text(profile_to_toml(example_profile()))
    broken.write_text("nothing = [")
    sha256 = resolve(
        default, assignments=["train.max_steps=3"], data=tmp_path
    ).profile_sha256
    assert sha256 == profile_sha256(read_profile_tables(default))
    world = World()
    run = run_of(world, settings(world))
    mine = replace(run, header=run.header.model_copy(update={"profile_sha256": sha256}))
    profile = profile_of_run(mine, [other_seed, default, broken])
    assert (profile.path, profile.profile) == (default, read_profile(default).profile)
    assert profile_of_run(run, [other_seed, default, broken]) is None


def test_assumes_contents_without_a_dataset():
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


def test_reads_contents_of_a_dataset(patterned_dataset):
    contents = contents_of(patterned_dataset, "packed", 64)
    manifest = read_manifest(patterned_dataset)
    assert not contents.assumed
    assert (contents.dataset_hash, contents.vocab_size) == (
        manifest.dataset_hash,
        manifest.vocab_size,
    )
    assert 32 < contents.mean_non_padding_tokens <= 64
    assert contents.documents >= contents.mean_samples > 1


@pytest.fixture
def run_directory(tmp_path) -> Path:
    directory = tmp_path / "runs" / "one"
    directory.mkdir(parents=True)
    header = header_of(job="slurm-12").model_copy(update={"config": {"max_steps": 50}})
    (directory / "run.json").write_text(header.model_dump_json())
    return directory


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
    ids=["running", "killed", "unknown", "finished", "requeued", "gave up", "failed"],
)
def test_state_follows_from_record_and_job(run_directory, code, jobs, state):
    if code is not None:
        (run_directory / "exit.json").write_text(
            exit_of(code, reason="so it is").model_dump_json()
        )
    status = run_status(run_directory, jobs)
    assert (status.state, status.max_steps, status.job) == (
        state,
        50,
        (jobs or {}).get("train-one", (None,))[0],
    )
    text = status_text([status], [], has_queue=jobs is not None)
    assert state in text
    assert ("so it is" in text) == (code in (75, 76, 3))
    assert ("SLURM cannot be queried" in text) == (jobs is None)


def test_run_without_record_is_queued(tmp_path, run_directory):
    (tmp_path / "runs" / "two").mkdir()
    assert (
        run_status(tmp_path / "runs" / "two", {"train-two": ("13", "PENDING")}).state
        == "queued"
    )
    assert run_status(tmp_path / "runs" / "two", None).state == "not started"


def test_broken_record_is_unreadable(run_directory):
    (run_directory / "run.json").write_text("{")
    assert run_status(run_directory, None).state == "unreadable"


def test_reads_tuning_from_its_trial_log(tmp_path, run_directory):
    runs = tmp_path / "runs"
    reports = tmp_path / "reports"
    tuning = reports / "p"
    TrialLog(tuning / "trials", "w").append(record().model_dump(mode="json"))
    with next((tuning / "trials").glob("*.jsonl")).open("a") as file:
        file.write("torn")
    status = tuning_status(tuning)
    assert (status.trials, status.outcomes, status.newest, status.corrupt_lines) == (
        1,
        {"measured": 1},
        "x",
        1,
    )
    (reports / "jobs").mkdir()
    for paths in ([], [tuning, run_directory]):
        assert find_runs_and_tunings(paths, runs, reports) == (
            [run_directory],
            [tuning],
        )
    assert status_text([], [], has_queue=True) == "no runs and no tunings found"
