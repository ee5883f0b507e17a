"""The ``training`` job: a timed window of training on the dataset.

Batches come from DataLoader workers, or are cached. The step is the trainer's own, or
simulated with a given duration.
"""

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from autotune.trials.jobs import footprint
from autotune.workers.values import TrainingRequest
from trainer.build import Training, build_training
from trainer.config.train_config import TrainConfig, gradient_accumulation_steps
from trainer.data.data_wait import DataWait
from trainer.data.dataset import TokenDataset
from trainer.data.global_batch import make_plan, with_batch_in_sequences
from trainer.data.loader import make_loader, micro_batch_plans
from trainer.data.micro_batch import MicroBatch
from trainer.data.micro_batch_source import MicroBatchSource
from trainer.data.sampler import MicroBatchPlan
from trainer.distributed.device_events import DeviceEvent, mark
from trainer.distributed.optimizer import learning_rate
from trainer.distributed.ranks import Ranks, join_ranks, leave_ranks, open_libraries
from trainer.distributed.step import StepResult

CACHED_BATCHES = 32
"""Number of cached batches: enough for average sequences, few enough for memory."""
WARM_UP_STEPS = {"cpu": 2, "cuda": 3}
MOST_MICRO_BATCHES = 4
"""Limit of micro-batches in a measured step. The last one synchronises gradients
and updates, as in training."""
FIRST_PART = 4
"""Divisor of a window's time for its first part, which shows the speed of steps."""
NOT_READY_S = 0.005
"""Least wait that shows that a batch was not ready in a queue."""


