import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune.memory.jobs.worst_case import fullest_batch, predicted_by_sequence
from trainer.config.train_config import ModelSettings, TrainConfig
from trainer.data.dataset import SpecialIds
from trainer.data.masking import head_slots

SPECIAL_IDS = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)


def config_of(rows: int) -> TrainConfig:
    model = ModelSettings(name="m", config={"model_type": "bert"})
    return TrainConfig(
        model=model,
        seq_length_tokens=128,
        micro_batch_size=rows,
        global_batch_size=rows,
    )


@given(
    rows=st.integers(1, 300),
    width=st.integers(8, 2048),
    probability=st.floats(0.01, 0.9),
)
def test_one_row_is_as_full_as_rows_can_be_and_all_fill_the_head(
    rows, width, probability
):
    counts = predicted_by_sequence(rows, width, probability)
    assert len(counts) == rows
    assert sum(counts) == min(head_slots(rows * width, probability), rows * width)
    assert max(counts) == counts[0] == min(head_slots(width, probability), width)
    assert max(counts[1:], default=0) - min(counts[1:], default=0) <= 1
    assert min(counts) >= 0


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_the_batch_says_of_itself_what_it_holds_and_chance_changes_no_shape(rows):
    batch, other = (fullest_batch(config_of(rows), 500, SPECIAL_IDS) for _ in range(2))
    in_row = torch.bincount(batch.predicted_P.long() // 128, minlength=rows)
    assert in_row.tolist() == predicted_by_sequence(rows, 128, 0.15)
    assert batch.most_predicted_in_sequence == int(in_row.max())
    assert batch.predicted_tokens == len(batch.predicted_P) == len(batch.targets_P)
    assert batch.non_padding_tokens == rows * 128 - 1
    assert len(set(batch.predicted_P.tolist())) == batch.predicted_tokens
    assert batch.predicted_P.tolist() == sorted(batch.predicted_P.tolist())
    # Targets are ordinary words, with masks in their place.
    assert (batch.ids_BS.flatten()[batch.predicted_P.long()] == SPECIAL_IDS.mask).all()
    assert int((batch.ids_BS == SPECIAL_IDS.mask).sum()) == batch.predicted_tokens
    assert int(batch.targets_P.long().min()) > max(SPECIAL_IDS.all())
    assert batch.predicted_P.tolist() != other.predicted_P.tolist()
    assert batch.predicted_P.shape == other.predicted_P.shape
    assert batch.most_predicted_in_sequence == other.most_predicted_in_sequence
