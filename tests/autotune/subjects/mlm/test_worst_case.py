"""The fullest micro-batch, which has the most tokens to predict that can occur."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune.subjects.mlm.jobs.worst_case import fullest_batch, predicted_by_sequence
from trainer.data.head_slots import head_slots
from trainer.data.micro_batch import MicroBatch
from trainer.formats.manifest import SpecialIds
from trainer.formats.train_config import ModelSettings, TrainConfig

SPECIAL_IDS = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
VOCAB_SIZE = 500
WIDTH = 128
MASKING_PROBABILITY = 0.15


def batch_of(sequences: int) -> MicroBatch:
    config = TrainConfig(
        model=ModelSettings(name="m", config={"model_type": "bert"}),
        seq_length_tokens=WIDTH,
        masking_probability=MASKING_PROBABILITY,
        micro_batch_size=sequences,
        global_batch_size=sequences,
    )
    return fullest_batch(config, VOCAB_SIZE, SPECIAL_IDS)


WIDTHS = st.integers(8, 2048)
PROBABILITIES = st.floats(0.01, 0.9)


@given(sequences=st.integers(1, 300), width=WIDTHS, probability=PROBABILITIES)
def test_first_sequence_has_most_predicted_tokens(sequences, width, probability):
    first_tokens, *other_tokens = predicted_by_sequence(sequences, width, probability)
    assert first_tokens == min(head_slots(width, probability), width)
    assert all(tokens <= first_tokens for tokens in other_tokens)


@given(sequences=st.integers(1, 300), width=WIDTHS, probability=PROBABILITIES)
def test_predicted_tokens_fill_the_slots(sequences, width, probability):
    tokens = predicted_by_sequence(sequences, width, probability)
    positions = sequences * width
    assert len(tokens) == sequences
    assert sum(tokens) == min(head_slots(positions, probability), positions)
    assert min(tokens) >= 0


@given(sequences=st.integers(2, 300), width=WIDTHS, probability=PROBABILITIES)
def test_later_sequences_share_tokens_evenly(sequences, width, probability):
    _, *later_tokens = predicted_by_sequence(sequences, width, probability)
    assert max(later_tokens) - min(later_tokens) <= 1


@pytest.mark.parametrize("sequences", [1, 2, 7])
def test_batch_describes_itself(sequences):
    batch = batch_of(sequences)
    sequence_of_token = batch.predicted_P.long() // WIDTH
    in_sequence = torch.bincount(sequence_of_token, minlength=sequences)
    assert in_sequence.tolist() == predicted_by_sequence(
        sequences, WIDTH, MASKING_PROBABILITY
    )
    assert batch.most_predicted_in_sequence == int(in_sequence.max())
    assert batch.predicted_tokens == len(batch.predicted_P) == len(batch.targets_P)
    # One position is padding.
    assert batch.non_padding_tokens == sequences * WIDTH - 1


@pytest.mark.parametrize("sequences", [1, 2, 7])
def test_predicted_positions_are_distinct_in_order(sequences):
    positions = batch_of(sequences).predicted_P.tolist()
    assert positions == sorted(set(positions))


@pytest.mark.parametrize("sequences", [1, 2, 7])
def test_masks_hide_ordinary_targets(sequences):
    batch = batch_of(sequences)
    is_mask = batch.ids_BS == SPECIAL_IDS.mask
    assert is_mask.flatten()[batch.predicted_P.long()].all()
    assert int(is_mask.sum()) == batch.predicted_tokens
    assert int(batch.targets_P.long().min()) > max(SPECIAL_IDS.all())


@pytest.mark.parametrize("sequences", [1, 2, 7])
def test_random_batches_have_equal_shapes(sequences):
    batch = batch_of(sequences)
    other = batch_of(sequences)
    assert batch.predicted_P.tolist() != other.predicted_P.tolist()
    assert batch.predicted_P.shape == other.predicted_P.shape
    assert batch.most_predicted_in_sequence == other.most_predicted_in_sequence
