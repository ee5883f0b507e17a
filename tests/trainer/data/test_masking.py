import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.masking import IGNORED_LABEL, Masker

RULE = {
    "vocab_size": 1000,
    "mask_id": 4,
    "special_ids": (0, 1, 2, 3, 4),
    "probability": 0.15,
}
ORDINARY_IDS = np.arange(5, 1000)
SAMPLES = 400
"""Samples of all ordinary ids in ``mask_many``."""


def mask(
    ids, rule=RULE, *, seed=0, epochs=(0,), samples=(0,), tokens=None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the corrupted ids, and the labels: original ids where predicted."""
    corrupted = np.array(ids, dtype=np.uint16)
    if tokens is None:
        tokens = [len(corrupted)]
    lengths = np.array(tokens, dtype=np.int64)
    predicted, originals = Masker(**rule, seed=seed).corrupt(
        corrupted,
        np.cumsum(lengths) - lengths,
        lengths,
        epochs=np.array(epochs, dtype=np.int64),
        samples=np.array(samples, dtype=np.int64),
    )
    labels = np.full(len(corrupted), IGNORED_LABEL, dtype=np.int64)
    labels[predicted] = originals
    return corrupted.astype(np.int64), labels


def mask_many() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the original ids, corrupted ids and labels of many samples."""
    ids = np.tile(ORDINARY_IDS, SAMPLES)
    corrupted, labels = mask(
        ids,
        seed=1,
        epochs=[0] * SAMPLES,
        samples=range(SAMPLES),
        tokens=[len(ORDINARY_IDS)] * SAMPLES,
    )
    return ids, corrupted, labels


def is_likely(count: int, trials: int, probability: float) -> bool:
    """Return whether a count is within five standard deviations of a binomial one.

    Wrong once in 1.7 million.
    """
    sigma = math.sqrt(trials * probability * (1 - probability))
    return abs(count - trials * probability) < 5 * sigma


def test_ignored_label_is_that_of_torch():
    assert IGNORED_LABEL == -100


def test_fifteen_per_cent_are_predicted():
    ids, _, labels = mask_many()
    assert is_likely((labels != IGNORED_LABEL).sum(), len(ids), 0.15)


def test_predicted_tokens_are_split_80_10_10():
    ids, corrupted, labels = mask_many()
    is_predicted = labels != IGNORED_LABEL
    is_masked = (corrupted == RULE["mask_id"]) & is_predicted
    assert is_likely(is_masked.sum(), is_predicted.sum(), 0.8)
    is_replaced = is_predicted & ~is_masked & (corrupted != ids)
    # One replacement in 995 draws the original id.
    assert is_likely(is_replaced.sum(), is_predicted.sum(), 0.1 * 994 / 995)


def test_replacements_are_uniform_over_ordinary_ids():
    ids, corrupted, labels = mask_many()
    is_predicted = labels != IGNORED_LABEL
    is_masked = (corrupted == RULE["mask_id"]) & is_predicted
    replacements = corrupted[is_predicted & ~is_masked & (corrupted != ids)]
    assert not np.isin(replacements, RULE["special_ids"]).any()
    assert replacements.max() < RULE["vocab_size"]
    counts, _ = np.histogram(replacements, bins=5, range=(5, 1000))
    assert all(is_likely(count, len(replacements), 0.2) for count in counts)


def test_every_position_is_predicted_equally_often():
    _, _, labels = mask_many()
    positions = len(ORDINARY_IDS)
    is_predicted = (labels != IGNORED_LABEL).reshape(SAMPLES, positions)
    # Chi-square over all positions; its mean is their number (1 - 0.15 is divided
    # out), its deviation sqrt(2 * that number).
    variance = SAMPLES * 0.15 * 0.85
    deviations = is_predicted.sum(axis=0) - SAMPLES * 0.15
    statistic = (deviations**2 / variance).sum()
    assert abs(statistic - positions) < 6 * math.sqrt(2 * positions)


def test_neighbours_are_predicted_independently():
    _, _, labels = mask_many()
    is_predicted = (labels != IGNORED_LABEL).reshape(SAMPLES, len(ORDINARY_IDS))
    pairs = is_predicted[:, 1:] & is_predicted[:, :-1]
    assert is_likely(pairs.sum(), pairs.size, 0.15**2)


def test_special_ids_within_the_vocabulary_are_never_drawn():
    rule = {
        "vocab_size": 8,
        "mask_id": 3,
        "special_ids": (1, 3, 5, 7),
        "probability": 0.99,
    }
    corrupted, _ = mask([0, 2, 4, 6] * 300, rule)
    assert set(corrupted.tolist()) == {0, 2, 3, 4, 6}


IDS = st.integers(0, 999)
BODIES = st.lists(st.lists(IDS, max_size=40), min_size=1, max_size=8)


@given(
    bodies=BODIES,
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 2**31),
    data=st.data(),
)
def test_mask_does_not_depend_on_other_samples(bodies, seed, epoch, data):
    count = len(bodies)
    distinct_samples = st.lists(
        st.integers(0, 2**40), min_size=count, max_size=count, unique=True
    )
    samples = data.draw(distinct_samples)
    together = mask(
        list(itertools.chain(*bodies)),
        seed=seed,
        epochs=[epoch] * count,
        samples=samples,
        tokens=[len(body) for body in bodies],
    )
    alone = [
        mask(body, seed=seed, epochs=[epoch], samples=[sample])
        for body, sample in zip(bodies, samples, strict=True)
    ]
    for joined, parts in zip(together, zip(*alone, strict=True), strict=True):
        assert joined.tolist() == np.concatenate(parts).tolist()


SAMPLE_IDS = st.lists(IDS, min_size=1, max_size=60)


@given(ids=SAMPLE_IDS, sample=st.integers(0, 1000))
def test_special_tokens_are_never_predicted(ids, sample):
    _, labels = mask(ids, samples=[sample])
    is_special = np.isin(ids, RULE["special_ids"])
    assert (labels[is_special] == IGNORED_LABEL).all()


@given(ids=SAMPLE_IDS, sample=st.integers(0, 1000))
def test_labels_are_the_original_ids(ids, sample):
    original = np.array(ids)
    corrupted, labels = mask(original, samples=[sample])
    is_predicted = labels != IGNORED_LABEL
    assert (labels[is_predicted] == original[is_predicted]).all()
    assert (corrupted[~is_predicted] == original[~is_predicted]).all()


@given(ids=SAMPLE_IDS, sample=st.integers(0, 1000))
def test_truncation_keeps_the_mask_of_other_tokens(ids, sample):
    corrupted, labels = mask(ids, samples=[sample])
    half = len(ids) // 2
    truncated_corrupted, truncated_labels = mask(ids[:half], samples=[sample])
    assert truncated_corrupted.tolist() == corrupted[:half].tolist()
    assert truncated_labels.tolist() == labels[:half].tolist()


def test_masks_differ_between_seeds_epochs_and_samples():
    ids = np.arange(5, 500)
    masks = set()
    for seed, epoch, sample in itertools.product(range(3), repeat=3):
        _, labels = mask(ids, seed=seed, epochs=[epoch], samples=[sample])
        masks.add(labels.tobytes())
    assert len(masks) == 27


def test_rejects_id_outside_the_vocabulary():
    with pytest.raises(IndexError):
        mask([5000] * 100)
