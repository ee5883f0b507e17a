"""Look at what rows of a dataset hold, or assume it."""

import functools
from pathlib import Path

from autotune.core.dataset import RowContents
from autotune.search.estimate import DOCUMENTS_PER_PACKED_ROW
from trainer.batch import row_statistics
from trainer.config import Layout, ModelSettings, TrainConfig
from trainer.dataset import SpecialIds, TokenDataset

DEFAULT_SPECIAL_IDS = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
PACKED_FULL_SHARE = 0.997
"""Of packed rows of 512, functions of programs; ``docs/performance.md``."""


def assumed_contents(vocab_size: int, layout: Layout, seq_length_tokens: int) -> RowContents:
    """Without a dataset: packed rows are full, and others hold a sample without padding."""
    packed = layout == "packed"
    return RowContents(
        vocab_size=vocab_size,
        special_ids=DEFAULT_SPECIAL_IDS,
        mean_real_tokens=(PACKED_FULL_SHARE if packed else 1.0) * seq_length_tokens,
        mean_samples=1.0,  # so that a global batch of 256 samples is one of 256 rows, as BERT's was
        documents=DOCUMENTS_PER_PACKED_ROW if packed else 1.0,
        dataset_hash=None,
    )


@functools.cache
def contents_of(data: Path, layout: Layout, seq_length_tokens: int) -> RowContents:
    """Of a dataset; laying a part of it out takes a moment.

    Raises:
        TrainerError: If it is none.
    """
    dataset = TokenDataset.open(data)
    # Any model will do: rows do not depend on it.
    laid_out = TrainConfig(
        model=ModelSettings(name="any", config={"model_type": "bert"}),
        layout=layout,
        seq_length_tokens=seq_length_tokens,
    )
    rows = row_statistics(laid_out, dataset)
    return RowContents(
        vocab_size=dataset.manifest.vocab_size,
        special_ids=dataset.manifest.special_ids,
        mean_real_tokens=rows.mean_real_tokens,
        mean_samples=rows.mean_samples,
        documents=rows.most_documents if layout == "packed" else 1.0,
        dataset_hash=dataset.manifest.dataset_hash,
    )
