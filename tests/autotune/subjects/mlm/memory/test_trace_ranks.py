"""Traced memory of a rank that shares its training with others, by DDP or FSDP2."""

import functools
from collections import Counter
from dataclasses import replace
from itertools import accumulate

import pytest

from autotune.memory.values import Term, Trace
from tests.autotune.subjects.mlm.memory.traced_steps import (
    BASE,
    GPU,
    SHAPE,
    between_steps,
    changes_of,
    traced,
    weights_bytes,
)

TWO_RANKS = {"ranks": 2, "global_batch_size": 2 * BASE.rows}
"""Changes by which each of two ranks takes the steps of one."""


@pytest.fixture(scope="module")
def terms_of_one_rank() -> Counter[str]:
    """Bytes in use between two steps of a single rank, by term."""
    return between_steps(traced(BASE))


def test_ddp_keeps_gradient_buckets_between_steps(terms_of_one_rank):
    one_rank = terms_of_one_rank
    two_ranks = between_steps(traced(BASE, **TWO_RANKS))
    assert one_rank[Term.GRADIENTS] == 0
    assert two_ranks[Term.GRADIENTS] == pytest.approx(
        weights_bytes(one_rank), rel=0.001
    )
    del two_ranks[Term.GRADIENTS]
    assert two_ranks == one_rank


def max_gradient_bytes(*, as_views: bool) -> int:
    """Return the most bytes of gradients in DDP, which may be views of its buckets."""
    trace = traced(BASE, **TWO_RANKS, parallel={"gradient_as_bucket_view": as_views})
    gradients_bytes = (
        size_bytes for term, size_bytes in changes_of(trace) if term == Term.GRADIENTS
    )
    return max(accumulate(gradients_bytes))


def test_gradients_without_bucket_views_exist_twice(terms_of_one_rank):
    once = weights_bytes(terms_of_one_rank)
    assert max_gradient_bytes(as_views=False) == pytest.approx(2 * once, rel=0.01)


def test_gradients_with_bucket_views_exist_once(terms_of_one_rank):
    once = weights_bytes(terms_of_one_rank)
    # A gradient exists beside its bucket until it becomes a view; the largest one, of
    # the embeddings, is less than half of all.
    assert once < max_gradient_bytes(as_views=True) < 1.5 * once


@functools.cache
def trace_fsdp2(ranks: int) -> Trace:
    """Return the trace of one of several ranks that share the state by FSDP2."""
    return traced(
        BASE,
        ranks=ranks,
        global_batch_size=ranks * BASE.rows,
        **GPU,
        parallel={"strategy": "fsdp2"},
    )


@pytest.mark.parametrize("term", [Term.PARAMETERS, Term.OPTIMIZER])
def test_fsdp2_rank_holds_half_of_the_state(term):
    one_rank = between_steps(trace_fsdp2(1))
    two_ranks = between_steps(trace_fsdp2(2))
    # Shards are rounded up, and buffers and counts of steps are not sharded.
    assert two_ranks[term] == pytest.approx(one_rank[term] / 2, rel=0.02)


@pytest.mark.parametrize(
    ("ranks", "streams"),
    [
        pytest.param(1, {0}, id="one rank computes only"),
        pytest.param(2, {0, 1, 2}, id="two ranks also gather and reduce"),
    ],
)
def test_fsdp2_communicates_on_streams_of_its_own(ranks, streams):
    trace = trace_fsdp2(ranks)
    assert {allocation.stream for allocation in trace.allocations} == streams


def test_fsdp2_releases_blocks_of_communication():
    trace = trace_fsdp2(2)
    released = {-1 - event for event in trace.events if event < 0}
    communicated = {
        number
        for number, allocation in enumerate(trace.allocations)
        if allocation.stream != 0
    }
    assert communicated
    assert communicated <= released


@pytest.fixture(scope="module")
def trace_with_small_buckets():
    """Return the trace of a model whose gradients fill many buckets."""
    large = replace(
        BASE,
        vocab_size=8000,
        shape=SHAPE | {"num_hidden_layers": 6, "hidden_size": 128},
    )
    return traced(large, **TWO_RANKS, parallel={"bucket_cap_mib": 1})


def test_first_bucket_holds_all_gradients(trace_with_small_buckets):
    trace = trace_with_small_buckets
    gradients_bytes = [
        allocation.size_bytes
        for allocation in trace.allocations
        if allocation.term == Term.GRADIENTS
    ]
    all_gradients = weights_bytes(between_steps(trace))
    assert max(gradients_bytes) == pytest.approx(all_gradients, rel=0.01)
    # It is made before the first step, and so in the first half of the allocations.
    sizes_bytes = [allocation.size_bytes for allocation in trace.allocations]
    assert sizes_bytes.index(max(sizes_bytes)) < len(sizes_bytes) / 2


def test_smaller_buckets_replace_the_first(trace_with_small_buckets):
    between = between_steps(trace_with_small_buckets)
    # Kept beside the smaller buckets, the first one would double the gradients.
    assert between[Term.GRADIENTS] == pytest.approx(weights_bytes(between), rel=0.01)
