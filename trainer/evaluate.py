"""Evaluation of the model on the validation split."""

import contextlib
import math
import time
from collections.abc import Callable

import torch

from trainer.config.train_config import TrainConfig
from trainer.data.dataset import TokenDataset
from trainer.data.global_batch import make_plan
from trainer.data.loader import make_loader, micro_batch_plans
from trainer.data.micro_batch import MicroBatch
from trainer.data.micro_batch_source import MicroBatchSource
from trainer.distributed.parallel import reshard_weights
from trainer.distributed.ranks import Ranks
from trainer.model.masked_lm import MaskedLM
from trainer.record.run_record import EvaluationRow

_MAX_LOG_PERPLEXITY = 700.0
"""Largest loss whose perplexity is a finite float."""


def evaluate(
    module: MaskedLM,
    validation: TokenDataset,
    config: TrainConfig,
    ranks: Ranks,
    step: int,
    *,
    progressed: Callable[[], None] = lambda: None,
) -> EvaluationRow:
    """Evaluate the model on the same sequences and masks every time.

    The result does not depend on the number of ranks. All ranks call this function.

    Args:
        module: Model, not wrapped for its parallel strategy.
        validation: Validation split.
        config: Configuration of the run.
        ranks: This process's rank and device.
        step: Finished optimizer steps, for the row.
        progressed: Callback before each micro-batch.
    """
    started_s = time.perf_counter()
    config = _as_one_step(config, len(validation))
    plan = make_plan(config, len(validation), ranks.world_size)
    micro_batches = make_loader(
        MicroBatchSource(validation, config, plan),
        config,
        micro_batch_plans(validation, config, plan, ranks.rank, steps=1),
    )
    # This rank's loss, correct predictions, tokens to predict, and sequences.
    sums = torch.zeros(4, dtype=torch.float64, device=ranks.device)
    sequences_at_once = plan.sequences_per_micro_batch * ranks.world_size
    empty_sequences = 0
    module.eval()
    # Compilation would take longer than it saves.
    eager = (
        torch.compiler.set_stance("force_eager")
        if config.compiled
        else contextlib.nullcontext()
    )
    with torch.no_grad(), eager:
        for micro_batch in micro_batches:
            progressed()
            # All ranks stop together. Lanes end one by one: all have after as many
            # empty sequences as there are lanes.
            if any(ranks.all_reduce_sum(micro_batch.non_padding_tokens)):
                empty_sequences = 0
                sums += _evaluate_micro_batch(module, micro_batch, ranks.device)
                continue
            empty_sequences += sequences_at_once
            if empty_sequences >= plan.lanes:
                break
    reshard_weights(module)
    module.train()
    ranks.all_reduce_async(sums)()
    loss_sum, correct, predicted_tokens, sequences = sums.tolist()
    loss = loss_sum / max(1.0, predicted_tokens)
    return EvaluationRow(
        step=step,
        loss=loss,
        perplexity=math.exp(min(loss, _MAX_LOG_PERPLEXITY)),
        masked_accuracy=correct / max(1.0, predicted_tokens),
        predicted_tokens=round(predicted_tokens),
        rows=round(sequences),
        seconds=time.perf_counter() - started_s,
    )


def _as_one_step(config: TrainConfig, samples: int) -> TrainConfig:
    """Return a configuration that reads all sequences as one optimizer step.

    It has no DataLoader workers, which take longer to start than they save.
    """
    data = config.data.model_copy(update={"num_workers": 0})
    return config.model_copy(
        update={
            "global_batch_size": min(config.evaluation.max_sequences, samples),
            "max_epochs": 1,
            "data": data,
        }
    )


def _evaluate_micro_batch(
    module: MaskedLM, micro_batch: MicroBatch, device: torch.device
) -> torch.Tensor:
    """Return a micro-batch's part of the sums, shape (4,), on the device."""
    loss_sum, correct = module.evaluate(micro_batch.to(device))
    width = micro_batch.ids_BS.shape[1]
    sequences = len(torch.unique(micro_batch.starts_N // width))
    counts = torch.tensor(
        [micro_batch.predicted_tokens, sequences], dtype=torch.float64
    ).to(device)
    return torch.cat([torch.stack([loss_sum.double(), correct.double()]), counts])
