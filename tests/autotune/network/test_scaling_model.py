from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.network.decide import scaling_model
from autotune.network.values import (
    MIB,
    GradientPart,
    GradientSync,
    Link,
    Network,
    RankCompute,
)
from autotune.plan.values import PlanFigure

GRADIENTS = tuple(
    GradientPart(elements=1_000_000, ready_share=(number + 1) / 20)
    for number in range(20)
)
COMPUTE = RankCompute(
    sequence_s=0.01, micro_batch_s=0.002, optimizer_step_s=0.01, gradients=GRADIENTS
)
EXCHANGES = scaling_model.gradient_syncs(sixteen_bit=False)
NETWORK = Network(
    nodes=2, ranks_per_node=2, between=Link(latency_s=2e-5, bytes_per_s=1e9)
)


def load(rows=1024, most=32):
    return scaling_model.Load(
        compute=COMPUTE,
        global_batch_size=rows,
        tokens_per_sequence=500.0,
        max_micro_batch_size=most,
    )


def model(load_=None, network=NETWORK, gradient_syncs=EXCHANGES):
    return scaling_model.ScalingModel(
        load=load_ or load(), network=network, gradient_syncs=tuple(gradient_syncs)
    )


@given(st.integers(1, 5000), st.integers(1, 200), st.integers(1, 300))
def test_every_dealing_holds_the_global_batch_in_micro_batches_that_fit_and_fewer_rows_than_ranks_have_none(
    rows, most, ranks
):
    found = load(rows, most).micro_batch_options(ranks)
    assert bool(found) == (rows >= ranks)
    for split in found:
        assert split.micro_batch_size <= most
        step, micro = split.gradient_accumulation_steps, split.micro_batch_size * ranks
        assert micro * step >= rows > micro * (step - 1)


def test_what_cannot_be_dealt_or_sent_has_no_prediction():
    few = load(rows=3)
    assert (
        scaling_model.predict(few, NETWORK, GradientSync())
        is model(few).at(2)
        is model(few).efficiency(2)
        is None
    )
    assert spread_of(rate(), 2, few) == scaling_model.AllRanks()
    # No 16 bits under accumulation.
    narrow = GradientSync(strategy="fsdp2", gradient_dtype="bf16")
    assert scaling_model.predict(load(rows=1024, most=32), NETWORK, narrow) is None
    assert scaling_model.predict(load(rows=128, most=32), NETWORK, narrow) is not None


def test_efficiency_is_against_one_node_and_falls_with_nodes_and_what_limits_is_named():
    found = [model().at(nodes) for nodes in (1, 4, 16, 64)]
    efficiencies = [one.efficiency for one in found]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert efficiencies[0] == pytest.approx(1.0)
    assert all(one.bound_efficiency >= one.efficiency - 1e-9 for one in found)
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


def test_sixteen_bits_are_among_the_choices_only_if_allowed_and_the_simplest_of_equals_is_taken():
    every = scaling_model.gradient_syncs(sixteen_bit=True, strategies=("ddp", "zero1"))
    assert [{one.gradient_dtype for one in some} for some in (EXCHANGES, every)] == [
        {"fp32"},
        {"fp32", "bf16"},
    ]
    fast = Network(
        nodes=2, ranks_per_node=1, between=Link(latency_s=0.0, bytes_per_s=1e15)
    )
    # Nothing to send.
    assert model(None, fast, every).at(2).sync == GradientSync(
        bucket_cap_bytes=25 * MIB
    )


@pytest.mark.parametrize("last", [3, 40, 64, 100, 700])
def test_useful_nodes_are_looked_for_until_they_end(last):
    asked = []
    found = scaling_model.useful_nodes(
        lambda nodes: asked.append(nodes) or (0.95 if nodes <= last else 0.5), 8192
    )
    assert found == last
    assert len(asked) == max(asked) <= max(64, 1.3 * last)
    # The largest counts, even if a smaller one divides badly.
    assert (
        scaling_model.useful_nodes(
            lambda nodes: 0.95 if nodes <= 160 or nodes == 190 else 0.85, 8192
        )
        == 190
    )
    assert scaling_model.useful_nodes(lambda nodes: None, 5) == 1


def test_levers_are_those_that_lift_and_the_strongest_comes_first():
    found = model().levers(200, 1)
    assert {"16-bit gradients", "four times the global batch"} <= {
        change for change, _ in found
    }
    counts = [nodes for _, nodes in found]
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


def test_one_node_is_as_many_ranks_as_it_has():
    found = spread_of(rate(share=0.1), 1, over=replace(NETWORK, ranks_per_node=4))
    assert [found.tokens_per_s.value, found.tokens_per_s.low] == pytest.approx(
        [200_000, 180_000]
    )
    assert (found.tokens_per_s.basis, found.efficiency, found.efficiency_by_nodes) == (
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
def test_all_ranks_are_never_faster_than_each_alone_and_keep_the_rates_interval(
    tokens, share, speed, nodes, rows
):
    over = replace(NETWORK, between=Link(latency_s=2e-5, bytes_per_s=speed))
    found = spread_of(rate(tokens, share), nodes, load(rows), over)
    total, efficiency = found.tokens_per_s, found.efficiency.value
    assert 0 < efficiency <= 1
    assert total.value == pytest.approx(2 * nodes * tokens * efficiency)
    if share:
        assert [total.low, total.high] == pytest.approx(
            [(1 - share) * total.value, (1 + share) * total.value]
        )
    assert (total.confidence, found.efficiency.low) == (0.95 if share else None, None)
    assert total.basis == found.efficiency.basis == "assumed"
    assert found.efficiency_by_nodes[nodes] == pytest.approx(efficiency)
    assert list(found.efficiency_by_nodes) == sorted(found.efficiency_by_nodes)


@pytest.mark.parametrize(
    ("rows", "useful", "shown"), [(4096, 2, {1, 2, 16}), (4096 * 64, None, {1, 8, 16})]
)
def test_how_many_nodes_are_useful_is_said_where_they_are_not_all_and_only_there(
    rows, useful, shown
):
    found, slower = (
        spread_of(rate(value), 16, load(rows=rows)) for value in (5e5, 5e3)
    )
    assert (found.efficiency.value < scaling_model.USEFUL_EFFICIENCY) == (
        useful is not None
    )
    assert (found.useful_nodes, set(found.efficiency_by_nodes)) == (useful, shown)
    # A faster rank waits longer for the same exchange.
    assert found.efficiency.value < slower.efficiency.value
