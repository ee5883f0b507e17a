"""Evaluation of the model on the validation split."""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from trainer.data.batch_plan import BatchPlan, make_plan
from trainer.data.dataset import TokenDataset
from trainer.data.loader import make_loader, micro_batch_plans
from trainer.data.micro_batch import MicroBatch
from trainer.data.micro_batch_source import MicroBatchSource
from trainer.distributed.parallel import reshard_weights
from trainer.formats.run_record import EvaluationRow
from trainer.formats.train_config import TrainConfig
from trainer.model.masked_lm import MaskedLM
from trainer.runtime.ranks import Ranks

_MAX_LOG_PERPLEXITY = 700.0
"""Loss above which the perplexity is that of this loss, as ``exp(710)`` is no finite
float."""


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
        module: Model, without the wrapper of its parallel strategy.
        validation: Validation split.
        config: Configuration of the run.
        ranks: This process's rank and device.
        step: Finished optimizer steps, which the result names.
        progressed: Callback before each micro-batch.

    Returns:
        The result, as a row of the run record.
    """
    started_s = time.perf_counter()
    one_step_config = _as_one_step(config, len(validation))
    plan = make_plan(one_step_config, len(validation), ranks.world_size)
    micro_batches = make_loader(
        MicroBatchSource(validation, one_step_config, plan),
        one_step_config,
        micro_batch_plans(validation, one_step_config, plan, ranks.rank, steps=1),
    )
    rank_sums = _RankSums(ranks)
    with _evaluation_mode(module, is_compiled=config.compiled):
        for micro_batch in _until_all_lanes_end(micro_batches, plan, ranks, progressed):
            rank_sums.evaluate_and_add(module, micro_batch)
    totals = rank_sums.over_all_ranks()
    loss = totals.loss_sum / max(1.0, totals.predicted_tokens)
    is_finite = math.isfinite(loss)
    return EvaluationRow(
        step=step,
        loss=loss if is_finite else None,
        perplexity=math.exp(min(loss, _MAX_LOG_PERPLEXITY)) if is_finite else None,
        masked_accuracy=totals.correct / max(1.0, totals.predicted_tokens),
        predicted_tokens=round(totals.predicted_tokens),
        rows=round(totals.sequences),
        seconds=time.perf_counter() - started_s,
    )


def _as_one_step(config: TrainConfig, samples: int) -> TrainConfig:
    """Return a configuration whose first optimizer step has all sequences to evaluate.

    It sets no DataLoader workers, as they would take longer to start than they save.

    Args:
        config: Configuration of the run.
        samples: Number of samples in the validation split.
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
    # Compiled layers run uncompiled here: to compile them again for evaluation would
    # take longer than it saves.
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

    A lane is one of several streams into which the split is divided. Lanes end at
    different times; from then on, they give empty sequences. A rank whose lanes have
    ended computes empty micro-batches until the lanes of all other ranks have ended
    too, so all ranks stop together.

    Args:
        micro_batches: Micro-batches of this rank.
        plan: Batch split, and the number of lanes.
        ranks: This process's rank.
        progressed: Callback before each micro-batch.
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
    """Number of tokens to predict."""
    sequences: float
    """Number of sequences that are not empty."""


class _RankSums:
    """Sums of this rank's micro-batches, kept on the device.

    The host never waits for them before ``over_all_ranks``.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        # One tensor, so that one all-reduce sums all four: the loss, the correct
        # predictions, the tokens to predict and the sequences.
        self._sums = torch.zeros(4, dtype=torch.float64, device=ranks.device)

    def evaluate_and_add(self, module: MaskedLM, micro_batch: MicroBatch) -> None:
        """Evaluate a micro-batch and add its results to the sums."""
        loss_sum, correct = module.evaluate(micro_batch.to(self._ranks.device))
        # Documents start at positions in the whole micro-batch. An empty sequence has
        # none.
        length_tokens = micro_batch.ids_BS.shape[1]
        sequences = len(torch.unique(micro_batch.starts_N // length_tokens))
        counts = torch.tensor(
            [micro_batch.predicted_tokens, sequences], dtype=torch.float64
        ).to(self._ranks.device)
        self._sums += torch.cat(
            [torch.stack([loss_sum.double(), correct.double()]), counts]
        )

    def over_all_ranks(self) -> _Totals:
        """Return the sums over all ranks, which must all call this method."""
        let_device_wait = self._ranks.all_reduce_async(self._sums)
        let_device_wait()
        loss_sum, correct, predicted_tokens, sequences = self._sums.tolist()
        return _Totals(
            loss_sum=loss_sum,
            correct=correct,
            predicted_tokens=predicted_tokens,
            sequences=sequences,
        )
