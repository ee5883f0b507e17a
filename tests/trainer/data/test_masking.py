"""Masking of tokens: its probabilities, and what the mask of a sample depends on."""

import inspect
import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from trainer.data.masking import IGNORED_LABEL, Masker

VOCAB_SIZE = 1000
MASK_ID = 4
PROBABILITY = 0.15
RULE = {
    "vocab_size": VOCAB_SIZE,
    "mask_id": MASK_ID,
    "special_ids": (0, 1, 2, 3, MASK_ID),
    "probability": PROBABILITY,
}
"""Arguments of a ``Masker``, but for its seed."""
ORDINARY_IDS = np.arange(5, VOCAB_SIZE)
SAMPLES = 400
"""Number of samples in ``mask_many``."""
IDS = st.integers(0, VOCAB_SIZE - 1)
BODIES = st.lists(st.lists(IDS, max_size=40), min_size=1, max_size=8)
"""Ids of some samples."""
SAMPLE_IDS = st.lists(IDS, min_size=1, max_size=60)
"""Ids of one sample."""


@dataclass(frozen=True)
class Masked:
    """Ids of samples, one after the other, before and after masking."""

    original: np.ndarray
    corrupted: np.ndarray
    labels: np.ndarray
    """Original ids of predicted tokens, elsewhere the ignored label."""

    @property
    def is_predicted(self) -> np.ndarray:
        return self.labels != IGNORED_LABEL

    @property
    def is_masked(self) -> np.ndarray:
        return self.is_predicted & (self.corrupted == MASK_ID)

    @property
    def is_replaced(self) -> np.ndarray:
        """Whether each token is predicted and has another ordinary id."""
        is_changed = self.corrupted != self.original
        return self.is_predicted & ~self.is_masked & is_changed


def mask_samples(bodies, rule=RULE, *, seed=0, epoch=0, samples=None) -> Masked:
    """Mask samples, which have these ids.

    ``samples`` are their indices in a dataset, counted from 0 by default.
    """
    original = np.concatenate([np.array(body, dtype=np.uint16) for body in bodies])
    corrupted = original.copy()
    lengths = np.array([len(body) for body in bodies], dtype=np.int64)
    if samples is None:
        samples = range(len(bodies))
    predicted, originals = Masker(**rule, seed=seed).corrupt(
        corrupted,
        np.cumsum(lengths) - lengths,
        lengths,
        epochs=np.full(len(bodies), epoch, dtype=np.int64),
        samples=np.array(samples, dtype=np.int64),
    )
    labels = np.full(len(corrupted), IGNORED_LABEL, dtype=np.int64)
    labels[predicted] = originals
    return Masked(original.astype(np.int64), corrupted.astype(np.int64), labels)


def mask(ids, *, seed=0, epoch=0, sample=0) -> Masked:
    """Mask one sample."""
    return mask_samples([ids], seed=seed, epoch=epoch, samples=[sample])


def mask_many() -> Masked:
    """Mask many samples, each of which holds all ordinary ids."""
    return mask_samples([ORDINARY_IDS] * SAMPLES, seed=1)


def is_likely(count: int, trials: int, probability: float) -> bool:
    """Return whether a count is within five standard deviations of its expectation.

    The count has a binomial distribution. One in 1.7 million lies outside.
    """
    sigma = math.sqrt(trials * probability * (1 - probability))
    return abs(count - trials * probability) < 5 * sigma


def test_ignored_label_is_that_of_torch():
    assert inspect.signature(cross_entropy).parameters["ignore_index"].default == (
        IGNORED_LABEL
    )


def test_fifteen_per_cent_are_predicted():
    masked = mask_many()
    assert is_likely(masked.is_predicted.sum(), len(masked.labels), PROBABILITY)


def test_predicted_tokens_are_split_80_10_10():
    masked = mask_many()
    predicted = masked.is_predicted.sum()
    assert is_likely(masked.is_masked.sum(), predicted, 0.8)
    # Of as many ordinary ids, one replacement draws the original and is not seen.
    seen_share = 1 - 1 / len(ORDINARY_IDS)
    assert is_likely(masked.is_replaced.sum(), predicted, 0.1 * seen_share)


def test_replacements_are_ordinary_ids():
    masked = mask_many()
    replacements = masked.corrupted[masked.is_replaced]
    assert np.isin(replacements, ORDINARY_IDS).all()


