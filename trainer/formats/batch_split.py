"""Layout of samples in sequences, and the split of a global batch. No torch here."""

import math
from typing import Literal

from pydantic import PositiveInt

from trainer.formats.tables import StrictTable

Layout = Literal["padded", "dynamic", "bucketed", "packed"]
"""Layout of samples in sequences; ``TrainConfig.layout`` documents its values."""


class BatchSplit(StrictTable):
    """Batch split: the division of a global batch into micro-batches of ranks."""

    layout: Layout
    global_batch_size: PositiveInt
    gradient_accumulation_steps: PositiveInt
    world_size: PositiveInt

    @property
    def sequences_per_micro_batch(self) -> int:
        """Sequences per micro-batch after an even split, rounded up.

        At most the configured micro-batch size.
        """
        micro_batches = self.world_size * self.gradient_accumulation_steps
        return math.ceil(self.global_batch_size / micro_batches)
