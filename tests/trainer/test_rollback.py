"""Runs that roll back after bad steps: losses that spike or are not finite."""

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.trainer.bad_steps import EASING_STEPS, BadSteps, health_of
from tests.trainer.late_metrics import read_metrics_late
from tests.trainer.tiny_models import config_of
from tests.trainer.training_runs import (
    CHECKPOINTS,
    events_of,
    run_of,
    train_or_resume,
)
from trainer.checkpoint.stored_checkpoints import list_checkpoints, read_checkpoint
from trainer.distributed.optimizer import learning_rate
from trainer.formats.errors import TrainingFailed
from trainer.formats.run_record import Run, RunExit, read_run
from trainer.formats.train_config import CheckpointSettings, DataSettings
from trainer.health.watchdog import REQUEUE

WEIGHTS_FILE = "rank-00000.safetensors"
SEQUENCES_PER_STEP = 8
"""Global batch size of ``config_of``."""
SAVED_STEP = 18
"""Step of the only checkpoint beside that of step 0."""
ROLLING_BACK = {
    "health": health_of(on_spike="rollback"),
    "checkpoint": CheckpointSettings(interval_steps=SAVED_STEP, keep_last=9),
}
SPIKE_STEP = 20
UNDONE_STEPS = SPIKE_STEP - SAVED_STEP
LAST_STEP = 22
SETTINGS_OF_SPIKE = {"max_steps": LAST_STEP, "warmup_steps": 0, **ROLLING_BACK}


@dataclass(frozen=True, kw_only=True)
class RunWithSpike:
    """A run that has rolled back after a spike, and finished."""

    run: Run
    ending: RunExit
    bad_steps: BadSteps
    checkpoints: Path


@pytest.fixture(scope="module")
def spike(patterned_dataset, tmp_path_factory) -> RunWithSpike:
    """Train a run with a spike two steps after its checkpoint; tests only read it."""
    directory = tmp_path_factory.mktemp("spike")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        bad_steps = BadSteps(patch, {SPIKE_STEP})
        run, ending = train_or_resume(source=patterned_dataset, **SETTINGS_OF_SPIKE)
    return RunWithSpike(
        run=run,
        ending=ending,
        bad_steps=bad_steps,
        checkpoints=directory / CHECKPOINTS,
    )


def test_rolls_back_after_a_spike(spike):
    assert (spike.ending.exit_code, spike.ending.steps) == (0, LAST_STEP)
    assert [row.step for row in spike.run.steps] == list(range(1, LAST_STEP + 1))


def test_rollback_is_recorded_with_its_cause(spike):
    (spike_event,) = events_of(spike.run, "spike")
    assert spike_event.step == SPIKE_STEP
    assert (spike_event.action, spike_event.level) == ("rollback", "error")
    (rolled_back,) = events_of(spike.run, "rolled_back")
    assert rolled_back.values == {
        "from_step": SPIKE_STEP,
        "to_step": SAVED_STEP,
        "first_row_left_out": SAVED_STEP * SEQUENCES_PER_STEP,
        "first_row_after": SPIKE_STEP * SEQUENCES_PER_STEP,
        "rollbacks": 1,
        "learning_rate_share": 0.5,
    }


def test_rollback_skips_the_data_since_the_checkpoint(spike):
    tries = LAST_STEP + UNDONE_STEPS
    assert spike.bad_steps.tries == tries
    # The position never goes back.
    assert [position.rows for position in spike.bad_steps.positions_after] == [
        SEQUENCES_PER_STEP * number for number in range(1, tries + 1)
    ]


def test_rollback_eases_the_learning_rate(spike):
    config = config_of(**SETTINGS_OF_SPIKE)
    # Tries are counted from 1, finished steps from 0.
    at_spike, after_rollback, one_step_later, *_ = spike.bad_steps.learning_rates[
        SPIKE_STEP - 1 :
    ]
    assert at_spike == learning_rate(config, SPIKE_STEP - 1)
    # Half of the schedule. The other half comes back in equal parts.
    assert after_rollback == pytest.approx(0.5 * learning_rate(config, SAVED_STEP))
    assert one_step_later == pytest.approx(
        (0.5 + 0.5 / EASING_STEPS) * learning_rate(config, SAVED_STEP + 1)
    )


