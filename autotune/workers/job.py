"""The ``training`` job: a timed window of training on the dataset with DataLoader workers, or on cached batches.

The step is the trainer's own, or simulated with a given duration.
"""

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from autotune.trials.jobs import footprint
from autotune.workers.values import TrainingRequest
from trainer.build import Training, build_training
from trainer.config.train_config import TrainConfig, gradient_accumulation_steps
from trainer.data.dataset import TokenDataset
from trainer.data.global_batch import make_plan, with_batch_in_sequences
from trainer.data.loader import (
    DataWait,
    MicroBatch,
    MicroBatchSource,
    make_loader,
    micro_batch_plans,
)
from trainer.data.sampler import MicroBatchPlan
from trainer.distributed.optimizer import learning_rate
from trainer.distributed.ranks import (
    DeviceEvent,
    Ranks,
    join_ranks,
    leave_ranks,
    mark,
    open_libraries,
)
from trainer.distributed.step import StepResult

CACHED_BATCHES = 32
"""Number of cached batches: enough for average sequences, few enough for memory."""
WARM_UP_STEPS = {"cpu": 2, "cuda": 3}
MOST_MICRO_BATCHES = 4
"""Limit of micro-batches in a measured step; the last one synchronises gradients and
updates, as in training."""
FIRST_PART = 4
"""Divisor of a window's time for its first part, which shows the speed of steps."""
NOT_READY_S = 0.005
"""Least wait that shows that a batch was not ready in a queue."""


