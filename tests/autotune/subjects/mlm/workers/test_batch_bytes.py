"""Size of a micro-batch that a DataLoader worker sends."""

import numpy as np
import pytest

from autotune.subjects.mlm.workers.batch_bytes import micro_batch_bytes
from trainer.data.head_slots import head_slots
from trainer.data.micro_batch import MicroBatch


def _real_batch_bytes(
    *,
    micro_batch_size: int,
    seq_length_tokens: int,
    id_type: type,
    masking_probability: float,
    samples_per_sequence: int,
) -> int:
    """Return the size of a real micro-batch, whose sequences all end in padding."""
    tokens = seq_length_tokens // samples_per_sequence - 1
    first_positions = np.arange(micro_batch_size)[:, None] * seq_length_tokens
    positions = micro_batch_size * seq_length_tokens
    predicted = np.arange(round(masking_probability * positions))
    batch = MicroBatch.from_samples(
        np.zeros((micro_batch_size, seq_length_tokens), dtype=id_type),
        starts_N=(first_positions + tokens * np.arange(samples_per_sequence)).ravel(),
        tokens_N=np.full(micro_batch_size * samples_per_sequence, tokens),
        predicted_P=predicted,
        targets_P=np.zeros(len(predicted), dtype=id_type),
        fixed_slots=head_slots(positions, masking_probability),
    )
    return batch.tensors.buffer.nbytes


@pytest.mark.parametrize("id_type", [np.uint16, np.uint32])
@pytest.mark.parametrize("masking_probability", [0.01, 0.15, 0.5])
@pytest.mark.parametrize("samples_per_sequence", [1, 10])
@pytest.mark.parametrize("micro_batch_size", [1, 64])
def test_predicts_size_of_micro_batch(
    id_type, masking_probability, samples_per_sequence, micro_batch_size
):
    shape = {
        "micro_batch_size": micro_batch_size,
        "seq_length_tokens": 128,
        "masking_probability": masking_probability,
        "samples_per_sequence": samples_per_sequence,
    }
    real_bytes = _real_batch_bytes(**shape, id_type=id_type)
    predicted_bytes = micro_batch_bytes(**shape, id_bytes=id_type().itemsize)
    # Each of ten tensors begins at a multiple of 16 bytes.
    assert abs(predicted_bytes - real_bytes) <= 10 * 16
