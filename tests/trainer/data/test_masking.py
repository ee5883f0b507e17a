import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.masking import Masker

RULE = {
    "vocab_size": 1000,
    "mask_id": 4,
    "special_ids": (0, 1, 2, 3, 4),
    "probability": 0.15,
}


def mask(
    ids, rule=RULE, *, seed=0, epochs=(0,), samples=(0,), tokens=None
) -> tuple[np.ndarray, np.ndarray]:
    """The corrupted ids, and the originals where something is to be predicted, -100
    elsewhere."""
    corrupted = np.array(ids, dtype=np.uint16)
    lengths = np.array(
        tokens if tokens is not None else [len(corrupted)], dtype=np.int64
    )
    places = np.cumsum(lengths) - lengths
    of = {
        "epochs": np.array(epochs, dtype=np.int64),
        "samples": np.array(samples, dtype=np.int64),
    }
    predicted, originals = Masker(**rule, seed=seed).corrupt(
        corrupted, places, lengths, **of
    )
    labels = np.full(len(corrupted), -100, dtype=np.int64)
    labels[predicted] = originals
    return corrupted.astype(np.int64), labels


def _within(count: int, trials: int, probability: float) -> bool:
    """Within five standard deviations of a binomial distribution: wrong once in 1.7
    million."""
    return abs(count - trials * probability) < 5 * math.sqrt(
        trials * probability * (1 - probability)
    )


def _many() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids = np.tile(np.arange(5, 1000), 400)
    corrupted, labels = mask(
        ids, seed=1, epochs=[0] * 400, samples=range(400), tokens=[995] * 400
    )
    return ids, corrupted, labels


def test_fifteen_per_cent_are_predicted_and_split_80_10_10_where_ordinary_words_replace_evenly():
    ids, corrupted, labels = _many()
    chosen = labels != -100
    assert _within(chosen.sum(), len(ids), 0.15)
    masked = (corrupted == RULE["mask_id"]) & chosen
    assert _within(masked.sum(), chosen.sum(), 0.8)
    replaced = corrupted[chosen & ~masked & (corrupted != ids)]
    # One replacement in 995 draws the word that stood there.
    assert _within(len(replaced), chosen.sum(), 0.1 * 994 / 995)
    assert not np.isin(replaced, RULE["special_ids"]).any()
    assert replaced.max() < RULE["vocab_size"]
    assert all(
        _within(count, len(replaced), 0.2)
        for count in np.histogram(replaced, bins=5, range=(5, 1000))[0]
    )


def test_every_place_of_a_sample_is_as_likely_to_be_predicted_whatever_its_neighbours_are():
    _, _, labels = _many()
    chosen = (labels != -100).reshape(400, 995)
    # Chi-square over 995 places; its mean is 995 (1 - 0.15 is divided out), its
    # deviation sqrt(2 * 995).
    statistic = ((chosen.sum(axis=0) - 60) ** 2 / (400 * 0.15 * 0.85)).sum()
    assert abs(statistic - 995) < 6 * math.sqrt(2 * 995)
    assert _within((chosen[:, 1:] & chosen[:, :-1]).sum(), 400 * 994, 0.15**2)


def test_special_ids_in_the_middle_of_the_vocabulary_are_never_drawn():
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
def test_masks_do_not_depend_on_who_draws_them_or_beside_what(
    bodies, seed, epoch, data
):
    samples = data.draw(
        st.lists(
            st.integers(0, 2**40),
            min_size=len(bodies),
            max_size=len(bodies),
            unique=True,
        )
    )
    together = mask(
        [token for body in bodies for token in body],
        seed=seed,
        epochs=[epoch] * len(bodies),
        samples=samples,
        tokens=[len(body) for body in bodies],
    )
    alone = [
        mask(body, seed=seed, epochs=[epoch], samples=[s])
        for body, s in zip(bodies, samples, strict=True)
    ]
    for joined, parts in zip(together, zip(*alone, strict=True), strict=True):
        assert joined.tolist() == np.concatenate(parts).tolist()


@given(ids=st.lists(IDS, min_size=1, max_size=60), sample=st.integers(0, 1000))
def test_special_tokens_are_left_alone_labels_are_the_original_words_and_a_cut_keeps_them(
    ids, sample
):
    original = np.array(ids)
    corrupted, labels = mask(original, samples=[sample])
    chosen = labels != -100
    assert not chosen[np.isin(original, RULE["special_ids"])].any()
    assert (labels[chosen] == original[chosen]).all()
    assert (corrupted[~chosen] == original[~chosen]).all()
    half = len(ids) // 2
    cut = mask(ids[:half], samples=[sample])
    assert [part.tolist() for part in cut] == [
        corrupted[:half].tolist(),
        labels[:half].tolist(),
    ]


def test_seeds_epochs_and_samples_have_masks_of_their_own():
    ids, numbers = np.arange(5, 500), itertools.product(range(3), repeat=3)
    draws = {
        mask(ids, seed=seed, epochs=[epoch], samples=[sample])[1].tobytes()
        for seed, epoch, sample in numbers
    }
    assert len(draws) == 27


def test_an_id_outside_the_vocabulary_is_an_error_and_not_a_read_past_a_table():
    with pytest.raises(IndexError):
        mask([5000] * 100)
