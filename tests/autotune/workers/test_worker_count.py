import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.workers.decide import worker_count

Rate = Callable[[int], float]


class Feed:
    """A training whose throughput by the workers is known, in the long run; batches
    from memory read 1.

    ``noise`` is the relative standard deviation of a window, and of what it waits.
    Without ``waits`` every window says that it waits for ever, else the truth.
    """

    def __init__(
        self, rate: Rate, *, noise: float = 0.0, waits: bool = True, seed: int = 0
    ) -> None:
        self.rate, self.noise, self.waits = rate, noise, waits
        self.random = random.Random(seed)
        self.windows = 0

    def read(self, count: worker_count.Count) -> worker_count.WindowFigures:
        self.windows += 1
        rate = 1.0 if count is None else self.rate(count)
        wait = max(0.0, 1 - rate) if self.waits else 1.0
        factor = 1 + self.noise * self.random.uniform(-1.7, 1.7)
        return worker_count.WindowFigures(
            tokens_per_s=1000 * rate * factor, data_wait_share=min(1.0, wait * factor)
        )

    def measure(self, todo: worker_count.NextRounds) -> list[worker_count.Round]:
        return [
            {count: self.read(count) for count in todo.counts}
            for _ in range(todo.rounds)
        ]


def decide(
    feed: Feed, max_count: int, *, most_windows: int = 3000
) -> tuple[worker_count.WorkersChoice, list[worker_count.Round]]:
    rounds: list[worker_count.Round] = []
    while feed.windows < most_windows:
        todo = worker_count.WorkersRule(rounds, max_count).next_rounds()
        if todo is None:
            break
        assert todo.rounds >= 1
        assert len(set(todo.counts)) == len(todo.counts) >= 2
        rounds += feed.measure(todo)
    return worker_count.WorkersRule(rounds, max_count).choose(), rounds


def rising(knee: int, plateau: float = 1.0) -> Rate:
    """Workers add up until so many of them give all that there is."""
    return lambda count: plateau * min(1.0, max(count, 0.4) / max(knee, 0.4))


@pytest.mark.parametrize("max_count", [0, 1, 2, 5, 8, 12])
@pytest.mark.parametrize(
    "waits", [True, False], ids=["by wait too", "by throughput alone"]
)
def test_without_noise_the_count_is_exact_for_every_knee_and_few_counts_are_tried(
    max_count, waits
):
    for knee in range(max_count + 1):
        choice, _ = decide(Feed(rising(knee), waits=waits), max_count)
        assert (choice.workers, choice.undecided_between) == (knee, ())
        assert choice.verdicts[knee] == "verified"
        assert (
            len(choice.verdicts)
            <= len(worker_count.ladder(max_count)) + max_count.bit_length()
        )


@given(
    st.integers(1, 24).flatmap(
        lambda limit: st.tuples(st.just(limit), st.integers(0, limit))
    ),
    st.floats(0.2, 1.0),
    st.integers(0, 10**6),
)
@settings(max_examples=25, deadline=None)
def test_a_plateau_below_the_ceiling_is_as_good_as_the_ceiling(limits, plateau, seed):
    max_count, knee = limits
    choice, _ = decide(Feed(rising(knee, plateau), noise=0.0005, seed=seed), max_count)
    assert (choice.workers, choice.undecided_between) == (knee, ())


PEAK = [0.2, 0.3, 0.5, 0.7, 0.88, 0.92, 0.95, 0.92, 0.89]
CEILING, RIVAL = "on cached batches, the upper bound", "the fastest larger count"


@pytest.mark.parametrize(
    ("feed", "most", "workers", "tried", "proof", "refused"),
    [
        (Feed(rising(3, 0.6), noise=0.003), 16, 3, 16, RIVAL, 2),
        (Feed(rising(2), noise=0.003), 32, 2, 2, CEILING, 1),
        (Feed(lambda _: 1.0, noise=0.003), 8, 0, 0, CEILING, None),
        (Feed(lambda _: 0.3, noise=0.003), 0, 0, 0, "the largest allowed", None),
        (Feed(rising(40), noise=0.003), 8, 8, 8, "the largest allowed", 7),
        (Feed(PEAK.__getitem__, noise=0.001, waits=False), 8, 6, 8, RIVAL, 5),
        (
            Feed(
                lambda count: [0.5, 0.979, 0.9795][min(count, 2)],
                noise=0.001,
                waits=False,
            ),
            8,
            1,
            8,
            RIVAL,
            0,
        ),
    ],
    ids=[
        "slow storage",
        "keeps_up",
        "always fed",
        "none allowed",
        "all slow",
        "peak between rungs",
        "at the border",
    ],
)
def test_the_knee_is_picked_and_once_the_ceiling_is_reached_no_larger_count_is_tried(
    feed, most, workers, tried, proof, refused
):
    choice, rounds = decide(feed, most)
    assert (choice.workers, choice.undecided_between) == (workers, ())
    assert max(choice.verdicts) == tried
    assert sum(map(len, rounds)) < 400
    assert choice.ratios[workers].value == pytest.approx(feed.rate(workers), rel=0.02)
    assert proof in choice.proof
    if refused is None:
        assert choice.next_smaller is None
    else:
        assert choice.next_smaller.startswith(
            f"num_workers={refused} is too few: at most"
        )


