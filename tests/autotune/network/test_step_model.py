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
from autotune.network.decide import step_model

NIC = Link(latency_s=0.0, bytes_per_s=1e9)


def network(nodes, *, ranks=1, between=NIC, within=None):
    return Network(nodes=nodes, ranks_per_node=ranks, between=between, within=within)


def compute(parts=((1_000_000, 0.5), (1_000_000, 1.0)), *, seconds=0.3, **changes):
    gradients = tuple(
        GradientPart(elements=elements, ready_share=ready) for elements, ready in parts
    )
    return RankCompute(
        sequence_s=seconds,
        micro_batch_s=0.0,
        optimizer_step_s=0.0,
        gradients=gradients,
        **changes,
    )


SLOW = replace(NIC, bytes_per_s=4e6)
"""1 s for each part of ``compute`` between two nodes."""


def step(micro_batches=1, *, over=None, micro_batch_size=1, rank_compute=None, **sync):
    over = over or network(2, between=SLOW)
    return step_model.step_time(
        rank_compute or compute(),
        micro_batch_size,
        micro_batches,
        GradientSync(**sync),
        over,
    )


@given(st.integers(1, 300), st.floats(1.0, 1e9), st.floats(0, 1e-3))
def test_ring_time_grows_with_size(nodes, size, latency_s):
    ring = network(nodes, between=replace(NIC, latency_s=latency_s))
    assert step_model.all_reduce_s(2 * size, ring) >= step_model.all_reduce_s(
        size, ring
    )


def test_ring_sends_each_byte_nearly_twice():
    assert [
        step_model.all_reduce_s(1e9, network(nodes)) for nodes in (1, 2, 4)
    ] == pytest.approx([0.0, 1.0, 1.5])


def test_tree_is_used_for_slow_hops():
    slow_hops = network(64, between=replace(NIC, latency_s=1e-3))
    assert step_model.all_reduce_s(1000, slow_hops) == pytest.approx(
        2 * 6 * 1e-3, rel=1e-3
    )


def test_links_within_nodes_add_their_time():
    within = replace(NIC, bytes_per_s=10e9)  # what it costs in nodes comes on top
    alone = step_model.all_reduce_s(1e9, network(2, ranks=2))
    assert step_model.all_reduce_s(
        1e9, network(2, ranks=2, within=within)
    ) == pytest.approx(alone + 0.1)


@given(
    st.lists(
        st.tuples(st.integers(1, 5_000_000), st.floats(0, 1)), min_size=1, max_size=40
    ),
    st.sampled_from([1, 5, 25, 100]),
)
def test_buckets_hold_every_gradient_once(parts, cap_mib):
    ready = sorted(share for _, share in parts)
    gradients = tuple(
        GradientPart(elements=count, ready_share=ready_share)
        for (count, _), ready_share in zip(parts, ready, strict=True)
    )
    bucket_list = step_model.buckets(gradients, cap_mib * MIB)
    assert sum(bucket.elements for bucket in bucket_list) == sum(
        count for count, _ in parts
    )
    leaving = [bucket.ready_share for bucket in bucket_list]
    assert leaving == sorted(leaving)
    assert leaving[-1] == ready[-1]


