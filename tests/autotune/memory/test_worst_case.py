import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune.memory.jobs.worst_case import fullest_batch, predicted_by_sequence
from trainer.config.train_config import ModelSettings, TrainConfig
from trainer.data.head_slots import head_slots
from trainer.data.manifest import SpecialIds

SPECIAL_IDS = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)


def config_of(sequences: int) -> TrainConfig:
    model = ModelSettings(name="m", config={"model_type": "bert"})
    return TrainConfig(
        model=model,
        seq_length_tokens=128,
        micro_batch_size=sequences,
        global_batch_size=sequences,
    )


@given(
    sequences=st.integers(1, 300),
    width=st.integers(8, 2048),
    probability=st.floats(0.01, 0.9),
)
def test_one_sequence_is_full(sequences, width, probability):
    counts = predicted_by_sequence(sequences, width, probability)
    assert len(counts) == sequences
    assert sum(counts) == min(
        head_slots(sequences * width, probability), sequences * width
    )
    assert max(counts) == counts[0] == min(head_slots(width, probability), width)
    assert max(counts[1:], default=0) - min(counts[1:], default=0) <= 1
    assert min(counts) >= 0


@pytest.mark.parametrize("sequences", [1, 2, 7])
def test_batch_describes_itself(sequences):
    batch = fullest_batch(config_of(sequences), 500, SPECIAL_IDS)
    sequence_of_token = batch.predicted_P.long() // 128
    in_sequence = torch.bincount(sequence_of_token, minlength=sequences)
    assert in_sequence.tolist() == predicted_by_sequence(sequences, 128, 0.15)
    assert batch.most_predicted_in_sequence == int(in_sequence.max())
    assert batch.predicted_tokens == len(batch.predicted_P) == len(batch.targets_P)
    assert batch.non_padding_tokens == sequences * 128 - 1
    assert len(set(batch.predicted_P.tolist())) == batch.predicted_tokens
    assert batch.predicted_P.tolist() == sorted(batch.predicted_P.tolist())


@pytest.mark.parametrize("sequences", [1, 2, 7])
def test_targets_are_ordinary_words_behind_masks(sequences):
    batch = fullest_batch(config_of(sequences), 500, SPECIAL_IDS)
    is_mask = batch.ids_BS == SPECIAL_IDS.mask
    assert is_mask.flatten()[batch.predicted_P.long()].all()
    assert int(is_mask.sum()) == batch.predicted_tokens
    assert int(batch.targets_P.long().min()) > max(SPECIAL_IDS.all())


@pytest.mark.parametrize("sequences", [1, 2, 7])
def test_chance_changes_no_shape(sequences):
    batch, other = (
        fullest_batch(config_of(sequences), 500, SPECIAL_IDS) for _ in range(2)
    )
    assert batch.predicted_P.tolist() != other.predicted_P.tolist()
    assert batch.predicted_P.shape == other.predicted_P.shape
    assert batch.most_predicted_in_sequence == other.most_predicted_in_sequence
