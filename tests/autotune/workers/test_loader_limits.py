"""Limits of DataLoader workers by CPUs, memory and shared memory."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import ExceedsMemory
from autotune.workers.decide.loader_limits import (
    USABLE_SHARE,
    WORKER_BYTES,
    LoaderLimits,
    batch_bytes,
)
from testbed.fakes import FakeHost

MIB = 2**20
HOST = replace(
    FakeHost().facts([Path()]),
    cpus_online=8,
    cpus_affinity=8,
    cpus_quota=None,
    cpus_slurm=None,
    ram_available_bytes=2**36,
    shm_free_bytes=2**34,
)
LIMITS = LoaderLimits(host=HOST, local_ranks=1, batch_bytes=MIB, prefetch_factor=2)


def with_host(**facts) -> LoaderLimits:
    return replace(LIMITS, host=replace(HOST, **facts))


def ram_for(workers: float) -> int:
    """Return the free memory of which these workers take the usable part."""
    return round(workers * (WORKER_BYTES + 2 * MIB) / USABLE_SHARE)


@pytest.mark.parametrize(
    "facts",
    [{"cpus_slurm": 3}, {"cpus_quota": 3.5}, {"cpus_affinity": 3}],
    ids=["SLURM", "quota", "affinity"],
)
def test_available_cpus_limit_workers(facts):
    max_workers, because = with_host(**facts).max_workers()
    assert max_workers == 3
    assert "3 available CPU cores" in because


def test_free_memory_limits_workers():
    max_workers, because = with_host(ram_available_bytes=ram_for(3.5)).max_workers()
    assert max_workers == 3
    assert "8 DataLoader workers on each of 1 ranks need about " in because
    assert "(assumed), but only " in because


def test_hardly_any_memory_allows_no_workers():
    max_workers, because = with_host(ram_available_bytes=MIB).max_workers()
    assert max_workers == 0
    assert "8 DataLoader workers" in because


def test_shared_memory_limits_workers():
    max_workers, because = with_host(shm_free_bytes=16 * MIB).max_workers()
    assert max_workers == 4
    assert "of /dev/shm, but only 16 MiB are free" in because


def test_unknown_shared_memory_limits_nothing():
    max_workers, because = with_host(shm_free_bytes=None).max_workers()
    assert max_workers == 8
    assert "8 available CPU cores" in because


@pytest.mark.parametrize(
    ("ranks", "workers", "words"),
    [
        (1, 8, "1 local rank"),
        (2, 4, "2 local ranks"),
        (3, 2, "3 local ranks"),
        (8, 1, "8 local ranks"),
        # Each may have one.
        (16, 1, "16 local ranks"),
    ],
)
def test_ranks_share_the_cpus(ranks, workers, words):
    limits = replace(LIMITS, local_ranks=ranks)
    assert limits.cpus_per_rank == workers
    assert limits.max_workers() == (workers, f"8 available CPU cores, {words}")


def test_measured_worker_replaces_the_assumed_one():
    limits = with_host(ram_available_bytes=4 * 2**30)
    assert limits.max_workers()[0] == 8
    assert limits.largest_fitting(8, worker_bytes=2**30) == 3
    assert "(measured)" in limits.shortage(8, worker_bytes=2**30)


def test_requested_workers_may_exceed_cpus():
    limits = replace(LIMITS, requested_workers=12, local_ranks=2)
    assert limits.max_workers() == (12, "--max-workers")
    assert (
        limits.warning()
        == "--max-workers 12 exceeds the 4 CPU cores of each of 2 ranks: workers will"
        " compete for them"
    )


@pytest.mark.parametrize("requested", [None, 0, 3, 8])
def test_no_warning_within_cpus(requested):
    assert replace(LIMITS, requested_workers=requested).warning() is None


@pytest.mark.parametrize(
    "shortage",
    [{"ram_available_bytes": ram_for(3.5)}, {"shm_free_bytes": 10 * MIB}],
    ids=["memory", "shared memory"],
)
def test_rejects_requested_workers_beyond_memory(shortage):
    limits = replace(with_host(**shortage), requested_workers=6)
    fitting, _ = with_host(**shortage).max_workers()
    with pytest.raises(ExceedsMemory, match="6 DataLoader workers") as caught:
        limits.max_workers()
    assert f"--max-workers {fitting}" in caught.value.next_step
    fewer = replace(limits, requested_workers=fitting)
    assert fewer.max_workers() == (fitting, "--max-workers")


@given(
    st.integers(1, 64),
    st.integers(1, 8),
    st.integers(0, 2**40),
    st.integers(0, 2**38),
    st.integers(1, 2**28),
    st.integers(1, 8),
)
def test_largest_limit_fits(cpus, ranks, ram_bytes, shm_bytes, size_bytes, prefetch):
    host = replace(
        HOST,
        cpus_online=cpus,
        cpus_affinity=cpus,
        ram_available_bytes=ram_bytes,
        shm_free_bytes=shm_bytes,
    )
    limits = LoaderLimits(
        host=host, local_ranks=ranks, batch_bytes=size_bytes, prefetch_factor=prefetch
    )
    workers, _ = limits.max_workers()
    assert 0 <= workers <= limits.cpus_per_rank
    if workers:
        assert limits.shortage(workers) is None
        needed_bytes = ranks * workers * (WORKER_BYTES + prefetch * size_bytes)
        assert needed_bytes <= USABLE_SHARE * ram_bytes
        shared_bytes = ranks * workers * (prefetch + 1) * size_bytes
        assert shared_bytes <= USABLE_SHARE * shm_bytes
    # One more does not fit, or has no CPU.
    assert workers == limits.cpus_per_rank or limits.shortage(workers + 1) is not None


def test_batch_holds_ids_masked_tokens_boundaries():
    assert batch_bytes(16, 128, 2, 0.0, 1.0) == 16 * 128 * 2 + 16 * 8
    assert batch_bytes(16, 128, 2, 0.5, 1.0) == 16 * 128 * 2 + 1024 * 6 + 16 * 8
    assert batch_bytes(16, 128, 4, 0.0, 10.0) == 16 * 128 * 4 + 160 * 8
