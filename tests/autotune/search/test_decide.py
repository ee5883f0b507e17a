import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.profiles.decide.batch_split import split_global_batch
from autotune.search import decide
from autotune.search.decide import (
    Posterior,
    Seen,
    expected_improvement,
    knob_space,
    micro_batches,
    posterior,
)
from testbed.simulators.explorations import UNEXPLORED

AXES = {
    "precision": ("fp32", "bf16"),
    "activation_checkpointing": ("none", "full"),
    "layout": ("packed", "padded"),
    "micro_batch_size": (1, 4, 16),
}
CELLS = tuple(
    UNEXPLORED.but(**dict(zip(AXES, levels, strict=True)))
    for levels in itertools.product(*AXES.values())
)


def alike(name):
    values = np.array([getattr(cell, name) for cell in CELLS])
    if name == "micro_batch_size":
        return np.exp(
            -((np.log2(values[:, None] / values)) ** 2) / (2 * decide.ROWS_SCALE**2)
        )
    return (values[:, None] == values).astype(float)


def posterior_of_single_windows(seen):
    """Return mean, covariance and noise window by window, from the formulas."""
    each = [alike(name) for name in AXES]
    singles = sum(each)
    pairs = sum(first * second for first, second in itertools.combinations(each, 2))
    cells = [window.cell for window in seen]
    y = np.array([window.log_ratio for window in seen])
    wider = np.diag([decide.SHORT_NOISE**2 if window.short else 1.0 for window in seen])
    candidates = []
    scales = (decide.EFFECT_SIGMAS, decide.PAIR_SHARES, decide.NOISE_SIGMAS)
    level = decide.LEVEL_VARIANCE + decide.CELL_SIGMA**2 * np.eye(len(CELLS))
    for effect, pair, noise in itertools.product(*scales):
        prior = level + effect**2 * (singles + pair * pairs)
        among = prior[np.ix_(cells, cells)] + noise**2 * wider
        across = prior[:, cells]
        mean = across @ np.linalg.solve(among, y)
        taken = across @ np.linalg.solve(among, across.T)
        likely = (
            -0.5 * y @ np.linalg.solve(among, y) - 0.5 * np.linalg.slogdet(among)[1]
        )
        candidates.append((likely, mean, prior - taken, noise))
    return max(candidates, key=lambda candidate: candidate[0])[1:]


@pytest.mark.parametrize("seed", range(5))
def test_grouped_windows_equal_single_windows(seed):
    rng = random.Random(seed)
    cells = [rng.randrange(len(CELLS)) for _ in range(6)] * 3 + [
        rng.randrange(len(CELLS)) for _ in range(4)
    ]
    seen = [
        Seen(
            cell=cell, log_ratio=rng.gauss(0.05 * cell, 0.03), short=rng.random() < 0.3
        )
        for cell in cells
    ]
    mean, covariance, noise = posterior_of_single_windows(seen)
    grouped = posterior(CELLS, seen)
    assert grouped.noise_sigma == noise
    assert grouped.mean == pytest.approx(mean, abs=1e-8)
    assert grouped.covariance == pytest.approx(covariance, abs=1e-8)
    mixed = posterior(CELLS, rng.sample(seen, len(seen)))
    assert mixed.noise_sigma == grouped.noise_sigma
    assert (mixed.mean == grouped.mean).all()
    assert (mixed.covariance == grouped.covariance).all()


def learnt(rate, cells):
    """Return the posterior of four noisy windows of each of these cells."""
    rng = random.Random(0)
    windows = [
        (cell, rate(CELLS[cell]) + rng.gauss(0, 0.01))
        for cell in cells
        for _ in range(4)
    ]
    return posterior(
        CELLS, [Seen(cell=cell, log_ratio=log_ratio) for cell, log_ratio in windows]
    )


def test_effects_add_up_for_unread_cells():
    def rate(cell):
        doublings = math.log2(cell.micro_batch_size)
        return (
            0.4 * (cell.precision == "bf16")
            - 0.3 * (cell.activation_checkpointing == "full")
            + 0.1 * doublings
        )

    seen = random.Random(0).sample(range(len(CELLS)), 10)
    rates = [rate(cell) for cell in CELLS]
    learnt_posterior = learnt(rate, seen)
    errors = [
        abs(learnt_posterior.mean[n] - rates[n])
        for n in range(len(CELLS))
        if n not in seen
    ]
    assert max(errors) < 0.15
    assert sum(errors) / len(errors) < 0.06 * (max(rates) - min(rates))


def test_learns_pairs_that_do_not_add_up():
    def rate(cell):
        return 0.6 * (cell.precision == "bf16" and cell.layout == "packed")

    learnt_posterior = learnt(
        rate,
        [n for n, cell in enumerate(CELLS) if cell.activation_checkpointing == "none"],
    )
    full = CELLS[0].but(
        activation_checkpointing="full", precision="bf16", micro_batch_size=4
    )
    assert learnt_posterior.mean[CELLS.index(full)] == pytest.approx(0.6, abs=0.15)
    assert learnt_posterior.mean[
        CELLS.index(full.but(layout="padded"))
    ] == pytest.approx(0.0, abs=0.15)


def test_posterior_requires_windows():
    with pytest.raises(ValueError, match="there are no windows"):
        posterior(CELLS, [])


