"""The trainer's step on random sequences, of a tiny model on this CPU."""

import pytest

from autotune.subjects.mlm.jobs import step as trainer_step
from autotune.subjects.mlm.jobs.step import PREPARED_STEPS, build_step
from autotune.subjects.mlm.subject import MlmSubject
from tests.trainer.tiny_models import config_of
from trainer.formats.manifest import SpecialIds
from trainer.runtime.ranks import join_ranks

MICRO_BATCH_SIZE = 2
MICRO_BATCHES = 3
SEQ_LENGTH_TOKENS = 32
SPECIAL_IDS = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)


@pytest.fixture
def batches(monkeypatch):
    """Return the list of the micro-batches that steps prepare."""
    made = []
    fullest_batch = trainer_step.fullest_batch

    def make_batch(*arguments, **options):
        made.append(fullest_batch(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(trainer_step, "fullest_batch", make_batch)
    return made


@pytest.fixture
def step(batches):
    """Return a step of three micro-batches, as a trial of the subject builds it."""
    config = config_of(seq_length_tokens=SEQ_LENGTH_TOKENS)
    subject = MlmSubject(config=config, vocab_size=99, special_ids=SPECIAL_IDS)
    call = subject.step(
        {"micro_batch_size": MICRO_BATCH_SIZE, "micro_batches": MICRO_BATCHES}
    )
    return build_step(**call.arguments, opened=join_ranks(config))


def test_step_has_the_requested_micro_batches(step, batches):
    assert step.autotune_facts.micro_batches == MICRO_BATCHES
    assert {batch.ids_BS.shape for batch in batches} == {
        (MICRO_BATCH_SIZE, SEQ_LENGTH_TOKENS)
    }


def test_micro_batches_of_few_steps_are_reused(step, batches):
    step.autotune_facts.prepare()
    for _ in range(2 * PREPARED_STEPS):
        step()
    assert len(batches) == PREPARED_STEPS * MICRO_BATCHES


def test_step_reports_its_last_loss(step):
    step.autotune_facts.prepare()
    step()
    first = step.autotune_facts.loss()
    for _ in range(PREPARED_STEPS):
        step()
    assert 0 < step.autotune_facts.loss() != first


def test_flops_are_those_of_all_micro_batches(step, batches):
    one = step._training.work.step_flops(
        batches[0].tokens_N.numpy(), batches[0].predicted_tokens
    )
    assert step.autotune_facts.model_flops == pytest.approx(MICRO_BATCHES * one)


def test_evaluation_leaves_the_model_in_training(step):
    step.autotune_facts.prepare()
    step.autotune_facts.evaluate()
    assert step._training.module.training
