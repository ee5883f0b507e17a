import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.plan import BatchPlan, permute


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 5))
def test_a_permutation_hits_every_index_once(size, seed, epoch):
    result = permute(np.arange(size, dtype=np.uint64), size, seed, epoch)
    assert sorted(result.tolist()) == list(range(size))


def test_epochs_and_seeds_have_orders_of_their_own():
    indices = np.arange(1000, dtype=np.uint64)
    orders = {tuple(permute(indices, 1000, seed, epoch).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_a_permutation_of_202_million_is_answered_for_single_indices():
    result = permute(np.array([0, 1, 201_999_999], dtype=np.uint64), 202_000_000, 7, 0)
    assert len(set(result.tolist())) == 3
    assert result.max() < 202_000_000


def test_neighbours_end_up_far_apart():
    result = permute(np.arange(10_000, dtype=np.uint64), 10_000, 0, 0).astype(np.int64)
    # Of a random permutation the mean distance is a third of the size.
    assert abs(np.abs(np.diff(result)).mean() - 10_000 / 3) < 200


plans = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 9),
        "dataset_samples": st.integers(1, 60),
        "global_batch_rows": st.integers(1, 20),
        "accumulation_steps": st.integers(1, 4),
        "world_size": st.integers(1, 5),
    }
)


def _rows_of_step(plan: BatchPlan, step: int) -> list[tuple[int, int]]:
    rows = []
    for part in range(plan.accumulation_steps):
        for rank in range(plan.world_size):
            dealt = plan.rows(step * plan.accumulation_steps + part, rank)
            rows += list(zip(dealt.epochs.tolist(), dealt.samples.tolist(), strict=True))
    return sorted(rows)


@given(options=plans)
def test_every_sample_comes_exactly_once_per_epoch(options):
    plan = BatchPlan(**options)
    steps = -(-3 * plan.dataset_samples // plan.global_batch_rows)
    rows = [row for step in range(steps) for row in _rows_of_step(plan, step)]
    for epoch in range(2):
        assert sorted(sample for e, sample in rows if e == epoch) == list(range(plan.dataset_samples))


@given(options=plans, step=st.integers(0, 50))
def test_the_rows_of_a_step_do_not_depend_on_ranks_or_accumulation(options, step):
    alone = BatchPlan(**options | {"world_size": 1, "accumulation_steps": 1})
    assert _rows_of_step(BatchPlan(**options), step) == _rows_of_step(alone, step)
