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
CPUS = {"cpus_slurm": 3, "cpus_quota": 3.5, "cpus_affinity": 3}
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
    """Free memory of which so many workers take the usable part."""
    return round(workers * (WORKER_BYTES + 2 * MIB) / USABLE_SHARE)


@pytest.mark.parametrize(
    ("facts", "most", "words"),
    [
        *(({name: count}, 3, "3 available CPU cores") for name, count in CPUS.items()),
        (
            {"ram_available_bytes": ram_for(3.5)},
            3,
            "8 DataLoader workers on each of 1 ranks need about ",
        ),
        ({"ram_available_bytes": ram_for(3.5)}, 3, "(assumed), but only "),
        ({"ram_available_bytes": MIB}, 0, "8 DataLoader workers"),
        ({"shm_free_bytes": 16 * MIB}, 4, "of /dev/shm, but only 16 MiB are free"),
        ({"shm_free_bytes": None}, 8, "8 available CPU cores"),
    ],
)
def test_cpus_that_others_have_and_memory_that_is_short_allow_fewer_and_that_is_said(
    facts, most, words
):
    found, because = with_host(**facts).most()
    assert found == most
    assert words in because


def test_ranks_share_the_allotted_cpus_and_a_measured_worker_takes_the_place_of_the_assumed_one():
    for ranks, most in ((1, 8), (2, 4), (3, 2), (8, 1), (16, 1)):
        limits = replace(LIMITS, local_ranks=ranks)
        assert limits.cpus_per_rank == most  # each may have one
        assert limits.most() == (
            most,
            f"8 available CPU cores, {ranks} local rank{'s' * (ranks > 1)}",
        )
    limits = with_host(ram_available_bytes=4 * 2**30)
    assert limits.most()[0] == 8
    assert limits.fitting(8, worker_bytes=2**30) == 3
    assert "(measured)" in limits.refusal(8, worker_bytes=2**30)


def test_what_the_user_asks_for_goes_beyond_the_cpus_with_a_warning_and_not_beyond_memory():
    asked = replace(LIMITS, asked=12, local_ranks=2)
    assert asked.most() == (12, "--max-workers")
    assert (
        asked.warning()
        == "--max-workers 12 exceeds the 4 CPU cores of each of 2 ranks: workers will"
        " compete for them"
    )
    assert [replace(LIMITS, asked=few).warning() for few in (None, 0, 3, 8)] == [
        None
    ] * 4
    for short in ({"ram_available_bytes": ram_for(3.5)}, {"shm_free_bytes": 10 * MIB}):
        limits, fitting = (
            replace(with_host(**short), asked=6),
            with_host(**short).most()[0],
        )
        with pytest.raises(ExceedsMemory, match="6 DataLoader workers") as refused:
            limits.most()
        assert f"--max-workers {fitting}" in refused.value.next_step
        assert replace(limits, asked=fitting).most() == (fitting, "--max-workers")


@given(
    st.integers(1, 64),
    st.integers(1, 8),
    st.integers(0, 2**40),
    st.integers(0, 2**38),
    st.integers(1, 2**28),
    st.integers(1, 8),
)
def test_the_most_fits_and_one_more_does_not_or_has_no_cpu(
    cpus, ranks, ram, shm, batch, prefetch
):
    host = replace(
        HOST,
        cpus_online=cpus,
        cpus_affinity=cpus,
        ram_available_bytes=ram,
        shm_free_bytes=shm,
    )
    limits = LoaderLimits(
        host=host, local_ranks=ranks, batch_bytes=batch, prefetch_factor=prefetch
    )
    most, _ = limits.most()
    assert 0 <= most <= limits.cpus_per_rank
    if most:
        assert limits.refusal(most) is None
        assert ranks * most * (WORKER_BYTES + prefetch * batch) <= USABLE_SHARE * ram
        assert ranks * most * (prefetch + 1) * batch <= USABLE_SHARE * shm
    assert most == limits.cpus_per_rank or limits.refusal(most + 1) is not None


def test_a_batch_is_its_ids_what_is_predicted_and_the_places_of_samples():
    assert batch_bytes(16, 128, 2, 0.0, 1.0) == 16 * 128 * 2 + 16 * 8
    assert batch_bytes(16, 128, 2, 0.5, 1.0) == 16 * 128 * 2 + 1024 * 6 + 16 * 8
    assert batch_bytes(16, 128, 4, 0.0, 10.0) == 16 * 128 * 4 + 160 * 8
