import errno
import os
from pathlib import Path

import pytest

from testbed.examples.checkpoints import (
    end_of,
    header_of,
    leave,
    refusing,
    resolved_of,
    write_checkpoint,
    write_run,
)
from tests.trainer.oracles import SHAPES, config_of
from trainer.checkpoint.format import CHECKPOINTS_DIRECTORY, prune
from trainer.checkpoint.resume import Start, choose_run, job_name
from trainer.config.train_config import (
    CheckpointSettings,
    DataSettings,
    HealthSettings,
    ModelSettings,
)
from trainer.errors import BadConfig, DiskTrouble, TrainingFailed
from trainer.record.run_record import read_run

CONFIG = config_of(max_steps=20)
EASED = config_of(max_steps=20, learning_rate=1e-5)
SLURM = {"SLURM_JOB_ID": "17"}
AGAIN = SLURM | {"SLURM_RESTART_COUNT": "1"}


@pytest.fixture(autouse=True)
def cwd(tmp_path, monkeypatch):
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


def chosen(out, resume="auto", config=CONFIG, environment=None):
    """The run's writer, and what it goes on from; as a process would that ends at
    once."""
    opened = []
    try:
        return choose_run(
            out, resume, resolved_of(config), environment or {}, on_open=opened.append
        )
    finally:
        for writer in opened:
            leave(writer)


def begin(name, *arguments, **options):
    """A run under the directory where a job looks for its own."""
    return write_run(Path("runs") / name, *arguments, **options)


def messages(start):
    return [event.message for event in start.events]


def saved(run, step):
    return run / CHECKPOINTS_DIRECTORY / f"step-{step:09d}"


def damage(*checkpoints):
    for path in checkpoints:
        (path / "rank-00000.safetensors").write_bytes(b"short")


def names(run):
    return sorted(path.name for path in (run / CHECKPOINTS_DIRECTORY).glob("step-*"))


@pytest.fixture
def run(tmp_path):
    """A run of 20 steps that was killed after its 10th, with checkpoints of steps 5 and
    10."""
    return write_run(tmp_path / "r", CONFIG)


def test_a_new_run_begins_where_it_was_asked_to_or_under_its_name_and_time(tmp_path):
    for resume in ("auto", "never"):
        writer, start = chosen(tmp_path / resume, resume)
        assert (writer.directory, writer.attempt, start) == (
            tmp_path / resume,
            1,
            Start(),
        )
    writer, _ = chosen(None)
    assert writer.directory.parts[0] == "runs"
    assert writer.directory.name.endswith("Z-m")


def test_auto_goes_on_with_the_newest_checkpoint_and_clears_what_an_earlier_start_left(
    run,
):
    partial = run / CHECKPOINTS_DIRECTORY / ".step-000000015.attempt-1.partial"
    partial.mkdir()
    with pytest.raises(BadConfig, match="already contains a run"):
        chosen(run, "never")
    assert partial.exists()
    writer, start = chosen(run)
    assert (writer.directory, writer.attempt) == (run, 2)
    assert (start.checkpoint, start.origin, start.manifest.state.step) == (
        saved(run, 10),
        "step-000000010",
        10,
    )
    assert messages(start) == ["resumed from step-000000010"]
    assert not partial.exists()


def test_auto_begins_a_run_anew_that_has_no_checkpoint_yet(tmp_path):
    writer, start = chosen(write_run(tmp_path / "r", CONFIG, ()))
    assert (writer.attempt, start.checkpoint) == (2, None)
    assert start.events[0].level == "warning"
    assert "no intact checkpoint" in messages(start)[0]


def test_a_job_that_slurm_started_again_finds_its_own_run(tmp_path):
    assert job_name(SLURM) == "slurm-17"
    for name, job in (("a", "slurm-17"), ("b", "slurm-18"), ("c", "")):
        begin(name, CONFIG, job=job)
    Path("runs/d").mkdir()
    Path("runs/d/run.json").write_text("{")
    writer, start = chosen(None, environment=AGAIN)
    assert (writer.directory.name, start.manifest.state.step) == ("a", 10)
    for other in (
        SLURM,
        {},
        {"SLURM_RESTART_COUNT": "1"},
        {"SLURM_JOB_ID": "19", "SLURM_RESTART_COUNT": "1"},
    ):
        assert chosen(None, environment=other)[1].checkpoint is None
    assert chosen(None, "never", environment=AGAIN)[1].checkpoint is None
    assert chosen(tmp_path / "out", environment=AGAIN)[1].checkpoint is None


