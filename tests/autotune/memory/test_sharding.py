"""Formulas for the memory of one GPU when several share a model."""

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
from autotune.memory.values import MemoryParts

GB = 10**9
SIZES = st.integers(0, 10**12)
RANKS = st.integers(1, 64)
STAGES = st.integers(0, 3)
STATES = st.builds(
    MemoryParts,
    parameters_bytes=SIZES,
    gradients_bytes=SIZES,
    optimizer_bytes=SIZES,
    activations_bytes=SIZES,
    head_and_loss_bytes=SIZES,
    temporaries_bytes=SIZES,
    non_pytorch_bytes=SIZES,
)
TERMS_BYTES = {
    "parameters": 4 * GB,
    "gradients": 4 * GB,
    "optimizer": 8 * GB,
    "activations: layers": 2 * GB,
}
"""Memory breakdown of a model to be sharded."""
PARAMETERS_70B = 70 * 10**9
PARAMETERS_7_5B = 7_500_000_000
ROUNDED_GB = 0.05
"""Error of a literal with one digit after the decimal point."""


def mixed_precision_state(
    parameters=0, *, activations_bytes=0, head_and_loss_bytes=0
) -> MemoryParts:
    """Return the memory of Adam in mixed precision.

    A parameter takes 2 bytes, its gradient 2 and its optimizer state 12.
    """
    return MemoryParts(
        parameters_bytes=2 * parameters,
        gradients_bytes=2 * parameters,
        optimizer_bytes=12 * parameters,
        activations_bytes=activations_bytes,
        head_and_loss_bytes=head_and_loss_bytes,
        temporaries_bytes=0,
        non_pytorch_bytes=0,
    )


def test_zero_shares_of_a_70b_model():
    # 16 bytes for each of 70 billion parameters, over 8 * 4 model-parallel GPUs, are
    # 35 GB. Over 8 data-parallel ranks, ZeRO-1 divides 12 of the 16 bytes, ZeRO-2
    # divides 14, and ZeRO-3 all of them.
    state = mixed_precision_state(PARAMETERS_70B)
    shard = model_share(state, tensor_ranks=8, pipeline_stages=4)
    totals_gb = [
        zero_share(shard, stage, ranks=8, largest_layer_bytes=0).total_bytes / GB
        for stage in range(4)
    ]
    assert totals_gb == pytest.approx([35.0, 12.0, 8.2, 4.4], abs=ROUNDED_GB)


def test_shares_reproduce_the_zero_paper():
    # Rajbhandari et al. 2020, figure 1: 7.5 billion parameters, 64 ranks.
    by_stage = shares(
        mixed_precision_state(PARAMETERS_7_5B),
        ranks=64,
        largest_layer_bytes=0,
        budget_bytes=20 * GB,
    )
    totals_gb = [share.total_bytes / GB for share in by_stage]
    assert totals_gb == pytest.approx([120, 31.4, 16.6, 1.9], abs=ROUNDED_GB)
    assert [share.fits for share in by_stage] == [False, False, True, True]
    assert [share.name for share in by_stage if not share.trains_here] == ["ZeRO-2"]


def test_model_parallelism_follows_the_zero_stages():
    state = mixed_precision_state(parameters=1000)
    assert state.total_bytes == 16_000
    *_, tensor, pipeline = shares(
        state,
        ranks=8,
        largest_layer_bytes=0,
        budget_bytes=1,
        tensor_ranks=2,
        pipeline_stages=4,
    )
    assert (tensor.name, tensor.total_bytes) == ("TP 2", 16_000 / 2)
    assert (pipeline.name, pipeline.total_bytes) == ("PP 4", 16_000 / 4)
    assert not tensor.trains_here
    assert not pipeline.trains_here


@given(state=STATES, stage=STAGES, layer_bytes=SIZES)
def test_one_rank_holds_everything(state, stage, layer_bytes):
    assert zero_share(state, stage, ranks=1, largest_layer_bytes=layer_bytes) == state
    assert model_share(state, tensor_ranks=1, pipeline_stages=1) == state
    (alone,) = shares(
        state, ranks=1, largest_layer_bytes=layer_bytes, budget_bytes=state.total_bytes
    )
    assert alone.held == state
    assert alone.fits


@given(state=STATES, stage=STAGES, ranks=RANKS, layer_bytes=SIZES, more_ranks=RANKS)
def test_more_ranks_hold_no_more_state(state, stage, ranks, layer_bytes, more_ranks):
    few = zero_share(state, stage, ranks, largest_layer_bytes=layer_bytes)
    many = zero_share(state, stage, ranks + more_ranks, largest_layer_bytes=layer_bytes)
    assert many.state_bytes <= few.state_bytes
    # From one rank to two, ZeRO-3 begins to gather, which alone may cost more than
    # sharding saves.
    if ranks > 1:
        assert many.total_bytes <= few.total_bytes


