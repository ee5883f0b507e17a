"""One optimizer step: micro-batches, accumulation, clipping, update. Probing trials run this same code.

Shapes: B rows of a micro-batch, S tokens of a row, V words.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from trainer.config import TrainConfig
from trainer.errors import BadConfig
from trainer.feed import MicroBatch
from trainer.masking import IGNORED_LABEL
from trainer.parallel import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one optimizer step was on this rank. Tensors stay on the device: reading them waits for it."""

    loss_share: torch.Tensor
    """Shape (): this rank's part of the mean loss per predicted token; the ranks' parts add up to it."""
    grad_norm: torch.Tensor
    """Shape (): the whole gradient's L2 norm before clipping."""


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Fused AdamW; weight decay on matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then linear decay to zero, for a step counted from 0."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    left = (config.max_steps - step) / max(1, config.max_steps - config.warmup_steps)
    return config.learning_rate * max(0.0, min(1.0, left))


class TrainStep:
    """A model with its optimizer, ready to take steps.

    Raises:
        BadConfig: If rows are packed: attention would cross from one sample to the next.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig, ranks: Ranks) -> None:
        if config.layout == "packed":
            raise BadConfig(
                "train.layout is packed, and this version's models would attend across the samples of a row",
                next_step="Use --set train.layout=bucketed or padded.",
            )
        self._model = model
        self._optimizer = optimizer
        self._config = config
        self._ranks = ranks

    def run(self, micro_batches: Sequence[MicroBatch], lr: float) -> StepResult:
        """Take one optimizer step.

        The loss of every token weighs the same, whichever rank and micro-batch it fell to: each rank divides by the
        number of predicted tokens of all ranks and micro-batches.
        """
        (predicted,) = self._ranks.sum(sum(batch.predicted_tokens for batch in micro_batches))
        weight = 1.0 / max(1.0, predicted)
        loss_share = torch.zeros((), device=self._ranks.device)
        for number, batch in enumerate(micro_batches):
            with self._synchronised_if(number == len(micro_batches) - 1):
                loss = self._loss_sum(batch) * weight
                # DDP averages over ranks; the loss is already divided by what all of them predict.
                (loss * self._ranks.world_size).backward()
            loss_share += loss.detach()
        grad_norm = nn.utils.clip_grad_norm_(self._model.parameters(), self._config.max_grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult(loss_share=loss_share, grad_norm=grad_norm)

    def _loss_sum(self, batch: MicroBatch) -> torch.Tensor:
        """Summed cross-entropy of the predicted tokens, in fp32; shape ()."""
        batch = batch.to(self._ranks.device)
        bf16 = self._config.precision == "bf16"
        with torch.autocast(self._ranks.device.type, dtype=torch.bfloat16, enabled=bf16):
            logits_BSV = self._model(input_ids=batch.wide_ids_BS(), attention_mask=batch.attention_BS()).logits
        loss: torch.Tensor = functional.cross_entropy(
            logits_BSV.flatten(0, 1).float(), batch.labels_BS().flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
        )
        return loss

    def _synchronised_if(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Gradients travel once per optimizer step, with its last micro-batch."""
        if last or not isinstance(self._model, DistributedDataParallel):
            return contextlib.nullcontext()
        return self._model.no_sync()
