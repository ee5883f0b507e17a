"""What rows hold and how much a pass over the data is: from the dataset, from a profile, or assumed."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from autotune.core.dataset import SPECIAL_TOKENS_PER_SAMPLE, LengthDistribution
from autotune.core.plan import Basis, Figure
from autotune.core.profile import Profile
from autotune.decide.choose import DEFAULT_GLOBAL_BATCH_TOKENS
from autotune.decide.shape import assumed_lengths, typical_lengths
from autotune.search.estimate import DOCUMENTS_PER_PACKED_ROW
from autotune.search.plan_subject import Subject
from autotune.search.row_contents import DEFAULT_SPECIAL_IDS, PACKED_FULL_SHARE
from trainer.batch import RowStatistics, row_statistics
from trainer.config import TrainConfig
from trainer.dataset import Manifest, SpecialIds, TokenDataset


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """What rows hold."""

    tokens_per_row: Figure
    tokens_per_pass: Figure | None
    """None without a dataset."""
    samples_per_row: float | None
    documents_per_row: float
    """In the fullest micro-batches."""
    lengths: npt.NDArray[np.int64]
    """Typical ones of documents, special tokens included; shape (N,)."""
    vocab_size: int | None
    """None where only a default could be taken."""
    special_ids: SpecialIds
    said: tuple[str, ...] = ()


def rows_of(subject: Subject, data: Path | None) -> RowFacts:
    """Look at the dataset that is named, else at the one the profile names if it is here; else assume.

    Raises:
        BadConfig: If what is named is no dataset.
    """
    directory = data or (None if subject.stored is None else subject.stored.data_here())
    if directory is not None:
        return _of_dataset(subject, directory)
    profile, train = subject.profile, subject.train
    return RowFacts(
        tokens_per_row=_assumed_tokens(profile, train),
        tokens_per_pass=None,
        samples_per_row=None,
        documents_per_row=DOCUMENTS_PER_PACKED_ROW if train.layout == "packed" else 1.0,
        lengths=assumed_lengths(train.seq_length_tokens),
        vocab_size=None,
        special_ids=DEFAULT_SPECIAL_IDS,
    )


def batch_rows(subject: Subject, rows: RowFacts, global_batch_tokens: float | None) -> int:
    """Rows of a step over all ranks: as asked for, else as the profile says, else as ``probe`` would choose."""
    per_row, train = rows.tokens_per_row.value, subject.train
    profile = subject.profile
    if global_batch_tokens is not None:
        return max(1, round(global_batch_tokens / per_row))
    if profile is None:
        return max(1, round(DEFAULT_GLOBAL_BATCH_TOKENS / per_row))
    if train.global_batch_tokens is not None or train.global_batch_samples is not None:
        return max(1, round((train.global_batch_tokens or profile.constraints.global_batch_tokens) / per_row))
    return train.global_batch_rows


def _of_dataset(subject: Subject, directory: Path) -> RowFacts:
    dataset = TokenDataset.open(directory)
    try:
        found = row_statistics(subject.train, dataset)
    finally:
        dataset.close()
    manifest, train = dataset.manifest, subject.train
    samples = LengthDistribution(
        edges=manifest.train.length_histogram.edges, counts=manifest.train.length_histogram.counts
    )
    profile = subject.profile
    other = profile is not None and manifest.dataset_hash != profile.fingerprint.dataset_hash
    return RowFacts(
        tokens_per_row=Figure(
            value=found.mean_real_tokens, basis="measured", source="rows of the dataset, a part of it laid out"
        ),
        tokens_per_pass=_pass(manifest, samples, found, train),
        samples_per_row=found.mean_samples,
        documents_per_row=found.most_documents if train.layout == "packed" else 1.0,
        lengths=typical_lengths(samples, train.seq_length_tokens),
        vocab_size=manifest.vocab_size,
        special_ids=manifest.special_ids,
        said=("The dataset is not the one that the profile was tuned on.",) if other else (),
    )


def _pass(manifest: Manifest, samples: LengthDistribution, found: RowStatistics, train: TrainConfig) -> Figure | None:
    count, room = manifest.train.samples, train.seq_length_tokens - SPECIAL_TOKENS_PER_SAMPLE
    if not count:
        return None
    if samples.counts[-1] and samples.edges[-1] < room:  # the last bin is open: how many are longer, it does not say
        of_a_sample = found.mean_real_tokens / found.mean_samples
        return Figure(value=count * of_a_sample, basis="measured", source="samples by what those laid out hold")
    cut = samples.truncated_share(room) or 0.0
    stored = manifest.train.tokens if not cut else count * (samples.mean_tokens(room) or 0.0)
    told = "the manifest" if not cut else f"the manifest's lengths; {cut:.0%} of the samples are cut to a row"
    return Figure(value=stored + SPECIAL_TOKENS_PER_SAMPLE * count, basis="measured", source=told)


def _assumed_tokens(profile: Profile | None, train: TrainConfig) -> Figure:
    probe = None if profile is None else profile.evidence.probe
    if probe is not None:
        return Figure(
            value=probe.mean_real_tokens_per_row, basis="measured", source="rows of the dataset that was probed with"
        )
    estimate = None if profile is None else profile.evidence.estimate
    if estimate is not None:
        known: Basis = "assumed" if estimate.rows_assumed else "measured"
        return Figure(
            value=estimate.mean_real_tokens_per_row, basis=known, source=f"rows as they were {known} by the estimate"
        )
    places = train.seq_length_tokens
    said = None if profile is None else profile.constraints.global_batch_tokens / train.global_batch_rows
    if said is not None and 1 <= said <= places:
        return Figure(value=said, basis="assumed", source="tokens by rows of the profile's global batch")
    if train.layout == "packed":
        return Figure(
            value=PACKED_FULL_SHARE * places, basis="assumed", source="packed rows of functions are 99.7 % full"
        )
    return Figure(value=places, basis="assumed", source="rows without padding, for want of a dataset")