def test_rollback_saves_the_restored_state(spike):
    names = [path.name for path in list_checkpoints(spike.checkpoints)]
    assert names[:2] == ["step-000000022-rollback-1", "step-000000018-rollback-1"]
    before = spike.checkpoints / "step-000000018"
    after = spike.checkpoints / "step-000000018-rollback-1"
    assert (before / WEIGHTS_FILE).read_bytes() == (after / WEIGHTS_FILE).read_bytes()
    state_before = read_checkpoint(before).state
    state_after = read_checkpoint(after).state
    skipped_sequences = UNDONE_STEPS * SEQUENCES_PER_STEP
    assert state_after.position.rows == state_before.position.rows + skipped_sequences
    assert state_after.good


@pytest.mark.usefixtures("working_directory")
@pytest.mark.parametrize(
    ("step", "workers"),
    [
        pytest.param(19, 0, id="last but one"),
        pytest.param(20, 1, id="last, with a DataLoader worker"),
    ],
)
def test_undoes_spike_in_the_last_two_steps(monkeypatch, step, workers):
    read_metrics_late(monkeypatch)
    bad_steps = BadSteps(monkeypatch, {step})
    run, ending = train_or_resume(
        data=DataSettings(num_workers=workers), max_steps=20, **ROLLING_BACK
    )
    assert (ending.exit_code, ending.steps, ending.reason) == (0, 20, "finished")
    assert ending.checkpoint == "step-000000020-rollback-1"
    (rolled_back,) = events_of(run, "rolled_back")
    assert rolled_back.values["from_step"] == 20
    assert rolled_back.values["to_step"] == SAVED_STEP
    assert bad_steps.tries == 22  # 20 steps, of which 19 and 20 were taken twice
    assert [row.step for row in run.steps] == list(range(1, 21))


@pytest.mark.usefixtures("working_directory")
def test_undoes_spike_found_on_exit(monkeypatch):
    read_metrics_late(monkeypatch)
    BadSteps(monkeypatch, {21})
    run, ending = train_or_resume(signal_after=19, max_steps=30, **ROLLING_BACK)
    assert ending.exit_code == REQUEUE
    assert ending.steps == SAVED_STEP
    assert ending.checkpoint == "step-000000018-rollback-1"
    kinds = ["spike", "rolled_back", "stopped"]
    assert [event.kind for event in run.events if event.kind in kinds] == kinds


@pytest.fixture
def all_bad_from_step_7(monkeypatch, working_directory) -> BadSteps:
    """Let the loss be NaN from step 7 on, so that no rollback helps."""
    return BadSteps(monkeypatch, range(7, 100), factor=math.nan)


def _train_until_it_gives_up(max_steps: int, max_rollbacks: int) -> None:
    """Train with a checkpoint at step 6, and check that the run gives up.

    It must report why, and leave no model and no checkpoint with bad weights.
    """
    with pytest.raises(TrainingFailed, match="training gives up") as raised:
        run_of(
            max_steps=max_steps,
            health=health_of(on_non_finite="rollback", max_rollbacks=max_rollbacks),
            checkpoint=CheckpointSettings(interval_steps=6),
        )
    assert "train.learning_rate" in raised.value.next_step
    run = read_run(Path("r"))
    assert len(events_of(run, "rolled_back")) == max_rollbacks
    assert events_of(run, "non_finite")[-1].action == "give_up"
    assert not Path("r/model").exists()
    checkpoints = list_checkpoints(CHECKPOINTS)
    assert checkpoints
    for path in checkpoints:
        tensors = load_file(path / WEIGHTS_FILE)
        assert all(tensor.isfinite().all() for tensor in tensors.values())


@pytest.mark.parametrize("max_rollbacks", [0, 2])
def test_gives_up_when_rolling_back_does_not_help(all_bad_from_step_7, max_rollbacks):
    _train_until_it_gives_up(max_steps=50, max_rollbacks=max_rollbacks)
    # Step 7 is tried again after each rollback.
    assert all_bad_from_step_7.tries == 7 + max_rollbacks


@pytest.mark.parametrize("max_rollbacks", [0, 2])
def test_gives_up_in_the_last_two_steps(
    monkeypatch, all_bad_from_step_7, max_rollbacks
):
    read_metrics_late(monkeypatch)
    _train_until_it_gives_up(max_steps=8, max_rollbacks=max_rollbacks)
    # Each time, the run takes steps 7 and 8 before it reads the metrics of 7.
    assert all_bad_from_step_7.tries == 8 + 2 * max_rollbacks
