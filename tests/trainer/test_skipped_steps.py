"""Runs that skip the updates of bad steps: losses that spike or are not finite."""

import math
from pathlib import Path

import pytest

from tests.trainer.bad_steps import BadSteps, health_of
from tests.trainer.tiny_models import config_of
from tests.trainer.training_runs import (
    CHECKPOINTS,
    events_of,
    run_of,
    train_or_resume,
    weights_of,
)
from trainer.checkpoint.stored_checkpoints import list_checkpoints, read_checkpoint
from trainer.data.batch_plan import make_plan
from trainer.data.dataset import TokenDataset
from trainer.data.loader import micro_batch_plans
from trainer.formats.train_config import CheckpointSettings

pytestmark = pytest.mark.usefixtures("working_directory")


def test_skips_non_finite_step_by_default(monkeypatch):
    BadSteps(monkeypatch, {3}, factor=math.nan)
    run, ending = train_or_resume(max_steps=6)
    assert ending.exit_code == 0
    assert [row.step for row in run.steps] == [1, 2, 3, 4, 5, 6]
    assert [row.step for row in run.steps if row.loss is None] == [3]
    assert run.steps[-1].skipped_steps == 1
    assert all(weight.isfinite().all() for weight in weights_of("r").values())


def test_non_finite_step_is_reported(monkeypatch):
    BadSteps(monkeypatch, {3}, factor=math.nan)
    (event,) = events_of(run_of(max_steps=3), "non_finite")
    assert (event.values["loss"], event.action) == ("nan", "skip")


def test_checkpoint_after_non_finite_step_is_not_good(monkeypatch):
    BadSteps(monkeypatch, {3}, factor=math.nan)
    run_of(max_steps=6, checkpoint=CheckpointSettings(interval_steps=1, keep_last=9))
    good = {
        path.name: read_checkpoint(path).state.good
        for path in list_checkpoints(CHECKPOINTS)
    }
    assert good == {f"step-{step:09d}": step != 3 for step in range(7)}


def test_resumed_run_counts_skipped_steps(monkeypatch):
    settings = {
        "max_steps": 22,
        "health": health_of(on_spike="skip"),
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
