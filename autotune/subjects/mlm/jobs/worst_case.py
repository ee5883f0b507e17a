"""The micro-batch that needs the most memory of all that can occur in training.

Shapes: B sequences of a micro-batch, S positions of a sequence, N documents, P tokens
to predict.
"""

import math
from collections.abc import Sequence

import torch

from trainer.data.head_slots import fixed_slots, head_slots
from trainer.data.micro_batch import MicroBatch
from trainer.formats.manifest import SpecialIds
from trainer.formats.train_config import TrainConfig


def fullest_batch(
    config: TrainConfig,
    vocab_size: int,
    special_ids: SpecialIds,
    *,
    documents_per_sequence: float = 1.0,
) -> MicroBatch:
    """Return a micro-batch of random words in full sequences.

    It has as many tokens to predict as the trainer has room for.

    Args:
        config: Trainer settings.
        vocab_size: Tokens of the vocabulary.
        special_ids: Tokens that are not words.
        documents_per_sequence: Mean number of documents in a sequence. It matters as
            kernels that compute documents one by one round up each of them.
    """
    sequences = config.micro_batch_size
    width = config.seq_length_tokens
    ids = _random_words(sequences * width, vocab_size, special_ids)
    counts = predicted_by_sequence(sequences, width, config.masking_probability)
    predicted = _random_positions(counts, width)
    targets = ids[predicted]
    ids[predicted] = special_ids.mask
    edges = _document_edges(width, documents_per_sequence)
    first_positions = torch.arange(sequences)[:, None] * width
    starts_N = (first_positions + edges[:-1]).flatten()
    tokens_N = edges.diff().repeat(sequences)
    # One position is padding, as a batch without any takes a shorter way through
    # attention, without a mask in memory.
    tokens_N[-1] -= 1
    # The loader delivers ids in this type.
    id_dtype = torch.uint16 if vocab_size <= 2**16 else torch.uint32
    return MicroBatch.from_samples(
        ids.to(id_dtype).reshape(sequences, width).numpy(),
        starts_N=starts_N.numpy(),
        tokens_N=tokens_N.numpy(),
        predicted_P=predicted.numpy(),
        targets_P=targets.to(id_dtype).numpy(),
        fixed_slots=fixed_slots(config),
    )


def _random_words(count: int, vocab_size: int, special_ids: SpecialIds) -> torch.Tensor:
    """Return random tokens, none of which is special."""
    is_word = torch.ones(vocab_size, dtype=torch.bool)
    is_word[list(special_ids.all())] = False
    words = is_word.nonzero().squeeze(1)
    return words[torch.randint(len(words), (count,))]


def _random_positions(counts: Sequence[int], width: int) -> torch.Tensor:
    """Return ``counts`` random positions of the sequences, in ascending order."""
    return torch.cat(
        [
            number * width + torch.randperm(width)[:count].sort().values
            for number, count in enumerate(counts)
        ]
    )


def _document_edges(width: int, documents_per_sequence: float) -> torch.Tensor:
    """Return the first position of each document of a sequence, and the sequence's end.

    There are whole documents only, none of which is a single token.
    """
    documents = min(max(1, math.ceil(documents_per_sequence)), width // 2)
    return torch.arange(documents + 1) * width // documents


def predicted_by_sequence(sequences: int, width: int, probability: float) -> list[int]:
    """Return the number of tokens to predict in each sequence of the fullest batch.

    Two shapes depend on it: the head has a slot for each token to predict of the
    micro-batch, and attention in the last layer has as many slots in every sequence as
    the fullest one needs. With random numbers the fullest sequence would differ between
    runs, and the largest micro-batch would be a matter of luck. So one sequence has all
    that it has room for, and the others share the rest evenly.
    """
    positions = sequences * width
    in_batch = min(positions, head_slots(positions, probability))
    in_first = min(width, head_slots(width, probability))
    others = sequences - 1
    each, remainder = divmod(in_batch - in_first, max(1, others))
    counts = [in_first]
    for number in range(others):
        counts.append(each + 1 if number < remainder else each)
    return counts
