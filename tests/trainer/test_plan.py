import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.streams import Lengths, make_plan
from trainer.plan import LANES, lay_out


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
