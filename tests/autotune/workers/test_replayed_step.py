"""Replayed step: its pace on a simulated host, and other threads beside it."""

import itertools
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.trials.jobs.rank_group import RankGroup
from autotune.workers.jobs.consumers import ReplayedStep

STEP_S = 1.0
"""Time of a full micro-batch on the simulated GPU."""
FAST_LOAD_S = 0.5
"""Time that a fast loader takes for a batch: half as long as a step."""
SLOW_LOAD_S = 2.5
"""Time that a slow loader takes for a batch: 2.5 times as long as a step."""
COMPUTE_S = 0.25
"""Time that the simulated host computes between two looks at its clock. All simulated
times are multiples of it, and so their sums are exact."""
TIMED_STEPS = 6
"""Steps over which the pace is averaged; more than one shows that it is steady."""

REAL_STEP_S = 0.5
"""Time of a step by the real clock. Another thread needs the GIL once in that time. A
matmul of 2 * 96**3 FLOPs takes 0.2 ms at 10 GFLOP/s, so that even a core ten times
slower releases the GIL 250 times."""

ALONE = RankGroup(rank=0, world_size=1, device=torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class SizedBatch:
    """Batch for a replayed step."""

    share: float = 1.0
    """Time of the batch as a share of the time of a full micro-batch."""


class SimulatedHost:
    """Host whose clock advances only while the host loads a batch or computes."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def compute(self) -> None:
        self._now_s += COMPUTE_S

    def load_batches(self, load_s: float) -> Iterator[SizedBatch]:
        """Yield full batches without end, each of which takes a time to load."""
        while True:
            self._now_s += load_s
            yield SizedBatch()


def replay(
    host: SimulatedHost,
    micro_batches: int = 1,
    ranks: Any = ALONE,
    *,
    host_runs_ahead: bool = True,
) -> ReplayedStep:
    """Return a replayed step by the clock of a simulated host."""
    return ReplayedStep(
        STEP_S,
        share=lambda batch: batch.share,
        micro_batches=micro_batches,
        ranks=ranks,
        host_runs_ahead=host_runs_ahead,
        now_s=host.now_s,
        compute=host.compute,
    )


def measure_pace(host: SimulatedHost, load_s: float) -> tuple[float, float]:
    """Return the time of a step and its wait for data, ``(step_s, waited_s)``.

    Both are means over steps of one batch. A first step, after which the GPU has work,
    is left out of both.

    Args:
        host: Host that takes the steps.
        load_s: Time that the loader takes for a batch.
    """
    consumer = replay(host)
    loader = host.load_batches(load_s)
    consumer.step(loader)
    # Resets the timer of waits.
    consumer.wait.take_waited_s()
    began_s = host.now_s()
    for _ in range(TIMED_STEPS):
        consumer.step(loader)
    step_s = (host.now_s() - began_s) / TIMED_STEPS
    waited_s = consumer.wait.take_waited_s() / TIMED_STEPS
    return step_s, waited_s


@pytest.fixture
def host() -> SimulatedHost:
    return SimulatedHost()


def test_replayed_step_takes_its_time(host):
    assert measure_pace(host, load_s=0.0) == (STEP_S, 0.0)


def test_fast_loader_hides_behind_the_step(host):
    # One after the other, loading and step would take 1.5 times as long as a step.
    assert measure_pace(host, FAST_LOAD_S) == (1.0 * STEP_S, 0.0)


def test_slow_loader_sets_the_pace(host):
    # One after the other, loading and step would take 3.5 times as long as a step. Of
    # the 2.5 times that loading takes, the GPU computes once and then waits.
    assert measure_pace(host, SLOW_LOAD_S) == (2.5 * STEP_S, 1.5 * STEP_S)


def test_idle_gpu_waits_for_the_whole_load(host):
    consumer = replay(host)
    loader = host.load_batches(FAST_LOAD_S)
    consumer.step(loader)
    consumer.finish()
    consumer.step(loader)
    # The GPU has no work before the first batch, and none again once it is computed.
    assert consumer.wait.take_waited_s() == 2 * FAST_LOAD_S


def test_step_returns_when_last_micro_batch_begins(host):
    consumer = replay(host, micro_batches=3)
    consumer.step(host.load_batches(0.0))
    # The first two micro-batches have been computed.
    assert host.now_s() == 2 * STEP_S


def test_host_that_reads_the_loss_waits_for_it(host):
    consumer = replay(host, micro_batches=3, host_runs_ahead=False)
    consumer.step(host.load_batches(0.0))
    assert host.now_s() == 3 * STEP_S


def test_finish_waits_for_the_last_micro_batch(host):
    consumer = replay(host, micro_batches=3)
    consumer.step(host.load_batches(0.0))
    consumer.finish()
    assert host.now_s() == 3 * STEP_S


def test_batches_take_their_shares_of_time(host):
    consumer = replay(host, micro_batches=3)
    consumer.step(iter([SizedBatch(1.0), SizedBatch(0.25), SizedBatch(0.5)]))
    consumer.finish()
    assert host.now_s() == (1.0 + 0.25 + 0.5) * STEP_S


def test_micro_batch_begins_when_all_ranks_are_ready(host):
    others_ready_s = 3 * STEP_S
    ranks = SimpleNamespace(
        all_reduce_max=lambda ready_s: [max(ready_s, others_ready_s)]
    )
    replay(host, ranks=ranks).step(host.load_batches(FAST_LOAD_S))
    assert host.now_s() == others_ready_s


def test_replayed_step_returns_its_batches(host):
    batches = [SizedBatch(), SizedBatch()]
    loader = iter(batches)
    consumer = replay(host)
    for batch in batches:
        (returned,) = consumer.step(loader)
        assert returned is batch


@pytest.fixture
def real_step():
    """Yield a step by the real clock, and then restore torch's number of threads.

    The step sets that number to 1.
    """
    threads = torch.get_num_threads()
    yield ReplayedStep(
        REAL_STEP_S, share=lambda batch: batch.share, micro_batches=1, ranks=ALONE
    )
    torch.set_num_threads(threads)


@pytest.fixture
def unforced_gil():
    """Let each thread keep the GIL until it releases it.

    By default, a waiting thread gets the GIL after 5 ms, even from a loop that does not
    release it.
    """
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(3600.0)  # longer than any test
    yield
    sys.setswitchinterval(interval_s)


def test_real_step_takes_at_least_its_time(real_step):
    began_s = time.perf_counter()
    real_step.step(itertools.repeat(SizedBatch()))
    real_step.finish()
    # The step ends by the same clock, and so never early.
    assert time.perf_counter() - began_s >= REAL_STEP_S


@pytest.mark.usefixtures("unforced_gil")
def test_replayed_step_lets_other_threads_run(real_step):
    step_began = threading.Event()
    thread_ran = threading.Event()

    def run_during_step():
        step_began.wait()
        thread_ran.set()

    thread = threading.Thread(target=run_during_step)
    thread.start()
    try:
        real_step.step(itertools.repeat(SizedBatch()))
        step_began.set()
        real_step.finish()
        ran_during_step = thread_ran.is_set()
    finally:
        step_began.set()
        thread.join()
    assert ran_during_step
