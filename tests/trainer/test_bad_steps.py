"""Runs with bad steps: losses that spike or are not finite."""

import math
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.trainer.oracles import config_of
from tests.trainer.training_runs import (
    CHECKPOINTS,
    events_of,
    read_late,
    run_of,
    train_or_resume,
    weights_of,
)
from trainer.checkpoint.stored_checkpoints import list_checkpoints, read_checkpoint
from trainer.config.train_config import CheckpointSettings, DataSettings, HealthSettings
from trainer.data.batch_plan import make_plan
from trainer.data.dataset import TokenDataset
from trainer.data.loader import micro_batch_plans
from trainer.distributed.optimizer import learning_rate
from trainer.distributed.step import TrainStep
from trainer.errors import TrainingFailed
from trainer.model.masked_lm import MaskedLM
from trainer.record.run_record import read_run

pytestmark = pytest.mark.usefixtures("working_directory")


class BadSteps:
    """Multiplies the losses of some tries of a step, and notes all tries.

    Tries are counted from 1. A step that is taken again after a rollback is another
    try, so the bad tries are the bad steps only until the first rollback.
    """

    def __init__(self, monkeypatch, bad_tries, factor=100.0) -> None:
        self.tries = 0
        """Number of tries so far."""
        self.positions_after = []
        """Position in the data after each try."""
        self.learning_rates = []
        """Learning rate of each try."""
        run = TrainStep.run
        forward = MaskedLM.forward

        def run_and_note(step, batches, lr, **options):
            self.tries += 1
            self.positions_after.append(batches[-1].after)
            self.learning_rates.append(lr)
            return run(step, batches, lr, **options)

        def forward_with_factor(module, batch):
            loss = forward(module, batch)
            return loss * factor if self.tries in bad_tries else loss

        monkeypatch.setattr(TrainStep, "run", run_and_note)
        monkeypatch.setattr(MaskedLM, "forward", forward_with_factor)


def _health(**changes) -> HealthSettings:
    """Return settings with which a spike is noticed after 16 steps."""
    return HealthSettings(window_steps=16, easing_steps=10, **changes)


SAVED_STEP = 18
"""Step of the only checkpoint beside that of step 0."""
SPIKE_STEP = 20
UNDONE_STEPS = SPIKE_STEP - SAVED_STEP
LAST_STEP = 22
SEQUENCES_PER_STEP = 8
"""Global batch size of ``config_of``."""
ROLLING_BACK = {
    "health": _health(on_spike="rollback"),
    "checkpoint": CheckpointSettings(interval_steps=SAVED_STEP, keep_last=9),
}
ROLLBACK_SETTINGS = {"max_steps": LAST_STEP, "warmup_steps": 0, **ROLLING_BACK}


@pytest.fixture
def spike(monkeypatch) -> BadSteps:
    """A spike two steps after the checkpoint of ``ROLLBACK_SETTINGS``."""
    return BadSteps(monkeypatch, {SPIKE_STEP})


@pytest.mark.usefixtures("spike")
def test_rolls_back_after_a_spike():
    run, ending = train_or_resume(**ROLLBACK_SETTINGS)
    assert (ending.exit_code, ending.steps) == (0, LAST_STEP)
    assert [row.step for row in run.steps] == list(range(1, LAST_STEP + 1))


@pytest.mark.usefixtures("spike")
def test_rollback_is_recorded_with_its_cause():
    run = run_of(**ROLLBACK_SETTINGS)
    (spike_event,) = events_of(run, "spike")
    assert spike_event.step == SPIKE_STEP
    assert (spike_event.action, spike_event.level) == ("rollback", "error")
    (rolled_back,) = events_of(run, "rolled_back")
    assert rolled_back.values == {
        "from_step": SPIKE_STEP,
        "to_step": SAVED_STEP,
        "first_row_left_out": SAVED_STEP * SEQUENCES_PER_STEP,
        "first_row_after": SPIKE_STEP * SEQUENCES_PER_STEP,
        "rollbacks": 1,
        "learning_rate_share": 0.5,
    }


def test_rollback_skips_the_data_since_the_checkpoint(spike):
    run_of(**ROLLBACK_SETTINGS)
    tries = LAST_STEP + UNDONE_STEPS
    assert spike.tries == tries
    # The position never goes back.
    assert [position.rows for position in spike.positions_after] == [
        SEQUENCES_PER_STEP * number for number in range(1, tries + 1)
    ]


def test_rollback_eases_the_learning_rate(spike):
    run_of(**ROLLBACK_SETTINGS)
    config = config_of(**ROLLBACK_SETTINGS)
    # Tries are counted from 1, finished steps from 0.
    at_spike, after_rollback, one_step_later, *_ = spike.learning_rates[
        SPIKE_STEP - 1 :
    ]
    assert at_spike == learning_rate(config, SPIKE_STEP - 1)
    # Half of the schedule. The other half comes back in equal parts in 10 easing steps.
    assert after_rollback == pytest.approx(0.5 * learning_rate(config, SAVED_STEP))
    assert one_step_later == pytest.approx(
        (0.5 + 0.5 / 10) * learning_rate(config, SAVED_STEP + 1)
    )


@pytest.mark.usefixtures("spike")
def test_rollback_saves_the_restored_state():
    run_of(**ROLLBACK_SETTINGS)
    names = [path.name for path in list_checkpoints(CHECKPOINTS)]
    assert names[:2] == ["step-000000022-rollback-1", "step-000000018-rollback-1"]
    before = CHECKPOINTS / "step-000000018"
    after = CHECKPOINTS / "step-000000018-rollback-1"
    weights = "rank-00000.safetensors"
    assert (before / weights).read_bytes() == (after / weights).read_bytes()
    state_before = read_checkpoint(before).state
    state_after = read_checkpoint(after).state
    skipped_sequences = UNDONE_STEPS * SEQUENCES_PER_STEP
    assert state_after.position.rows == state_before.position.rows + skipped_sequences
    assert state_after.good


