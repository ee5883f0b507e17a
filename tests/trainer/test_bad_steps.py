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
from trainer.checkpoint.format import list_checkpoints, read_checkpoint
from trainer.config.train_config import CheckpointSettings, DataSettings, HealthSettings
from trainer.data.dataset import TokenDataset
from trainer.data.global_batch import make_plan
from trainer.data.loader import micro_batch_plans
from trainer.distributed.optimizer import learning_rate
from trainer.distributed.step import TrainStep
from trainer.errors import TrainingFailed
from trainer.model.masked_lm import MaskedLM
from trainer.record.run_record import read_run

pytestmark = pytest.mark.usefixtures("working_directory")


class BadSteps:
    """Multiplies the losses of some steps, and notes all steps that are tried.

    Steps are counted from 1; a step that is taken again after a rollback counts again.
    """

    def __init__(self, monkeypatch, steps, factor=100.0) -> None:
        self.tried = 0
        """Number of steps that were tried."""
        self.ends = []
        """Position in the data after each step that was tried."""
        self.learning_rates = []
        """Learning rate of each step that was tried."""
        run = TrainStep.run
        forward = MaskedLM.forward

        def run_and_note(step, batches, lr, **options):
            self.tried += 1
            self.ends.append(batches[-1].after)
            self.learning_rates.append(lr)
            return run(step, batches, lr, **options)

        def forward_with_factor(module, batch):
            loss = forward(module, batch)
            return loss * (factor if self.tried in steps else 1.0)

        monkeypatch.setattr(TrainStep, "run", run_and_note)
        monkeypatch.setattr(MaskedLM, "forward", forward_with_factor)


def _health(**changes) -> HealthSettings:
    """Return settings under which a spike is noticed after few steps."""
    return HealthSettings(window_steps=16, easing_steps=10, **changes)


SAVED_STEP = 18
SPIKE_STEP = 20
SEQUENCES_PER_STEP = 8
ROLLING_BACK = {
    "health": _health(on_spike="rollback"),
    "checkpoint": CheckpointSettings(interval_steps=SAVED_STEP, keep_last=9),
}
ROLLBACK_SETTINGS = {"max_steps": 22, "warmup_steps": 0, **ROLLING_BACK}


@pytest.fixture
def spike(monkeypatch) -> BadSteps:
    """A spike two steps after the only checkpoint but the first."""
    return BadSteps(monkeypatch, {SPIKE_STEP})


@pytest.mark.usefixtures("spike")
def test_rolls_back_after_a_spike():
    run, ending = train_or_resume(**ROLLBACK_SETTINGS)
    assert (ending.exit_code, ending.steps) == (0, 22)
    assert [row.step for row in run.steps] == list(range(1, 23))
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
    assert spike.tried == 24  # 22, of which 2 were undone
    # The position never goes back.
    assert [position.rows for position in spike.ends] == [
        SEQUENCES_PER_STEP * number for number in range(1, 25)
    ]


def test_rollback_eases_the_learning_rate(spike):
    run_of(**ROLLBACK_SETTINGS)
    config = config_of(**ROLLBACK_SETTINGS)
    at_spike, after_rollback, next_one = spike.learning_rates[SPIKE_STEP - 1 :][:3]
    assert at_spike == learning_rate(config, SPIKE_STEP - 1)
    # Half of the schedule, and the other half again within the 10 easing steps.
    assert after_rollback == pytest.approx(0.5 * learning_rate(config, SAVED_STEP))
    assert next_one == pytest.approx(0.55 * learning_rate(config, SAVED_STEP + 1))


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
    skipped_sequences = (SPIKE_STEP - SAVED_STEP) * SEQUENCES_PER_STEP
    assert state_after.position.rows == state_before.position.rows + skipped_sequences
    assert state_after.good


def _train_until_it_gives_up(max_steps: int, max_rollbacks: int) -> None:
    """Train with a checkpoint at step 6, and check what is left in the end."""
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
    return BadSteps(monkeypatch, set(range(7, 100)), factor=math.nan)


@pytest.mark.parametrize("max_rollbacks", [0, 2])
def test_gives_up_when_rolling_back_does_not_help(all_bad_from_step_7, max_rollbacks):
    _train_until_it_gives_up(50, max_rollbacks)
    assert all_bad_from_step_7.tried == 7 + max_rollbacks


@pytest.mark.parametrize("max_rollbacks", [0, 2])
def test_gives_up_in_the_last_two_steps(
    monkeypatch, all_bad_from_step_7, max_rollbacks
):
    read_late(monkeypatch)
    _train_until_it_gives_up(8, max_rollbacks)
    # Each time, the run takes steps 7 and 8 before it reads the numbers of 7.
    assert all_bad_from_step_7.tried == 8 + 2 * max_rollbacks


def test_resumed_run_counts_skipped_steps(monkeypatch):
    settings = {
        "max_steps": 22,
        "health": _health(on_spike="skip"),
        "micro_batch_size": 4,
    }
    with monkeypatch.context() as patch:
        BadSteps(patch, {5}, factor=math.nan)
        train_or_resume(signal_after=18, **settings)
    BadSteps(monkeypatch, {1})
    run = run_of(**settings)
    assert [run.steps[step].skipped_steps for step in (3, 18, -1)] == [0, 1, 2]
    # The checkpoint has the losses of earlier steps that this one is compared with.
    (spike,) = events_of(run, "spike")
    assert (spike.step, spike.action) == (20, "skip")
    assert spike.samples == _samples_of_step(20, **settings)


def _samples_of_step(step: int, **changes) -> list[int]:
    """Return the samples of a step of two micro-batches, sorted."""
    dataset = TokenDataset.open(Path("data"))
    config = config_of(**changes)
    plan = make_plan(config, len(dataset), 1)
    plans = list(micro_batch_plans(dataset, config, plan, 0, steps=step))
    samples = []
    for micro_batch_plan in plans[-2:]:
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
    assert rolled_back.values["to_step"] == 18
    assert bad_steps.tried == 22
    assert [row.step for row in run.steps] == list(range(1, 21))


def test_undoes_spike_found_on_exit(monkeypatch):
    read_late(monkeypatch)
    BadSteps(monkeypatch, {21})
    run, ending = train_or_resume(signal_after=19, max_steps=30, **ROLLING_BACK)
    assert (ending.exit_code, ending.steps, ending.checkpoint) == (
        75,
        18,
        "step-000000018-rollback-1",
    )
    kinds = ["spike", "rolled_back", "stopped"]
    assert [event.kind for event in run.events if event.kind in kinds] == kinds
