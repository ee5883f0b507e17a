"""The micro-batch that needs the most memory of all that can occur in training.

Shapes: B sequences of a micro-batch, S positions of a sequence, N documents, P tokens
to predict.
"""

import math

import torch

from trainer.config.train_config import TrainConfig
from trainer.data.dataset import SpecialIds
from trainer.data.loader import MicroBatch
from trainer.data.masking import head_slots


def fullest_batch(
    config: TrainConfig,
    vocab_size: int,
    special_ids: SpecialIds,
    *,
    documents_per_sequence: float = 1.0,
) -> MicroBatch:
    """Return a micro-batch of random words in full sequences, with as many to predict as the trainer has room for.

    ``documents_per_sequence`` matters because kernels that compute documents one by one
    round up each of them.
    """
    rows, width = config.micro_batch_size, config.seq_length_tokens
    ordinary = torch.ones(vocab_size, dtype=torch.bool)
    ordinary[list(special_ids.all())] = False
    words = ordinary.nonzero().squeeze(1)
    ids = words[torch.randint(len(words), (rows * width,))]
    counts = predicted_by_sequence(rows, width, config.masking_probability)
    predicted = torch.cat(
        [
            row * width + torch.randperm(width)[:count].sort().values
            for row, count in enumerate(counts)
        ]
    )
    targets = ids[predicted]
    ids[predicted] = special_ids.mask
    # Whole documents, the same in every sequence, and none of a single token.
    in_row = min(max(1, math.ceil(documents_per_sequence)), width // 2)
    columns = torch.arange(in_row + 1) * width // in_row
    starts_N = (
        (torch.arange(rows)[:, None] * width + columns[:-1]).flatten().to(torch.int32)
    )
    tokens_N = columns.diff().repeat(rows).to(torch.int32)
    # One position is padding, as a batch without any takes a shorter way through
    # attention, without a mask in memory.
    tokens_N[-1] -= 1
    # As the loader delivers them.
    stored = torch.uint16 if vocab_size <= 2**16 else torch.uint32
    return MicroBatch(
        ids_BS=ids.to(stored).reshape(rows, width),
        starts_N=starts_N,
        tokens_N=tokens_N,
        predicted_P=predicted.to(torch.int32),
        targets_P=targets.to(stored),
        non_padding_tokens=int(tokens_N.sum()),
        predicted_tokens=len(predicted),
        most_predicted_in_sequence=max(counts),
        padded_sequences=1,
    )


def predicted_by_sequence(rows: int, width: int, probability: float) -> list[int]:
    """Return the number of tokens to predict in each sequence: the most that the trainer has room for.

    Two shapes depend on it: the head has a slot for each token to predict of the
    micro-batch, and attention in the last layer has as many slots in every sequence as
    the fullest one needs. With random numbers the fullest sequence would differ between
    runs, and the largest micro-batch would be a matter of luck. So one sequence has all
    that it has room for, and the others share the rest evenly.
    """
    in_all, in_first = (
        min(places, head_slots(places, probability)) for places in (rows * width, width)
    )
    each, more = divmod(in_all - in_first, max(1, rows - 1))
    return [in_first, *(each + (row < more) for row in range(rows - 1))]
