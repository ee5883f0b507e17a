import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.oracles import config_of, micro_batches
from tests.trainer.streams import Lengths, make_plan
from trainer.batch import in_rows, mean_row
from trainer.plan import LANES, hash_words, lay_out, pack_rows, permute, to_unit


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 5))
def test_a_permutation_hits_every_index_once_and_answers_for_single_ones_of_millions(size, seed, epoch):
    assert sorted(permute(np.arange(size, dtype=np.uint64), size, seed, epoch).tolist()) == list(range(size))
    some = permute(np.array([0, 1, 201_999_999], dtype=np.uint64), 202_000_000, seed, epoch)
    assert len(set(some.tolist())) == 3
    assert some.max() < 202_000_000


def test_epochs_and_seeds_have_orders_of_their_own_in_which_neighbours_end_up_far_apart():
    indices = np.arange(10_000, dtype=np.uint64)
    orders = [permute(indices, 10_000, seed, epoch).astype(np.int64) for seed in range(3) for epoch in range(3)]
    assert len({order.tobytes() for order in orders}) == 9
    # Of a random permutation the mean distance is a third of the size.
    assert abs(np.abs(np.diff(orders[0])).mean() - 10_000 / 3) < 200


def test_where_each_index_lands_is_uniform():
    # Where index 0 of 16 lands over many seeds: chi-square with 15 degrees of freedom, wrong once in a million.
    landed = [int(permute(np.zeros(1, dtype=np.uint64), 16, seed, 0)[0]) for seed in range(3200)]
    counts = np.bincount(landed, minlength=16)
    assert ((counts - 200) ** 2 / 200).sum() < 60


@given(a=st.integers(0, 2**64 - 1), b=st.integers(0, 2**64 - 1))
def test_a_hash_tells_the_order_of_its_words_and_words_become_numbers_from_0_to_below_1(a, b):
    assert (hash_words(a, b)[0] == hash_words(b, a)[0]) == (a == b)
    units = to_unit(np.array([0, 2**63, 2**64 - 1, a], dtype=np.uint64))
    assert units[:2].tolist() == [0.0, 0.5]
    assert 1 - 1e-15 < units[2] < 1
    assert units[3] == pytest.approx(a / 2**64)


PROBLEMS = st.integers(1, 100).flatmap(lambda row: st.tuples(st.just(row), st.lists(st.integers(1, row), max_size=200)))


def _slow_best_fit(lengths: list[int], row_tokens: int) -> list[int]:
    """The same by looking at every open row; of equally full ones the one filled last."""
    free: list[int] = []
    touched: list[int] = []
    rows = [0] * len(lengths)
    for turn, sample in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        roomy = [row for row in range(len(free)) if free[row] >= lengths[sample]]
        row = min(roomy, key=lambda r: (free[r], -touched[r]), default=len(free))
        if not roomy:
            free.append(row_tokens)
            touched.append(0)
        free[row] -= lengths[sample]
        touched[row] = turn
        rows[sample] = row
    return rows


@given(problem=PROBLEMS)
def test_the_rows_are_those_of_best_fit_by_trying_every_row_and_no_two_could_be_one(problem):
    row_tokens, lengths = problem
    rows = pack_rows(np.array(lengths, dtype=np.int64), row_tokens)
    assert rows.tolist() == _slow_best_fit(lengths, row_tokens)
    filled = np.sort(np.bincount(rows, weights=lengths))
    assert all(0 < tokens <= row_tokens for tokens in filled)
    assert len(filled) < 2 or filled[0] + filled[1] > row_tokens


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
def test_every_row_of_a_rank_lies_in_a_lane_that_it_follows_and_a_rank_among_many_packs_one_only(world, rows):
    plan = make_plan(Lengths(np.ones(100_000)), world_size=world, global_batch_rows=rows)
    for step in (0, 1, 7):
        for j in {0, 1, rows // 2, rows - 1} & set(range(rows)):
            assert (step * rows + j) % plan.lanes in plan.lanes_of(j % world)
    many = make_plan(Lengths(np.ones(100_000)), world_size=256, global_batch_rows=256 * 184)
    assert [len(many.lanes_of(rank)) for rank in (0, 3, 255)] == [1, 1, 1]


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
def test_a_rows_mean_is_that_of_what_is_trained_on_and_turns_tokens_or_samples_into_rows(layout, dataset):
    config = config_of(layout=layout, micro_batch_rows=400, global_batch_rows=400, max_epochs=1)
    (batch,) = micro_batches(dataset, config)
    rows = len((batch.starts_N // batch.ids_BS.shape[1]).unique())
    means = mean_row(config, dataset)
    assert means == pytest.approx((batch.real_tokens / rows, len(batch.starts_N) / rows))
    for name, mean in zip(("global_batch_tokens", "global_batch_samples"), means, strict=True):
        assert in_rows(config.model_copy(update={name: round(20 * mean)}), dataset).global_batch_rows == 20
    assert in_rows(config, dataset) is config
