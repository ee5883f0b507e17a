import errno
import os
from pathlib import Path

import pytest

from testbed.examples.checkpoints import (
    exit_of,
    failing_method,
    header_of,
    release_run,
    resolved_of,
    write_checkpoint,
    write_run,
)
from tests.trainer.oracles import SHAPES, config_of
from trainer.checkpoint.format import CHECKPOINTS_DIRECTORY, prune
from trainer.checkpoint.job import job_name
from trainer.checkpoint.resume import Start, choose_run
from trainer.config.train_config import (
    CheckpointSettings,
    DataSettings,
    HealthSettings,
    ModelSettings,
)
from trainer.errors import BadConfig, DiskTrouble, TrainingFailed
from trainer.health.watchdog import REQUEUE
from trainer.record.run_record import read_run

CONFIG = config_of(max_steps=20)
LOWER_RATE = config_of(max_steps=20, learning_rate=1e-5)
"""The configuration with a setting that may change on resume."""
GAVE_UP = TrainingFailed.exit_code
SHARE = "rank-00000.safetensors"
SLURM = {"SLURM_JOB_ID": "17"}
RESTARTED_SLURM = SLURM | {"SLURM_RESTART_COUNT": "1"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
RESTARTED_TORCHRUN = TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"}

RELU_MODEL = ModelSettings(name="m", config=SHAPES["bert"] | {"hidden_act": "relu"})
MODEL_WITHOUT_A_KEY = ModelSettings(
    name="m", config=SHAPES["bert"], null_keys=["classifier_dropout"]
)
OTHER_DATASET = DataSettings(dataset_hash="e" * 64)
OTHER_RECIPE = {  # every value differs from that of ``CONFIG``
    "learning_rate": 1e-3,
    "schedule": "cosine",
    "warmup_steps": 3,
    "decay_share": 0.2,
    "final_learning_rate_share": 0.1,
    "weight_decay": 0.1,
    "adam_beta1": 0.8,
    "adam_beta2": 0.98,
    "adam_epsilon": 1e-6,
    "max_grad_norm": 1.0,
    "max_steps": 30,
    "masking_probability": 0.3,
    "attention_dropout": 0.1,
    "precision": "bf16",
    "residual_dtype": "bf16",
    "float8": "rowwise",
    "tf32": False,
    "max_epochs": 3,
}


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    """Directory without runs, in which a job looks for its own in ``runs``."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


@pytest.fixture
def run(tmp_path):
    """A run of 20 steps that was killed after its 10th.

    It has checkpoints of steps 5 and 10.
    """
    return write_run(tmp_path / "r", CONFIG)


def choose(out, resume="auto", config=CONFIG, environment=None):
    """Return the writer and the start that ``choose_run`` chooses.

    The run is released, as at the end of a process, so that it can be opened again.
    """
    opened = []
    try:
        return choose_run(
            out,
            str(resume),
            resolved_of(config),
            environment or {},
            on_open=opened.append,
        )
    finally:
        for writer in opened:
            release_run(writer)


def resume_by_out(run, config):
    """Resume a run as ``--out RUN`` does."""
    return choose(run, "auto", config)


def resume_by_path(run, config):
    """Resume a run as ``--resume RUN`` does."""
    return choose(None, run, config)


def start_another_run(run, config):
    """Start a run from another one, as ``--resume RUN --out OTHER`` does."""
    return choose(run.parent / "other", run, config)


def write_run_of_job(name, job, config=CONFIG):
    """Write a run of a job where the job looks for its own, in ``runs``."""
    return write_run(Path("runs") / name, config, job=job)


def assert_rejected(out, resume, message):
    """Check that a start is rejected with a next step."""
    with pytest.raises(BadConfig, match=message) as raised:
        choose(out, resume)
    assert raised.value.next_step
    # ``autotune train`` has no option ``--resume never``.
    assert "--resume never" not in raised.value.next_step


def messages_of(start):
    return [event.message for event in start.events]


def checkpoint_of(run, step):
    return run / CHECKPOINTS_DIRECTORY / f"step-{step:09d}"


def corrupt(*checkpoints):
    """Truncate the file of tensors in each checkpoint."""
    for path in checkpoints:
        (path / SHARE).write_bytes(b"short")


def names_in(run):
    """Return the names of all checkpoints of a run, also of those put aside."""
    return sorted(path.name for path in (run / CHECKPOINTS_DIRECTORY).glob("step-*"))


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_new_run_is_in_the_requested_directory(tmp_path, resume):
    writer, start = choose(tmp_path / "r", resume)
    assert (writer.directory, writer.attempt) == (tmp_path / "r", 1)
    assert start == Start()


def test_new_run_is_named_by_model_and_time():
    writer, _ = choose(None)
    assert writer.directory.parts[0] == "runs"
    assert writer.directory.name.endswith("Z-m")


def test_auto_resumes_from_the_newest_checkpoint(run):
    writer, start = choose(run)
    assert (writer.directory, writer.attempt) == (run, 2)
    assert start.checkpoint == checkpoint_of(run, 10)
    assert (start.origin, start.manifest.state.step) == ("step-000000010", 10)
    assert messages_of(start) == ["resumed from step-000000010"]


def test_existing_run_is_rejected_unless_resumed(run):
    partial = run / CHECKPOINTS_DIRECTORY / ".step-000000015.attempt-1.partial"
    partial.mkdir()
    with pytest.raises(BadConfig, match="already contains a run"):
        choose(run, "never")
    assert partial.exists()


def test_resume_removes_unfinished_checkpoints(run):
    partial = run / CHECKPOINTS_DIRECTORY / ".step-000000015.attempt-1.partial"
    partial.mkdir()
    choose(run)
    assert not partial.exists()


def test_run_without_a_checkpoint_starts_from_scratch(tmp_path):
    writer, start = choose(write_run(tmp_path / "r", CONFIG, steps=()))
    assert (writer.attempt, start.checkpoint) == (2, None)
    assert start.events[0].level == "warning"
    assert "no intact checkpoint" in messages_of(start)[0]


@pytest.fixture
def runs_of_jobs():
    """Runs of several jobs, of which ``own`` belongs to ``SLURM``."""
    write_run_of_job("own", "slurm-17")
    write_run_of_job("other-job", "slurm-18")
    write_run_of_job("no-job", "")
    Path("runs/corrupt").mkdir()
    Path("runs/corrupt/run.json").write_text("{")


@pytest.mark.usefixtures("runs_of_jobs")
def test_restarted_slurm_job_resumes_its_run():
    assert job_name(SLURM) == "slurm-17"
    writer, start = choose(None, environment=RESTARTED_SLURM)
    assert (writer.directory.name, start.manifest.state.step) == ("own", 10)


@pytest.mark.usefixtures("runs_of_jobs")
@pytest.mark.parametrize(
    "environment",
    [
        pytest.param(SLURM, id="first start"),
        pytest.param({}, id="no job"),
        pytest.param({"SLURM_RESTART_COUNT": "1"}, id="no job number"),
        pytest.param(
            {"SLURM_JOB_ID": "19", "SLURM_RESTART_COUNT": "1"}, id="other job"
        ),
    ],
)
def test_other_starts_do_not_resume_its_run(environment):
    _, start = choose(None, environment=environment)
    assert start.checkpoint is None


@pytest.mark.usefixtures("runs_of_jobs")
@pytest.mark.parametrize(
    ("out", "resume"),
    [
        pytest.param(None, "never", id="--resume never"),
        pytest.param(Path("out"), "auto", id="--out"),
    ],
)
def test_options_take_precedence_over_the_job(out, resume):
    _, start = choose(out, resume, environment=RESTARTED_SLURM)
    assert start.checkpoint is None


@pytest.fixture
def runs_of_one_job():
    """Runs of the same job, oldest first, which is not the order of their names."""
    configs = {"z-oldest": CONFIG, "a-newer": CONFIG, "m-newest": LOWER_RATE}
    for modified_s, (name, config) in enumerate(configs.items()):
        run = write_run_of_job(name, "slurm-17", config)
        os.utime(run / "run.json", (modified_s, modified_s))


@pytest.mark.usefixtures("runs_of_one_job")
@pytest.mark.parametrize(
    ("config", "name"),
    [
        pytest.param(CONFIG, "a-newer", id="two runs"),
        pytest.param(LOWER_RATE, "m-newest", id="one run"),
    ],
)
def test_job_resumes_its_newest_run_with_its_configuration(config, name):
    writer, _ = choose(None, config=config, environment=RESTARTED_SLURM)
    assert writer.directory.name == name


@pytest.mark.usefixtures("runs_of_one_job")
def test_job_with_another_configuration_starts_another_run():
    config = config_of(max_steps=30)
    _, start = choose(None, config=config, environment=RESTARTED_SLURM)
    assert start.checkpoint is None


def test_restarted_torchrun_resumes_its_run():
    write_run_of_job("own", job_name(TORCHRUN))
    _, first_start = choose(None, environment=TORCHRUN)
    assert first_start.checkpoint is None
    writer, start = choose(None, environment=RESTARTED_TORCHRUN)
    assert (writer.directory.name, start.manifest.state.step) == ("own", 10)


@pytest.fixture
def finished_run(tmp_path):
    """A run that has taken all of its 20 steps."""
    run_exit = exit_of(0, steps=20)
    return write_run(tmp_path / "r", CONFIG, steps=(10, 20), run_exit=run_exit)


def test_finished_run_is_unchanged(finished_run):
    writer, start = choose(finished_run)
    assert start.finished == exit_of(0, steps=20)
    assert start.checkpoint is None
    assert read_run(finished_run).header.attempt == 1
    assert writer.directory == finished_run


def test_finished_run_resumes_with_more_steps(finished_run):
    # A start with the same steps, which only writes its exit, changes nothing for it.
    writer, _ = choose(finished_run)
    writer.finish(exit_of(0, steps=20))
    _, start = choose(finished_run, config=config_of(max_steps=30))
    assert (start.finished, start.manifest.state.step) == (None, 20)
    assert "train.max_steps is now 30, it was 20" in messages_of(start)[0]


def test_run_that_was_signalled_resumes(tmp_path):
    run = write_run(tmp_path / "r", CONFIG, steps=(5, 20), run_exit=exit_of(REQUEUE))
    _, start = choose(run)
    assert start.finished is None
    assert start.manifest.state.step == 20
    assert not start.gave_up


@pytest.fixture
def run_that_gave_up(tmp_path):
    """A run that gave up, whose first checkpoint is good."""
    run_exit = exit_of(GAVE_UP, reason="nothing helped")
    return write_run(tmp_path / "r", CONFIG, run_exit=run_exit, good=False)


def test_run_that_gave_up_rejects_the_same_settings(run_that_gave_up):
    for _ in range(2):  # the first try changes nothing
        with pytest.raises(
            TrainingFailed,
            match=r"gave up before with the same settings: nothing helped",
        ):
            choose(run_that_gave_up)


def test_gave_up_run_resumes_from_a_good_checkpoint(run_that_gave_up):
    writer, start = choose(run_that_gave_up, config=LOWER_RATE)
    assert (writer.attempt, start.manifest.state.step) == (2, 5)
    assert "train.learning_rate is now 1e-05, it was 0.0001" in messages_of(start)[0]
    assert (start.gave_up, start.events[0].level) == (True, "warning")


def test_later_starts_resume_from_newer_checkpoints(run_that_gave_up):
    # The checkpoint of step 10, from before the run gave up, must not seem the newest.
    writer, _ = choose(run_that_gave_up, config=LOWER_RATE)
    writer.start(header_of(LOWER_RATE))
    root = run_that_gave_up / CHECKPOINTS_DIRECTORY
    for step in (6, 7):
        write_checkpoint(root, step, config=LOWER_RATE.model_dump(mode="json"))
        prune(root, keep_last=2, keep_every_steps=None)
    _, start = choose(run_that_gave_up, config=LOWER_RATE)
    assert start.manifest.state.step == 7


def test_corrupt_newest_checkpoint_is_put_aside(run):
    root = run / CHECKPOINTS_DIRECTORY
    corrupt(checkpoint_of(run, 10))
    _, start = choose(run)
    assert start.manifest.state.step == 5
    put_aside = root / "step-000000010.corrupt-2"
    assert (put_aside / SHARE).read_bytes() == b"short"
    assert (root / "latest").read_text() == "step-000000005\n"


def test_corrupt_checkpoint_is_reported_once(run):
    corrupt(checkpoint_of(run, 10))
    _, start = choose(run)
    assert [event.level for event in start.events] == ["error", "info"]
    assert "step-000000010 is corrupt and is skipped: " in messages_of(start)[0]
    assert "5 bytes, expected 1,024" in messages_of(start)[0]
    _, next_start = choose(run)
    assert messages_of(next_start) == ["resumed from step-000000005"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        pytest.param("model", RELU_MODEL, r"train\.model\.config ", id="model.config"),
        pytest.param(
            "model",
            MODEL_WITHOUT_A_KEY,
            r"train\.model\.null_keys ",
            id="model.null_keys",
        ),
        ("seq_length_tokens", 32, r"train\.seq_length_tokens "),
        ("layout", "padded", r"train\.layout "),
        ("global_batch_size", 16, r"train\.global_batch_size "),
        ("global_batch_tokens", 512, r"train\.global_batch_tokens "),
        ("global_batch_samples", 8, r"train\.global_batch_samples "),
        ("seed", 1, r"train\.seed "),
        pytest.param(
            "data", OTHER_DATASET, "hash is d…, not eeeeeeeeeeee", id="dataset"
        ),
    ],
)
@pytest.mark.parametrize(
    "start",
    [
        pytest.param(resume_by_out, id="run as --out"),
        pytest.param(resume_by_path, id="run as --resume"),
        pytest.param(start_another_run, id="another run"),
    ],
)
def test_settings_of_weights_or_position_cannot_change(run, key, value, message, start):
    files = sorted(run.rglob("*"))
    with pytest.raises(BadConfig, match=message) as raised:
        start(run, config_of(max_steps=20, **{key: value}))
    assert "start from scratch" in raised.value.next_step
    assert sorted(run.rglob("*")) == files
    assert not (run.parent / "other").exists()


def test_changes_of_the_recipe_are_reported(run):
    changed = config_of(**OTHER_RECIPE, health=HealthSettings(on_spike="rollback"))
    _, start = choose(run, config=changed)
    (event,) = start.events
    assert event.level == "warning"
    old_settings = CONFIG.model_dump()
    settings = changed.model_dump()
    for key in OTHER_RECIPE:
        change = f"train.{key} is now {settings[key]}, it was {old_settings[key]}"
        assert change in event.message
    assert "train.health.on_spike is now rollback, it was warn" in event.message


def test_changes_without_effect_on_results_are_not_reported(run):
    changed = config_of(
        max_steps=20,
        micro_batch_size=2,
        log_interval_steps=5,
        checkpoint=CheckpointSettings(interval_steps=3),
        data=DataSettings(num_workers=2),
    )
    _, start = choose(run, config=changed)
    assert messages_of(start) == ["resumed from step-000000010"]


with_or_without_out = pytest.mark.parametrize(
    "with_out",
    [pytest.param(False, id="without --out"), pytest.param(True, id="with --out")],
)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("", id="run"),
        pytest.param("checkpoints", id="directory of checkpoints"),
        pytest.param("checkpoints/step-000000010", id="newest checkpoint"),
    ],
)
@with_or_without_out
def test_path_resumes_its_run(run, path, with_out):
    writer, start = choose(run if with_out else None, run / path)
    assert (writer.directory, start.manifest.state.step) == (run, 10)


@pytest.mark.parametrize(
    ("path", "step"),
    [
        pytest.param("", 10, id="newest of a run"),
        pytest.param("checkpoints/step-000000005", 5, id="older checkpoint"),
    ],
)
def test_another_run_starts_from_a_checkpoint(tmp_path, path, step):
    # How the run ended is of no importance to another one.
    run = write_run(tmp_path / "r", CONFIG, run_exit=exit_of(GAVE_UP))
    writer, start = choose(tmp_path / "other", run / path)
    assert (writer.directory, writer.attempt) == (tmp_path / "other", 1)
    checkpoint = checkpoint_of(run, step)
    assert (start.checkpoint, start.manifest.state.step) == (checkpoint, step)
    assert start.origin == str(checkpoint)
    assert messages_of(start) == [f"started from {checkpoint}"]


def test_another_run_skips_a_corrupt_checkpoint(run, tmp_path):
    corrupt(checkpoint_of(run, 10))
    _, start = choose(tmp_path / "other", run)
    assert start.manifest.state.step == 5
    assert checkpoint_of(run, 10).is_dir()  # it stays in its run
    assert "corrupt and is skipped" in messages_of(start)[0]


def test_rejects_corrupt_checkpoint_by_path(run, tmp_path):
    corrupt(checkpoint_of(run, 10))
    with pytest.raises(BadConfig, match="the checkpoint is corrupt"):
        choose(tmp_path / "other", checkpoint_of(run, 10))
    assert not (tmp_path / "other").exists()


def test_rejects_path_without_a_checkpoint(tmp_path):
    assert_rejected(None, tmp_path / "nowhere", "no checkpoint found there")


def test_rejects_directory_of_another_run(run, tmp_path):
    other = write_run(tmp_path / "other", CONFIG)
    assert_rejected(other, run, "already contains a run")


def test_rejects_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    assert_rejected(tmp_path / "file" / "r", "auto", "cannot write")


def test_rejects_run_without_checkpoints_as_origin(tmp_path):
    empty = write_run(tmp_path / "empty", CONFIG, steps=())
    (empty / CHECKPOINTS_DIRECTORY).mkdir()
    assert_rejected(tmp_path / "other", empty, "has no intact checkpoint")


@with_or_without_out
def test_rejects_older_checkpoint_of_its_own_run(run, with_out):
    assert_rejected(
        run if with_out else None,
        checkpoint_of(run, 5),
        "has newer checkpoints than step-000000005",
    )


@pytest.mark.parametrize(
    ("method", "name"),
    [
        pytest.param("open", "manifest.json", id="manifest"),
        pytest.param("open", SHARE, id="tensors"),
        pytest.param("iterdir", CHECKPOINTS_DIRECTORY, id="directory"),
    ],
)
def test_unreachable_checkpoints_stay_for_the_next_start(
    run, monkeypatch, method, name
):
    opened = []
    with monkeypatch.context() as patch:
        patch.setattr(Path, method, failing_method(name, errno.ESTALE, method))
        with pytest.raises(DiskTrouble) as raised:
            choose_run(run, "auto", resolved_of(CONFIG), {}, on_open=opened.append)
    (writer,) = opened  # so that the exit of that start is recorded
    assert (writer.directory, writer.attempt) == (run, 2)
    release_run(writer)
    assert raised.value.exit_code == REQUEUE
    assert names_in(run) == ["step-000000005", "step-000000010"]
    _, start = choose(run)
    assert start.manifest.state.step == 10


def test_run_with_only_corrupt_checkpoints_never_restarts(run):
    corrupt(checkpoint_of(run, 5), checkpoint_of(run, 10))
    for _ in range(2):  # as torchrun with --max-restarts does
        with pytest.raises(BadConfig, match="all 2 checkpoints of") as raised:
            choose(run)
        assert "another --out" in raised.value.next_step
    assert names_in(run) == ["step-000000005.corrupt-2", "step-000000010.corrupt-2"]


def test_run_without_a_good_checkpoint_starts_from_scratch(tmp_path):
    run = write_run(tmp_path / "r", CONFIG, steps=(), run_exit=exit_of(GAVE_UP))
    for step in (5, 10):
        write_checkpoint(
            run / CHECKPOINTS_DIRECTORY,
            step,
            good=False,
            config=CONFIG.model_dump(mode="json"),
        )
    writer, start = choose(run, config=LOWER_RATE)
    assert (writer.attempt, start.checkpoint, start.manifest) == (2, None, None)
    assert names_in(run) == ["step-000000005.given-up-2", "step-000000010.given-up-2"]
    assert start.events[-1].level == "warning"
    assert messages_of(start) == [
        f"{run} has no good checkpoint; starting from scratch"
    ]


@pytest.fixture
def origin(run):
    """Checkpoint from which ``other_run`` started."""
    return checkpoint_of(run, 5)


@pytest.fixture
def other_run(origin, tmp_path):
    """A run that started from ``origin``, and has no checkpoint of its own."""
    other_run = tmp_path / "other"
    writer, start = choose(other_run, origin)
    writer.start(header_of(CONFIG, resumed_from=start.origin, resumed_step=5))
    return other_run


def test_run_without_checkpoints_starts_from_its_origin_again(origin, other_run):
    for attempt, resume in ((2, "auto"), (3, origin), (4, "auto")):
        writer, start = choose(other_run, resume)
        assert (writer.directory, writer.attempt) == (other_run, attempt)
        assert (start.checkpoint, start.manifest.state.step) == (origin, 5)
        assert start.from_other_run
        assert start.origin == str(origin)
        writer.start(header_of(CONFIG, resumed_from=start.origin, resumed_step=5))
    assert "starting again from" in messages_of(start)[0]


def test_rejects_start_from_a_corrupt_origin(origin, other_run):
    corrupt(origin)
    with pytest.raises(BadConfig, match="the checkpoint is corrupt"):
        choose(other_run)


def test_own_checkpoints_take_precedence_over_the_origin(origin, other_run):
    write_checkpoint(
        other_run / CHECKPOINTS_DIRECTORY, 6, config=CONFIG.model_dump(mode="json")
    )
    _, start = choose(other_run, origin)
    assert (start.origin, start.from_other_run) == ("step-000000006", False)
