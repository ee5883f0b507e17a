"""Batches for a window: from a loader without end, or cached."""

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils import _pytree

from trainer.formats.errors import BadConfig

CACHED_BATCHES = 32
"""Number of cached batches. The samples of fewer batches would bias the rate of a step
whose time depends on their lengths: of 32 batches of 8, the mean length is within a few
percent of the dataset's."""
FEWEST_CACHED = 8
"""Number of cached batches if they are large, or take long to load."""
CACHED_BYTES = 2**30
"""Size from which ``FEWEST_CACHED`` are enough: many batches of large images would fill
the memory of the host."""
NOT_READY_S = 0.005
"""Shortest wait for a batch that shows that no queue held it ready."""


class Epochs:
    """Endless iterator over a loader, which is restarted at the end of each epoch.

    Args:
        loader: What a function of a subject returned.
        name: Name of the function, for messages.

    Raises:
        BadConfig: If the loader cannot be iterated.
    """

    def __init__(self, loader: Any, name: str) -> None:
        if not hasattr(loader, "__iter__"):
            raise BadConfig(
                f"{name} returned {type(loader).__name__}, which is not iterable",
                next_step="Return an iterable of batches, such as a torch DataLoader.",
            )
        self._loader = loader
        self._name = name
        self.epoch_batches: int | None = None
        """Batches of the last epoch that ended; None if none did."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            count = 0
            for batch in self._loader:
                count += 1
                yield batch
            if not count:
                raise self._without_batches()
            self.epoch_batches = count

    def _without_batches(self) -> BadConfig:
        after = ""
        if self.epoch_batches is not None:
            after = f" after {self.epoch_batches} batches"
        return BadConfig(
            f"the loader of {self._name} has no batches{after}",
            next_step=(
                "Return an iterable that can be iterated again, such as a DataLoader,"
                " or an endless one."
            ),
        )


def cached(batches: Iterator[Any], enough_s: float = math.inf) -> Iterator[Any]:
    """Return an endless iterator that repeats the first batches of another.

    It keeps ``CACHED_BATCHES``, or ``FEWEST_CACHED`` if those exceed ``CACHED_BYTES``
    or the time.

    Args:
        batches: Iterator to take batches from.
        enough_s: Time to load batches: that of a window, so that loading does not take
            most of a sweep.
    """
    kept: list[Any] = []
    kept_bytes = 0
    started_s = time.perf_counter()
    for batch in itertools.islice(batches, CACHED_BATCHES):
        kept.append(batch)
        kept_bytes += bytes_of(batch)
        is_enough = (
            kept_bytes >= CACHED_BYTES or time.perf_counter() - started_s >= enough_s
        )
        if is_enough and len(kept) >= FEWEST_CACHED:
            break
    return itertools.cycle(kept)


def bytes_of(batch: Any) -> int:
    """Return the bytes of the tensors of a batch, in any container."""
    total_bytes = 0
    for leaf in _pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            total_bytes += leaf.nbytes
        elif is_dataclass(leaf):
            members = [getattr(leaf, field.name) for field in fields(leaf)]
            total_bytes += bytes_of(members)
    return total_bytes


def drain(loader: Iterator[Any], ready: int) -> int:
    """Take the batches that are ready in queues, so that a window has no head start.

    A slow loader would deliver them faster than it can sustain.

    Args:
        loader: Loader to drain.
        ready: Number of batches that the queues hold if they are full.

    Returns:
        Number of batches taken: more than ``ready`` and at most twice as many, as
        workers refill the queues meanwhile. The last one was not ready, unless they
        keep up to the end. 0 if ``ready`` is 0.
    """
    for number in range(2 * ready):
        started_s = time.perf_counter()
        next(loader)
        wait_s = time.perf_counter() - started_s
        if number >= ready and wait_s > NOT_READY_S:
            return number + 1
    return 2 * ready