def run(measured: dict[str, Any], local: dict[str, Any]) -> dict[str, Any]:
    """Train all ranks for a timed window.

    Args:
        measured: A ``TrainingRequest``; its ``interleaved_with`` and ``storage`` only
            distinguish windows.
        local: ``data_dir``, the dataset's directory; with several ranks
            ``environment`` and ``rendezvous``.

    Returns:
        Fields of ``TrainingFigures``, the same from every rank.
    """
    request = TrainingRequest.of(measured)
    ranks = _join_ranks(request.config, local)
    dataset = TokenDataset.open(Path(local["data_dir"]))
    config = with_batch_in_sequences(request.config, dataset)
    micro_batches = min(
        MOST_MICRO_BATCHES, gradient_accumulation_steps(config, ranks.world_size)
    )
    config = _window_config(config, request.round, micro_batches * ranks.world_size)
    workers = 0 if request.cached else config.data.num_workers
    consumer = _consumer(request, config, dataset, ranks, micro_batches)
    loader = batches_of(
        dataset,
        config,
        ranks,
        cached=request.cached,
        sample_delay_s=request.sample_delay_s,
    )
    drained = drain(loader, workers * config.data.prefetch_factor)
    warm_up_steps = WARM_UP_STEPS[config.device]
    step_s = _warm_up(consumer, loader, warm_up_steps)
    # Workers deliver in bursts, so a window must have whole bursts.
    group = max(1, workers // math.gcd(workers, micro_batches))
    figures = _measure(request, loader, consumer, ranks, group=group, step_s=step_s)
    if request.losses and isinstance(consumer, TrainingStep):
        figures["losses"] = [float(loss) for loss in consumer.losses]
    leave_ranks(together=True)
    return figures | {
        "optimizer_steps": warm_up_steps + figures["steps"],
        "discarded_batches": drained + warm_up_steps * micro_batches,
        "gradient_accumulation_steps": micro_batches,
        "local_ranks": ranks.local_world_size,
    }


def _join_ranks(config: TrainConfig, local: dict[str, Any]) -> Ranks:
    """Join the other ranks of the window, and share the cores with them."""
    ranks = join_ranks(
        config,
        environment=local.get("environment", {}),
        rendezvous=local.get("rendezvous"),
    )
    if ranks.local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        # As torchrun sets it, so that ranks do not compete for cores.
        torch.set_num_threads(1)
    return ranks


def _warm_up(consumer: "Consumer", loader: Iterator[MicroBatch], steps: int) -> float:
    """Take steps one by one; return the seconds of the last one."""
    step_s = math.nan
    for _ in range(steps):
        started_s = time.perf_counter()
        consumer.step(loader)
        consumer.finish()
        step_s = time.perf_counter() - started_s
    return step_s


def _window_config(
    config: TrainConfig, round_number: int, micro_batches: int
) -> TrainConfig:
    """Return the trainer settings of a window.

    Args:
        config: Trainer settings of the training.
        round_number: Number of the window's round, from 0.
        micro_batches: Micro-batches of a step on all ranks.
    """
    return config.model_copy(
        update={
            "global_batch_size": micro_batches * config.micro_batch_size,
            # The window ends the training.
            "global_batch_tokens": None,
            "global_batch_samples": None,
            "max_epochs": None,
            # Other sequences in every round, so that their cost is noise between rounds
            # and not bias.
            "seed": config.seed + round_number,
        }
    )


def _consumer(
    request: TrainingRequest,
    config: TrainConfig,
    dataset: TokenDataset,
    ranks: Ranks,
    micro_batches: int,
) -> "Consumer":
    """Return the trainer's own step, or a replayed one if the request has its time."""
    if request.replayed_step_s is not None:
        return ReplayedStep(
            request.replayed_step_s,
            lambda batch: batch.ids_BS.shape[1] / config.seq_length_tokens,
            micro_batches,
            ranks,
        )
    manifest = dataset.manifest
    open_libraries(ranks)
    training = build_training(config, manifest.vocab_size, manifest.special_ids, ranks)
    return TrainingStep(training, config, micro_batches, ranks.device)


class Consumer(Protocol):
    """Consumer of batches; the trainer's runs one step ahead of the device."""

    wait: DataWait

    def step(self, loader: Iterator[Any]) -> list[Any]:
        """Take the batches of a step and the step; return the batches."""

    def finish(self) -> None:
        """Wait until the device is idle."""


class TrainingStep:
    """The trainer's step, with the host one step ahead of the device."""

    def __init__(
        self,
        training: Training,
        config: TrainConfig,
        micro_batches: int,
        device: torch.device,
    ) -> None:
        self._step = training.step
        self._module = training.module
        self.work = training.work
        self._config = config
        self._micro_batches = micro_batches
        self._steps_taken = 0
        self._last_result: StepResult | None = None
        self.losses: list[torch.Tensor] = []
        """Loss of each step so far, warm-up included."""
        self.wait = DataWait(lambda: mark(device))

    def step(self, loader: Iterator[MicroBatch]) -> list[MicroBatch]:
        """Take a step's micro-batches and launch the step.

        Return after the device finished the previous one.
        """
        batches = self.wait.take(loader, self._micro_batches)
        if not self._steps_taken:
            self._module.expect_documents(batches[0])
        previous = self._last_result
        result = self._step.run(batches, learning_rate(self._config, self._steps_taken))
        self._last_result = result
        self.losses.append(result.loss)
        self.wait.device_busy_until(result.updated)
        self._steps_taken += 1
        if previous is not None:
            previous.updated.wait()
        return batches

    def finish(self) -> None:
        """Wait until the device is idle.

        Raises:
            ValueError: If the loss is not finite.
        """
        if self._last_result is None:
            return
        loss = float(self._last_result.loss)
        if not math.isfinite(loss):
            raise ValueError(f"the loss is {loss}")


class ReplayedStep:
    """Simulation of a GPU with a known time per micro-batch.

    This process keeps one CPU core busy, as in training. A micro-batch starts when all
    ranks have their data, as they synchronise gradients. Copies to the GPU and their
    host memory bandwidth are not simulated.

    Args:
        micro_batch_s: Time of a full micro-batch.
        share: Function that returns the share of ``micro_batch_s`` that a batch takes.
        micro_batches: Micro-batches of a step.
        ranks: Ranks that train together.
    """

    def __init__(
        self,
        micro_batch_s: float,
        share: Callable[[Any], float],
        micro_batches: int,
        ranks: Ranks,
    ) -> None:
        self._micro_batch_s = micro_batch_s
        self._share = share
        self._micro_batches = micro_batches
        self._ranks = ranks
        self._idle_from_s = time.perf_counter()
        self.wait = DataWait(lambda: DeviceEvent(time.perf_counter()))
        torch.set_num_threads(1)
        self._matrix = torch.rand(96, 96)

    def step(self, loader: Iterator[MicroBatch]) -> list[MicroBatch]:
        """Take a step's micro-batches.

        The host is as far ahead of the simulated GPU as the trainer is of a real one.
        """
        batches = []
        begins_s = self._idle_from_s
        for _ in range(self._micro_batches):
            (batch,) = self.wait.take(loader, 1)
            ready_s = max(time.perf_counter(), self._idle_from_s)
            (begins_s,) = self._ranks.all_reduce_max(ready_s)
            self._idle_from_s = begins_s + self._micro_batch_s * self._share(batch)
            self.wait.device_busy_until(_Until(self._idle_from_s))
            batches.append(batch)
        self._compute_until(begins_s)
        return batches

    def finish(self) -> None:
        """Wait until the device is idle."""
        self._compute_until(self._idle_from_s)

    def _compute_until(self, end_s: float) -> None:
        while time.perf_counter() < end_s:
            # Releases the GIL, unlike a loop that reads the clock.
            torch.mm(self._matrix, self._matrix)


class _Until(DeviceEvent):
    """Device event at a time known in advance."""

    def reached(self) -> bool:
        assert isinstance(self.moment, float)
        return time.perf_counter() >= self.moment


def batches_of(
    dataset: TokenDataset,
    config: TrainConfig,
    ranks: Ranks,
    *,
    cached: bool = True,
    sample_delay_s: float = 0.0,
) -> Iterator[MicroBatch]:
    """Return an endless iterator over a rank's micro-batches.

    Args:
        dataset: Dataset to read.
        config: Trainer settings.
        ranks: Ranks, of which this process is one.
        cached: True to repeat a few cached micro-batches instead of loading all.
        sample_delay_s: Delay added to the reading of each sample, unless cached.
    """
    plan = make_plan(config, len(dataset), world_size=ranks.world_size)
    source = MicroBatchSource(dataset, config, plan)
    plans = micro_batch_plans(dataset, config, plan, rank=ranks.rank)
    if not cached:
        return make_loader(_Delayed(source, sample_delay_s), config, plans)
    without_workers = config.model_copy(
        update={"data": config.data.model_copy(update={"num_workers": 0})}
    )
    loader = make_loader(source, without_workers, plans)
    return itertools.cycle(list(itertools.islice(loader, CACHED_BATCHES)))


class _Delayed:
    """Source with a delay for every sample, to simulate slower storage."""

    def __init__(self, source: MicroBatchSource, sample_delay_s: float) -> None:
        self._source = source
        self._sample_delay_s = sample_delay_s

    def __getitems__(self, plan: MicroBatchPlan) -> MicroBatch:
        if self._sample_delay_s:
            time.sleep(self._sample_delay_s * len(plan.segments))
        return self._source.__getitems__(plan)


def drain(loader: Iterator[Any], ready: int) -> int:
    """Take the batches that are ready in queues, so that a window has no head start.

    A slow loader would deliver them faster than it can sustain.

    Args:
        loader: Loader to drain.
        ready: Batches that the queues hold.

    Returns:
        Number of batches taken: twice ``ready``, or less if one that was not ready
        shows that the queues are empty.
    """
    for number in range(2 * ready):
        started_s = time.perf_counter()
        next(loader)
        wait_s = time.perf_counter() - started_s
        if number >= ready and wait_s > NOT_READY_S:
            return number + 1
    return 2 * ready


def _measure(
    request: TrainingRequest,
    loader: Iterator[MicroBatch],
    consumer: Consumer,
    ranks: Ranks,
    *,
    group: int,
    step_s: float,
) -> dict[str, Any]:
    """Measure a window; return its figures, with the rates of all ranks together."""
    work = consumer.work if isinstance(consumer, TrainingStep) else None
    sums = {"tokens_per_s": 0.0, "padded_tokens_per_s": 0.0}
    if work is not None:
        sums["model_flops_per_s"] = 0.0

    def count_step(batches: list[MicroBatch]) -> None:
        sums["tokens_per_s"] += sum(batch.non_padding_tokens for batch in batches)
        sums["padded_tokens_per_s"] += sum(batch.ids_BS.numel() for batch in batches)
        if work is not None:
            sums["model_flops_per_s"] += sum(
                work.step_flops(batch.tokens_N.numpy(), batch.predicted_tokens)
                for batch in batches
            )

    window = timed_window(
        loader,
        consumer,
        ranks,
        count_step,
        window_s=request.window_s,
        step_s=step_s,
        min_steps=request.min_steps,
        group=group,
    )
    rates = {
        name: ranks.all_reduce_sum(total)[0] / window.slowest_s
        for name, total in sums.items()
    }
    return window.figures | {"model_flops_per_s": None} | rates


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedWindow:
    """Figures of a window, and the duration that rates of the window are of."""

    figures: dict[str, Any]
    """Fields of ``LoadedWindow`` but the rates."""
    slowest_s: float
    """Seconds of the slowest rank."""


def timed_window(
    loader: Iterator[Any],
    consumer: Consumer,
    ranks: Ranks,
    on_step: Callable[[list[Any]], None],
    *,
    window_s: float,
    step_s: float,
    min_steps: int,
    group: int,
) -> TimedWindow:
    """Take steps until a window is full, the same number on all ranks.

    Args:
        loader: Endless iterator over batches.
        consumer: Consumer of the batches.
        ranks: Ranks, of which this process is one.
        on_step: Function that gets the batches of each step.
        window_s: Least duration of the window.
        step_s: Duration of a step so far.
        min_steps: Fewest steps of the window's first part.
        group: Steps that come together, in which workers deliver whole bursts.
    """
    read_before_bytes = footprint.storage_read_bytes()
    # Forgets the waits of warm-up.
    consumer.wait.take_waited_s()
    first_steps = _steps_to_fill(window_s / FIRST_PART, step_s, group, min_steps)
    first_steps = round(ranks.all_reduce_max(first_steps)[0])
    # All ranks start together.
    ranks.all_reduce_sum(0.0)
    start_s = time.monotonic()

    def take_steps(count: int) -> None:
        for _ in range(count):
            on_step(consumer.step(loader))

    steps = _fill_window(
        take_steps,
        ranks,
        start_s,
        window_s=window_s,
        first_steps=first_steps,
        group=group,
    )
    consumer.finish()
    end_s = time.monotonic()
    read_bytes = _difference(footprint.storage_read_bytes(), read_before_bytes)
    return _figures_of_all_ranks(
        ranks,
        consumer,
        steps=steps,
        start_s=start_s,
        end_s=end_s,
        read_bytes=read_bytes,
    )


def _steps_to_fill(
    remaining_s: float, step_s: float, group: int, min_steps: int = 1
) -> int:
    """Return the steps that fill a time, in whole groups."""
    # At least a microsecond a step, to not divide by 0.
    steps = max(min_steps, remaining_s / max(step_s, 1e-6))
    return math.ceil(steps / group) * group


def _fill_window(
    take_steps: Callable[[int], None],
    ranks: Ranks,
    start_s: float,
    *,
    window_s: float,
    first_steps: int,
    group: int,
) -> int:
    """Take steps until the window is full on the slowest rank; return their number.

    After each part of the window, all ranks agree on the steps that are left.
    """
    steps = 0
    next_steps = first_steps
    while next_steps:
        take_steps(next_steps)
        steps += next_steps
        past_s = ranks.all_reduce_max(time.monotonic() - start_s)[0]
        remaining_s = window_s - past_s
        next_steps = 0
        if remaining_s > 0:
            next_steps = _steps_to_fill(remaining_s, past_s / steps, group)
    return steps


def _figures_of_all_ranks(
    ranks: Ranks,
    consumer: Consumer,
    *,
    steps: int,
    start_s: float,
    end_s: float,
    read_bytes: int | None,
) -> TimedWindow:
    """Return the figures of a window over all ranks, each of which calls this.

    Args:
        ranks: Ranks, of which this process is one.
        consumer: Consumer of the batches.
        steps: Steps of the window.
        start_s: Start of this rank's window.
        end_s: End of this rank's window.
        read_bytes: Bytes that this rank read from storage; None if unknown.
    """
    (slowest_s,) = ranks.all_reduce_max(end_s - start_s)
    (waited_s,) = ranks.all_reduce_sum(consumer.wait.take_waited_s())
    memory_bytes = footprint.memory_bytes()
    worker_bytes = max(footprint.private_bytes_of_children(), default=0)
    # There is a maximum over ranks only.
    first_start_s = -ranks.all_reduce_max(-start_s)[0]
    (last_end_s,) = ranks.all_reduce_max(end_s)
    all_memory_bytes = _sum_over_ranks(ranks, memory_bytes)
    (largest_worker_bytes,) = ranks.all_reduce_max(worker_bytes)
    all_read_bytes = _sum_over_ranks(ranks, read_bytes)
    storage_bytes_per_s = None
    if all_read_bytes is not None:
        storage_bytes_per_s = all_read_bytes / slowest_s
    figures = {
        "steps": steps,
        "data_wait_share": min(1.0, waited_s / slowest_s),
        "window_start_s": first_start_s,
        "window_end_s": last_end_s,
        "memory_bytes": all_memory_bytes,
        # 0 without workers.
        "worker_bytes": round(largest_worker_bytes) or None,
        "storage_bytes_per_s": storage_bytes_per_s,
    }
    return TimedWindow(figures=figures, slowest_s=slowest_s)


def _difference(after: int | None, before: int | None) -> int | None:
    """Return how much a counter grew; None if it cannot be read."""
    if after is None or before is None:
        return None
    return after - before


def _sum_over_ranks(ranks: Ranks, value: float | None) -> int | None:
    """Return the sum over all ranks; None if a rank has no value."""
    total = ranks.all_reduce_sum(math.nan if value is None else float(value))[0]
    return None if math.isnan(total) else round(total)
