import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.core.exploration import Configuration
from autotune.decide.exploration import (
    CELL_SIGMA,
    EFFECT_SIGMAS,
    LEVEL_VARIANCE,
    NOISE_SIGMAS,
    PAIR_SHARES,
    ROWS_SCALE,
    SHORT_NOISE,
    Posterior,
    Seen,
    expected_improvement,
    posterior,
)

CELLS = tuple(
    Configuration(
        precision=precision, attention="auto", checkpointing=checkpointing, compile_layers=False, layout=layout,
        micro_batch_rows=rows,
    )
    for precision, checkpointing, layout, rows in itertools.product(
        ("fp32", "bf16"), ("none", "full"), ("packed", "padded"), (1, 4, 16)
    )
)  # fmt: skip
LOGS = st.floats(-1.5, 1.5).map(lambda one: round(one, 6))
READINGS = st.lists(
    st.builds(Seen, cell=st.integers(0, len(CELLS) - 1), log_ratio=LOGS, short=st.booleans()), min_size=1, max_size=30
)


def read(rates, times=1, noise=0.0, seed=0):
    """Windows of cells by their place."""
    rng = random.Random(seed)
    return [Seen(cell=cell, log_ratio=rate + rng.gauss(0, noise)) for cell, rate in rates.items() for _ in range(times)]


def additive(cell):
    return 0.4 * (cell.precision == "bf16") - 0.3 * (cell.checkpointing == "full") + 0.1 * math.log2(
        cell.micro_batch_rows
    )  # fmt: skip


def place_of(**values):
    return next(n for n, cell in enumerate(CELLS) if all(getattr(cell, name) == one for name, one in values.items()))


@settings(max_examples=25)
@given(READINGS)
def test_what_is_believed_is_finite_and_never_wider_than_before_anything_was_read(seen):
    found = posterior(CELLS, seen)
    assert np.isfinite(found.mean).all()
    assert np.isfinite(found.covariance).all()
    assert np.allclose(found.covariance, found.covariance.T, atol=1e-8)
    assert np.linalg.eigvalsh(found.covariance).min() > -1e-6
    assert found.sigma.max() < 3.0


@settings(max_examples=25)
@given(READINGS, st.randoms(use_true_random=False))
def test_the_order_of_readings_does_not_matter(seen, rng):
    mixed = list(seen)
    rng.shuffle(mixed)
    one, other = posterior(CELLS, seen), posterior(CELLS, mixed)
    assert one.noise_sigma == other.noise_sigma
    assert (one.mean == other.mean).all()
    assert (one.covariance == other.covariance).all()


@settings(max_examples=30)
@given(st.dictionaries(st.integers(0, len(CELLS) - 1), LOGS, min_size=1, max_size=12))
def test_what_was_read_often_and_without_noise_is_believed(rates):
    found = posterior(CELLS, read(rates, times=40))
    for cell, rate in rates.items():
        assert found.mean[cell] == pytest.approx(rate, abs=0.02)
        assert found.sigma[cell] < 0.01


def likely(among, y):
    return -0.5 * y @ np.linalg.solve(among, y) - 0.5 * np.linalg.slogdet(among)[1]


def alike(name):
    values = [getattr(cell, name) for cell in CELLS]
    if name == "micro_batch_rows":
        logs = np.log2(values)
        return np.exp(-((logs[:, None] - logs) ** 2) / (2 * ROWS_SCALE**2))
    return np.array([[one == other for other in values] for one in values], dtype=float)


def posterior_of_single_windows(seen):
    """The same without taking windows of a cell together, straight from the formulas: mean and noise."""
    each = [alike(name) for name in ("precision", "checkpointing", "layout", "micro_batch_rows")]
    singles = sum(each)
    pairs = sum(one * other for one, other in itertools.combinations(each, 2))
    at = [one.cell for one in seen]
    y = np.array([one.log_ratio for one in seen])
    wider = np.diag([SHORT_NOISE**2 if one.short else 1.0 for one in seen])
    found = []
    for effect, pair, noise in itertools.product(EFFECT_SIGMAS, PAIR_SHARES, NOISE_SIGMAS):
        prior = LEVEL_VARIANCE + effect**2 * (singles + pair * pairs) + CELL_SIGMA**2 * np.eye(len(CELLS))
        among = prior[np.ix_(at, at)] + noise**2 * wider
        found.append((likely(among, y), noise, prior[:, at] @ np.linalg.solve(among, y)))
    _, noise, mean = max(found, key=lambda one: one[0])
    return mean, noise


