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
    UNEXPLORED.but(**dict(zip(AXES, one, strict=True)))
    for one in itertools.product(*AXES.values())
)


def alike(name):
    values = np.array([getattr(cell, name) for cell in CELLS])
    if name == "micro_batch_size":
        return np.exp(
            -((np.log2(values[:, None] / values)) ** 2) / (2 * decide.ROWS_SCALE**2)
        )
    return (values[:, None] == values).astype(float)


def posterior_of_single_windows(seen):
    """The same without taking windows of a cell together, straight from the formulas:
    mean, covariance and noise."""
    each = [alike(name) for name in AXES]
    singles = sum(each)
    pairs = sum(one * other for one, other in itertools.combinations(each, 2))
    at = [one.cell for one in seen]
    y = np.array([one.log_ratio for one in seen])
    wider = np.diag([decide.SHORT_NOISE**2 if one.short else 1.0 for one in seen])
    found, scales = [], (decide.EFFECT_SIGMAS, decide.PAIR_SHARES, decide.NOISE_SIGMAS)
    own = decide.LEVEL_VARIANCE + decide.CELL_SIGMA**2 * np.eye(len(CELLS))
    for effect, pair, noise in itertools.product(*scales):
        prior = own + effect**2 * (singles + pair * pairs)
        among = prior[np.ix_(at, at)] + noise**2 * wider
        across = prior[:, at]
        mean, taken = (
            across @ np.linalg.solve(among, y),
            across @ np.linalg.solve(among, across.T),
        )
        likely = (
            -0.5 * y @ np.linalg.solve(among, y) - 0.5 * np.linalg.slogdet(among)[1]
        )
        found.append((likely, mean, prior - taken, noise))
    return max(found, key=lambda one: one[0])[1:]


@pytest.mark.parametrize("seed", range(5))
def test_windows_of_a_cell_taken_together_say_what_they_say_one_by_one_in_any_order(
    seed,
):
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
    found = posterior(CELLS, seen)
    assert found.noise_sigma == noise
    assert found.mean == pytest.approx(mean, abs=1e-8)
    assert found.covariance == pytest.approx(covariance, abs=1e-8)
    mixed = posterior(CELLS, rng.sample(seen, len(seen)))
    assert mixed.noise_sigma == found.noise_sigma
    assert (mixed.mean == found.mean).all()
    assert (mixed.covariance == found.covariance).all()


def learnt(rate, cells):
    """The posterior of four noisy windows of each of these cells."""
    rng = random.Random(0)
    windows = [
        (cell, rate(CELLS[cell]) + rng.gauss(0, 0.01))
        for cell in cells
        for _ in range(4)
    ]
    return posterior(
        CELLS, [Seen(cell=cell, log_ratio=log_ratio) for cell, log_ratio in windows]
    )


def test_effects_add_up_for_cells_that_were_never_read():
    def rate(cell):
        rows = math.log2(cell.micro_batch_size)
        return (
            0.4 * (cell.precision == "bf16")
            - 0.3 * (cell.activation_checkpointing == "full")
            + 0.1 * rows
        )

    seen = random.Random(0).sample(range(len(CELLS)), 10)
    rates, found = [rate(cell) for cell in CELLS], learnt(rate, seen)
    errors = [abs(found.mean[n] - rates[n]) for n in range(len(CELLS)) if n not in seen]
    assert max(errors) < 0.15
    assert sum(errors) / len(errors) < 0.06 * (max(rates) - min(rates))


def test_pairs_that_do_not_add_up_are_seen():
    def rate(cell):
        return 0.6 * (cell.precision == "bf16" and cell.layout == "packed")

    found = learnt(
        rate,
        [n for n, cell in enumerate(CELLS) if cell.activation_checkpointing == "none"],
    )
    full = CELLS[0].but(
        activation_checkpointing="full", precision="bf16", micro_batch_size=4
    )
    assert found.mean[CELLS.index(full)] == pytest.approx(0.6, abs=0.15)
    assert found.mean[CELLS.index(full.but(layout="padded"))] == pytest.approx(
        0.0, abs=0.15
    )
    with pytest.raises(ValueError, match="there are no windows"):
        posterior(CELLS, [])


