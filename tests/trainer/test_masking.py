import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.masking import IGNORED_LABEL, MaskingRule, mask_tokens

RULE = MaskingRule(vocab_size=1000, mask_id=4, special_ids=(0, 1, 2, 3, 4), probability=0.15)


def _within(count: int, trials: int, probability: float) -> bool:
    """Within five standard deviations of a binomial distribution: wrong once in 1.7 million."""
    return abs(count - trials * probability) < 5 * math.sqrt(trials * probability * (1 - probability))


def _many() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids = np.arange(5, 1000)
    found = [mask_tokens(ids, RULE, seed=1, epoch=0, sample=sample) for sample in range(400)]
    return np.tile(ids, 400), np.concatenate([c for c, _ in found]), np.concatenate([labels for _, labels in found])


def test_fifteen_per_cent_are_predicted_and_split_80_10_10():
    ids, corrupted, labels = _many()
    chosen = labels != IGNORED_LABEL
    assert _within(chosen.sum(), len(ids), 0.15)
    masked = (corrupted == RULE.mask_id) & chosen
    assert _within(masked.sum(), chosen.sum(), 0.8)
    replaced = chosen & ~masked & (corrupted != ids)
    # One replacement in 995 draws the word that stood there.
    assert _within(replaced.sum(), chosen.sum(), 0.1 * 994 / 995)


def test_replacements_cover_the_ordinary_words_evenly_and_nothing_else():
    ids, corrupted, labels = _many()
    replaced = corrupted[(labels != IGNORED_LABEL) & (corrupted != RULE.mask_id) & (corrupted != ids)]
    assert not np.isin(replaced, RULE.special_ids).any()
    assert replaced.max() < RULE.vocab_size
    halves = (replaced < 5 + 995 / 2).sum()
    assert _within(halves, len(replaced), 0.5)


def test_special_ids_in_the_middle_of_the_vocabulary_are_never_drawn():
    rule = MaskingRule(vocab_size=8, mask_id=3, special_ids=(1, 3, 5, 7), probability=0.99)
    drawn = set()
    for sample in range(300):
        drawn |= set(mask_tokens(np.array([0, 2, 4, 6]), rule, seed=0, epoch=0, sample=sample)[0].tolist())
    assert drawn == {0, 2, 3, 4, 6}


@given(
    ids=st.lists(st.integers(0, 999), min_size=1, max_size=50),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 100),
    sample=st.integers(0, 2**40),
)
def test_masks_are_a_function_of_seed_epoch_and_sample_alone(ids, seed, epoch, sample):
    first = mask_tokens(np.array(ids), RULE, seed=seed, epoch=epoch, sample=sample)
    mask_tokens(np.array(ids), RULE, seed=seed + 1, epoch=epoch, sample=sample)
    second = mask_tokens(np.array(ids), RULE, seed=seed, epoch=epoch, sample=sample)
    assert [a.tolist() for a in first] == [b.tolist() for b in second]


@given(ids=st.lists(st.integers(0, 999), min_size=1, max_size=50), sample=st.integers(0, 1000))
def test_special_tokens_are_left_alone_and_labels_are_the_original_words(ids, sample):
    original = np.array(ids)
    corrupted, labels = mask_tokens(original, RULE, seed=0, epoch=0, sample=sample)
    special = np.isin(original, RULE.special_ids)
    assert (corrupted[special] == original[special]).all()
    assert (labels[special] == IGNORED_LABEL).all()
    chosen = labels != IGNORED_LABEL
    assert (labels[chosen] == original[chosen]).all()
    assert (corrupted[~chosen] == original[~chosen]).all()


def test_epochs_mask_differently():
    ids = np.arange(5, 500)
    masks = {mask_tokens(ids, RULE, seed=0, epoch=epoch, sample=0)[1].tobytes() for epoch in range(4)}
    assert len(masks) == 4
