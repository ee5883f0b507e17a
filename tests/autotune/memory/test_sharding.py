from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.memory.decide.sharding import (
    model_share,
    shares,
    smallest_sharding,
    zero_share,
)
from autotune.memory.values import StateBytes

sizes = st.integers(0, 10**12)
ranks = st.integers(1, 64)
stages = st.integers(0, 3)
TERMS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "head_and_loss",
    "temporaries",
    "non_pytorch",
)
states = st.builds(StateBytes, **{f"{name}_bytes": sizes for name in TERMS})
GB = 10**9


def model(parameters, **others):
    """Return a state of Adam in mixed precision: 2, 2 and 12 bytes a parameter."""
    terms = dict.fromkeys(TERMS, 0)
    terms |= {
        "parameters": 2 * parameters,
        "gradients": 2 * parameters,
        "optimizer": 12 * parameters,
    } | others
    return StateBytes(**{f"{name}_bytes": size for name, size in terms.items()})


def test_zero_shares_of_a_70b_model():
    # 16 bytes for each of 70 billion parameters, over 8 * 4 GPUs, are 35 GB. Over 8
    # data-parallel ranks, ZeRO-1 divides 12 of the 16 bytes, ZeRO-2 divides 14, and
    # ZeRO-3 all of them.
    shard = model_share(model(70 * GB), 8, 4)
    totals_gb = [
        zero_share(shard, stage, 8, largest_layer_bytes=0).total_bytes / GB
        for stage in range(4)
    ]
    assert totals_gb == pytest.approx([35.0, 12.0, 8.2, 4.4], abs=0.05)


def test_shares_reproduce_the_zero_paper():
    # Rajbhandari et al. 2020, figure 1: 7.5 billion parameters, 64 ranks.
    by_stage = shares(
        model(7_500_000_000), 64, largest_layer_bytes=0, budget_bytes=20 * GB
    )
    assert [share.total_bytes / GB for share in by_stage] == pytest.approx(
        [120, 31.4, 16.6, 1.9], abs=0.05
    )
    assert [share.fits for share in by_stage] == [False, False, True, True]
    assert [share.name for share in by_stage if not share.trains_here] == ["ZeRO-2"]


def test_model_parallelism_follows_the_zero_stages():
    *_, tensor, pipeline = shares(
        model(1000),
        8,
        largest_layer_bytes=0,
        budget_bytes=1,
        tensor_ranks=2,
        pipeline_stages=4,
    )
    assert (tensor.name, tensor.total_bytes) == ("TP 2", 8000)
    assert (pipeline.name, pipeline.total_bytes) == ("PP 4", 4000)
    assert not tensor.trains_here
    assert not pipeline.trains_here


@given(states, stages, sizes)
def test_one_rank_holds_everything(state, stage, layer_bytes):
    zero = zero_share(state, stage, 1, largest_layer_bytes=layer_bytes)
    assert zero == state
    assert model_share(state, 1, 1) == state
    (alone,) = shares(
        state, 1, largest_layer_bytes=layer_bytes, budget_bytes=state.total_bytes
    )
    assert (alone.held, alone.fits) == (state, True)


@given(states, stages, ranks, sizes, ranks)
def test_more_ranks_hold_no_more_state(state, stage, count, layer_bytes, more):
    few = zero_share(state, stage, count, largest_layer_bytes=layer_bytes)
    many = zero_share(state, stage, count + more, largest_layer_bytes=layer_bytes)
    assert many.state_bytes <= few.state_bytes
    # From one to two, ZeRO-3 begins to gather: that alone may cost more than it saves.
    if count > 1:
        assert many.total_bytes <= few.total_bytes
    assert few.gathered_bytes == (layer_bytes if stage == 3 and count > 1 else 0)


@given(states, st.integers(1, 3), ranks, sizes)
def test_higher_stage_holds_no_more_state(state, stage, count, layer_bytes):
    higher = zero_share(state, stage, count, largest_layer_bytes=layer_bytes)
    lower = zero_share(state, stage - 1, count, largest_layer_bytes=layer_bytes)
    assert higher.state_bytes <= lower.state_bytes


@given(states, ranks, ranks, ranks)
def test_more_tensor_ranks_hold_no_more(state, tensor, pipeline, more):
    few = model_share(state, tensor, pipeline)
    for many in (
        model_share(state, tensor + more, pipeline),
        model_share(state, tensor, pipeline + more),
    ):
        assert many.state_bytes <= few.state_bytes
        assert many.total_bytes <= few.total_bytes


@given(states, stages, ranks, ranks, ranks, sizes)
def test_no_term_is_lost(state, stage, count, tensor, pipeline, layer_bytes):
    split = model_share(state, tensor, pipeline)
    shard = zero_share(split, stage, count, largest_layer_bytes=layer_bytes)
    terms = asdict(shard)
    assert min(terms.values()) >= 0
    assert shard.total_bytes == sum(terms.values())
    assert shard.state_bytes * count * tensor * pipeline >= state.state_bytes
    assert shard.temporaries_bytes == state.temporaries_bytes
    assert shard.non_pytorch_bytes == state.non_pytorch_bytes


def test_tensor_parallelism_splits_activations_partly():
    share = model_share(model(0, activations=34_000), 8, 1)
    # 10 of 34 parts stay whole.
    assert share.activations_bytes == 10_000 + 24_000 // 8
    assert share.head_and_loss_bytes == 0


def test_first_pipeline_stage_saves_no_activations():
    share = model_share(model(0, activations=8000, head_and_loss=1000), 1, 4)
    assert share.activations_bytes == 8000
    assert share.head_and_loss_bytes == 0


def test_large_head_makes_the_last_stage_the_fullest():
    share = model_share(model(0, activations=8000, head_and_loss=9000), 1, 4)
    assert share.activations_bytes == 2000
    assert share.head_and_loss_bytes == 9000


TERMS_BYTES = {
    "parameters": 4 * GB,
    "gradients": 4 * GB,
    "optimizer": 8 * GB,
    "activations: layers": 2 * GB,
}


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        # 14 GB: half of the optimizer's state stays.
        (15 * GB, "'zero1' over 2 ranks (predicted: 13 GiB per rank)"),
        # 8 of state, 1 gathered, 2 of activations.
        (12 * GB, "'fsdp2' over 2 ranks (predicted: 10.2 GiB per rank)"),
        # 2 of state, 1 gathered, 2 of activations.
        (6 * GB, "'fsdp2' over 8 ranks (predicted: 4.66 GiB per rank)"),
    ],
)
def test_smallest_sharding_that_fits(budget, expected):
    setting = smallest_sharding(TERMS_BYTES, budget, largest_layer_bytes=GB)
    assert setting == f"parallel.strategy = {expected}"


def test_no_sharding_fits_activations_of_a_rank():
    # 1 gathered and 2 of activations, beside any share of the state.
    assert smallest_sharding(TERMS_BYTES, 3 * GB, largest_layer_bytes=GB) is None