@given(st.integers(0, 8), st.floats(0.002, 0.05), st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_a_refuted_count_refutes_all_smaller_ones(knee, noise, seed):
    choice, _ = decide(Feed(rising(knee), noise=noise, seed=seed), 8, most_windows=150)
    refuted = [
        count for count, verdict in choice.verdicts.items() if verdict == "refuted"
    ]
    assert all(
        choice.verdicts[count] == "refuted"
        for count in choice.verdicts
        if count <= max(refuted, default=-1)
    )
    assert choice.workers not in refuted


@pytest.mark.parametrize("knee", [0, 1, 3, 6])
def test_undecided_counts_contain_the_truth_when_noise_meets_a_small_budget(knee):
    undecided = contained = 0
    for seed in range(12):
        choice, _ = decide(
            Feed(rising(knee), noise=0.05, waits=False, seed=seed), 8, most_windows=20
        )
        low, high = choice.undecided_between or (choice.workers, choice.workers)
        assert low <= choice.workers <= high
        contained += low <= knee <= high
        undecided += bool(choice.undecided_between)
    assert undecided > 0
    assert contained >= 11  # an interval of 98 % is wrong now and then


def test_the_ladder_doubles_and_the_first_round_is_of_no_workers_beside_the_ceiling_and_decides_nothing():
    expected = {
        0: [0],
        1: [0, 1],
        6: [0, 1, 2, 4, 6],
        8: [0, 1, 2, 4, 8],
        9: [0, 1, 2, 4, 8, 9],
    }
    assert {limit: worker_count.ladder(limit) for limit in expected} == expected
    first = worker_count.NextRounds(counts=(None, 0), rounds=1)
    assert worker_count.WorkersRule([], 8).next_rounds() == first
    rule = worker_count.WorkersRule(Feed(lambda _: 1.0).measure(first), 4)
    assert rule.choose().undecided_between == (0, 4)
    assert rule.next_rounds() == first


def waiting_rounds(
    shares: dict[int, float], rates: dict[int, float]
) -> list[worker_count.Round]:
    draw = random.Random(0)

    def window(rate: float, share: float) -> worker_count.WindowFigures:
        return worker_count.WindowFigures(
            tokens_per_s=1000 * rate * draw.uniform(0.95, 1.05), data_wait_share=share
        )

    ceiling = worker_count.WindowFigures(tokens_per_s=1000.0, data_wait_share=0.0)
    counts = rates.items()
    return [
        {None: ceiling} | {n: window(rate, shares[n]) for n, rate in counts}
        for _ in range(6)
    ]


def test_a_count_that_does_not_wait_is_proven_by_that_and_one_that_waits_is_not():
    choice = worker_count.WorkersRule(waiting_rounds({0: 0.001}, {0: 0.96}), 8).choose()
    assert (choice.workers, choice.undecided_between) == (0, ())
    assert "data wait is at most 0.1" in choice.proof
    assert (
        worker_count.WorkersRule(waiting_rounds({0: 0.05}, {0: 0.96}), 8).verdict(0)
        == "open"
    )
    # However little it waits.
    refuted = worker_count.WorkersRule(
        waiting_rounds({0: 0.0, 1: 0.0}, {0: 0.5, 1: 1.0}), 8
    )
    assert (refuted.verdict(0), refuted.choose().workers) == ("refuted", 1)


@given(st.floats(1e-3, 1e3), st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_what_drifts_between_rounds_and_the_unit_do_not_matter(scale, seed):
    _, rounds = decide(Feed(rising(3), noise=0.02, seed=seed), 8, most_windows=60)
    drifts = [
        (scale * 1.1**number, figures.items()) for number, figures in enumerate(rounds)
    ]
    drifted = [
        {count: one._replace(tokens_per_s=one.tokens_per_s * by) for count, one in read}
        for by, read in drifts
    ]
    plain, moved = (
        worker_count.WorkersRule(rounds, 8).choose(),
        worker_count.WorkersRule(drifted, 8).choose(),
    )
    assert (plain.workers, plain.undecided_between) == (
        moved.workers,
        moved.undecided_between,
    )
    assert plain.verdicts == moved.verdicts
