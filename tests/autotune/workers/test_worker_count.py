"""The number of DataLoader workers, chosen from simulated windows."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.workers.decide.count_statistics import Count, CountWindow, Round
from autotune.workers.decide.worker_count import (
    NextRounds,
    WorkersChoice,
    WorkersRule,
    ladder,
)

Rate = Callable[[int], float]
"""Function from workers to their share of the throughput on cached batches."""
MOST_WINDOWS = 3000
"""Windows after which a decision is given up."""

# Words of the reason for a chosen count, by which it was found to be sufficient.
BY_CACHED_BATCHES = "on cached batches, the upper bound"
BY_RIVAL = "the fastest larger count"
BY_LIMIT = "the largest allowed"


class Feed:
    """Training whose throughput by the number of workers is known in the long run.

    Args:
        rate: Share of the throughput on cached batches, by workers.
        noise: Relative standard deviation of a window and of its wait for data.
        waits: False to let every window claim that it only waits for data.
        seed: Seed of the noise.
    """

    def __init__(
        self, rate: Rate, *, noise: float = 0.0, waits: bool = True, seed: int = 0
    ) -> None:
        self.rate = rate
        self.noise = noise
        self.waits = waits
        self.random = random.Random(seed)
        self.windows = 0

    def measure_window(self, count: Count) -> CountWindow:
        """Return the figures of a window with a count; None for cached batches."""
        self.windows += 1
        rate = 1.0 if count is None else self.rate(count)
        wait_share = max(0.0, 1 - rate) if self.waits else 1.0
        # A uniform distribution over 2 * 1.7 has a standard deviation of about 1.
        factor = 1 + self.noise * self.random.uniform(-1.7, 1.7)
        return CountWindow(
            units_per_s=1000 * rate * factor,
            data_wait_share=min(1.0, wait_share * factor),
        )

    def measure(self, next_rounds: NextRounds) -> list[Round]:
        """Return the figures of rounds."""
        return [
            {count: self.measure_window(count) for count in next_rounds.counts}
            for _ in range(next_rounds.rounds)
        ]


def decide(
    feed: Feed, max_count: int, *, most_windows: int = MOST_WINDOWS
) -> tuple[WorkersChoice, list[Round]]:
    """Measure until the count is decided, or windows are used up.

    Returns:
        The choice, and the rounds that the rule requested.
    """
    rounds: list[Round] = []
    while feed.windows < most_windows:
        next_rounds = WorkersRule(rounds, max_count).next_rounds()
        if next_rounds is None:
            break
        assert next_rounds.rounds >= 1
        assert len(set(next_rounds.counts)) == len(next_rounds.counts) >= 2
        rounds += feed.measure(next_rounds)
    return WorkersRule(rounds, max_count).choose(), rounds


def rising(knee: int, plateau: float = 1.0) -> Rate:
    """Return a rate that grows with each worker until the knee.

    Without workers, the rate is that of 0.4 workers, so that it is not 0.
    """
    return lambda count: plateau * min(1.0, max(count, 0.4) / max(knee, 0.4))


def peaking_at_6(count: int) -> float:
    """Return a rate that is highest with 6 workers, and 97 % of that with 5 or 7."""
    return (0.2, 0.3, 0.5, 0.7, 0.88, 0.92, 0.95, 0.92, 0.89)[count]


def at_the_border(count: int) -> float:
    """Return a rate that one worker brings just below 98 % of cached batches.

    More workers hardly raise it, so that one suffices.
    """
    return (0.5, 0.979, 0.9795)[min(count, 2)]


@pytest.mark.parametrize("max_count", [0, 1, 2, 5, 8, 12])
@pytest.mark.parametrize(
    "waits", [True, False], ids=["by wait too", "by throughput alone"]
)
def test_finds_every_knee_without_noise(max_count, waits):
    for knee in range(max_count + 1):
        choice, _ = decide(Feed(rising(knee), waits=waits), max_count)
        assert choice.workers == knee
        assert choice.undecided_between == ()
        assert choice.verdicts[knee] == "verified"
        # Each rung of the ladder, and a bisection between two of them.
        most_counts = len(ladder(max_count)) + max_count.bit_length()
        assert len(choice.verdicts) <= most_counts


@given(data=st.data(), plateau=st.floats(0.2, 1.0), seed=st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_finds_knee_of_plateau_below_cached_batches(data, plateau, seed):
    max_count = data.draw(st.integers(1, 24), label="max_count")
    knee = data.draw(st.integers(0, max_count), label="knee")
    choice, _ = decide(Feed(rising(knee, plateau), noise=0.0005, seed=seed), max_count)
    assert choice.workers == knee
    assert choice.undecided_between == ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KneeCase:
    """Feed with a knee, and how the rule finds the knee."""

    feed: Feed
    max_count: int
    """Largest number of workers allowed."""
    workers: int
    """Number of workers at the knee."""
    largest_tried: int
    """Largest count that the rule measures."""
    proof: str
    """Words in the reason for the knee."""
    too_few: int | None
    """Count that is proven to be too few; None if no smaller count was tried."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            KneeCase(
                feed=Feed(rising(3, 0.6), noise=0.003),
                max_count=16,
                workers=3,
                largest_tried=16,
                proof=BY_RIVAL,
                too_few=2,
            ),
            id="slow storage",
        ),
        pytest.param(
            KneeCase(
                feed=Feed(rising(2), noise=0.003),
                max_count=32,
                workers=2,
                largest_tried=2,
                proof=BY_CACHED_BATCHES,
                too_few=1,
            ),
            id="keeps up",
        ),
        pytest.param(
            KneeCase(
                feed=Feed(lambda _: 1.0, noise=0.003),
                max_count=8,
                workers=0,
                largest_tried=0,
                proof=BY_CACHED_BATCHES,
                too_few=None,
            ),
            id="always fed",
        ),
        pytest.param(
            KneeCase(
                feed=Feed(lambda _: 0.3, noise=0.003),
                max_count=0,
                workers=0,
                largest_tried=0,
                proof=BY_LIMIT,
                too_few=None,
            ),
            id="none allowed",
        ),
        pytest.param(
            KneeCase(
                feed=Feed(rising(40), noise=0.003),
                max_count=8,
                workers=8,
                largest_tried=8,
                proof=BY_LIMIT,
                too_few=7,
            ),
            id="all slow",
        ),
        pytest.param(
            KneeCase(
                feed=Feed(peaking_at_6, noise=0.001, waits=False),
                max_count=8,
                workers=6,
                largest_tried=8,
                proof=BY_RIVAL,
                too_few=5,
            ),
            id="peak between rungs",
        ),
        pytest.param(
            KneeCase(
                feed=Feed(at_the_border, noise=0.001, waits=False),
                max_count=8,
                workers=1,
                largest_tried=8,
                proof=BY_RIVAL,
                too_few=0,
            ),
            id="at the border",
        ),
    ],
)
def test_proves_the_knee(case):
    choice, rounds = decide(case.feed, case.max_count)
    assert choice.workers == case.workers
    assert choice.undecided_between == ()
    assert max(choice.verdicts) == case.largest_tried
    # Far fewer windows than those after which ``decide`` gives up.
    assert sum(map(len, rounds)) < 400
    assert choice.ratios[case.workers].value == pytest.approx(
        case.feed.rate(case.workers), rel=0.02
    )
    assert case.proof in choice.proof
    if case.too_few is None:
        assert choice.next_smaller is None
    else:
        assert choice.next_smaller.startswith(
            f"num_workers={case.too_few} is too few: at most"
        )