def run(measured: dict[str, Any], local: dict[str, Any]) -> dict[str, Any]:
    """Train all ranks for a timed window, and return the fields of ``TrainingFigures``, the same from every rank.

    ``measured`` is a ``TrainingRequest``; its ``interleaved_with`` and ``storage`` only
    distinguish windows. ``local`` has ``data_dir``, the dataset's directory; with
    several ranks ``environment`` and ``rendezvous``.
    """
    asked = TrainingRequest.of(measured)
    ranks = join_ranks(
        asked.config,
        environment=local.get("environment", {}),
        rendezvous=local.get("rendezvous"),
    )
    if ranks.local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        # As torchrun sets it, so that ranks do not compete for cores.
        torch.set_num_threads(1)
    dataset = TokenDataset.open(Path(local["data_dir"]))
    config = with_batch_in_sequences(asked.config, dataset)
    micro_batches = min(
        MOST_MICRO_BATCHES, gradient_accumulation_steps(config, ranks.world_size)
    )
    config = config.model_copy(
        update={
            "global_batch_size": (
                micro_batches * config.micro_batch_size * ranks.world_size
            ),
            # The window ends the training.
            "global_batch_tokens": None,
            "global_batch_samples": None,
            "max_epochs": None,
            # Other sequences in every round, so that their cost is noise between rounds
            # and not bias.
            "seed": config.seed + asked.round,
        }
    )
    consumer: Consumer
    if asked.replayed_step_s is not None:
        consumer = ReplayedStep(
            asked.replayed_step_s,
            lambda batch: batch.ids_BS.shape[1] / config.seq_length_tokens,
            micro_batches,
            ranks,
        )
    else:
        manifest = dataset.manifest
        open_libraries(ranks)
        training = build_training(
            config, manifest.vocab_size, manifest.special_ids, ranks
        )
        consumer = TrainingStep(training, config, micro_batches, ranks.device)
    workers = 0 if asked.cached else config.data.num_workers
    loader = batches_of(
        dataset, config, ranks, cached=asked.cached, sample_delay_s=asked.sample_delay_s
    )
    drained = drain(loader, workers * config.data.prefetch_factor)
    warm_up = WARM_UP_STEPS[config.device]
    for _ in range(warm_up):
        started_s = time.perf_counter()
        consumer.step(loader)
        consumer.finish()
    step_s = time.perf_counter() - started_s
    # Workers deliver in bursts, so a window must have whole bursts.
    group = max(1, workers // math.gcd(workers, micro_batches))
    figures = _measure(asked, loader, consumer, ranks, group=group, step_s=step_s)
    if asked.losses and isinstance(consumer, TrainingStep):
        figures["losses"] = [float(loss) for loss in consumer.losses]
    leave_ranks(together=True)
    return figures | {
        "optimizer_steps": warm_up + figures["steps"],
        "discarded_batches": drained + warm_up * micro_batches,
        "gradient_accumulation_steps": micro_batches,
        "local_ranks": ranks.local_world_size,
    }


class TrainingStep:
    """The trainer's step, with the host one step ahead of the device."""

    def __init__(
        self,
        training: Training,
        config: TrainConfig,
        micro_batches: int,
        device: torch.device,
    ) -> None:
        self._step, self._config, self._micro_batches = (
            training.step,
            config,
            micro_batches,
        )
        self._module, self.work = training.module, training.work
        self._taken = 0
        self._last: StepResult | None = None
        self.losses: list[torch.Tensor] = []
        """Loss of each step so far, warm-up included."""
        self.wait = DataWait(lambda: mark(device))

    def step(self, loader: Iterator[MicroBatch]) -> list[MicroBatch]:
        """Take a step's micro-batches and launch the step.

        Return after the device finished the previous one.
        """
        batches = self.wait.take(loader, self._micro_batches)
        if not self._taken:
            self._module.expect_documents(batches[0])
        before, self._last = (
            self._last,
            self._step.run(batches, learning_rate(self._config, self._taken)),
        )
        self.losses.append(self._last.loss)
        self.wait.device_busy_until(self._last.updated)
        self._taken += 1
        if before is not None:
            before.updated.wait()
        return batches

    def finish(self) -> None:
        """Wait until the device is idle.

        Raises:
            ValueError: If the loss is not finite.
        """
        if self._last is not None and not math.isfinite(loss := float(self._last.loss)):
            raise ValueError(f"the loss is {loss}")


class ReplayedStep:
    """Simulation of a GPU with a known time per micro-batch.

    This process keeps one CPU core busy, as in training.

    A micro-batch takes its ``share`` of ``micro_batch_s``; it starts when all ranks
    have their data, as they synchronise gradients. Copies to the GPU and their host
    memory bandwidth are not simulated.
    """

    def __init__(
        self,
        micro_batch_s: float,
        share: Callable[[Any], float],
        micro_batches: int,
        ranks: Ranks,
    ) -> None:
        self._micro_batch_s, self._share = micro_batch_s, share
        self._micro_batches, self._ranks = micro_batches, ranks
        self._free_s = time.perf_counter()
        self.wait = DataWait(lambda: DeviceEvent(time.perf_counter()))
        torch.set_num_threads(1)
        self._keeps_busy = torch.rand(96, 96)

    def step(self, loader: Iterator[MicroBatch]) -> list[MicroBatch]:
        """Take a step's micro-batches, as far ahead of the simulated GPU as the trainer does."""
        batches = []
        begins_s = self._free_s
        for _ in range(self._micro_batches):
            (batch,) = self.wait.take(loader, 1)
            begins_s = self._ranks.all_reduce_max(
                max(time.perf_counter(), self._free_s)
            )[0]
            self._free_s = begins_s + self._micro_batch_s * self._share(batch)
            self.wait.device_busy_until(_Until(self._free_s))
            batches.append(batch)
        self._busy_until(begins_s)
        return batches

    def finish(self) -> None:
        """Wait until the device is idle."""
        self._busy_until(self._free_s)

    def _busy_until(self, moment_s: float) -> None:
        while time.perf_counter() < moment_s:
            # Releases the GIL, unlike a loop that reads the clock.
            torch.mm(self._keeps_busy, self._keeps_busy)


class _Until(DeviceEvent):
    """Device event at a time known in advance."""

    def reached(self) -> bool:
        assert isinstance(self.moment, float)
        return time.perf_counter() >= self.moment


class Consumer(Protocol):
    """Consumer of batches; the trainer's runs one step ahead of the device."""

    wait: DataWait

    def step(self, loader: Iterator[Any]) -> list[Any]:
        """Take the batches of a step and the step; return the batches."""

    def finish(self) -> None:
        """Wait until the device is idle."""


def batches_of(
    dataset: TokenDataset,
    config: TrainConfig,
    ranks: Ranks,
    *,
    cached: bool = True,
    sample_delay_s: float = 0.0,
) -> Iterator[MicroBatch]:
    """Return an endless iterator of a rank's micro-batches: a few cached ones repeatedly, or those of a loader."""
    plan = make_plan(config, len(dataset), world_size=ranks.world_size)
    source = MicroBatchSource(dataset, config, plan)
    plans = micro_batch_plans(dataset, config, plan, rank=ranks.rank)
    if not cached:
        return make_loader(_Delayed(source, sample_delay_s), config, plans)
    alone = config.model_copy(
        update={"data": config.data.model_copy(update={"num_workers": 0})}
    )
    return itertools.cycle(
        list(itertools.islice(make_loader(source, alone, plans), CACHED_BATCHES))
    )


class _Delayed:
    """Source with a delay for every sample, to simulate slower storage."""

    def __init__(self, source: MicroBatchSource, sample_delay_s: float) -> None:
        self._source, self._sample_delay_s = source, sample_delay_s

    def __getitems__(self, plan: MicroBatchPlan) -> MicroBatch:
        if self._sample_delay_s:
            time.sleep(self._sample_delay_s * len(plan.segments))
        return self._source.__getitems__(plan)


def drain(loader: Iterator[Any], ready: int) -> int:
    """Take the batches that are ready in queues, so that a slow loader has no head start; return their number.

    It is twice ``ready``, or less if one that was not ready shows that the queues are
    empty.
    """
    for number in range(2 * ready):
        asked_s = time.perf_counter()
        next(loader)
        if number >= ready and time.perf_counter() - asked_s > NOT_READY_S:
            return number + 1
    return 2 * ready


def _measure(
    asked: TrainingRequest,
    loader: Iterator[MicroBatch],
    consumer: Consumer,
    ranks: Ranks,
    *,
    group: int,
    step_s: float,
) -> dict[str, Any]:
    """Measure a window; return its figures, with the rates of all ranks together."""
    work = consumer.work if isinstance(consumer, TrainingStep) else None
    sums = {"tokens_per_s": 0.0, "padded_tokens_per_s": 0.0} | (
        {} if work is None else {"model_flops_per_s": 0.0}
    )

    def took(batches: list[MicroBatch]) -> None:
        sums["tokens_per_s"] += sum(one.non_padding_tokens for one in batches)
        sums["padded_tokens_per_s"] += sum(one.ids_BS.numel() for one in batches)
        if work is not None:
            flops = (
                work.step_flops(one.tokens_N.numpy(), one.predicted_tokens)
                for one in batches
            )
            sums["model_flops_per_s"] += sum(flops)

    figures, seconds = timed_window(
        loader,
        consumer,
        ranks,
        took,
        window_s=asked.window_s,
        step_s=step_s,
        least=asked.min_steps,
        group=group,
    )
    rates = {name: ranks.all_reduce_sum(one)[0] / seconds for name, one in sums.items()}
    return figures | {"model_flops_per_s": None} | rates


def timed_window(
    loader: Iterator[Any],
    consumer: Consumer,
    ranks: Ranks,
    took: Callable[[list[Any]], None],
    *,
    window_s: float,
    step_s: float,
    least: int,
    group: int,
) -> tuple[dict[str, Any], float]:
    """Take steps until a window is full, the same number on all ranks.

    ``took`` gets the batches of each.

    ``window_s`` is the least duration of the window, ``step_s`` the duration of a step
    so far, ``least`` the fewest steps of the window's first part. Steps come in whole
    groups of ``group``, in which workers deliver whole bursts. Return fields of
    ``LoadedWindow`` but the rates, and the seconds of the slowest rank.
    """

    def filling(left_s: float, step_s: float, least: int = 1) -> int:
        return math.ceil(max(least, left_s / max(step_s, 1e-6)) / group) * group

    read_before = footprint.storage_read_bytes()
    consumer.wait.take_waited_s()
    taken, todo = (
        0,
        round(ranks.all_reduce_max(filling(window_s / FIRST_PART, step_s, least))[0]),
    )
    ranks.all_reduce_sum(0.0)
    start_s = time.monotonic()
    while todo:
        for _ in range(todo):
            took(consumer.step(loader))
        taken += todo
        past_s = ranks.all_reduce_max(time.monotonic() - start_s)[0]
        left_s = window_s - past_s
        todo = filling(left_s, past_s / taken) if left_s > 0 else 0
    consumer.finish()
    end_s = time.monotonic()
    read_after = footprint.storage_read_bytes()
    (slowest_s,) = ranks.all_reduce_max(end_s - start_s)
    waited_s = ranks.all_reduce_sum(consumer.wait.take_waited_s())[0]
    memory, workers = footprint.memory_bytes(), footprint.private_bytes_of_children()
    read = (
        None if read_before is None or read_after is None else read_after - read_before
    )
    return {
        "steps": taken,
        "data_wait_share": min(1.0, waited_s / slowest_s),
        "window_start_s": -ranks.all_reduce_max(-start_s)[0],
        "window_end_s": ranks.all_reduce_max(end_s)[0],
        "memory_bytes": _sum(ranks, memory),
        "worker_bytes": round(ranks.all_reduce_max(max(workers, default=0))[0]) or None,
        "storage_bytes_per_s": (
            None if (total := _sum(ranks, read)) is None else total / slowest_s
        ),
    }, slowest_s


def _sum(ranks: Ranks, value: float | None) -> int | None:
    """Return the sum over all ranks; None if a rank has no value."""
    total = ranks.all_reduce_sum(math.nan if value is None else float(value))[0]
    return None if math.isnan(total) else round(total)
