"""Evaluation of the model on the validation split."""

import contextlib
import math
import time
from collections.abc import Callable

import torch

from trainer.config.train_config import TrainConfig
from trainer.data.dataset import TokenDataset
from trainer.data.global_batch import make_plan
from trainer.data.loader import MicroBatchSource, make_loader, micro_batch_plans
from trainer.distributed.ranks import Ranks, reshard_weights
from trainer.model.masked_lm import MaskedLM
from trainer.record.run_record import EvaluationRow


def evaluate(
    module: MaskedLM,
    validation: TokenDataset,
    config: TrainConfig,
    ranks: Ranks,
    step: int,
    *,
    progressed: Callable[[], None] = lambda: None,
) -> EvaluationRow:
    """Evaluate the unwrapped model on the same sequences and masks every time, for any number of ranks; collective."""
    started_s = time.perf_counter()
    # All sequences as one optimizer step, without DataLoader workers, which take longer
    # to start than they save.
    rows = min(config.evaluation.max_sequences, len(validation))
    data = config.data.model_copy(update={"num_workers": 0})
    config = config.model_copy(
        update={"global_batch_size": rows, "max_epochs": 1, "data": data}
    )
    plan = make_plan(config, len(validation), ranks.world_size)
    plans = micro_batch_plans(validation, config, plan, ranks.rank, steps=1)
    # This rank's loss, hits, tokens to predict, and sequences.
    sums = torch.zeros(4, dtype=torch.float64, device=ranks.device)
    rows_at_once, empty_rows = plan.sequences_per_micro_batch * ranks.world_size, 0
    module.eval()
    # Not compiled either, as compilation would take longer than it saves.
    eager = (
        torch.compiler.set_stance("force_eager")
        if config.compiled
        else contextlib.nullcontext()
    )
    with torch.no_grad(), eager:
        for batch in make_loader(
            MicroBatchSource(validation, config, plan), config, plans
        ):
            progressed()
            # All ranks stop together. Lanes end one by one: all have after as many
            # empty sequences as there are lanes.
            empty_rows = (
                0
                if any(ranks.all_reduce_sum(batch.non_padding_tokens))
                else empty_rows + rows_at_once
            )
            if empty_rows >= plan.lanes:
                break
            if empty_rows:
                continue
            loss_sum, correct = module.evaluate(batch.to(ranks.device))
            rows = len(torch.unique(batch.starts_N // batch.ids_BS.shape[1]))
            counts = torch.tensor(
                [batch.predicted_tokens, rows], dtype=torch.float64
            ).to(ranks.device)
            sums += torch.cat(
                [torch.stack([loss_sum.double(), correct.double()]), counts]
            )
    reshard_weights(module)
    module.train()
    ranks.all_reduce_async(sums)()
    loss, hits, predicted, rows_seen = sums.tolist()
    loss /= max(1.0, predicted)
    return EvaluationRow(
        step=step,
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        masked_accuracy=hits / max(1.0, predicted),
        predicted_tokens=round(predicted),
        rows=round(rows_seen),
        seconds=time.perf_counter() - started_s,
    )
