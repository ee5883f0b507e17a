from dataclasses import dataclass

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autotune.errors import BadInput
from autotune.profiles.decide.batch_split import (
    GlobalBatchSplit,
    global_batch_size_of,
    split_global_batch,
)


@given(st.integers(1, 10**8), st.floats(1, 512))
def test_global_batch_is_met_to_half_a_sequence(tokens, tokens_per_sequence):
    sequences = global_batch_size_of(tokens, tokens_per_sequence)
    difference = abs(sequences * tokens_per_sequence - tokens)
    # Rounding of a product up to 10^8 in fp64: 1.5e-8, with a margin.
    rounding = 1e-6
    assert sequences == 1 or difference <= tokens_per_sequence / 2 + rounding


def test_split_counts_empty_sequences():
    split = split_global_batch(global_batch_size=97, micro_batch_size=16, ranks=4)
    assert split.gradient_accumulation_steps == 2
    assert split.micro_batch_size == 13
    # 2 x 13 x 4 ranks hold 104 sequences.
    assert split.empty_sequences == 104 - 97


def test_split_names_global_batches_without_empty_sequences():
    split = split_global_batch(global_batch_size=97, micro_batch_size=16, ranks=4)
    # Multiples of 8, which is 2 micro-batches on each of 4 ranks.
    assert split.without_empty == (96, 104)


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size", "ranks", "words"),
    [
        pytest.param(1028, 257, 1, "1,028 = 4 x 257", id="even"),
        pytest.param(1028, 348, 1, "1,028 = 3 x 343", id="empty sequence"),
        pytest.param(97, 16, 4, "97 = 2 x 13 x 4 ranks", id="several ranks"),
    ],
)
def test_split_is_shown_as_a_product(global_batch_size, micro_batch_size, ranks, words):
    split = split_global_batch(global_batch_size, micro_batch_size, ranks)
    assert split.words(ranks) == words


def test_even_split_has_no_better_batch():
    split = split_global_batch(global_batch_size=128, micro_batch_size=16, ranks=4)
    assert split.without_empty == ()


@given(st.integers(1, 64), st.integers(1, 600), st.integers(1, 64))
def test_rejects_fewer_sequences_than_ranks(missing, micro_batch_size, ranks):
    global_batch_size = ranks - missing
    with pytest.raises(BadInput, match="is too small for"):
        split_global_batch(global_batch_size, micro_batch_size, ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCase:
    """Global batch with at least a sequence for each rank, and how to split it."""

    sequences_beyond_ranks: int
    largest_micro_batch_size: int
    ranks: int

    @property
    def global_batch_size(self) -> int:
        return self.ranks + self.sequences_beyond_ranks

    @property
    def micro_batches_of_all_ranks(self) -> int:
        return self.split().gradient_accumulation_steps * self.ranks

    def split(self) -> GlobalBatchSplit:
        """Return the split of the global batch."""
        return split_global_batch(
            self.global_batch_size, self.largest_micro_batch_size, self.ranks
        )


splits = st.builds(
    SplitCase,
    sequences_beyond_ranks=st.integers(0, 5000),
    largest_micro_batch_size=st.integers(1, 600),
    ranks=st.integers(1, 64),
)


@given(splits)
def test_split_keeps_every_sequence(case):
    split = case.split()
    sequences = case.micro_batches_of_all_ranks * split.micro_batch_size
    assert sequences - split.empty_sequences == case.global_batch_size


@given(splits)
def test_split_is_within_the_micro_batch_size(case):
    assert case.split().micro_batch_size <= case.largest_micro_batch_size


@given(splits)
def test_named_global_batches_fill_every_micro_batch(case):
    split = case.split()
    assume(split.empty_sequences > 0)
    assert split.without_empty
    for global_batch_size in split.without_empty:
        assert global_batch_size % case.micro_batches_of_all_ranks == 0
