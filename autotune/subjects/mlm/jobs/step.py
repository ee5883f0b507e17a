"""The trainer's optimizer step on random, full sequences: the worst case for memory."""

import contextlib
from typing import Any

import torch

from autotune.subjects.mlm.jobs.worst_case import fullest_batch
from autotune.subjects.subject import StepFacts
from autotune.trials.jobs.budget import reject_mig_slice
from trainer.build import Training, build_training
from trainer.checkpoint.tensors import make_optimizer_state
from trainer.data.micro_batch import MicroBatch
from trainer.distributed.optimizer import learning_rate
from trainer.distributed.parallel import reshard_weights
from trainer.distributed.step import StepResult
from trainer.formats.manifest import SpecialIds
from trainer.formats.train_config import TrainConfig, gradient_accumulation_steps
from trainer.runtime.ranks import (
    Ranks,
    join_ranks,
    leave_ranks,
    warm_up_libraries,
)

PREPARED_STEPS = 4
"""Steps whose micro-batches are made in advance and reused in rotation: a GPU must not
wait for them."""


def build_step(
    config: dict[str, Any],
    vocab_size: int,
    special_ids: dict[str, int],
    documents_per_sequence: float,
    opened: Ranks,
) -> "RandomStep":
    """Build the model, and return its optimizer step.

    Args:
        config: ``TrainConfig`` as JSON.
        vocab_size: Tokens of the vocabulary.
        special_ids: ``SpecialIds`` as JSON.
        documents_per_sequence: Documents in each sequence, on average.
        opened: Result of ``join``.
    """
    return RandomStep(
        TrainConfig.model_validate(config),
        vocab_size,
        SpecialIds.model_validate(special_ids),
        documents_per_sequence,
        opened,
    )


def join(config: dict[str, Any], rendezvous: str | None = None) -> Ranks:
    """Join the ranks and open libraries, whose memory is not the model's.

    Args:
        config: ``TrainConfig`` as JSON.
        rendezvous: File through which the ranks of the node connect; None for one rank.
    """
    ranks = join_ranks(TrainConfig.model_validate(config), rendezvous=rendezvous)
    reject_mig_slice(ranks.device)
    warm_up_libraries(ranks)
    return ranks


build_step.before_budget = join  # type: ignore[attr-defined]  # read by the job


class RandomStep:
    """The trainer's optimizer step on micro-batches of random words.

    Args:
        config: Trainer settings. Each rank takes as many micro-batches as its share of
            the global batch has.
        vocab_size: Tokens of the vocabulary.
        special_ids: Tokens that are not words.
        documents_per_sequence: Documents in each sequence, on average.
        ranks: Ranks, of which this process is one.
    """

    def __init__(
        self,
        config: TrainConfig,
        vocab_size: int,
        special_ids: SpecialIds,
        documents_per_sequence: float,
        ranks: Ranks,
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._training = build_training(config, vocab_size, special_ids, ranks)
        self._prepared = [
            batches_of_step(
                config, vocab_size, special_ids, documents_per_sequence, ranks
            )
            for _ in range(PREPARED_STEPS)
        ]
        self._number = 0
        self._last: StepResult | None = None
        first = self._prepared[0]
        work = self._training.work
        self.autotune_facts = StepFacts(
            micro_batches=len(first),
            model_flops=sum(
                work.step_flops(batch.tokens_N.numpy(), batch.predicted_tokens)
                for batch in first
            ),
            prepare=self._prepare,
            # An all-reduce makes the ranks begin together.
            begin_together=lambda: ranks.all_reduce_sum(0.0),
            evaluate=self._evaluate,
            loss=self._loss,
            end=lambda: leave_ranks(together=True),
        )

    def __call__(self) -> None:
        """Take an optimizer step."""
        batches = self._prepared[self._number % PREPARED_STEPS]
        self._last = self._training.step.run(
            batches, learning_rate(self._config, self._number)
        )
        self._number += 1

    def _prepare(self) -> None:
        """Allocate the optimizer's state and rehearse a step, as the trainer does."""
        make_optimizer_state(self._training)
        self._training.step.rehearse(self._prepared[0][0])

    def _evaluate(self) -> None:
        evaluate_once(
            self._training, self._prepared[0][0], self._config, self._ranks.device
        )

    def _loss(self) -> float:
        assert self._last is not None
        return float(self._last.loss)


def batches_of_step(
    config: TrainConfig,
    vocab_size: int,
    special_ids: SpecialIds,
    documents_per_sequence: float,
    ranks: Ranks,
) -> list[MicroBatch]:
    """Return the micro-batches of a step, pinned if the trainer pins them."""
    is_pinned = config.device == "cuda" and config.data.pin_memory
    batches = []
    for _ in range(gradient_accumulation_steps(config, ranks.world_size)):
        batch = fullest_batch(
            config,
            vocab_size,
            special_ids,
            documents_per_sequence=documents_per_sequence,
        )
        batches.append(batch.pin_memory() if is_pinned else batch)
    return batches


def evaluate_once(
    training: Training, batch: MicroBatch, config: TrainConfig, device: torch.device
) -> None:
    """Evaluate a micro-batch as the trainer does: a size fits only if this fits, too.

    The trainer runs compiled layers eagerly in an evaluation, and so does this.
    """
    training.module.eval()
    eager = (
        torch.compiler.set_stance("force_eager")
        if config.compiled
        else contextlib.nullcontext()
    )
    with torch.no_grad(), eager:
        float(training.module.evaluate(batch.to(device))[0])
    reshard_weights(training.module)
    training.module.train()
