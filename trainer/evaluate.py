"""Evaluation of the model on the validation split."""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields

import torch

from trainer.config.train_config import TrainConfig
from trainer.data.batch_plan import BatchPlan
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
    sums = _Sums(ranks)
    with _evaluation_mode(module, is_compiled=config.compiled):
        for micro_batch in _until_all_lanes_end(micro_batches, plan, ranks, progressed):
            sums.add(module, micro_batch)
    totals = sums.over_all_ranks()
    loss = totals.loss_sum / max(1.0, totals.predicted_tokens)
    return EvaluationRow(
        step=step,
        loss=loss,
        perplexity=math.exp(min(loss, _MAX_LOG_PERPLEXITY)),
        masked_accuracy=totals.correct / max(1.0, totals.predicted_tokens),
        predicted_tokens=round(totals.predicted_tokens),
        rows=round(totals.sequences),
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


@contextlib.contextmanager
def _evaluation_mode(module: MaskedLM, *, is_compiled: bool) -> Iterator[None]:
    """Compute without dropout, gradients and compilation in the block."""
    module.eval()
    # Compilation of the evaluation would take longer than it saves.
    eager = (
        torch.compiler.set_stance("force_eager")
        if is_compiled
        else contextlib.nullcontext()
    )
    with torch.no_grad(), eager:
        yield
    reshard_weights(module)
    module.train()


def _until_all_lanes_end(
    micro_batches: Iterable[MicroBatch],
    plan: BatchPlan,
    ranks: Ranks,
    progressed: Callable[[], None],
) -> Iterator[MicroBatch]:
    """Yield micro-batches until every lane of every rank has ended.

    A lane is one of several streams into which the split is divided. Lanes end one by
    one, and then give empty sequences. A rank whose lanes have ended computes empty
    micro-batches as long as any other rank has tokens, so all ranks stop together.
    """
    sequences_at_once = plan.sequences_per_micro_batch * ranks.world_size
    consecutive_empty_sequences = 0
    for micro_batch in micro_batches:
        progressed()
        (tokens_of_all_ranks,) = ranks.all_reduce_sum(micro_batch.non_padding_tokens)
        if tokens_of_all_ranks > 0:
            consecutive_empty_sequences = 0
            yield micro_batch
            continue
        # Sequences come from the lanes in turn: after as many empty ones as there are
        # lanes, every lane has ended.
        consecutive_empty_sequences += sequences_at_once
        if consecutive_empty_sequences >= plan.lanes:
            return


@dataclass(frozen=True, slots=True, kw_only=True)
class _Totals:
    """Sums over all sequences of the evaluation."""

    loss_sum: float
    """Summed cross-entropy of the tokens to predict, in nats."""
    correct: float
    """Number of tokens predicted correctly."""
    predicted_tokens: float
    sequences: float


class _Sums:
    """Sums of this rank's micro-batches, which wait on the device for all ranks'."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        # One tensor, in the order of the fields of ``_Totals``, so that one all-reduce
        # sums them all.
        self._sums = torch.zeros(
            len(fields(_Totals)), dtype=torch.float64, device=ranks.device
        )

    def add(self, module: MaskedLM, micro_batch: MicroBatch) -> None:
        """Evaluate a micro-batch and add its results."""
        loss_sum, correct = module.evaluate(micro_batch.to(self._ranks.device))
        width = micro_batch.ids_BS.shape[1]
        sequences = len(torch.unique(micro_batch.starts_N // width))
        counts = torch.tensor(
            [micro_batch.predicted_tokens, sequences], dtype=torch.float64
        ).to(self._ranks.device)
        self._sums += torch.cat(
            [torch.stack([loss_sum.double(), correct.double()]), counts]
        )

    def over_all_ranks(self) -> _Totals:
        """Return the sums over all ranks, which must all call this."""
        wait = self._ranks.all_reduce_async(self._sums)
        wait()
        names = [field.name for field in fields(_Totals)]
        return _Totals(**dict(zip(names, self._sums.tolist(), strict=True)))