def test_of_the_runs_that_a_job_began_the_newest_of_the_same_configuration_is_its_own():
    for number, (name, config) in enumerate(
        (("z", CONFIG), ("a", CONFIG), ("m", EASED))
    ):
        os.utime(
            begin(name, config, job="slurm-17") / "run.json",
            (1000 + number, 1000 + number),
        )
    for config, name in ((CONFIG, "a"), (EASED, "m")):
        assert chosen(None, config=config, environment=AGAIN)[0].directory.name == name
    assert (
        chosen(None, config=config_of(max_steps=30), environment=AGAIN)[1].checkpoint
        is None
    )


def test_a_torchrun_that_starts_its_ranks_again_finds_its_own_run():
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
    restarted = torchrun | {"TORCHELASTIC_RESTART_COUNT": "1"}
    job = job_name(torchrun)
    assert job.startswith("torchrun-")
    assert (job_name(restarted), job_name({}), job_name(torchrun | SLURM)) == (
        job,
        "",
        "slurm-17",
    )
    begin("a", CONFIG, job=job)
    assert chosen(None, environment=torchrun)[1].checkpoint is None
    writer, start = chosen(None, environment=restarted)
    assert (writer.directory.name, start.manifest.state.step) == ("a", 10)


def test_a_run_that_is_over_is_left_as_it_is_unless_it_has_more_steps_to_take_or_was_asked_to_leave(
    tmp_path,
):
    end = end_of(0, steps=20)
    run = write_run(tmp_path / "r", CONFIG, (10, 20), end=end)
    writer, start = chosen(run)
    assert (start.finished, start.checkpoint, read_run(run).header.attempt) == (
        end,
        None,
        1,
    )
    writer.finish(end)
    _, start = chosen(run, config=config_of(max_steps=30))
    assert (start.finished, start.manifest.state.step) == (None, 20)
    assert "train.max_steps is now 30, it was 20" in messages(start)[0]
    _, start = chosen(
        write_run(tmp_path / "asked to leave", CONFIG, (5, 20), end=end_of(75))
    )
    assert (start.finished, start.manifest.state.step, start.gave_up) == (
        None,
        20,
        False,
    )


def test_a_run_that_gave_up_goes_on_only_with_another_setting_and_from_then_on_from_a_good_checkpoint(
    tmp_path,
):
    run = write_run(
        tmp_path / "r",
        CONFIG,
        (5, 10),
        end=end_of(76, reason="nothing helped"),
        good=False,
    )
    for _ in range(2):  # asking twice changes nothing
        with pytest.raises(
            TrainingFailed,
            match=r"gave up before with the same settings: nothing helped",
        ):
            chosen(run)
    writer, start = chosen(run, config=EASED)
    assert (writer.attempt, start.manifest.state.step) == (2, 5)
    assert "train.learning_rate is now 1e-05, it was 0.0001" in messages(start)[0]
    assert (start.gave_up, start.events[0].level) == (True, "warning")
    writer.start(header_of(EASED))
    for step in (6, 7):
        write_checkpoint(
            run / CHECKPOINTS_DIRECTORY, step, config=EASED.model_dump(mode="json")
        )
        prune(run / CHECKPOINTS_DIRECTORY, keep_last=2, keep_every_steps=None)
    assert chosen(run, config=EASED)[1].manifest.state.step == 7


def test_a_damaged_newest_checkpoint_is_put_aside_and_told(run):
    root = run / CHECKPOINTS_DIRECTORY
    damage(saved(run, 10))
    _, start = chosen(run)
    assert start.manifest.state.step == 5
    assert (
        root / "step-000000010.corrupt-2" / "rank-00000.safetensors"
    ).read_bytes() == b"short"
    assert [event.level for event in start.events] == ["error", "info"]
    assert "step-000000010 is corrupt and is skipped: " in messages(start)[0]
    assert "5 bytes, expected 1,024" in messages(start)[0]
    assert (root / "latest").read_text() == "step-000000005\n"
    assert messages(chosen(run)[1]) == ["resumed from step-000000005"]


