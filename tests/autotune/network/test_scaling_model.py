from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.evidence.network import (
    MIB,
    GradientPart,
    GradientSync,
    Link,
    Network,
    RankCompute,
)
from autotune.evidence.plan import PlanFigure
from autotune.network.decide import scaling_model

GRADIENTS = tuple(
    GradientPart(elements=1_000_000, ready_share=(number + 1) / 20)
    for number in range(20)
)
COMPUTE = RankCompute(
    sequence_s=0.01, micro_batch_s=0.002, optimizer_step_s=0.01, gradients=GRADIENTS
)
GRADIENT_SYNCS = scaling_model.gradient_syncs(sixteen_bit=False)
NETWORK = Network(
    nodes=2, ranks_per_node=2, between=Link(latency_s=2e-5, bytes_per_s=1e9)
)


def load(global_batch_size=1024, max_micro_batch_size=32):
    return scaling_model.Load(
        compute=COMPUTE,
        global_batch_size=global_batch_size,
        tokens_per_sequence=500.0,
        max_micro_batch_size=max_micro_batch_size,
    )


def model(load_=None, network=NETWORK, gradient_syncs=GRADIENT_SYNCS):
    return scaling_model.ScalingModel(
        load=load_ or load(), network=network, gradient_syncs=tuple(gradient_syncs)
    )


@given(st.integers(1, 5000), st.integers(1, 200), st.integers(1, 300))
def test_batch_options_hold_the_global_batch(
    global_batch_size, max_micro_batch_size, ranks
):
    options = load(global_batch_size, max_micro_batch_size).micro_batch_options(ranks)
    assert bool(options) == (global_batch_size >= ranks)
    for split in options:
        assert split.micro_batch_size <= max_micro_batch_size
        step = split.gradient_accumulation_steps
        micro = split.micro_batch_size * ranks
        assert micro * step >= global_batch_size > micro * (step - 1)


def test_undividable_batch_has_no_prediction():
    few = load(global_batch_size=3)
    assert (
        scaling_model.predict(few, NETWORK, GradientSync())
        is model(few).at(2)
        is model(few).efficiency(2)
        is None
    )
    assert spread_of(rate(), 2, few) == scaling_model.AllRanks()


def test_accumulation_excludes_16_bit_gradients():
    # No 16 bits under accumulation.
    narrow = GradientSync(strategy="fsdp2", gradient_dtype="bf16")
    assert (
        scaling_model.predict(
            load(global_batch_size=1024, max_micro_batch_size=32), NETWORK, narrow
        )
        is None
    )
    assert (
        scaling_model.predict(
            load(global_batch_size=128, max_micro_batch_size=32), NETWORK, narrow
        )
        is not None
    )


def test_efficiency_falls_with_nodes():
    predictions = [model().at(nodes) for nodes in (1, 4, 16, 64)]
    efficiencies = [prediction.efficiency for prediction in predictions]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert efficiencies[0] == pytest.approx(1.0)
    assert all(
        prediction.bound_efficiency >= prediction.efficiency - 1e-9
        for prediction in predictions
    )


def test_names_the_limit():
    slow = model(
        None,
        replace(NETWORK, nodes=16, between=Link(latency_s=0.0, bytes_per_s=1e7)),
        [GradientSync()],
    )
    limit, share = scaling_model.limit_of(slow.at(16).time)
    assert limit == "network"
    assert 0.1 < share <= 1
    alone = replace(slow, network=replace(slow.network, ranks_per_node=1))
    assert scaling_model.limit_of(alone.at(1).time) == ("compute", None)


def test_16_bits_are_offered_on_request():
    every = scaling_model.gradient_syncs(sixteen_bit=True, strategies=("ddp", "zero1"))
    assert [
        {sync.gradient_dtype for sync in syncs} for syncs in (GRADIENT_SYNCS, every)
    ] == [
        {"fp32"},
        {"fp32", "bf16"},
    ]


def test_takes_the_simplest_of_equals():
    every = scaling_model.gradient_syncs(sixteen_bit=True, strategies=("ddp", "zero1"))
    fast = Network(
        nodes=2, ranks_per_node=1, between=Link(latency_s=0.0, bytes_per_s=1e15)
    )
    # Nothing to send.
    assert model(None, fast, every).at(2).sync == GradientSync(
        bucket_cap_bytes=25 * MIB
    )