def test_a_prediction_of_some_is_the_mean_of_all_until_windows_contradict_it():
    rates = [
        0.4 * (cell.precision == "bf16")
        - 0.3 * (cell.activation_checkpointing == "full")
        for cell in CELLS
    ]
    some = {n: rate for n, rate in enumerate(rates) if n % 4 != 3}
    start = [Seen(cell=0, log_ratio=0.0)] * 8
    assert posterior(CELLS, start, some).mean == pytest.approx(rates, abs=0.05)
    wrong, seen = (
        {n: -3 * rate for n, rate in some.items()},
        [Seen(cell=n, log_ratio=rates[n]) for n in range(0, 24, 2)],
    )
    assert posterior(CELLS, start + seen, wrong).mean == pytest.approx(
        posterior(CELLS, start + seen).mean, abs=1e-9
    )


@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(0, 2)), min_size=1, max_size=10),
    st.floats(-3, 3),
    st.floats(0, 3),
)
def test_expected_improvement_is_never_negative_and_the_less_the_higher_the_bar(
    believed, best, more
):
    means, sigmas = zip(*believed, strict=True)
    found = Posterior(
        mean=np.array(means), covariance=np.diag(np.square(sigmas)), noise_sigma=0.01
    )
    gains = expected_improvement(found, best)
    assert (gains >= 0).all()
    assert (gains >= np.maximum(0, found.mean - best) - 1e-6).all()
    assert (expected_improvement(found, best + more) <= gains + 1e-12).all()


def test_expected_improvement_is_that_of_a_normal_distribution():
    rng = np.random.default_rng(0)
    found = Posterior(
        mean=np.array([0.1, -0.2]), covariance=np.diag([0.04, 0.25]), noise_sigma=0.01
    )
    expected = np.maximum(
        rng.normal(found.mean, found.sigma, size=(400_000, 2)) - 0.15, 0
    ).mean(axis=0)
    assert expected_improvement(found, 0.15) == pytest.approx(expected, rel=0.02)


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
MOST = st.integers(1, 1000)


def space(global_batch_size, ranks, most):
    return knob_space(UNEXPLORED, LEVELS, global_batch_size, ranks, lambda knobs: most)


@settings(max_examples=25)
@given(GLOBAL, RANKS, MOST)
def test_the_space_has_every_combination_with_every_micro_batch_of_its_layout_once(
    global_batch_size, ranks, most
):
    cells = space(global_batch_size, ranks, most)
    own = decide.with_split_batch(UNEXPLORED, global_batch_size, ranks)
    assert cells[0] == own
    found = {}
    for cell in cells:
        found.setdefault(cell.kind, []).append(cell.micro_batch_size)
        whole, rows = global_batch_size[cell.layout], cell.micro_batch_size
        split = split_global_batch(whole, rows, ranks)
        assert split.micro_batch_size == rows
        assert (
            split.gradient_accumulation_steps * rows * ranks - split.empty_sequences
            == whole
        )
        useful = decide.useful_share(cell, global_batch_size, ranks)
        assert useful == pytest.approx(
            whole / (split.gradient_accumulation_steps * rows * ranks)
        )
    assert len(found) == 2**5
    for kind, rows in found.items():
        more = {own.micro_batch_size} if kind == own.kind else set()
        assert sorted(rows) == sorted(
            set(micro_batches(global_batch_size[kind.layout], ranks, most)) | more
        )


@given(st.integers(1, 5000), RANKS, MOST)
def test_micro_batches_ascend_fit_and_are_not_far_below_the_largest_useful_one(
    global_batch_size, ranks, most
):
    rows = micro_batches(global_batch_size, ranks, most)
    assert rows == sorted(set(rows))
    assert all(1 <= one <= most for one in rows)
    if global_batch_size >= ranks:
        largest = min(most, -(-global_batch_size // ranks))
        assert (
            rows[-1]
            == split_global_batch(global_batch_size, largest, ranks).micro_batch_size
        )
        assert all(2 * 2**decide.ROW_DOUBLINGS * one >= largest for one in rows)


def test_what_may_be_tried_bounds_its_kind_alone_and_a_layout_that_leaves_ranks_without_a_row_has_no_cells():
    assert micro_batches(3, 4, 64) == []
    assert {cell.layout for cell in space({"packed": 32, "padded": 3}, 4, 64)} == {
        "packed"
    }
    most = {"none": 4, "full": 16}
    batches = {"packed": 64, "padded": 64}
    cells = knob_space(
        UNEXPLORED,
        LEVELS,
        batches,
        1,
        lambda knobs: most[knobs.activation_checkpointing],
    )[1:]
    for kind, rows in most.items():
        assert rows == max(
            cell.micro_batch_size
            for cell in cells
            if cell.activation_checkpointing == kind
        )


def test_a_cell_is_named_by_what_people_would_change():
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
