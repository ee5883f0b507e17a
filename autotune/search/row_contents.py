"""Look at what rows of a dataset hold, or assume it: for predictions, and for an export to another trainer."""

import contextlib
import functools
from pathlib import Path

from autotune.core.dataset import RowContents
from autotune.decide.export import RowsHold
from autotune.search.estimate import DOCUMENTS_PER_PACKED_ROW
from autotune.search.profiles import StoredProfile
from trainer.batch import RowStatistics, row_statistics
from trainer.config import Layout, ModelSettings, TrainConfig
from trainer.dataset import Manifest, SpecialIds, TokenDataset

DEFAULT_SPECIAL_IDS = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
PACKED_FULL_SHARE = 0.997
"""Of packed rows of 512, functions of programs; ``docs/performance.md``."""


def assumed_contents(vocab_size: int, layout: Layout, seq_length_tokens: int) -> RowContents:
    """Return what is assumed without a dataset: packed rows are full, and others hold a sample without padding."""
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
    any_model = ModelSettings(name="any", config={"model_type": "bert"})  # rows do not depend on it
    rows, manifest = _laid_out(data, TrainConfig(model=any_model, layout=layout, seq_length_tokens=seq_length_tokens))
    documents = rows.most_documents if layout == "packed" else 1.0
    said = {name: getattr(manifest, name) for name in ("vocab_size", "special_ids", "dataset_hash")}
    return RowContents(
        mean_real_tokens=rows.mean_real_tokens, mean_samples=rows.mean_samples, documents=documents, **said
    )


def _laid_out(data: Path, config: TrainConfig) -> tuple[RowStatistics, Manifest]:
    with contextlib.closing(TokenDataset.open(data)) as dataset:
        return row_statistics(config, dataset), dataset.manifest


def rows_hold(stored: StoredProfile, data: Path | None) -> RowsHold:
    """Return non-padding tokens and samples of a row, from a part of the dataset; without it, what the profile says.

    Raises:
        TrainerError: If ``data`` is no dataset.
    """
    profile, directory = stored.profile, data or stored.data_here()
    if directory is None:
        packed = profile.train.layout == "packed"
        source = "the dataset is not here" if packed else "one sample in each row"
        tokens = profile.mean_real_tokens_per_row
        return RowsHold(real_tokens=tokens, samples=None if packed else 1.0, source=source)
    found, manifest = _laid_out(directory, profile.train)
    other = manifest.dataset_hash != profile.fingerprint.dataset_hash
    source = "another dataset than the profile was tuned on" if other else "rows of the dataset, a part laid out"
    return RowsHold(real_tokens=found.mean_real_tokens, samples=found.mean_samples, source=source)
