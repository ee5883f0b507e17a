"""The trainer's step on micro-batches of its loader, for windows of training."""

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from autotune.subjects.mlm.jobs.window_settings import window_settings
from autotune.subjects.subject import StepFacts
from trainer.build import Training, build_training
from trainer.data.dataset import TokenDataset
from trainer.data.micro_batch import MicroBatch
from trainer.distributed.optimizer import learning_rate
from trainer.formats.train_config import TrainConfig
from trainer.runtime.ranks import join_ranks, leave_ranks, warm_up_libraries


def build_step(
    config: Mapping[str, Any],
    data_dir: str,
    *,
    most_micro_batches: int,
    round_number: int = 0,
    losses: bool = False,
    rendezvous: str | None = None,
) -> "TrainerStep":
    """Return the trainer's step, on this rank of those of torchrun's environment.

    Args:
        config: Settings of the training, as JSON.
        data_dir: Directory of the dataset, which has the vocabulary.
        most_micro_batches: Limit of micro-batches in a step of each rank.
        round_number: Number of the window's round, from 0.
        losses: True to keep the loss of each step.
        rendezvous: File through which several ranks connect.
    """
    dataset = TokenDataset.open(Path(data_dir))
    settings, micro_batches = window_settings(
        config, dataset, most_micro_batches, round_number
    )
    ranks = join_ranks(settings, os.environ, rendezvous)
    if ranks.local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        # As torchrun sets it, so that ranks do not compete for cores.
        torch.set_num_threads(1)
    manifest = dataset.manifest
    dataset.close()
    warm_up_libraries(ranks)
    training = build_training(
        settings, manifest.vocab_size, manifest.special_ids, ranks
    )
    return TrainerStep(training, settings, micro_batches, keeps_losses=losses)


class TrainerStep:
    """The trainer's step.

    Args:
        training: Training whose step is taken.
        config: Trainer settings.
        micro_batches: Micro-batches of a step.
        keeps_losses: True to keep the loss of each step.
    """

    def __init__(
        self,
        training: Training,
        config: TrainConfig,
        micro_batches: int,
        *,
        keeps_losses: bool = False,
    ) -> None:
        self._training = training
        self._config = config
        self._keeps_losses = keeps_losses
        self._losses: list[torch.Tensor] = []
        self._steps_taken = 0
        self.autotune_facts = StepFacts(
            micro_batches=micro_batches,
            work=self._work,
            loss=lambda: float(self._losses[-1]),
            losses=self._all_losses if keeps_losses else None,
            end=functools.partial(leave_ranks, together=True),
        )

    def __call__(self, batches: Sequence[MicroBatch]) -> None:
        """Launch an optimizer step, which the device may compute later."""
        if not self._steps_taken:
            # Sets the fixed number of attention segments before the first step.
            self._training.module.fixed_sizes.expect_documents(batches[0])
        rate = learning_rate(self._config, self._steps_taken)
        result = self._training.step.run(batches, rate)
        if not self._keeps_losses:
            self._losses.clear()
        self._losses.append(result.loss)
        self._steps_taken += 1

    def _work(self, batch: MicroBatch) -> dict[str, float]:
        """Return the tokens and the model FLOPs of a micro-batch."""
        flops = self._training.work.step_flops(
            batch.tokens_N.numpy(), batch.predicted_tokens
        )
        return {
            "units": batch.non_padding_tokens,
            "padded_units": batch.ids_BS.numel(),
            "samples": len(batch.tokens_N),
            "model_flops": flops,
        }

    def _all_losses(self) -> list[float]:
        """Return the loss of each step so far, for which this waits."""
        return [float(loss) for loss in self._losses]