OTHERS = {
    "model.config": {
        "model": ModelSettings(name="m", config=SHAPES["bert"] | {"hidden_act": "relu"})
    },
    "model.null_keys": {
        "model": ModelSettings(
            name="m", config=SHAPES["bert"], null_keys=["classifier_dropout"]
        )
    },
    "seq_length_tokens": {"seq_length_tokens": 32},
    "layout": {"layout": "padded"},
    "global_batch_size": {"global_batch_size": 16},
    "global_batch_tokens": {"global_batch_tokens": 512},
    "global_batch_samples": {"global_batch_samples": 8},
    "seed": {"seed": 1},
    "another dataset": {"data": DataSettings(dataset_hash="e" * 64)},
}


@pytest.mark.parametrize("key", OTHERS)
def test_settings_that_a_position_and_weights_depend_on_cannot_change(
    run, tmp_path, key
):
    before = sorted(run.rglob("*"))
    said = rf"train\.{key} " if "dataset" not in key else "hash is d…, not eeeeeeeeeeee"
    for resume, out in (("auto", run), (str(run), None), (str(run), tmp_path / "fork")):
        with pytest.raises(BadConfig, match=said) as caught:
            chosen(out, resume, config_of(max_steps=20, **OTHERS[key]))
        assert "start from scratch" in caught.value.next_step
    assert sorted(run.rglob("*")) == before
    assert not (tmp_path / "fork").exists()


RECIPE = {
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


def test_changes_of_the_recipe_are_each_named_and_those_that_change_nothing_of_the_result_are_not(
    run,
):
    changed = config_of(**RECIPE, health=HealthSettings(on_spike="rollback"))
    (event,) = chosen(run, config=changed)[1].events
    assert event.level == "warning"
    before, now = CONFIG.model_dump(), changed.model_dump()
    for key in RECIPE:
        assert f"train.{key} is now {now[key]}, it was {before[key]}" in event.message
    assert "train.health.on_spike is now rollback, it was warn" in event.message
    other = config_of(
        max_steps=20,
        micro_batch_size=2,
        log_interval_steps=5,
        checkpoint=CheckpointSettings(interval_steps=3),
        data=DataSettings(num_workers=2),
    )
    assert messages(chosen(run, config=other)[1]) == ["resumed from step-000000010"]


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/step-000000010"])
def test_a_run_its_checkpoints_or_the_newest_of_them_can_be_named_to_go_on_in_place(
    run, tmp_path, place
):
    for out in (None, run):
        writer, start = chosen(out, str(run / place))
        assert (writer.directory, start.manifest.state.step) == (run, 10)


@pytest.mark.parametrize(
    ("place", "step"), [("", 10), ("checkpoints/step-000000005", 5)]
)
def test_another_run_can_begin_from_a_checkpoint(tmp_path, place, step):
    run = write_run(tmp_path / "r", CONFIG, end=end_of(76))
    writer, start = chosen(tmp_path / "fork", str(run / place))
    assert (writer.directory, writer.attempt, start.manifest.state.step) == (
        tmp_path / "fork",
        1,
        step,
    )
    assert (start.checkpoint, start.origin) == (saved(run, step), str(saved(run, step)))
    assert messages(start) == [f"started from {start.checkpoint}"]


def test_a_fork_passes_a_damaged_checkpoint_over_and_leaves_it_where_it_is(
    run, tmp_path
):
    damage(saved(run, 10))
    with pytest.raises(BadConfig, match="the checkpoint is corrupt"):  # that was named
        chosen(tmp_path / "fork", str(saved(run, 10)))
    assert not (tmp_path / "fork").exists()
    _, start = chosen(tmp_path / "fork", str(run))
    assert start.manifest.state.step == 5
    assert saved(run, 10).is_dir()
    assert "corrupt and is skipped" in messages(start)[0]


def test_what_is_no_run_and_a_place_that_is_taken_are_refused(run, tmp_path):
    other, empty = (
        write_run(tmp_path / "other", CONFIG),
        write_run(tmp_path / "empty", CONFIG, ()),
    )
    (empty / CHECKPOINTS_DIRECTORY).mkdir()
    (tmp_path / "file").write_text("")
    for out, resume, said in (
        (None, tmp_path / "nowhere", "no checkpoint found there"),
        (other, run, "already contains a run"),
        (tmp_path / "file" / "r", "auto", "cannot write"),
        (tmp_path / "fork", empty, "has no intact checkpoint"),
        (None, saved(run, 5), "has newer checkpoints than step-000000005"),
        (run, saved(run, 5), "has newer checkpoints than step-000000005"),
    ):
        with pytest.raises(BadConfig, match=said) as caught:
            chosen(out, str(resume))
        assert caught.value.next_step


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("open", "manifest.json"),
        ("open", "rank-00000.safetensors"),
        ("iterdir", CHECKPOINTS_DIRECTORY),
    ],
)
def test_a_file_system_that_fails_leaves_all_checkpoints_for_the_next_start(
    run, monkeypatch, method, name
):
    opened = []
    with monkeypatch.context() as patch:
        patch.setattr(Path, method, refusing(name, errno.ESTALE, method))
        with pytest.raises(DiskTrouble) as caught:
            choose_run(run, "auto", resolved_of(CONFIG), {}, on_open=opened.append)
    (writer,) = opened  # which can then write down how that start ended
    assert (writer.directory, writer.attempt) == (run, 2)
    leave(writer)
    assert caught.value.exit_code == 75
    assert names(run) == ["step-000000005", "step-000000010"]
    assert chosen(run)[1].manifest.state.step == 10