def test_replacements_are_uniform():
    masked = mask_many()
    replacements = masked.corrupted[masked.is_replaced]
    # 995 ordinary ids are five bins of 199.
    counts, _ = np.histogram(replacements, bins=5, range=(5, VOCAB_SIZE))
    assert all(is_likely(count, len(replacements), 1 / 5) for count in counts)


def test_every_position_is_predicted_equally_often():
    positions = len(ORDINARY_IDS)
    is_predicted = mask_many().is_predicted.reshape(SAMPLES, positions)
    # Each position is a binomial count over samples. The sum of its squared deviations
    # in units of its variance is chi-square: its mean is the number of positions, and
    # its standard deviation the square root of twice that number. It exceeds six of
    # them less than once in a million.
    variance = SAMPLES * PROBABILITY * (1 - PROBABILITY)
    deviations = is_predicted.sum(axis=0) - SAMPLES * PROBABILITY
    statistic = (deviations**2 / variance).sum()
    assert abs(statistic - positions) < 6 * math.sqrt(2 * positions)


def test_neighbours_are_predicted_independently():
    is_predicted = mask_many().is_predicted.reshape(SAMPLES, len(ORDINARY_IDS))
    pairs = is_predicted[:, 1:] & is_predicted[:, :-1]
    assert is_likely(pairs.sum(), pairs.size, PROBABILITY**2)


def test_special_ids_between_ordinary_ones_are_never_drawn():
    mask_id = 3
    ordinary_ids = [0, 2, 4, 6]
    rule = {
        "vocab_size": 8,
        "mask_id": mask_id,
        "special_ids": (1, mask_id, 5, 7),
        "probability": 0.99,
    }
    masked = mask_samples([ordinary_ids * 300], rule)
    assert set(masked.corrupted.tolist()) == {mask_id, *ordinary_ids}


@given(
    bodies=BODIES,
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 2**31),
    data=st.data(),
)
def test_mask_does_not_depend_on_other_samples(bodies, seed, epoch, data):
    distinct_samples = st.lists(
        st.integers(0, 2**40), min_size=len(bodies), max_size=len(bodies), unique=True
    )
    samples = data.draw(distinct_samples)
    together = mask_samples(bodies, seed=seed, epoch=epoch, samples=samples)
    alone = [
        mask(body, seed=seed, epoch=epoch, sample=sample)
        for body, sample in zip(bodies, samples, strict=True)
    ]
    corrupted = np.concatenate([masked.corrupted for masked in alone])
    assert together.corrupted.tolist() == corrupted.tolist()
    labels = np.concatenate([masked.labels for masked in alone])
    assert together.labels.tolist() == labels.tolist()


@given(ids=SAMPLE_IDS, sample=st.integers(0, 1000))
def test_special_tokens_are_never_predicted(ids, sample):
    masked = mask(ids, sample=sample)
    is_special = np.isin(masked.original, RULE["special_ids"])
    assert not masked.is_predicted[is_special].any()


@given(ids=SAMPLE_IDS, sample=st.integers(0, 1000))
def test_labels_are_the_original_ids(ids, sample):
    masked = mask(ids, sample=sample)
    is_predicted = masked.is_predicted
    assert (masked.labels[is_predicted] == masked.original[is_predicted]).all()


@given(ids=SAMPLE_IDS, sample=st.integers(0, 1000))
def test_other_ids_are_unchanged(ids, sample):
    masked = mask(ids, sample=sample)
    is_other = ~masked.is_predicted
    assert (masked.corrupted[is_other] == masked.original[is_other]).all()


@given(ids=SAMPLE_IDS, sample=st.integers(0, 1000))
def test_truncation_keeps_the_mask_of_other_tokens(ids, sample):
    half = len(ids) // 2
    masked = mask(ids, sample=sample)
    truncated = mask(ids[:half], sample=sample)
    assert truncated.corrupted.tolist() == masked.corrupted[:half].tolist()
    assert truncated.labels.tolist() == masked.labels[:half].tolist()


def test_masks_differ_between_seeds_epochs_and_samples():
    distinct_masks = set()
    keys = list(itertools.product(range(3), repeat=3))
    for seed, epoch, sample in keys:
        labels = mask(ORDINARY_IDS, seed=seed, epoch=epoch, sample=sample).labels
        distinct_masks.add(labels.tobytes())
    assert len(distinct_masks) == len(keys)


def test_rejects_id_outside_the_vocabulary():
    # Only ids that are predicted are looked up: of as many, at least one surely is.
    with pytest.raises(IndexError):
        mask([VOCAB_SIZE] * 100)