@pytest.mark.parametrize("last_useful", [3, 40, 64, 100, 700])
def test_searches_useful_nodes_to_their_end(last_useful):
    asked_nodes = []
    useful = scaling_model.useful_nodes(
        lambda nodes: (
            asked_nodes.append(nodes) or (0.95 if nodes <= last_useful else 0.5)
        ),
        8192,
    )
    assert useful == last_useful
    assert len(asked_nodes) == max(asked_nodes) <= max(64, 1.3 * last_useful)


def test_largest_useful_count_is_taken():
    # The largest counts, even if a smaller one divides badly.
    assert (
        scaling_model.useful_nodes(
            lambda nodes: 0.95 if nodes <= 160 or nodes == 190 else 0.85, 8192
        )
        == 190
    )
    assert scaling_model.useful_nodes(lambda nodes: None, 5) == 1


def test_levers_are_ordered_by_gain():
    levers = model().levers(200, 1)
    assert {"16-bit gradients", "four times the global batch"} <= {
        change for change, _ in levers
    }
    counts = [nodes for _, nodes in levers]
    assert counts == sorted(counts, reverse=True)
    halved = model(gradient_syncs=scaling_model.gradient_syncs(sixteen_bit=True))
    assert "16-bit gradients" not in dict(halved.levers(200, 1))


def spread_of(rate, nodes, load_=None, over=None):
    return scaling_model.spread(
        rate, model(load_, over or NETWORK), nodes=nodes, links=("assumed", "lines")
    )


def rate(value=50_000.0, share=0.0):
    low, high = (value * (1 - share), value * (1 + share)) if share else (None, None)
    confidence = 0.95 if share else None
    return PlanFigure(
        value=value,
        low=low,
        high=high,
        confidence=confidence,
        basis="measured",
        source="windows",
    )


def test_one_node_has_all_its_ranks():
    plan = spread_of(rate(share=0.1), 1, over=replace(NETWORK, ranks_per_node=4))
    assert [plan.units_per_s.value, plan.units_per_s.low] == pytest.approx(
        [200_000, 180_000]
    )
    assert (plan.units_per_s.basis, plan.efficiency, plan.efficiency_by_nodes) == (
        "predicted",
        None,
        {},
    )


@given(
    st.floats(1e3, 1e7),
    st.floats(0, 0.5),
    st.floats(1e7, 1e9),
    st.integers(2, 40),
    st.integers(80, 5000),
)
def test_all_ranks_are_never_faster_than_alone(
    tokens, share, speed, nodes, global_batch_size
):
    over = replace(NETWORK, between=Link(latency_s=2e-5, bytes_per_s=speed))
    plan = spread_of(rate(tokens, share), nodes, load(global_batch_size), over)
    total = plan.units_per_s
    efficiency = plan.efficiency.value
    assert 0 < efficiency <= 1
    assert total.value == pytest.approx(2 * nodes * tokens * efficiency)
    if share:
        assert [total.low, total.high] == pytest.approx(
            [(1 - share) * total.value, (1 + share) * total.value]
        )
    assert (total.confidence, plan.efficiency.low) == (0.95 if share else None, None)
    assert total.basis == plan.efficiency.basis == "assumed"
    assert plan.efficiency_by_nodes[nodes] == pytest.approx(efficiency)
    assert list(plan.efficiency_by_nodes) == sorted(plan.efficiency_by_nodes)


@pytest.mark.parametrize(
    ("global_batch_size", "useful", "shown"),
    [(4096, 2, {1, 2, 16}), (4096 * 64, None, {1, 8, 16})],
)
def test_names_useful_nodes_if_not_all_are(global_batch_size, useful, shown):
    plan, slower = (
        spread_of(rate(value), 16, load(global_batch_size=global_batch_size))
        for value in (5e5, 5e3)
    )
    assert (plan.efficiency.value < scaling_model.USEFUL_EFFICIENCY) == (
        useful is not None
    )
    assert (plan.useful_nodes, set(plan.efficiency_by_nodes)) == (useful, shown)
    # A faster rank waits longer for the same gradient synchronisation.
    assert plan.efficiency.value < slower.efficiency.value
