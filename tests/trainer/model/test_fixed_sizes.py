"""Numbers of slots and segments, without a model.

Shapes: B sequences, N documents.
"""

from types import SimpleNamespace

import pytest
import torch

from trainer.model.fixed_sizes import FixedSizes

WIDTH = 512
"""Positions of a sequence."""


def _fixed_sizes(**sizes) -> FixedSizes:
    """Return sizes of packed sequences: of those not given, shapes may change."""
    return FixedSizes(
        **{"slots": None, "sequence_slots": None, "is_packed": True} | sizes
    )


def _micro_batch(documents_B: list[int]) -> SimpleNamespace:
    """Return the documents of a micro-batch, given their number in each sequence."""
    starts_N = []
    for sequence, documents in enumerate(documents_B):
        starts_N += range(WIDTH * sequence, WIDTH * sequence + documents)
    # Each document is one token, and each sequence ends in padding.
    return SimpleNamespace(
        ids_BS=torch.empty(len(documents_B), WIDTH),
        starts_N=torch.tensor(starts_N),
        segment_edges=torch.empty(len(starts_N) + len(documents_B) + 1),
    )


@pytest.mark.parametrize(
    ("predicted_tokens", "overflows"),
    [
        pytest.param(64, 0, id="as many as slots"),
        pytest.param(65, 1, id="one more than slots"),
    ],
)
def test_counts_micro_batch_with_more_predicted_tokens_than_slots(
    predicted_tokens, overflows
):
    sizes = _fixed_sizes(slots=64)
    sizes.count_slots(SimpleNamespace(predicted_tokens=predicted_tokens))
    assert sizes.overflows == overflows


def test_sequence_slots_are_not_counted_as_overflows():
    sizes = _fixed_sizes(sequence_slots=64)
    assert sizes.sequence_slots_for(65) == 128
    assert sizes.overflows == 0


@pytest.mark.parametrize("needed", [pytest.param(0, id="none needed"), 1])
def test_changing_shapes_have_at_least_one_slot(needed):
    assert _fixed_sizes().sequence_slots_for(needed) == 1


def test_counts_micro_batch_with_more_segments():
    sizes = _fixed_sizes(segments=10)
    # The padding of each of the two sequences is a segment too.
    assert sizes.segments_for(_micro_batch([4, 4])) == 10
    assert sizes.overflows == 0
    assert sizes.segments_for(_micro_batch([4, 5])) == 20
    assert sizes.overflows == 1


def test_padding_doubles_segments_of_unpacked_sequences():
    sizes = _fixed_sizes(is_packed=False)
    assert sizes.segments_for(_micro_batch([1, 1, 1])) == 6


def test_reserves_segments_for_uneven_packing():
    sizes = _fixed_sizes()
    sequences = 128
    # Sequences of 1 and 7 documents interleaved: 4 on average, with a deviation of 3.
    sizes.expect_documents(_micro_batch([1, 7] * (sequences // 2)))
    # The sum over sequences deviates by 3 * sqrt(128) = 34; six times that is reserved.
    max_documents = 4 * sequences + 6 * 34
    # The padding of each sequence is a segment too, and the number of documents is
    # rounded up to a multiple of 64.
    assert 0 <= sizes.segments - (max_documents + sequences) < 64
