"""Probes of your own step on several ranks: real processes, DDP and FSDP2 over gloo."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.errors import BadInput
from autotune.trials.outcomes import Measured, OutOfMemory

pytestmark = pytest.mark.system

RANKS = 2
MEMORY_BYTES = 240_000_000
STORE_BYTES = 2**23
"""Stack of the thread that serves torch's ``TCPStore``."""
PROGRAM = Path(__file__).with_name("rank_program.py")


def trials_by_size(runner):
    """Return the outcome of each size under the budget."""
    return {
        finished.trial.measured["size"]: finished.outcome
        for finished in runner.finished
        if finished.trial.measured["memory_budget_bytes"] == MEMORY_BYTES
    }


@pytest.mark.parametrize("name", ["data_parallel", "sharded"])
def test_finds_largest_size_of_all_ranks(own_code, name):
    probe, runner = own_code.probe(name, MEMORY_BYTES, ranks=RANKS)
    assert probe.local_ranks == RANKS
    assert probe.infeasible_min == probe.feasible_max + 1
    outcomes = trials_by_size(runner)
    largest = outcomes[probe.feasible_max]
    assert isinstance(largest, Measured)
    assert largest.figures["optimizer_steps"] == 3
    # Samples of both ranks.
    assert largest.figures["units_per_step"] == RANKS * probe.feasible_max
    by_rank = largest.figures["peak_bytes_by_rank"]
    assert len(by_rank) == RANKS
    assert 0.97 * MEMORY_BYTES < max(by_rank) <= MEMORY_BYTES
    # The ranks do the same, and the first one serves the store of their addresses.
    assert by_rank[0] == pytest.approx(by_rank[1] + STORE_BYTES, rel=0.03)
    assert isinstance(outcomes[probe.infeasible_min], OutOfMemory)


def test_fullest_rank_limits_the_size(own_code):
    probe, runner = own_code.probe("lopsided", MEMORY_BYTES, ranks=RANKS)
    outcomes = trials_by_size(runner)
    assert outcomes[probe.infeasible_min].detail.startswith("rank 1 of 2: ")
    first, second = outcomes[probe.feasible_max].figures["peak_bytes_by_rank"]
    assert second > 1.4 * first
    assert second == probe.feasible_peak_bytes


def test_throughput_is_that_of_all_ranks(own_code):
    probe, _ = own_code.probe(
        "data_parallel",
        MEMORY_BYTES,
        ranks=RANKS,
        max_size=8,
        measures_throughput=True,
    )
    point = probe.curve[-1]
    assert point.size == 8
    assert point.units_per_s == pytest.approx(RANKS * 8 / point.step_s)


def test_failing_rank_is_named(own_code):
    with pytest.raises(BadInput, match="ZeroDivisionError"):
        own_code.probe("one_rank_raises", ranks=RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data_parallel", "sharded"])
def test_torchrun_has_the_same_limit(own_code, name):
    probe, _ = own_code.probe(name, MEMORY_BYTES, ranks=RANKS)
    # The memory that the allocators of a program have free at first is its own.
    assert _fits_under_torchrun(name, round(0.9 * probe.feasible_max))
    assert not _fits_under_torchrun(name, round(1.1 * probe.infeasible_min))


def _fits_under_torchrun(name, size):
    """Return whether steps of a size fit on both ranks of a program."""
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={RANKS}",
            PROGRAM,
            name,
            str(size),
            str(MEMORY_BYTES),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=PROGRAM.parent,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "MALLOC_ARENA_MAX": "1"},
    )
    if process.returncode:
        assert "can't allocate memory" in process.stderr, process.stderr[-3000:]
    return process.returncode == 0
