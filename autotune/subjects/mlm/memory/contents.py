"""Contents of sequences, on which memory and tokens of a micro-batch depend.

They come from a sample of a dataset, or are assumed without one.
"""

import contextlib
import functools
from pathlib import Path

from autotune.corpus.values import SequenceContents, SequenceMeans
from autotune.evidence.profile import Profile
from autotune.profiles.store import StoredProfile
from trainer.data.dataset import TokenDataset
from trainer.data.sequence_statistics import SequenceStatistics, sequence_statistics
from trainer.formats.batch_split import Layout
from trainer.formats.manifest import Manifest, SpecialIds
from trainer.formats.train_config import ModelSettings, TrainConfig

DOCUMENTS_PER_PACKED_SEQUENCE = 4.0
"""Documents per packed sequence that are assumed without a dataset. Program functions
average 2.1 per 512 tokens, and memory depends on the fullest micro-batches, which have
more."""
DEFAULT_SPECIAL_IDS = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
"""Ids of special tokens that are assumed without a dataset."""
PACKED_FULL_SHARE = 0.997
"""Share of non-padding tokens that is assumed in packed sequences without a dataset:
that of program functions in sequences of 512 tokens (``docs/benchmarks.md``)."""


def assumed_contents(
    vocab_size: int, layout: Layout, seq_length_tokens: int
) -> SequenceContents:
    """Return the assumed contents of sequences without a dataset.

    A packed sequence is nearly full. In any other layout a sequence holds one sample,
    which fills it.

    Args:
        vocab_size: Vocabulary size to assume.
        layout: Layout of the sequences.
        seq_length_tokens: Length of a sequence, padding included.
    """
    is_packed = layout == "packed"
    full_share = PACKED_FULL_SHARE if is_packed else 1.0
    return SequenceContents(
        vocab_size=vocab_size,
        special_ids=DEFAULT_SPECIAL_IDS,
        dataset_hash=None,
        mean_non_padding_tokens=full_share * seq_length_tokens,
        # Also in packed sequences, so that a global batch of 256 samples has 256
        # sequences, as BERT's had.
        mean_samples=1.0,
        documents=DOCUMENTS_PER_PACKED_SEQUENCE if is_packed else 1.0,
    )


def sequence_contents(
    data: Path | None, vocab_size: int, config: TrainConfig
) -> SequenceContents:
    """Return the contents of sequences: the dataset's, or assumed ones without one.

    Args:
        data: Directory of the dataset; None without one.
        vocab_size: Vocabulary size, which is ignored with a dataset.
        config: Settings of the step, for the layout and the length of sequences.

    Raises:
        TrainerError: If the directory has no dataset.
    """
    if data is None:
        return assumed_contents(vocab_size, config.layout, config.seq_length_tokens)
    return contents_of(data, config.layout, config.seq_length_tokens)


@functools.cache
def contents_of(data: Path, layout: Layout, seq_length_tokens: int) -> SequenceContents:
    """Return the contents of a dataset's sequences, from a sample of the dataset.

    The result is cached, as an estimate asks for the same sequences many times.

    Raises:
        TrainerError: If the directory has no dataset.
    """
    # Settings require a model, but sequences do not depend on it.
    any_model = ModelSettings(name="any", config={"model_type": "bert"})
    config = TrainConfig(
        model=any_model, layout=layout, seq_length_tokens=seq_length_tokens
    )
    stats, manifest = _read_statistics(data, config)
    return SequenceContents(
        vocab_size=manifest.vocab_size,
        special_ids=manifest.special_ids,
        dataset_hash=manifest.dataset_hash,
        mean_non_padding_tokens=stats.mean_non_padding_tokens,
        mean_samples=stats.mean_samples,
        documents=stats.max_mean_samples if layout == "packed" else 1.0,
    )


def _read_statistics(
    data: Path, config: TrainConfig
) -> tuple[SequenceStatistics, Manifest]:
    """Return the statistics of a sample of a dataset's sequences, and its manifest.

    Raises:
        TrainerError: If the directory has no dataset.
    """
    with contextlib.closing(TokenDataset.open(data)) as dataset:
        return sequence_statistics(config, dataset), dataset.manifest


def sequence_means(stored: StoredProfile, data: Path | None) -> SequenceMeans:
    """Return the mean non-padding tokens and samples of a sequence.

    They are counted in a sample of the dataset. If it is not found, the profile's
    stored mean takes their place.

    Args:
        stored: The profile, for its settings and its own dataset.
        data: Directory of another dataset; None for the profile's own.

    Raises:
        TrainerError: If ``data`` has no dataset.
    """
    profile = stored.profile
    directory = stored.existing_data_dir() if data is None else data
    if directory is None:
        return _stored_means(profile)
    stats, manifest = _read_statistics(directory, profile.train)
    source = "a sample of the dataset's sequences"
    if manifest.dataset_hash != profile.fingerprint.dataset_hash:
        source = "a different dataset from the profile's"
    return SequenceMeans(
        non_padding_tokens=stats.mean_non_padding_tokens,
        samples=stats.mean_samples,
        source=source,
    )


def _stored_means(profile: Profile) -> SequenceMeans:
    """Return the means that a profile stores, for use without its dataset."""
    if profile.train.layout == "packed":
        # A profile does not store the samples of a packed sequence.
        return SequenceMeans(
            non_padding_tokens=profile.mean_tokens_per_sequence,
            samples=None,
            source="dataset not found",
        )
    return SequenceMeans(
        non_padding_tokens=profile.mean_tokens_per_sequence,
        samples=1.0,
        source="one sample per sequence",
    )
