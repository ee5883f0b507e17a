from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.decide.sharding import Layout, StateBytes, fewest_that_share, shard
from autotune.errors import BadInput

sizes = st.integers(0, 10**12)
ranks = st.integers(1, 64)
states = st.builds(
    StateBytes,
    parameters_bytes=sizes,
    gradients_bytes=sizes,
    optimizer_bytes=sizes,
    activations_bytes=sizes,
    head_and_loss_bytes=sizes,
    temporaries_bytes=sizes,
    outside_bytes=sizes,
)
layouts = st.builds(
    Layout,
    zero_stage=st.integers(0, 3),
    data_ranks=ranks,
    tensor_ranks=ranks,
    pipeline_stages=ranks,
    microbatches_per_step=st.none() | ranks,
    sequence_parallel=st.booleans(),
)
ALONE = Layout(zero_stage=0, data_ranks=1, tensor_ranks=1, pipeline_stages=1)
GB = 10**9


def model(parameters, **others):
    """Adam in mixed precision: 2, 2 and 12 bytes per parameter."""
    terms = dict.fromkeys(("activations", "head_and_loss", "temporaries", "outside"), 0)
    terms |= {"parameters": 2 * parameters, "gradients": 2 * parameters, "optimizer": 12 * parameters} | others
    return StateBytes(**{f"{name}_bytes": size for name, size in terms.items()})


def test_a_70b_model_at_tensor_8_pipeline_4_takes_35_and_12_gb_where_a_text_prints_58_and_32():
    # The text's code counts weights and gradients in bf16 and 12 bytes of Adam, nothing else: 58.3 and 31.7 are not
    # its results. What it calls ZeRO-3 divides the optimizer alone, over 8 data ranks: that is ZeRO-1.
    layout = Layout(zero_stage=0, data_ranks=8, tensor_ranks=8, pipeline_stages=4)
    totals = [
        shard(model(70 * GB), replace(layout, zero_stage=stage), largest_layer_bytes=0).total_bytes / GB
        for stage in range(4)
    ]
    assert totals == pytest.approx([35.0, 12.0, 8.2, 4.4], abs=0.05)


def test_the_figure_of_the_zero_paper_comes_out():
    # Rajbhandari et al. 2020, figure 1: 7.5 billion parameters, 64 ranks.
    totals = [
        shard(
            model(7_500_000_000),
            Layout(zero_stage=stage, data_ranks=64, tensor_ranks=1, pipeline_stages=1),
            largest_layer_bytes=0,
        ).total_bytes
        / GB
        for stage in range(4)
    ]
    assert totals == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


@given(states, sizes, st.integers(0, 3), st.booleans(), st.none() | ranks)
def test_one_rank_changes_nothing(state, layer_bytes, zero_stage, sequence_parallel, microbatches):
    layout = replace(
        ALONE, zero_stage=zero_stage, sequence_parallel=sequence_parallel, microbatches_per_step=microbatches
    )
    sharded = asdict(shard(state, layout, largest_layer_bytes=layer_bytes))
    assert sharded == asdict(state) | {"stage": 1, "gathered_bytes": 0}


@given(states, layouts, sizes)
def test_a_higher_stage_of_zero_never_holds_more_state(state, layout, layer_bytes):
    held = [
        shard(state, replace(layout, zero_stage=stage), largest_layer_bytes=layer_bytes).state_bytes
        for stage in range(4)
    ]
    assert held == sorted(held, reverse=True)


@given(states, layouts, sizes, st.sampled_from(["data_ranks", "tensor_ranks", "pipeline_stages"]), st.integers(1, 64))
def test_more_ranks_never_hold_more_state(state, layout, layer_bytes, kind, more):
    wider = replace(layout, **{kind: getattr(layout, kind) + more})
    few = shard(state, layout, largest_layer_bytes=layer_bytes)
    many = shard(state, wider, largest_layer_bytes=layer_bytes)
    for term in ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "state_bytes"):
        assert getattr(many, term) <= getattr(few, term)


@given(states, layouts, sizes, st.sampled_from(["data_ranks", "tensor_ranks", "pipeline_stages"]), st.integers(1, 64))
def test_more_ranks_never_hold_more_in_all_once_zero_gathers(state, layout, layer_bytes, kind, more):
    # From one data rank to two, ZeRO-3 begins to gather: that alone may cost more than it saves.
    layout = replace(layout, data_ranks=layout.data_ranks + 1)
    wider = replace(layout, **{kind: getattr(layout, kind) + more})
    few = shard(state, layout, largest_layer_bytes=layer_bytes)
    assert shard(state, wider, largest_layer_bytes=layer_bytes).total_bytes <= few.total_bytes


