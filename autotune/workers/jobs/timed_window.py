"""A timed window of steps, of the same number on all ranks."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from autotune.trials.jobs import footprint
from autotune.trials.jobs.rank_group import RankGroup
from autotune.workers.jobs.consumers import Consumer

FIRST_PART = 4
"""Divisor of a window's duration for its first part. The steps of this part show how
many more fill the window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowLength:
    """Length of a window, in time and in steps."""

    window_s: float
    """Least duration of the window."""
    step_s: float
    """Duration of a step before the window, in the warm-up."""
    min_steps: int
    """Fewest steps of the window's first part, and so of the window."""
    group_steps: int
    """Number of steps of a group. A window has whole groups, because workers deliver in
    bursts, and a group takes as many batches from each of them."""

    def first_steps(self) -> int:
        """Return the number of steps of the first part."""
        first_part_s = self.window_s / FIRST_PART
        return self._steps_to_fill(first_part_s, self.step_s, self.min_steps)

    def further_steps(self, steps: int, past_s: float) -> int:
        """Return the number of steps that are left; 0 if the window is full.

        Args:
            steps: Steps of the window so far, at least 1.
            past_s: Time that they took.
        """
        remaining_s = self.window_s - past_s
        if remaining_s <= 0:
            return 0
        return self._steps_to_fill(remaining_s, past_s / steps)

    def _steps_to_fill(
        self, remaining_s: float, step_s: float, min_steps: int = 1
    ) -> int:
        """Return the steps that fill a time, in whole groups."""
        # A step takes at least a microsecond, so that there is no division by 0.
        steps = max(min_steps, remaining_s / max(step_s, 1e-6))
        return math.ceil(steps / self.group_steps) * self.group_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedWindow:
    """Figures of a window, except for the rates that the caller computes."""

    figures: dict[str, Any]
    """Fields of ``WindowFigures``, except for the rates of work."""
    slowest_s: float
    """Duration of the window on the slowest rank, by which rates are divided."""


def timed_window(
    loader: Iterator[Any],
    consumer: Consumer,
    ranks: RankGroup,
    on_step: Callable[[list[Any]], None],
    length: WindowLength,
) -> TimedWindow:
    """Take steps until a window is full on the slowest rank.

    All ranks must call this together.

    Args:
        loader: Endless iterator over batches.
        consumer: Consumer of the batches.
        ranks: RankGroup, of which this process is one.
        on_step: Function that gets the batches of each step.
        length: Length of the window.
    """
    read_before_bytes = footprint.storage_read_bytes()
    # Reading the waits of warm-up resets them.
    consumer.wait.take_waited_s()
    next_steps = round(ranks.all_reduce_max(length.first_steps())[0])
    # All ranks start together.
    ranks.all_reduce_sum(0.0)
    start_s = time.monotonic()
    steps = 0
    while next_steps:
        for _ in range(next_steps):
            on_step(consumer.step(loader))
        steps += next_steps
        # All ranks agree on the steps that are left.
        (past_s,) = ranks.all_reduce_max(time.monotonic() - start_s)
        next_steps = length.further_steps(steps, past_s)
    consumer.finish()
    end_s = time.monotonic()
    read_bytes = _difference(footprint.storage_read_bytes(), read_before_bytes)
    return figures_of_all_ranks(
        ranks,
        waited_s=consumer.wait.take_waited_s(),
        steps=steps,
        start_s=start_s,
        end_s=end_s,
        read_bytes=read_bytes,
    )


def figures_of_all_ranks(
    ranks: RankGroup,
    *,
    waited_s: float,
    steps: int,
    start_s: float,
    end_s: float,
    read_bytes: int | None,
) -> TimedWindow:
    """Return the figures of a window over all ranks, each of which calls this.

    Args:
        ranks: RankGroup, of which this process is one.
        waited_s: Time that this rank waited for data.
        steps: Steps of the window.
        start_s: Start of this rank's window.
        end_s: End of this rank's window.
        read_bytes: Bytes that this rank read from storage; None if unknown.
    """
    (slowest_s,) = ranks.all_reduce_max(end_s - start_s)
    (all_waited_s,) = ranks.all_reduce_sum(waited_s)
    memory_bytes = footprint.memory_bytes()
    # A rank without workers takes part in the maximum with 0.
    worker_bytes = max(footprint.private_bytes_of_children(), default=0)
    # Ranks have no minimum, so the first start is the maximum of negative starts.
    first_start_s = -ranks.all_reduce_max(-start_s)[0]
    (last_end_s,) = ranks.all_reduce_max(end_s)
    processes = len(footprint.private_bytes_of_children())
    (most_processes,) = ranks.all_reduce_max(processes)
    all_memory_bytes = _sum_over_ranks(ranks, memory_bytes)
    (largest_worker_bytes,) = ranks.all_reduce_max(worker_bytes)
    all_read_bytes = _sum_over_ranks(ranks, read_bytes)
    storage_bytes_per_s = None
    if all_read_bytes is not None:
        storage_bytes_per_s = all_read_bytes / slowest_s
    figures = {
        "steps": steps,
        "data_wait_share": min(1.0, all_waited_s / slowest_s),
        "window_start_s": first_start_s,
        "window_end_s": last_end_s,
        "memory_bytes": all_memory_bytes,
        # No rank has workers if the largest takes 0 bytes.
        "worker_bytes": round(largest_worker_bytes) or None,
        "storage_bytes_per_s": storage_bytes_per_s,
        "processes": round(most_processes),
    }
    return TimedWindow(figures=figures, slowest_s=slowest_s)


def _difference(after: int | None, before: int | None) -> int | None:
    """Return how much a counter grew; None if it cannot be read."""
    if after is None or before is None:
        return None
    return after - before


def _sum_over_ranks(ranks: RankGroup, value: float | None) -> int | None:
    """Return the sum over all ranks; None if a rank has no value."""
    total = ranks.all_reduce_sum(math.nan if value is None else float(value))[0]
    return None if math.isnan(total) else round(total)
