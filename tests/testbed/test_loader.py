import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.simulators.loader import MAX_WORKERS, SimulatedFeed

seeds = st.integers(0, 10**6)


@given(seeds)
def test_same_seed_gives_same_training(seed: int) -> None:
    feed = SimulatedFeed(seed)
    repeated = SimulatedFeed(seed)
    assert feed.max_workers == repeated.max_workers
    assert [feed.read(count) for count in (None, 0, 1)] == [
        repeated.read(count) for count in (None, 0, 1)
    ]


@given(seeds)
def test_cached_batches_are_never_slower(seed: int) -> None:
    feed = SimulatedFeed(seed)
    rates = [feed.true_tokens_per_s(count) for count in range(feed.max_workers + 1)]
    assert feed.max_workers in MAX_WORKERS
    assert all(0 < rate <= 1 + 1e-9 for rate in rates)
    assert feed.true_tokens_per_s(None) == 1.0
    assert max(rates) == feed.best_tokens_per_s


@given(seeds, st.floats(0.5, 1.0))
def test_true_count_is_the_smallest_sufficient(seed: int, share: float) -> None:
    feed = SimulatedFeed(seed)
    count = feed.true_count(share)
    assert feed.true_tokens_per_s(count) >= share * feed.best_tokens_per_s
    assert all(
        feed.true_tokens_per_s(fewer) < share * feed.best_tokens_per_s
        for fewer in range(count)
    )


@given(seeds)
def test_best_count_is_borderline_at_share_one(seed: int) -> None:
    feed = SimulatedFeed(seed)
    assert feed.is_borderline(1.0, 1e-6)
    assert not feed.is_borderline(2.0, 0.5)


@settings(max_examples=10)
@given(seeds)
def test_windows_scatter_about_the_truth(seed: int) -> None:
    feed = SimulatedFeed(seed)
    rates = sorted(feed.read(None).tokens_per_s for _ in range(201))
    # Neighbours and held-up windows only ever slow down, drift goes both ways.
    assert 0.5 < rates[100] < 1.2
    assert feed.windows == 201
    assert all(0 <= feed.read(0).data_wait_share <= 1 for _ in range(20))


def test_fast_loader_is_hardly_waited_for() -> None:
    feed = next(
        feed
        for feed in map(SimulatedFeed, range(1000))
        if feed.true_tokens_per_s(0) > 0.999
    )
    waits = sorted(feed.read(0).data_wait_share for _ in range(101))
    assert waits[50] == pytest.approx(0.0, abs=0.02)