def test_only_default_buckets_begin_small():
    # Only default buckets begin with a small one.
    gradients = tuple(
        GradientPart(elements=MIB // 4, ready_share=number / 40)
        for number in range(1, 41)
    )
    assert [
        step_model.buckets(gradients, cap_mib * MIB)[0].elements * 4 / MIB
        for cap_mib in (25, 10)
    ] == [1, 10]


def test_backward_hides_all_but_last_bucket():
    # 4 MB each at 1 GB/s and 2 nodes: 4 ms; backward 200 ms. The first part is under
    # way long before the end.
    hidden = step(over=network(2), bucket_cap_bytes=MIB)
    assert [hidden.exposed_s, hidden.step_s] == pytest.approx([0.004, 0.304])
    # Forward, half of backward, and both.
    assert step(bucket_cap_bytes=MIB).step_s == pytest.approx(0.1 + 0.1 + 2.0)


def test_accumulation_hides_in_last_micro_batch():
    once = step(1)
    thrice = step(3)
    assert thrice.exposed_s == pytest.approx(once.exposed_s)
    assert thrice.step_s == pytest.approx(once.step_s + 0.6)


def test_sharded_weights_travel_in_every_micro_batch():
    over = network(4, ranks=2, within=replace(NIC, bytes_per_s=100e9))
    once, twice = (
        step(number, over=over, strategy="fsdp2").sync_s for number in (1, 2)
    )
    assert twice > 1.6 * once
    assert (
        step(2, over=over, strategy="fsdp2", shard_within_nodes=True).sync_s
        < 0.6 * twice
    )


def test_16_bits_halve_the_synchronisation():
    settings = ({}, {"gradient_dtype": "bf16"}, {"strategy": "zero1"})
    plain, narrow, zero = (
        step(
            over=network(4),
            rank_compute=replace(compute(), optimizer_step_s=0.08),
            **changes,
        )
        for changes in settings
    )
    assert narrow.sync_s == pytest.approx(plain.sync_s / 2)
    assert zero.optimizer_step_s == pytest.approx(plain.optimizer_step_s / 4)
    assert zero.exposed_s == pytest.approx(plain.exposed_s + 8e6 * 0.75 / 1e9)


def test_more_ranks_wait_longer():
    waits = [
        step(rank_compute=compute(jitter_share=0.02), over=network(nodes)).straggling_s
        for nodes in (1, 2, 64, 16_384)
    ]
    assert waits[0] == 0.0
    assert waits == sorted(set(waits))


def test_compute_slows_down_during_messages():
    over = network(2, between=replace(SLOW, bytes_per_s=40e6))
    time = step(
        rank_compute=compute(slowdown_share=0.1), over=over, bucket_cap_bytes=MIB
    )
    # A tenth of the 0.1 s under which the first part travels.
    assert time.slowdown_s == pytest.approx(0.01)
    largest = [step_model.expected_largest(ranks) for ranks in (2, 10, 100)]
    assert largest == pytest.approx([0.564, 1.539, 2.508], rel=1e-3)


@given(
    st.integers(1, 8),
    st.integers(1, 6),
    st.integers(2, 200),
    st.sampled_from(["ddp", "zero1", "fsdp2"]),
)
def test_nothing_beats_the_bound(micro_batch_size, micro_batches, nodes, strategy):
    rank_compute = compute()
    sync = GradientSync(strategy=strategy)
    over = network(nodes)
    bound_s = micro_batches * rank_compute.forward_backward_s(micro_batch_size)
    if strategy != "fsdp2":
        bound_s = (
            step_model.hidden_bound_s(
                rank_compute, micro_batch_size, micro_batches, sync, over
            )
            - 1e-9
        )
    assert (
        step_model.step_time(
            rank_compute, micro_batch_size, micro_batches, sync, over
        ).step_s
        >= bound_s
    )


def test_merges_small_gradients():
    many = [(1000 + number % 7, number / 500) for number in range(1, 500)] + [
        (10_000_000, 1.0)
    ]
    gradients = [
        GradientPart(elements=count, ready_share=share) for count, share in many
    ]
    *small, last = step_model.merged(
        gradients, step_model.LEAST_PART_ELEMENTS, step_model.LEAST_PART_ELEMENTS
    )
    assert sum(part.elements for part in (*small, last)) == sum(
        count for count, _ in many
    )
    # Finer than DDP's first bucket.
    assert all(2**17 <= part.elements < 2**17 + 1007 for part in small)
    assert last.elements > 10_000_000
    assert last.ready_share == 1.0


def test_counts_time_beyond_the_links():
    over = network(2, ranks=2, within=NIC)
    times = [
        (size, 1.5 * step_model.all_reduce_s(size, over))
        for size in (2**12, 2**20, 2**24)
    ]
    factor = step_model.all_reduce_factor(times, over)
    assert factor == pytest.approx(1.5)
    assert step_model.all_reduce_s(
        2**20, replace(over, all_reduce_factor=factor)
    ) == pytest.approx(times[1][1])
    assert step_model.all_reduce_factor(times, replace(over, ranks_per_node=1)) == 1.0
