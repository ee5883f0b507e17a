"""Runs in several parts, which learn the same as a run that is not interrupted."""

from pathlib import Path

import pytest
import torch

from testbed.datasets import write_dataset
from tests.trainer.late_metrics import read_metrics_late
from tests.trainer.tiny_models import SHAPES
from tests.trainer.training_runs import (
    CHECKPOINTS,
    RUN,
    events_of,
    run_of,
    train_or_resume,
    varied_samples,
    weights_of,
)
from trainer.formats.run_record import Run, read_run
from trainer.formats.train_config import DataSettings, ModelSettings
from trainer.health.watchdog import REQUEUE

pytestmark = pytest.mark.usefixtures("working_directory")

DROPOUT = ModelSettings(
    name="m",
    config=SHAPES["bert"]
    | {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
)
"""A model whose weights depend on the random numbers of every step."""
SETTINGS = {"max_steps": 7, "model": DROPOUT}


@pytest.fixture(scope="module")
def uninterrupted_run(patterned_dataset, tmp_path_factory) -> Path:
    """Directory of a run with ``SETTINGS``, which tests only read."""
    directory = tmp_path_factory.mktemp("uninterrupted") / "run"
    run_of(directory, source=patterned_dataset, **SETTINGS)
    return directory


def _learning_of(run: Run) -> list[tuple]:
    """Return the metrics of a run's rows that do not depend on time."""
    return [
        (
            row.step,
            row.loss,
            row.grad_norm,
            row.learning_rate,
            row.gradient_noise_scale_tokens,
            row.skipped_steps,
        )
        for row in run.steps
    ]


def _assert_learned_the_same(
    out: str | Path, other: str | Path, *, after_step: int = 0
) -> None:
    """Assert that a run learned the same as another one, to the last bit.

    The metrics of the other one are compared from the step after ``after_step`` on.
    """
    learning = _learning_of(read_run(Path(out)))
    assert learning
    assert learning == _learning_of(read_run(Path(other)))[after_step:]
    weights = weights_of(out)
    other_weights = weights_of(other)
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def _train_with_interruptions(**settings) -> None:
    """Train a run of 7 steps that is interrupted by SIGTERM twice, and check its ends.

    A signal ends the run one step later, as that step sums the requests of all ranks.
    """
    _train_until_signal(signal_after=2, last_step=3, **settings)
    _train_until_signal(signal_after=4, last_step=5, **settings)
    run, ending = train_or_resume(**settings)
    assert (ending.exit_code, ending.steps) == (0, 7)
    assert run.header.attempt == 3
    assert run.header.resumed_from == "step-000000005"
    assert run.header.resumed_step == 5
    assert len(events_of(run, "stopped")) == len(events_of(run, "resumed")) == 2


def _train_until_signal(*, signal_after: int, last_step: int, **settings) -> None:
    _, ending = train_or_resume(signal_after=signal_after, **settings)
    checkpoint = f"step-{last_step:09d}"
    assert ending.exit_code == REQUEUE
    assert ending.steps == last_step
    assert ending.checkpoint == checkpoint
    assert (
        ending.reason
        == f"SIGTERM on rank 0; run the same command again to resume from {checkpoint}"
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_interrupted_run_ends_with_the_same_weights(uninterrupted_run, workers):
    _train_with_interruptions(data=DataSettings(num_workers=workers), **SETTINGS)
    _assert_learned_the_same(RUN, uninterrupted_run)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"micro_batch_size": 3, "layout": "bucketed", "precision": "bf16"},
            id="bucketed",
        ),
        pytest.param(
            {"micro_batch_size": 4, "schedule": "cosine", "warmup_steps": 2},
            id="accumulated",
        ),
    ],
)
def test_interruptions_change_no_weights_in_other_settings(changes):
    settings = {**SETTINGS, **changes}
    run_of("uninterrupted", **settings)
    _train_with_interruptions(**settings)
    _assert_learned_the_same(RUN, "uninterrupted")


def test_run_from_copied_checkpoint_learns_the_same(uninterrupted_run):
    train_or_resume(signal_after=4, **SETTINGS)
    origin = str((CHECKPOINTS / "step-000000005").absolute())
    fork = run_of("fork", resume=origin, **SETTINGS)
    assert fork.header.resumed_from == origin
    _assert_learned_the_same("fork", uninterrupted_run, after_step=5)


def test_longer_run_resumes_to_the_same_weights():
    settings = {"schedule": "constant", "warmup_steps": 2, "model": DROPOUT}
    run_of("lengthened", max_steps=4, **settings)
    run_of("lengthened", max_steps=7, **settings)
    run_of("uninterrupted", max_steps=7, **settings)
    _assert_learned_the_same("lengthened", "uninterrupted")


def test_interrupted_run_sees_every_sample_once():
    samples = varied_samples(300)
    settings = {
        "source": write_dataset(Path("d"), samples, vocab_size=128),
        "max_epochs": 1,
        "max_steps": 500,
    }
    uninterrupted = run_of("uninterrupted", **settings)
    train_or_resume(signal_after=6, **settings)
    train_or_resume(**settings)
    # The run has finished: another start must not begin the epoch again.
    run, ending = train_or_resume(**settings)
    special_tokens = 2  # of each sample: one before it, and one after it
    expected_tokens = sum(len(sample) + special_tokens for sample in samples)
    assert sum(row.non_padding_tokens for row in run.steps) == expected_tokens
    assert (ending.exit_code, ending.steps) == (0, len(uninterrupted.steps))
    assert ending.steps < settings["max_steps"]  # the data ended before
    _assert_learned_the_same(RUN, "uninterrupted")


def test_reading_metrics_late_changes_no_weights(uninterrupted_run, monkeypatch):
    read_metrics_late(monkeypatch)
    _, ending = train_or_resume(signal_after=1, **SETTINGS)
    # Two steps later than if metrics were read at once.
    assert (ending.exit_code, ending.steps) == (REQUEUE, 4)
    run_of(**SETTINGS)
    _assert_learned_the_same(RUN, uninterrupted_run)
