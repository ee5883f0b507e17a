"""Size of a micro-batch that a DataLoader worker of the trainer sends. Pure."""

from trainer.data.head_slots import head_slots

_INDEX_BYTES = 4
"""Bytes of an index or a position, int32."""
_SLOT_BYTES = 16
"""Bytes of the position and the label of a slot of the MLM head, int64 each."""


def micro_batch_bytes(
    *,
    micro_batch_size: int,
    seq_length_tokens: int,
    id_bytes: int,
    masking_probability: float,
    samples_per_sequence: float,
) -> int:
    """Return the size of a micro-batch that a worker sends.

    Its tensors are those of ``trainer.data.micro_batch``. Samples are taken to leave
    padding in every sequence, and the head to have unused slots, so this may be a few
    percent too much.

    Args:
        micro_batch_size: Sequences of the micro-batch.
        seq_length_tokens: Tokens of a sequence, padding included.
        id_bytes: Bytes of a token id.
        masking_probability: Share of tokens that are masked.
        samples_per_sequence: Mean number of samples in a sequence.
    """
    tokens = micro_batch_size * seq_length_tokens
    samples = micro_batch_size * samples_per_sequence
    # A segment is a sample or the padding of a sequence.
    segments = samples + micro_batch_size
    slots = head_slots(tokens, masking_probability)
    # Of a token: its id, and its index in its segment. Of a masked token: its id and
    # position. Of a sample: its start and length. Of a segment: where it and its slots
    # begin.
    return round(
        tokens * (id_bytes + _INDEX_BYTES)
        + masking_probability * tokens * (id_bytes + _INDEX_BYTES)
        + slots * _SLOT_BYTES
        + samples * 2 * _INDEX_BYTES
        + segments * 2 * _INDEX_BYTES
    )