def _train_until_it_gives_up(max_steps: int, max_rollbacks: int) -> None:
    """Train with a checkpoint at step 6, and check that the run gives up.

    It must report why, and leave no model and no checkpoint with bad weights.
    """
    with pytest.raises(TrainingFailed, match="training gives up") as raised:
        run_of(
            max_steps=max_steps,
            health=_health(on_non_finite="rollback", max_rollbacks=max_rollbacks),
            checkpoint=CheckpointSettings(interval_steps=6),
        )
    assert "train.learning_rate" in raised.value.next_step
    run = read_run(Path("r"))
    assert len(events_of(run, "rolled_back")) == max_rollbacks
    assert events_of(run, "non_finite")[-1].action == "give_up"
    assert not Path("r/model").exists()
    for path in list_checkpoints(CHECKPOINTS):
        tensors = load_file(path / "rank-00000.safetensors")
        assert all(tensor.isfinite().all() for tensor in tensors.values())


@pytest.fixture
def all_bad_from_step_7(monkeypatch) -> BadSteps:
    return BadSteps(monkeypatch, range(7, 100), factor=math.nan)


@pytest.mark.parametrize("max_rollbacks", [0, 2])
def test_gives_up_when_rolling_back_does_not_help(all_bad_from_step_7, max_rollbacks):
    _train_until_it_gives_up(max_steps=50, max_rollbacks=max_rollbacks)
    # Step 7 is tried again after each rollback.
    assert all_bad_from_step_7.tries == 7 + max_rollbacks


@pytest.mark.parametrize("max_rollbacks", [0, 2])
def test_gives_up_in_the_last_two_steps(
    monkeypatch, all_bad_from_step_7, max_rollbacks
):
    read_late(monkeypatch)
    _train_until_it_gives_up(max_steps=8, max_rollbacks=max_rollbacks)
    # Each time, the run takes steps 7 and 8 before it reads the numbers of 7.
    assert all_bad_from_step_7.tries == 8 + 2 * max_rollbacks


def test_resumed_run_counts_skipped_steps(monkeypatch):
    settings = {
        "max_steps": 22,
        "health": _health(on_spike="skip"),
        "micro_batch_size": 4,
    }
    with monkeypatch.context() as patch:
        BadSteps(patch, {5}, factor=math.nan)
        train_or_resume(signal_after=18, **settings)  # ends after step 19
    BadSteps(monkeypatch, {1})  # the first step after the resume, step 20
    run = run_of(**settings)
    skipped_steps = {row.step: row.skipped_steps for row in run.steps}
    assert (skipped_steps[4], skipped_steps[19], skipped_steps[22]) == (0, 1, 2)
    # The spike was noticed, as the checkpoint has the losses to compare it with.
    (spike,) = events_of(run, "spike")
    assert (spike.step, spike.action) == (20, "skip")
    assert spike.samples == _samples_of_step(20, **settings)


def _samples_of_step(step: int, **changes) -> list[int]:
    """Return the sorted samples of a step that has two micro-batches."""
    dataset = TokenDataset.open(Path("data"))
    config = config_of(**changes)
    plan = make_plan(config, len(dataset), world_size=1)
    plans_up_to_step = list(micro_batch_plans(dataset, config, plan, 0, steps=step))
    samples = []
    for micro_batch_plan in plans_up_to_step[-2:]:
        samples += micro_batch_plan.segments.samples.tolist()
    return sorted(samples)


def test_skips_non_finite_step_by_default(monkeypatch):
    BadSteps(monkeypatch, {3}, factor=math.nan)
    run, ending = train_or_resume(max_steps=6)
    assert ending.exit_code == 0
    assert [row.step for row in run.steps if row.loss is None] == [3]
    assert len(run.steps) == 6
    assert run.steps[-1].skipped_steps == 1
    assert all(value.isfinite().all() for value in weights_of("r").values())
    (event,) = events_of(run, "non_finite")
    assert (event.values["loss"], event.action) == ("nan", "skip")


def test_checkpoint_after_non_finite_step_is_not_good(monkeypatch):
    BadSteps(monkeypatch, {3}, factor=math.nan)
    run_of(max_steps=6, checkpoint=CheckpointSettings(interval_steps=1, keep_last=9))
    good = {
        path.name: read_checkpoint(path).state.good
        for path in list_checkpoints(CHECKPOINTS)
    }
    assert good == {f"step-{step:09d}": step != 3 for step in range(7)}


@pytest.mark.parametrize(
    ("step", "workers"),
    [
        pytest.param(19, 0, id="last but one"),
        pytest.param(20, 1, id="last, with a DataLoader worker"),
    ],
)
def test_undoes_spike_in_the_last_two_steps(monkeypatch, step, workers):
    read_late(monkeypatch)
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


def test_undoes_spike_found_on_exit(monkeypatch):
    read_late(monkeypatch)
    BadSteps(monkeypatch, {21})
    run, ending = train_or_resume(signal_after=19, max_steps=30, **ROLLING_BACK)
    assert ending.exit_code == 75
    assert ending.steps == SAVED_STEP
    assert ending.checkpoint == "step-000000018-rollback-1"
    kinds = ["spike", "rolled_back", "stopped"]
    assert [event.kind for event in run.events if event.kind in kinds] == kinds
