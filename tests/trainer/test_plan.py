import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.oracles import config_of, micro_batches
from tests.trainer.streams import Lengths, make_plan
from trainer.batch import in_rows, mean_row
from trainer.plan import LANES, hash_words, lay_out, pack_rows, permute, to_unit


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


def test_where_each_index_lands_is_uniform():
    # Where index 0 of 16 lands over many seeds: chi-square with 15 degrees of freedom, wrong once in a million.
    landed = [int(permute(np.zeros(1, dtype=np.uint64), 16, seed, 0)[0]) for seed in range(3200)]
    counts = np.bincount(landed, minlength=16)
    assert ((counts - 200) ** 2 / 200).sum() < 60


@given(a=st.integers(0, 2**64 - 1), b=st.integers(0, 2**64 - 1))
def test_a_hash_tells_the_order_of_its_words(a, b):
    assert (hash_words(a, b)[0] == hash_words(b, a)[0]) == (a == b)


def test_words_become_numbers_from_0_to_below_1():
    units = to_unit(np.array([0, 2**63, 2**64 - 1], dtype=np.uint64))
    assert units[:2].tolist() == [0.0, 0.5]
    assert 1 - 1e-15 < units[2] < 1


problems = st.integers(1, 100).flatmap(
    lambda row: st.tuples(st.just(row), st.lists(st.integers(1, row), min_size=1, max_size=200))
)


def _slow_best_fit(lengths: list[int], row_tokens: int) -> list[int]:
    """The same by looking at every open row; of equally full ones the one filled last."""
    free: list[int] = []
    touched: list[int] = []
    rows = [0] * len(lengths)
    for turn, sample in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        roomy = [row for row in range(len(free)) if free[row] >= lengths[sample]]
        if roomy:
            row = min(roomy, key=lambda r: (free[r], -touched[r]))
        else:
            row = len(free)
            free.append(row_tokens)
            touched.append(0)
        free[row] -= lengths[sample]
        touched[row] = turn
        rows[sample] = row
    return rows


@given(problem=problems)
def test_the_rows_are_those_of_best_fit_by_trying_every_row_and_no_two_could_be_one(problem):
    row_tokens, lengths = problem
    rows = pack_rows(np.array(lengths), row_tokens)
    assert rows.tolist() == _slow_best_fit(lengths, row_tokens)
    filled = np.sort(np.bincount(rows, weights=lengths))
    assert 0 < filled[0] <= filled[-1] <= row_tokens
    assert len(filled) < 2 or filled[0] + filled[1] > row_tokens


def test_nothing_packs_into_nothing():
    assert pack_rows(np.array([], dtype=np.int64), 8).tolist() == []


@pytest.mark.parametrize("lengths", [[9], [0], [3, -1]])
def test_a_sample_that_no_row_can_hold_is_refused(lengths):
    with pytest.raises(ValueError, match="1 to 8"):
        pack_rows(np.array(lengths), 8)


@given(samples=st.integers(1, 40_000), epoch=st.integers(0, 2), seed=st.integers(0, 9))
def test_the_blocks_of_all_lanes_hold_every_sample_of_an_epoch_once(samples, epoch, seed):
    plan = make_plan(Lengths(np.ones(samples)), seed=seed)
    found = []
    for lane in range(plan.lanes):
        for block in range(epoch * plan.blocks_per_epoch, (epoch + 1) * plan.blocks_per_epoch):
            its_epoch, its_samples = plan.samples_of(lane, block)
            assert its_epoch == epoch
            assert len(its_samples) <= plan.block_samples
            found += its_samples.tolist()
    assert sorted(found) == list(range(samples))


@pytest.mark.parametrize(("samples", "lanes"), [(1, 1), (1023, 1), (1024, 2), (2500, 4), (10**6, LANES)])
def test_a_small_dataset_has_fewer_lanes_so_that_blocks_are_full(samples, lanes):
    assert make_plan(Lengths(np.ones(samples))).lanes == lanes


@given(world=st.integers(1, 300), rows=st.integers(1, 5000))
def test_every_row_of_a_rank_lies_in_a_lane_that_it_follows(world, rows):
    plan = make_plan(Lengths(np.ones(100_000)), world_size=world, global_batch_rows=rows)
    for step in (0, 1, 7):
        for j in {0, 1, rows // 2, rows - 1} & set(range(rows)):
            assert (step * rows + j) % plan.lanes in plan.lanes_of(j % world)


def test_a_rank_among_many_packs_one_lane_only():
    plan = make_plan(Lengths(np.ones(100_000)), world_size=256, global_batch_rows=256 * 184)
    assert [len(plan.lanes_of(rank)) for rank in (0, 3, 255)] == [1, 1, 1]


@given(lengths=st.lists(st.integers(0, 200), min_size=1, max_size=300), layout=st.sampled_from(["padded", "packed"]))
def test_a_block_laid_out_holds_its_samples_cut_to_a_row(lengths, layout):
    index = Lengths(lengths)
    plan = make_plan(index, layout=layout)
    segments = lay_out(plan, 0, 0, index)
    assert sorted(segments.samples.tolist()) == list(range(len(lengths)))
    assert (segments.tokens == np.minimum(np.array(lengths)[segments.samples], 62)).all()
    used = np.bincount(segments.rows, weights=segments.tokens + 2)
    assert used.max() <= 64
    assert used.min() > 0
    if layout == "padded":
        assert (segments.columns == 0).all()
        assert len(used) == len(lengths)


def test_packed_rows_come_in_an_order_that_does_not_tell_their_fill():
    lengths = np.random.default_rng(0).integers(1, 400, 1024)
    index = Lengths(lengths)
    segments = lay_out(make_plan(index, row_tokens=512), 0, 0, index)
    longest = np.zeros(int(segments.rows.max()) + 1)
    np.maximum.at(longest, segments.rows, segments.tokens)
    # Best fit alone gives a correlation near -1 between a row's number and its longest sample.
    assert abs(np.corrcoef(np.arange(len(longest)), longest)[0, 1]) < 0.15


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_global_batch_in_tokens_or_samples_becomes_the_rows_that_hold_it(layout, dataset):
    config = config_of(layout=layout, global_batch_rows=3)
    for name, mean in zip(("global_batch_tokens", "global_batch_samples"), mean_row(config, dataset), strict=True):
        assert in_rows(config.model_copy(update={name: round(20 * mean)}), dataset).global_batch_rows == 20
    assert in_rows(config, dataset) is config


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_rows_mean_is_that_of_what_is_trained_on(layout, dataset):
    config = config_of(layout=layout, micro_batch_rows=400, global_batch_rows=400, max_epochs=1)
    (batch,) = micro_batches(dataset, config)
    rows = len((batch.starts_N // batch.ids_BS.shape[1]).unique())
    assert mean_row(config, dataset) == pytest.approx((batch.real_tokens / rows, len(batch.starts_N) / rows))