@given(state=STATES, stage=STAGES, ranks=RANKS, layer_bytes=SIZES)
def test_only_sharded_parameters_are_gathered(state, stage, ranks, layer_bytes):
    share = zero_share(state, stage, ranks, largest_layer_bytes=layer_bytes)
    has_sharded_parameters = stage == 3 and ranks > 1
    assert share.gathered_bytes == (layer_bytes if has_sharded_parameters else 0)


@given(state=STATES, stage=st.integers(1, 3), ranks=RANKS, layer_bytes=SIZES)
def test_higher_stage_holds_no_more_state(state, stage, ranks, layer_bytes):
    higher = zero_share(state, stage, ranks, largest_layer_bytes=layer_bytes)
    lower = zero_share(state, stage - 1, ranks, largest_layer_bytes=layer_bytes)
    assert higher.state_bytes <= lower.state_bytes


@given(state=STATES, tensor_ranks=RANKS, pipeline_stages=RANKS, more=RANKS)
def test_more_model_parallel_ranks_hold_no_more(
    state, tensor_ranks, pipeline_stages, more
):
    few = model_share(state, tensor_ranks, pipeline_stages)
    for many in (
        model_share(state, tensor_ranks + more, pipeline_stages),
        model_share(state, tensor_ranks, pipeline_stages + more),
    ):
        assert many.state_bytes <= few.state_bytes
        assert many.total_bytes <= few.total_bytes


@given(
    state=STATES,
    stage=STAGES,
    ranks=RANKS,
    tensor_ranks=RANKS,
    pipeline_stages=RANKS,
    layer_bytes=SIZES,
)
def test_no_term_is_lost(
    state, stage, ranks, tensor_ranks, pipeline_stages, layer_bytes
):
    split = model_share(state, tensor_ranks, pipeline_stages)
    shard = zero_share(split, stage, ranks, largest_layer_bytes=layer_bytes)
    terms_bytes = asdict(shard)
    assert min(terms_bytes.values()) >= 0
    assert shard.total_bytes == sum(terms_bytes.values())
    # All ranks together hold at least the whole state.
    all_ranks = ranks * tensor_ranks * pipeline_stages
    assert shard.state_bytes * all_ranks >= state.state_bytes
    assert shard.temporaries_bytes == state.temporaries_bytes
    assert shard.non_pytorch_bytes == state.non_pytorch_bytes


def test_tensor_parallelism_splits_activations_partly():
    state = mixed_precision_state(activations_bytes=34_000)
    share = model_share(state, tensor_ranks=8, pipeline_stages=1)
    # 10 of 34 parts stay whole.
    assert share.activations_bytes == 10_000 + 24_000 // 8
    assert share.head_and_loss_bytes == 0


def test_first_pipeline_stage_saves_no_activations():
    state = mixed_precision_state(activations_bytes=8000, head_and_loss_bytes=1000)
    share = model_share(state, tensor_ranks=1, pipeline_stages=4)
    assert share.activations_bytes == 8000
    assert share.head_and_loss_bytes == 0


def test_large_head_makes_the_last_stage_the_fullest():
    state = mixed_precision_state(activations_bytes=8000, head_and_loss_bytes=9000)
    share = model_share(state, tensor_ranks=1, pipeline_stages=4)
    assert share.activations_bytes == 2000
    assert share.head_and_loss_bytes == 9000


@pytest.mark.parametrize(
    ("budget_gb", "expected"),
    [
        pytest.param(
            15,
            "'zero1' over 2 ranks (predicted: 13 GiB per rank)",
            id="14 GB, without half of the optimizer state",
        ),
        pytest.param(
            12,
            "'fsdp2' over 2 ranks (predicted: 10.2 GiB per rank)",
            id="8 GB of state, 1 gathered, 2 of activations",
        ),
        pytest.param(
            6,
            "'fsdp2' over 8 ranks (predicted: 4.66 GiB per rank)",
            id="2 GB of state, 1 gathered, 2 of activations",
        ),
    ],
)
def test_smallest_sharding_that_fits(budget_gb, expected):
    setting = smallest_sharding(TERMS_BYTES, budget_gb * GB, largest_layer_bytes=GB)
    assert setting == f"parallel.strategy = {expected}"


def test_no_sharding_fits_activations_of_a_rank():
    # 1 GB gathered and 2 GB of activations leave no room for any shard of the state.
    assert smallest_sharding(TERMS_BYTES, 3 * GB, largest_layer_bytes=GB) is None
