"""The ``gradient_sync`` job: training steps of all ranks.

They are taken with and without gradient synchronisation.
"""

import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autotune.subjects.mlm.gradient_sync import GradientSyncRequest
from autotune.subjects.mlm.jobs.loader import rank_batches
from autotune.trials.jobs.footprint import MemoryGrowth
from trainer.build import build_training
from trainer.checkpoint.tensors import make_optimizer_state
from trainer.data.dataset import TokenDataset
from trainer.data.global_batch import with_batch_in_sequences
from trainer.data.micro_batch import MicroBatch
from trainer.distributed.optimizer import learning_rate
from trainer.distributed.step import StepResult
from trainer.formats.train_config import gradient_accumulation_steps
from trainer.runtime.device_events import DeviceEvent, mark
from trainer.runtime.ranks import Ranks, warm_up_libraries

WARM_UP_STEPS = 2
CACHED_BATCHES = 32
"""Batches that are repeated; those of fewer would bias the time of a step."""
Gradients = list[tuple[int, DeviceEvent]]
"""Number of elements of each gradient, and the event at which it was ready."""


def run(
    measured: dict[str, Any], local: dict[str, Any], ranks: Ranks
) -> dict[str, Any]:
    """Train on cached batches of the dataset for the requested number of steps.

    Args:
        measured: A ``GradientSyncRequest``.
        local: ``data_dir``, the dataset's directory.
        ranks: All ranks.

    Returns:
        The fields of ``GradientSyncFigures``, the same from every rank.
    """
    asked, dataset = (
        GradientSyncRequest.of(measured),
        TokenDataset.open(Path(local["data_dir"])),
    )
    config = with_batch_in_sequences(asked.config, dataset)
    memory, manifest = MemoryGrowth(ranks), dataset.manifest
    warm_up_libraries(ranks)
    training = build_training(config, manifest.vocab_size, manifest.special_ids, ranks)
    traffic = training.parallel_module.traffic
    if not asked.synchronise:
        if traffic is None:
            raise ValueError(
                f"{config.parallel.strategy} cannot skip gradient synchronisation"
            )
        traffic.synchronise = False
    # Cached batches need no workers.
    without_workers = config.data.model_copy(update={"num_workers": 0})
    batches = _repeated(
        rank_batches(
            dataset,
            config.model_copy(update={"data": without_workers}),
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
    )
    each = gradient_accumulation_steps(config, ranks.world_size)
    make_optimizer_state(training)
    first = next(batches)
    training.module.fixed_sizes.expect_documents(first)
    training.step.rehearse(first)
    passes = (
        _LastPass(training.parallel_module.module, ranks.device)
        if traffic is not None
        else None
    )
    results, tokens, owns = [], [], []
    for number in range(WARM_UP_STEPS + asked.steps):
        taken = list(itertools.islice(batches, each))
        results.append(training.step.run(taken, learning_rate(config, number)))
        tokens.append(sum(batch.non_padding_tokens for batch in taken))
        # As in training, the host is at most one step ahead of the device.
        (results[-2] if number else results[-1]).updated.wait()
        if passes is not None:
            owns.append((passes.began, passes.turned, passes.ready))
    results[-1].updated.wait()
    dataset.close()
    return {
        "losses": [float(result.loss) for result in results[WARM_UP_STEPS:]],
        **_of_steps(results[WARM_UP_STEPS - 1 :], ranks),
        **_of_passes(results[WARM_UP_STEPS:], owns[WARM_UP_STEPS:], ranks),
        "gradient_accumulation_steps": each,
        "micro_batch_size": config.micro_batch_size,
        "tokens_per_step": ranks.all_reduce_sum(
            sum(tokens[WARM_UP_STEPS:]) / asked.steps
        )[0],
        "peak_bytes": memory.peak_bytes(),
    }


def _repeated(batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    """Return an endless iterator over the first batches of another."""
    return itertools.cycle(list(itertools.islice(batches, CACHED_BATCHES)))


class _LastPass:
    """Hooks that record the events of the last micro-batch.

    They are on a module's forward and backward.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        self.began = self.turned = mark(device)
        """Start of forward, and of backward."""
        self.ready: Gradients = []
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._turn)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._note)

    def _begin(self, *_: object) -> None:
        self.began, self.ready = mark(self._device), []

    def _turn(self, *_: object) -> None:
        self.turned = mark(self._device)

    def _note(self, parameter: torch.Tensor) -> None:
        self.ready.append((parameter.numel(), mark(self._device)))


def _of_steps(results: list[StepResult], ranks: Ranks) -> dict[str, Any]:
    """Return the times of steps, each of the slowest rank.

    The first result only marks the start of the next step.
    """
    each = [
        after.updated.seconds_since(before.updated)
        for before, after in itertools.pairwise(results)
    ]
    updates = [result.updated.seconds_since(result.reduced) for result in results[1:]]
    exposed = [
        result.reduced.seconds_since(result.gradients_sent)
        for result in results[1:]
        if result.gradients_sent is not None
    ]
    step_s, update_s = (
        ranks.all_reduce_max(*each),
        ranks.all_reduce_max(statistics.median(updates))[0],
    )
    exposed_s = ranks.all_reduce_max(statistics.median(exposed))[0] if exposed else None
    return {
        "step_s": step_s,
        "optimizer_step_s": update_s,
        "communication_s": exposed_s,
    }


def _of_passes(
    results: list[StepResult],
    passes: list[tuple[DeviceEvent, DeviceEvent, Gradients]],
    ranks: Ranks,
) -> dict[str, Any]:
    """Return the compute times of ranks without waits for each other.

    The result is empty if there were no hooks.
    """
    if not passes:
        return {"compute_s_by_rank": [], "forward_share": None, "gradients": []}
    forwards = [turned.seconds_since(began) for began, turned, _ in passes]
    # Seconds from the beginning of backward to each gradient, by step.
    arrivals = [
        [there.seconds_since(turned) for _, there in ready]
        for _, turned, ready in passes
    ]
    # By step and rank, for the spread between ranks and between steps.
    by_rank = [
        ranks.all_gather_float(
            result.count_requested.seconds_since(result.began)
            + ready[-1][1].seconds_since(result.count_received)
        )
        for result, (_, _, ready) in zip(results, passes, strict=True)
    ]
    medians_s = (
        statistics.median(forwards),
        statistics.median(one[-1] for one in arrivals),
    )
    forward, backward = ranks.all_reduce_sum(*medians_s)
    # From the first rank, so that all ranks return the same; means over steps, as a
    # single backward may be delayed.
    shares = [
        statistics.fmean(one[number] / one[-1] for one in arrivals)
        for number in range(len(arrivals[0]))
    ]
    pairs = zip((elements for elements, _ in passes[0][2]), shares, strict=True)
    gradients = [
        [elements, min(1.0, max(0.0, ranks.broadcast_object(share)))]
        for elements, share in pairs
    ]
    compute_s = [list(rank) for rank in zip(*by_rank, strict=True)]
    return {
        "compute_s_by_rank": compute_s,
        "forward_share": forward / (forward + backward),
        "gradients": gradients,
    }