@given(knee=st.integers(0, 8), noise=st.floats(0.002, 0.05), seed=st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_refuted_count_refutes_all_smaller_ones(knee, noise, seed):
    choice, _ = decide(Feed(rising(knee), noise=noise, seed=seed), 8, most_windows=150)
    refuted = [
        count for count, verdict in choice.verdicts.items() if verdict == "refuted"
    ]
    largest_refuted = max(refuted, default=-1)
    assert refuted == [count for count in choice.verdicts if count <= largest_refuted]
    assert choice.workers not in refuted


@pytest.mark.parametrize("knee", [0, 1, 3, 6])
def test_undecided_counts_contain_the_truth(knee):
    # Twenty windows of so much noise decide little.
    choices = []
    for seed in range(12):
        feed = Feed(rising(knee), noise=0.05, waits=False, seed=seed)
        choice, _ = decide(feed, 8, most_windows=20)
        choices.append(choice)
    assert any(choice.undecided_between for choice in choices)
    wrong_choices = 0
    for choice in choices:
        fewest, most = choice.undecided_between or (choice.workers, choice.workers)
        assert fewest <= choice.workers <= most
        if not fewest <= knee <= most:
            wrong_choices += 1
    # An interval of 98 % is wrong now and then.
    assert wrong_choices <= 1


@pytest.mark.parametrize(
    ("max_count", "counts"),
    [
        pytest.param(0, [0], id="none allowed"),
        pytest.param(1, [0, 1], id="one allowed"),
        pytest.param(6, [0, 1, 2, 4, 6], id="between powers of two"),
        pytest.param(8, [0, 1, 2, 4, 8], id="a power of two"),
        pytest.param(9, [0, 1, 2, 4, 8, 9], id="one more than a power of two"),
    ],
)
def test_ladder_doubles_up_to_the_limit(max_count, counts):
    assert ladder(max_count) == counts


FIRST_ROUND = NextRounds(counts=(None, 0), rounds=1)
"""The round that the rule begins with: cached batches, and no workers."""


def test_begins_without_workers():
    assert WorkersRule([], 8).next_rounds() == FIRST_ROUND


def test_first_round_decides_nothing():
    rule = WorkersRule(Feed(lambda _: 1.0).measure(FIRST_ROUND), 4)
    assert rule.choose().undecided_between == (0, 4)
    assert rule.next_rounds() == FIRST_ROUND


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A count whose throughput and wait for data are known in the long run."""

    rate: float
    """Share of the throughput on cached batches."""
    wait_share: float
    """Share of the time in which it waits for data, the same in every window."""


def choice_from(waiting_by_count: dict[int, Waiting]) -> WorkersChoice:
    """Return the choice after six rounds of some counts, with noise of 5 %.

    Each round also has cached batches. Up to eight workers are allowed.
    """
    noise = random.Random(0)
    rounds = []
    for _ in range(6):
        windows: dict[Count, CountWindow] = {
            None: CountWindow(units_per_s=1000.0, data_wait_share=0.0)
        }
        for count, waiting in waiting_by_count.items():
            windows[count] = CountWindow(
                units_per_s=1000 * waiting.rate * noise.uniform(0.95, 1.05),
                data_wait_share=waiting.wait_share,
            )
        rounds.append(windows)
    return WorkersRule(rounds, 8).choose()


def test_count_that_hardly_waits_is_verified():
    choice = choice_from({0: Waiting(rate=0.96, wait_share=0.001)})
    assert choice.workers == 0
    assert choice.undecided_between == ()
    assert "data wait is at most 0.1" in choice.proof


def test_count_that_waits_is_open():
    choice = choice_from({0: Waiting(rate=0.96, wait_share=0.05)})
    assert choice.verdicts[0] == "open"


def test_slow_count_is_refuted_however_little_it_waits():
    choice = choice_from(
        {0: Waiting(rate=0.5, wait_share=0.0), 1: Waiting(rate=1.0, wait_share=0.0)}
    )
    assert choice.verdicts[0] == "refuted"
    assert choice.workers == 1


@given(scale=st.floats(1e-3, 1e3), seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_drift_between_rounds_does_not_matter(scale, seed):
    _, rounds = decide(Feed(rising(3), noise=0.02, seed=seed), 8, most_windows=60)
    drifted = []
    for number, windows in enumerate(rounds):
        factor = scale * 1.1**number
        drifted.append(
            {
                count: figures._replace(units_per_s=figures.units_per_s * factor)
                for count, figures in windows.items()
            }
        )
    choice = WorkersRule(rounds, 8).choose()
    drifted_choice = WorkersRule(drifted, 8).choose()
    assert drifted_choice.workers == choice.workers
    assert drifted_choice.undecided_between == choice.undecided_between
    assert drifted_choice.verdicts == choice.verdicts
