import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.data.fake_dataset import FakeDataset, make_plan
from trainer.data.batch_plan import LANES, lay_out
from trainer.data.packing import pack_sequences

PACKING_PROBLEMS = st.integers(1, 100).flatmap(
    lambda capacity: st.tuples(
        st.just(capacity), st.lists(st.integers(1, capacity), max_size=200)
    )
)


def _slow_best_fit(lengths: list[int], seq_length_tokens: int) -> list[int]:
    """Pack as ``pack_sequences`` does, by trying every open sequence.

    Of equally full ones it takes the one filled last.
    """
    free_tokens: dict[int, int] = {}  # in the order in which they were filled last
    sequences = [0] * len(lengths)
    for sample in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        length = lengths[sample]
        with_room = [
            sequence
            for sequence in reversed(free_tokens)
            if free_tokens[sequence] >= length
        ]
        sequence = min(with_room, key=free_tokens.__getitem__, default=len(free_tokens))
        free_tokens[sequence] = free_tokens.pop(sequence, seq_length_tokens) - length
        sequences[sample] = sequence
    return sequences


@given(problem=PACKING_PROBLEMS)
def test_packing_is_best_fit_decreasing(problem):
    seq_length_tokens, lengths = problem
    sequences = pack_sequences(np.array(lengths, dtype=np.int64), seq_length_tokens)
    assert sequences.tolist() == _slow_best_fit(lengths, seq_length_tokens)


@given(problem=PACKING_PROBLEMS)
def test_no_two_packed_sequences_could_be_one(problem):
    seq_length_tokens, lengths = problem
    sequences = pack_sequences(np.array(lengths, dtype=np.int64), seq_length_tokens)
    filled_tokens = np.sort(np.bincount(sequences, weights=lengths))
    assert all(0 < tokens <= seq_length_tokens for tokens in filled_tokens)
    assert len(filled_tokens) < 2 or sum(filled_tokens[:2]) > seq_length_tokens


@pytest.mark.parametrize("lengths", [[9], [0], [3, -1]])
def test_rejects_sample_that_no_sequence_holds(lengths):
    with pytest.raises(ValueError, match="1 to 8"):
        pack_sequences(np.array(lengths), 8)


@pytest.mark.parametrize(
    ("samples", "lanes"),
    [(1, 1), (1023, 1), (1024, 2), (2500, 4), (10**6, LANES)],
)
def test_small_dataset_has_fewer_lanes(samples, lanes):
    assert make_plan(FakeDataset(np.ones(samples))).lanes == lanes


def test_rank_among_many_packs_one_lane():
    plan = make_plan(
        FakeDataset(np.ones(100_000)), world_size=256, global_batch_size=256 * 184
    )
    assert [len(plan.lanes_of(rank)) for rank in (0, 3, 255)] == [1, 1, 1]


def test_order_of_packed_sequences_is_random():
    dataset = FakeDataset(np.random.default_rng(0).integers(1, 400, 1024))
    plan = make_plan(dataset, seq_length_tokens=512)
    segments = lay_out(plan, 0, 0, dataset)
    longest_samples = np.zeros(int(segments.sequences.max()) + 1)
    np.maximum.at(longest_samples, segments.sequences, segments.tokens)
    # Best fit alone gives a correlation near -1 between a sequence's number and its
    # longest sample. In a random order of about 400 sequences, its standard deviation
    # is 0.05.
    numbers = np.arange(len(longest_samples))
    assert abs(np.corrcoef(numbers, longest_samples)[0, 1]) < 0.15