def test_prediction_holds_until_windows_contradict():
    rates = [
        0.4 * (cell.precision == "bf16")
        - 0.3 * (cell.activation_checkpointing == "full")
        for cell in CELLS
    ]
    predicted = {n: rate for n, rate in enumerate(rates) if n % 4 != 3}
    start = [Seen(cell=0, log_ratio=0.0)] * 8
    assert posterior(CELLS, start, predicted).mean == pytest.approx(rates, abs=0.05)
    wrong = {n: -3 * rate for n, rate in predicted.items()}
    seen = [Seen(cell=n, log_ratio=rates[n]) for n in range(0, 24, 2)]
    assert posterior(CELLS, start + seen, wrong).mean == pytest.approx(
        posterior(CELLS, start + seen).mean, abs=1e-9
    )


@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(0, 2)), min_size=1, max_size=10),
    st.floats(-3, 3),
    st.floats(0, 3),
)
def test_expected_improvement_falls_with_the_bar(believed, best, more):
    means, sigmas = zip(*believed, strict=True)
    beliefs = Posterior(
        mean=np.array(means), covariance=np.diag(np.square(sigmas)), noise_sigma=0.01
    )
    gains = expected_improvement(beliefs, best)
    assert (gains >= 0).all()
    assert (gains >= np.maximum(0, beliefs.mean - best) - 1e-6).all()
    assert (expected_improvement(beliefs, best + more) <= gains + 1e-12).all()


def test_expected_improvement_matches_a_normal_distribution():
    rng = np.random.default_rng(0)
    beliefs = Posterior(
        mean=np.array([0.1, -0.2]), covariance=np.diag([0.04, 0.25]), noise_sigma=0.01
    )
    expected = np.maximum(
        rng.normal(beliefs.mean, beliefs.sigma, size=(400_000, 2)) - 0.15, 0
    ).mean(axis=0)
    assert expected_improvement(beliefs, 0.15) == pytest.approx(expected, rel=0.02)


LEVELS = {
    name: AXES[name] for name in ("precision", "activation_checkpointing", "layout")
} | {
    "attention": ("auto", "sdpa"),
    "compile": (False, True),
}
GLOBAL = st.fixed_dictionaries(
    {"packed": st.integers(8, 300), "padded": st.integers(8, 600)}
)
RANKS = st.integers(1, 8)
MAX_MICRO_BATCH_SIZES = st.integers(1, 1000)


def space(global_batch_size, ranks, max_micro_batch_size):
    return knob_space(
        UNEXPLORED, LEVELS, global_batch_size, ranks, lambda knobs: max_micro_batch_size
    )


@settings(max_examples=25)
@given(GLOBAL, RANKS, MAX_MICRO_BATCH_SIZES)
def test_space_has_every_combination_once(
    global_batch_size, ranks, max_micro_batch_size
):
    cells = space(global_batch_size, ranks, max_micro_batch_size)
    start = decide.with_split_batch(UNEXPLORED, global_batch_size, ranks)
    assert cells[0] == start
    sizes = {}
    for cell in cells:
        sizes.setdefault(cell.kind, []).append(cell.micro_batch_size)
        whole = global_batch_size[cell.layout]
        size = cell.micro_batch_size
        split = split_global_batch(whole, size, ranks)
        assert split.micro_batch_size == size
        assert (
            split.gradient_accumulation_steps * size * ranks - split.empty_sequences
            == whole
        )
        useful = decide.useful_share(cell, global_batch_size, ranks)
        assert useful == pytest.approx(
            whole / (split.gradient_accumulation_steps * size * ranks)
        )
    assert len(sizes) == 2**5
    for kind, kind_sizes in sizes.items():
        further = {start.micro_batch_size} if kind == start.kind else set()
        assert sorted(kind_sizes) == sorted(
            set(
                micro_batches(
                    global_batch_size[kind.layout], ranks, max_micro_batch_size
                )
            )
            | further
        )


@given(st.integers(1, 5000), RANKS, MAX_MICRO_BATCH_SIZES)
def test_micro_batches_ascend_up_to_the_limit(
    global_batch_size, ranks, max_micro_batch_size
):
    sizes = micro_batches(global_batch_size, ranks, max_micro_batch_size)
    assert sizes == sorted(set(sizes))
    assert all(1 <= size <= max_micro_batch_size for size in sizes)
    if global_batch_size >= ranks:
        largest = min(max_micro_batch_size, -(-global_batch_size // ranks))
        assert (
            sizes[-1]
            == split_global_batch(global_batch_size, largest, ranks).micro_batch_size
        )
        assert all(2 * 2**decide.ROW_DOUBLINGS * size >= largest for size in sizes)


def test_too_small_batch_leaves_no_cells():
    assert micro_batches(3, 4, 64) == []
    assert {cell.layout for cell in space({"packed": 32, "padded": 3}, 4, 64)} == {
        "packed"
    }


def test_limit_bounds_its_kind_alone():
    max_sizes = {"none": 4, "full": 16}
    batches = {"packed": 64, "padded": 64}
    cells = knob_space(
        UNEXPLORED,
        LEVELS,
        batches,
        1,
        lambda knobs: max_sizes[knobs.activation_checkpointing],
    )[1:]
    for kind, size in max_sizes.items():
        assert size == max(
            cell.micro_batch_size
            for cell in cells
            if cell.activation_checkpointing == kind
        )


def test_cell_name_shows_what_differs():
    odd = UNEXPLORED.but(
        attention="sdpa",
        activation_checkpointing="full",
        compile=True,
        precision="bf16",
    )
    assert UNEXPLORED.name == "8 packed sequences, fp32"
    assert odd.name == "8 packed sequences, bf16, sdpa, full checkpointing, compiled"
    names = [cell.name for cell in space({"packed": 32, "padded": 64}, 1, 64)]
    assert len(set(names)) == len(names)
