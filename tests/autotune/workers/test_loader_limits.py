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
"""Limits of one rank on eight CPUs, with memory for all workers."""


def with_host(**facts) -> LoaderLimits:
    """Return the limits on a machine that differs from ``HOST`` in some facts."""
    return replace(LIMITS, host=replace(HOST, **facts))


def ram_for(workers: float) -> int:
    """Return the free memory of which these workers take the usable part."""
    return round(workers * (WORKER_BYTES + 2 * MIB) / USABLE_SHARE)


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param({"cpus_slurm": 3}, id="SLURM"),
        pytest.param({"cpus_quota": 3.5}, id="quota"),
        pytest.param({"cpus_affinity": 3}, id="affinity"),
    ],
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
    # A worker takes 3 MiB: two micro-batches that are prefetched, and one that it
    # prepares. Four take 12 MiB, and five more than 90 % of 16 MiB.
    assert max_workers == 4
    assert "of /dev/shm, but only 16 MiB are free" in because


def test_unknown_shared_memory_limits_nothing():
    max_workers, because = with_host(shm_free_bytes=None).max_workers()
    assert max_workers == 8
    assert "8 available CPU cores" in because


@pytest.mark.parametrize(
    ("local_ranks", "workers", "because"),
    [
        pytest.param(1, 8, "8 available CPU cores, 1 local rank", id="one"),
        pytest.param(2, 4, "8 available CPU cores, 2 local ranks", id="two"),
        pytest.param(3, 2, "8 available CPU cores, 3 local ranks", id="a remainder"),
        pytest.param(8, 1, "8 available CPU cores, 8 local ranks", id="a CPU each"),
        pytest.param(16, 1, "8 available CPU cores, 16 local ranks", id="half a CPU"),
    ],
)
def test_ranks_share_the_cpus(local_ranks, workers, because):
    limits = replace(LIMITS, local_ranks=local_ranks)
    assert limits.cpus_per_rank == workers
    assert limits.max_workers() == (workers, because)


def test_measured_worker_replaces_the_assumed_one():
    limits = with_host(ram_available_bytes=4 * 2**30)
    max_workers, _ = limits.max_workers()
    assert max_workers == 8
    # Of 4 GiB, 90 % may be used: three workers of 1 GiB fit.
    assert limits.largest_fitting(8, worker_bytes=2**30) == 3
    assert "(measured)" in limits.shortage(8, worker_bytes=2**30)


@pytest.fixture
def beyond_cpus():
    """Return the limits of ranks with four CPUs each, and 12 workers requested."""
    return replace(LIMITS, requested_workers=12, local_ranks=2)


def test_requested_workers_may_exceed_cpus(beyond_cpus):
    assert beyond_cpus.max_workers() == (12, "--max-workers")


def test_warns_of_more_workers_than_cpus(beyond_cpus):
    assert (
        beyond_cpus.warning()
        == "--max-workers 12 exceeds the 4 CPU cores of each of 2 ranks: workers will"
        " compete for them"
    )


@pytest.mark.parametrize("requested", [None, 0, 3, 8])
def test_no_warning_within_cpus(requested):
    assert replace(LIMITS, requested_workers=requested).warning() is None


@pytest.mark.parametrize(
    "shortage",
    [
        pytest.param({"ram_available_bytes": ram_for(3.5)}, id="memory"),
        pytest.param({"shm_free_bytes": 10 * MIB}, id="shared memory"),
    ],
)
def test_rejects_requested_workers_beyond_memory(shortage):
    limits = replace(with_host(**shortage), requested_workers=6)
    with pytest.raises(ExceedsMemory, match="6 DataLoader workers") as caught:
        limits.max_workers()
    # Three fit: each takes 3 MiB of shared memory, of which 90 % may be used.
    assert "--max-workers 3" in caught.value.next_step
    fewer = replace(limits, requested_workers=3)
    assert fewer.max_workers() == (3, "--max-workers")


@given(
    cpus=st.integers(1, 64),
    ranks=st.integers(1, 8),
    ram_bytes=st.integers(0, 2**40),
    shm_bytes=st.integers(0, 2**38),
    batch_bytes=st.integers(1, 2**28),
    prefetch_factor=st.integers(1, 8),
)
def test_largest_limit_fits(
    cpus, ranks, ram_bytes, shm_bytes, batch_bytes, prefetch_factor
):
    host = replace(
        HOST,
        cpus_online=cpus,
        cpus_affinity=cpus,
        ram_available_bytes=ram_bytes,
        shm_free_bytes=shm_bytes,
    )
    limits = LoaderLimits(
        host=host,
        local_ranks=ranks,
        batch_bytes=batch_bytes,
        prefetch_factor=prefetch_factor,
    )
    workers, _ = limits.max_workers()
    assert 0 <= workers <= limits.cpus_per_rank
    assert limits.shortage(workers) is None
    worker_bytes = WORKER_BYTES + prefetch_factor * batch_bytes
    assert ranks * workers * worker_bytes <= USABLE_SHARE * ram_bytes
    shared_bytes = ranks * workers * (prefetch_factor + 1) * batch_bytes
    assert shared_bytes <= USABLE_SHARE * shm_bytes
    # One more does not fit, or has no CPU.
    assert workers == limits.cpus_per_rank or limits.shortage(workers + 1) is not None
