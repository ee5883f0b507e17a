"""Indices of segments and of the head's slots."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.masking import IGNORED_LABEL
from trainer.data.segment_indices import segment_indices, slot_indices

WIDTH = 32
"""Positions of a sequence."""


@st.composite
def packed_sequences(draw):
    """Return starts and ends of documents in up to six sequences, some of them empty.

    Each sequence has documents from its first position on, and perhaps padding.
    """
    starts, ends = [], []
    sequences = draw(st.integers(1, 6))
    for sequence in range(sequences):
        cuts = draw(st.sets(st.integers(1, WIDTH), max_size=5))
        for start, end in pairwise(sorted({0} | cuts)):
            starts.append(sequence * WIDTH + start)
            ends.append(sequence * WIDTH + end)
    return (
        np.array(starts, dtype=np.int64),
        np.array(ends, dtype=np.int64),
        sequences,
    )


def indices_of(packed):
    starts_N, ends_N, sequences = packed
    return segment_indices(starts_N, ends_N, sequences=sequences, width=WIDTH)


class TestSegments:
    @given(packed=packed_sequences())
    def test_cover_all_positions(self, packed):
        edges = indices_of(packed).edges
        assert edges[0] == 0
        assert edges[-1] == packed[2] * WIDTH

    @given(packed=packed_sequences())
    def test_are_neither_empty_nor_longer_than_sequences(self, packed):
        lengths = np.diff(indices_of(packed).edges)
        assert lengths.min() > 0
        assert lengths.max() <= WIDTH

    @given(packed=packed_sequences())
    def test_are_documents_and_one_padding_for_each_sequence_at_most(self, packed):
        starts_N, ends_N, sequences = packed
        segments = list(pairwise(indices_of(packed).edges.tolist()))
        documents = set(zip(starts_N.tolist(), ends_N.tolist(), strict=True))
        assert documents <= set(segments)
        assert len(segments) <= len(documents) + sequences

    @given(packed=packed_sequences())
    def test_number_their_positions(self, packed):
        indices = indices_of(packed)
        expected = [
            index
            for length in np.diff(indices.edges).tolist()
            for index in range(length)
        ]
        assert indices.index_T.tolist() == expected


EDGES = np.array([0, 10, 30, 64], dtype=np.int32)


@st.composite
def predicted_tokens(draw):
    """Return positions of tokens to predict, and a sufficient number of slots."""
    positions = sorted(draw(st.sets(st.integers(0, int(EDGES[-1]) - 1))))
    slots = len(positions) + draw(st.integers(0 if positions else 1, 80))
    return np.array(positions, dtype=np.int64), slots


def slots_of(predicted):
    predicted_P, slots = predicted
    # The id of each token is its position, plus 100.
    return slot_indices(
        predicted_P,
        (predicted_P + 100).astype(np.uint16),
        slots=slots,
        segment_edges=EDGES,
    )


class TestSlots:
    @given(predicted=predicted_tokens())
    def test_are_ascending_positions(self, predicted):
        position_K = slots_of(predicted).position_K
        assert len(position_K) == predicted[1]
        assert np.diff(position_K).min(initial=0) >= 0
        assert position_K.min() >= 0
        assert position_K.max() < EDGES[-1]

    @given(predicted=predicted_tokens())
    def test_hold_each_token_to_predict_once(self, predicted):
        slots = slots_of(predicted)
        is_used_K = slots.label_K != IGNORED_LABEL
        assert slots.position_K[is_used_K].tolist() == predicted[0].tolist()
        assert slots.label_K[is_used_K].tolist() == (predicted[0] + 100).tolist()

    @given(predicted=predicted_tokens())
    def test_are_counted_up_to_each_edge(self, predicted):
        slots = slots_of(predicted)
        assert slots.edges.tolist() == [
            int((slots.position_K < edge).sum()) for edge in EDGES.tolist()
        ]


@pytest.mark.parametrize("unused", [1, 8, 64, 100])
def test_unused_slots_are_spread_evenly(unused):
    slots = slots_of((np.zeros(0, dtype=np.int64), unused))
    _, counts = np.unique(slots.position_K, return_counts=True)
    # Attention's kernels are told how many queries a position has at most.
    assert counts.max() <= 1 + unused // EDGES[-1]