@pytest.mark.parametrize("seed", range(5))
def test_windows_of_a_cell_taken_together_say_what_they_say_one_by_one(seed):
    rng = random.Random(seed)
    cells = [rng.randrange(len(CELLS)) for _ in range(6)] * 3 + [rng.randrange(len(CELLS)) for _ in range(4)]
    seen = [Seen(cell=cell, log_ratio=rng.gauss(0.05 * cell, 0.03), short=rng.random() < 0.3) for cell in cells]
    mean, noise = posterior_of_single_windows(seen)
    found = posterior(CELLS, seen)
    assert found.noise_sigma == noise
    assert found.mean == pytest.approx(mean, abs=1e-8)


@settings(max_examples=25)
@given(st.integers(0, len(CELLS) - 1), LOGS)
def test_another_window_makes_its_own_cell_surer_and_none_less_sure(cell, rate):
    base = read({0: 0.0, 7: 0.1, 13: -0.4}, times=4)
    before = posterior(CELLS, base)
    after = posterior(CELLS, [*base, Seen(cell=cell, log_ratio=float(before.mean[cell]))])
    if after.noise_sigma == before.noise_sigma:  # and the same scales, which the readings choose
        assert after.sigma[cell] <= before.sigma[cell] + 1e-6


def test_effects_add_up_for_cells_that_were_never_read():
    seen = {n: additive(CELLS[n]) for n in random.Random(0).sample(range(len(CELLS)), 10)}
    found = posterior(CELLS, read(seen, times=4, noise=0.01))
    unread = [n for n in range(len(CELLS)) if n not in seen]
    errors = [abs(found.mean[n] - additive(CELLS[n])) for n in unread]
    assert max(errors) < 0.15
    spread = max(map(additive, CELLS)) - min(map(additive, CELLS))
    assert sum(errors) / len(errors) < 0.06 * spread


def test_pairs_that_do_not_add_up_are_seen():
    def rate(cell):
        return 0.6 * (cell.precision == "bf16" and cell.layout == "packed")

    seen = {n: rate(cell) for n, cell in enumerate(CELLS) if cell.checkpointing == "none"}
    found = posterior(CELLS, read(seen, times=4, noise=0.01))
    together = place_of(precision="bf16", layout="packed", checkpointing="full", micro_batch_rows=4)
    alone = place_of(precision="bf16", layout="padded", checkpointing="full", micro_batch_rows=4)
    assert found.mean[together] == pytest.approx(0.6, abs=0.15)
    assert found.mean[alone] == pytest.approx(0.0, abs=0.15)


def test_close_micro_batches_are_alike_and_far_ones_less():
    found = posterior(CELLS, read({place_of(micro_batch_rows=1): 0.5, place_of(micro_batch_rows=16): -0.5}, times=8))
    between = place_of(micro_batch_rows=4)
    assert -0.5 < found.mean[between] < 0.5


def test_noisy_windows_are_told_from_quiet_ones_and_short_ones_weigh_less():
    rates = {n: additive(CELLS[n]) for n in range(0, len(CELLS), 2)}
    quiet, noisy = (posterior(CELLS, read(rates, times=6, noise=noise)) for noise in (0.01, 0.1))
    assert quiet.noise_sigma < noisy.noise_sigma
    told = [Seen(cell=0, log_ratio=0.3, short=short) for short in (False, True)]
    base = read({1: 0.0, 2: 0.1}, times=6, noise=0.05)
    full, short = (posterior(CELLS, [*base, one]) for one in told)
    assert full.sigma[0] < short.sigma[0]


def test_without_a_reading_there_is_nothing_to_say():
    with pytest.raises(ValueError, match="nothing was read"):
        posterior(CELLS, [])


@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(0, 2)), min_size=1, max_size=10), st.floats(-3, 3), st.floats(0, 3)
)
def test_expected_improvement_is_never_negative_and_the_less_the_higher_the_bar(believed, best, more):
    means, sigmas = zip(*believed, strict=True)
    found = Posterior(mean=np.array(means), covariance=np.diag(np.square(sigmas)), noise_sigma=0.01)
    gains = expected_improvement(found, best)
    assert (gains >= 0).all()
    assert (gains >= np.maximum(0, found.mean - best) - 1e-6).all()
    assert (expected_improvement(found, best + more) <= gains + 1e-12).all()


def test_expected_improvement_is_that_of_a_normal_distribution():
    rng = np.random.default_rng(0)
    found = Posterior(mean=np.array([0.1, -0.2]), covariance=np.diag([0.04, 0.25]), noise_sigma=0.01)
    drawn = rng.normal(found.mean, found.sigma, size=(400_000, 2))
    expected = np.maximum(drawn - 0.15, 0).mean(axis=0)
    assert expected_improvement(found, 0.15) == pytest.approx(expected, rel=0.02)