def test_a_run_all_of_whose_checkpoints_are_damaged_is_not_begun_afresh_however_often_it_is_started(
    run,
):
    damage(saved(run, 5), saved(run, 10))
    for _ in range(2):  # as torchrun with --max-restarts does
        with pytest.raises(BadConfig, match=r"all . checkpoints of") as caught:
            chosen(run)
        assert "another --out" in caught.value.next_step
    assert names(run) == ["step-000000005.corrupt-2", "step-000000010.corrupt-2"]


def test_a_run_that_gave_up_without_a_good_checkpoint_begins_afresh_and_keeps_what_it_had(
    tmp_path,
):
    run = write_run(tmp_path / "r", CONFIG, (), end=end_of(76))
    for step in (5, 10):
        write_checkpoint(
            run / CHECKPOINTS_DIRECTORY,
            step,
            good=False,
            config=CONFIG.model_dump(mode="json"),
        )
    writer, start = chosen(run, config=EASED)
    assert (writer.attempt, start.checkpoint, start.manifest) == (2, None, None)
    assert names(run) == ["step-000000005.given-up-2", "step-000000010.given-up-2"]
    assert start.events[-1].level == "warning"
    assert messages(start) == [f"{run} has no good checkpoint; starting from scratch"]


def test_a_fork_without_a_checkpoint_of_its_own_begins_from_its_origin_again_if_that_is_whole(
    run, tmp_path
):
    origin, fork = saved(run, 5), tmp_path / "b"
    for attempt, resume in (
        (1, str(origin)),
        (2, "auto"),
        (3, str(origin)),
        (4, "auto"),
    ):
        writer, start = chosen(fork, resume)
        assert (writer.directory, writer.attempt) == (fork, attempt)
        assert (start.checkpoint, start.manifest.state.step, start.from_other_run) == (
            origin,
            5,
            True,
        )
        assert start.origin == str(origin)
        writer.start(header_of(CONFIG, resumed_from=start.origin, resumed_step=5))
    assert "starting again from" in messages(start)[0]
    whole = (origin / "rank-00000.safetensors").read_bytes()
    damage(origin)
    with pytest.raises(BadConfig, match="the checkpoint is corrupt"):
        chosen(fork)
    (origin / "rank-00000.safetensors").write_bytes(whole)
    write_checkpoint(
        fork / CHECKPOINTS_DIRECTORY, 6, config=CONFIG.model_dump(mode="json")
    )
    _, start = chosen(fork, str(origin))
    assert (start.origin, start.from_other_run) == ("step-000000006", False)
