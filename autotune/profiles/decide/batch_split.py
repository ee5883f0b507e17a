"""Split of a global batch into ranks, gradient accumulation and micro-batches. Pure."""

import math
from dataclasses import dataclass

from autotune.base.wording import plural
from autotune.errors import BadInput
from autotune.evidence.profile import Profile

DEFAULT_GLOBAL_BATCH_TOKENS = 524_288
"""Non-padding tokens of the default global batch, between BERT's 131 thousand and
RoBERTa's 4 million."""
SPLIT_FACTORS = "accumulation x micro-batch"
"""Names of the factors of a batch split, in the order in which all outputs show it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatchSplit:
    """Split of a global batch into ranks and micro-batches.

    The global batch is kept exactly.
    """

    gradient_accumulation_steps: int
    """Micro-batches of each rank in an optimizer step."""
    micro_batch_size: int
    """Sequences of a micro-batch, empty ones included."""
    empty_sequences: int
    """Number of empty sequences in the micro-batches of all ranks."""
    without_empty: tuple[int, ...]
    """Nearest global batches in sequences, below and above, that leave no sequence
    empty; none if this one leaves none empty."""

    def words(self, ranks: int) -> str:
        """Return the split as every output shows it: ``32 = 3 x 11``.

        On the left is the global batch; the product on the right exceeds it by the
        empty sequences.
        """
        product = self.gradient_accumulation_steps * self.micro_batch_size * ranks
        by_ranks = f" x {ranks:,} ranks" if ranks > 1 else ""
        return (
            f"{product - self.empty_sequences:,} ="
            f" {self.gradient_accumulation_steps:,} x {self.micro_batch_size:,}"
            f"{by_ranks}"
        )


def split_global_batch(
    global_batch_size: int, micro_batch_size: int, ranks: int
) -> GlobalBatchSplit:
    """Split a global batch as the trainer does.

    Args:
        global_batch_size: Sequences of an optimizer step over all ranks.
        micro_batch_size: Largest number of sequences in a micro-batch.
        ranks: Ranks that train together.

    Raises:
        BadInput: If the global batch has fewer sequences than ranks.
    """
    if global_batch_size < ranks:
        next_step = (
            f"Use at least {ranks} sequences per global batch, or at most"
            f" {plural(global_batch_size, 'rank')}."
        )
        raise BadInput(
            f"global batch size {global_batch_size} is too small for {ranks} ranks",
            next_step=next_step,
        )
    accumulation_steps = math.ceil(global_batch_size / (micro_batch_size * ranks))
    micro_batches = accumulation_steps * ranks
    # With as many micro-batches, the smallest size that holds the global batch leaves
    # the fewest sequences empty.
    even_size = math.ceil(global_batch_size / micro_batches)
    sequences = even_size * micro_batches
    without_empty: tuple[int, ...] = ()
    if sequences > global_batch_size:
        # Every micro-batch has at least one sequence.
        below = max(global_batch_size // micro_batches, 1) * micro_batches
        without_empty = tuple(sorted({below, sequences}))
    return GlobalBatchSplit(
        gradient_accumulation_steps=accumulation_steps,
        micro_batch_size=even_size,
        empty_sequences=sequences - global_batch_size,
        without_empty=without_empty,
    )


def global_batch_size_of(
    global_batch_tokens: int, mean_tokens_per_sequence: float
) -> int:
    """Return the global batch in sequences, at least 1, that is closest to its tokens.

    Args:
        global_batch_tokens: Non-padding tokens of an optimizer step over all ranks.
        mean_tokens_per_sequence: Non-padding tokens of a sequence, on average.
    """
    return max(1, round(global_batch_tokens / mean_tokens_per_sequence))


def profile_split(profile: Profile, ranks: int) -> GlobalBatchSplit | None:
    """Return the split of a profile's global batch.

    Args:
        profile: The profile.
        ranks: Ranks that train together.

    Returns:
        The split; None if the step decides its global batch itself.

    Raises:
        BadInput: If the global batch has fewer sequences than ranks.
    """
    if not profile.has_train:
        return None
    train = profile.train
    return split_global_batch(train.global_batch_size, train.micro_batch_size, ranks)
