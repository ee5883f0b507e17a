"""Datasets without tokens, and plans of their batches."""

from collections.abc import Callable

import numpy as np

from trainer.data.batch_plan import BatchPlan

SEQ_LENGTH_TOKENS = 64
"""Length of the sequences of ``plan_of``."""


class FakeDataset:
    """A dataset that knows only the lengths of its samples, all in one shard."""

    def __init__(self, lengths: list[int] | np.ndarray) -> None:
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._begins = np.cumsum(self._lengths) - self._lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def prefetch_offsets(self, samples: Callable[[], np.ndarray]) -> None:
        """Do nothing, as there are no offsets on a disk."""

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the shard, the first token and the length of each sample."""
        return np.zeros_like(samples), self._begins[samples], self._lengths[samples]


def plan_of(dataset: FakeDataset, **options) -> BatchPlan:
    """Return a plan of packed sequences; ``options`` replace its defaults."""
    defaults = {
        "seed": 0,
        "seq_length_tokens": SEQ_LENGTH_TOKENS,
        "layout": "packed",
        "global_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "world_size": 1,
    }
    return BatchPlan(dataset_samples=len(dataset), **defaults | options)