@given(states, layouts, sizes)
def test_no_term_is_negative_or_lost_and_the_total_is_their_sum(state, layout, layer_bytes):
    sharded = shard(state, layout, largest_layer_bytes=layer_bytes)
    terms = {name: size for name, size in asdict(sharded).items() if name != "stage"}
    assert min(terms.values()) >= 0
    assert sharded.total_bytes == sum(terms.values())
    everyone = layout.data_ranks * layout.tensor_ranks * layout.pipeline_stages
    assert sharded.state_bytes * everyone >= state.parameters_bytes + state.gradients_bytes + state.optimizer_bytes
    assert (sharded.temporaries_bytes, sharded.outside_bytes) == (state.temporaries_bytes, state.outside_bytes)


@given(states, layouts, st.integers(1, 64))
def test_more_microbatches_never_hold_less(state, layout, more):
    layout = replace(layout, microbatches_per_step=layout.microbatches_per_step or 1)
    longer = replace(layout, microbatches_per_step=layout.microbatches_per_step + more)
    totals = [shard(state, each, largest_layer_bytes=0).total_bytes for each in (layout, longer)]
    assert totals == sorted(totals)


def test_only_zero_3_over_several_ranks_gathers_a_layer_by_its_tensor_ranks():
    layout = Layout(zero_stage=3, data_ranks=2, tensor_ranks=4, pipeline_stages=1)
    gathered = {
        (stage, data_ranks): shard(
            model(1000), replace(layout, zero_stage=stage, data_ranks=data_ranks), largest_layer_bytes=400
        ).gathered_bytes
        for stage in (2, 3)
        for data_ranks in (1, 2)
    }
    assert gathered == {(2, 1): 0, (2, 2): 0, (3, 1): 0, (3, 2): 100}


def test_tensor_ranks_leave_10_of_34_parts_of_the_activations_whole_without_sequence_parallelism():
    layout = replace(ALONE, tensor_ranks=8)
    plain, sequence = (
        shard(model(0, activations=34_000), replace(layout, sequence_parallel=on), largest_layer_bytes=0)
        for on in (False, True)
    )
    assert plain.activations_bytes == 10_000 + 24_000 // 8
    assert sequence.activations_bytes == 34_000 // 8


def test_a_full_pipeline_saves_no_activations_on_its_first_stage_and_a_short_one_does():
    state = model(0, activations=8000, head_and_loss=1000)
    full = shard(state, replace(ALONE, pipeline_stages=4), largest_layer_bytes=0)
    assert (full.stage, full.activations_bytes, full.head_and_loss_bytes) == (1, 8000, 0)
    short = shard(state, replace(ALONE, pipeline_stages=4, microbatches_per_step=2), largest_layer_bytes=0)
    assert (short.stage, short.activations_bytes) == (1, 4000)


def test_a_large_head_makes_the_last_stage_the_fullest():
    sharded = shard(
        model(0, activations=8000, head_and_loss=9000), replace(ALONE, pipeline_stages=4), largest_layer_bytes=0
    )
    assert (sharded.stage, sharded.activations_bytes, sharded.head_and_loss_bytes) == (4, 2000, 9000)


@pytest.mark.parametrize("field", ["data_ranks", "tensor_ranks", "pipeline_stages", "microbatches_per_step"])
@pytest.mark.parametrize("count", [0, -1])
def test_fewer_than_one_is_refused_by_name(field, count):
    with pytest.raises(BadInput, match=f"{field} = {count}") as caught:
        replace(ALONE, **{field: count})
    assert field in caught.value.next_step


@pytest.mark.parametrize("stage", [-1, 4])
def test_a_stage_that_zero_lacks_is_refused(stage):
    with pytest.raises(BadInput, match=f"zero_stage = {stage}") as caught:
        replace(ALONE, zero_stage=stage)
    assert "0 (plain data parallelism)" in caught.value.next_step


LEDGER = {"parameters": 4 * GB, "gradients": 4 * GB, "optimizer": 8 * GB, "activations: layers": 2 * GB}


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (15 * GB, ("zero1", 2, 14 * GB)),  # 16 GB of state, of which half of the optimizer's stays
        (12 * GB, ("fsdp2", 2, 11 * GB)),  # 8 of state, 1 that is gathered, 2 of activations
        (6 * GB, ("fsdp2", 8, 5 * GB)),
        (3 * GB, None),
    ],
)
def test_the_fewest_ranks_that_hold_what_one_cannot(budget, expected):
    found = fewest_that_share(LEDGER, budget, largest_layer_bytes=GB)
    assert (found and (found.strategy, found.ranks, found.bytes_of_a_rank)) == expected


def test_how_to_share_names_the_setting():
    found = fewest_that_share(LEDGER, 12 * GB, largest_layer_bytes=GB)
    assert found is not None
    assert found.words == "parallel.strategy = 'fsdp2' over 2 ranks (predicted: 10.2 GiB on each)"
