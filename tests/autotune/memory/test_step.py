"""Figures of the ``step`` job: of one rank, and of two over real gloo."""

import functools
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from autotune.memory.jobs.step import figures_of
from autotune.memory.values import StepRequest
from autotune.subjects.subject import StepFacts
from autotune.trials.jobs.budget import enforce
from autotune.trials.jobs.rank_group import RankGroup, join_rank_group
from trainer.formats.errors import BadConfig

CPU = torch.device("cpu")
ALONE = RankGroup(rank=0, world_size=1, device=CPU)
SLOW_S = 0.2
"""Seconds that a slow step of one rank takes; others take none."""
BUDGETS = [
    SimpleNamespace(peak=100, non_pytorch=7, step_peak=50, kept=3),
    SimpleNamespace(peak=300, non_pytorch=9, step_peak=40, kept=5),
]
"""Bytes that the ranks report."""


class FixedBudget:
    """Budget whose figures are fixed.

    Args:
        figures: Bytes to report.
    """

    host_peak_bytes = 0

    def __init__(self, figures):
        self._figures = figures
        self.non_pytorch_bytes = figures.non_pytorch

    def peak_bytes(self):
        return self._figures.peak

    def take_step_peak(self):
        return self._figures.step_peak

    def kept_bytes(self):
        return self._figures.kept

    def check(self):
        """Do nothing, as there is no limit."""


def request_of(**changes):
    """Return a request for one step of warm-up and two timed ones."""
    fields = {
        "function": "module:build",
        "arguments": {"micro_batch_size": 4},
        "size": 4,
        "units_per_size": 10.0,
        "source_sha256": "",
        "device": "cpu",
        "memory_budget_bytes": None,
        "warmup_steps": 1,
        "timed_steps": 2,
    }
    return StepRequest(**fields | changes)


def step_with(facts=None, slow=()):
    """Return a step that uses no optimizer.

    Args:
        facts: What it knows of itself.
        slow: Numbers of the calls that take ``SLOW_S``.
    """
    calls = []

    def step():
        if len(calls) in slow:
            time.sleep(SLOW_S)
        calls.append(0)

    step.autotune_facts = facts or StepFacts()
    return step


def figures(build, group=ALONE, budget=None, **changes):
    """Return the figures of a function's steps on one rank."""
    request = request_of(**changes)
    if budget is None:
        budget = enforce(None, CPU, None)
    return figures_of(request, build, dict(request.arguments), budget, group)


@pytest.fixture
def on_two_ranks(tmp_path):
    """Return a function that calls another one on two ranks, which are threads.

    It gets the rank's group, and the results are in the order of ranks.
    """
    # Imports of one thread would change the modules that the other one lists.
    figures(step_with)

    def run_rank(function, rank):
        environment = {"RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        local = {"environment": environment, "rendezvous": str(tmp_path / "ranks")}
        return function(join_rank_group("cpu", local))

    def run(function):
        with ThreadPoolExecutor(2) as threads:
            futures = [threads.submit(run_rank, function, rank) for rank in (0, 1)]
            return [future.result(timeout=60) for future in futures]

    return run


def test_figures_are_those_of_the_worst_rank(on_two_ranks):
    def figures_of_rank(group):
        facts = StepFacts(model_flops=[7.0, 8.0][group.rank], loss=lambda: 1.5)
        # The first timed step is slower on the first rank, the second on the other.
        step = step_with(facts, slow=[group.rank + 1])
        budget = FixedBudget(BUDGETS[group.rank])
        return figures(lambda: step, group, budget, local_ranks=2)

    first, second = on_two_ranks(figures_of_rank)
    assert first == second
    assert all(step_s >= SLOW_S for step_s in first.pop("step_s"))
    assert first.pop("host_peak_bytes") > 0
    assert first == {
        "steps": 3,
        "optimizer_steps": 0,
        "units_per_step": 2 * 4 * 10.0,
        "peak_bytes": 300,
        "peak_bytes_by_rank": [100, 300],
        "non_pytorch_bytes": 9,
        "step_peak_bytes": [50, 50, 50],
        "kept_bytes": [5, 5, 5],
        "gradient_bytes": 0,
        "trains": False,
        "local_ranks": 2,
        "loss": 1.5,
        # The sum, as all ranks compute a step together.
        "model_flops_per_step": 15.0,
        "imported": [],
        "contents": None,
        "settings": {},
    }


def test_rejects_different_numbers_of_steps(on_two_ranks):
    def figures_of_rank(group):
        with pytest.raises(ValueError, match=r"numbers of steps: \[3, 4\]"):
            figures(step_with, group, timed_steps=2 + group.rank)

    on_two_ranks(figures_of_rank)


def test_ranks_leave_together(on_two_ranks):
    has_left = threading.Event()

    def leave(group):
        if group.rank == 1:
            time.sleep(SLOW_S)
            assert not has_left.is_set()
        figures(step_with, group)
        has_left.set()

    on_two_ranks(leave)


def test_step_times_leave_out_warm_up():
    step = step_with(slow=[0])
    both = figures(lambda: step)
    assert len(both["step_s"]) == 2
    assert max(both["step_s"]) < SLOW_S
    assert both["steps"] == 3


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_rejects_a_loss_that_is_not_finite(loss):
    step = step_with(StepFacts(loss=lambda: loss))
    with pytest.raises(ValueError, match=f"the loss is {loss}"):
        figures(lambda: step)


def test_units_count_the_micro_batches_of_facts():
    step = step_with(StepFacts(micro_batches=3))
    assert figures(lambda: step)["units_per_step"] == 3 * 4 * 10.0


def training_step(accumulated=1):
    """Return a step of a layer, of which several calls take an optimizer step."""
    layer = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(layer.parameters())
    calls = []

    def step():
        layer(torch.ones(4, 8)).sum().backward()
        calls.append(0)
        if len(calls) % accumulated == 0:
            optimizer.step()
            optimizer.zero_grad()

    return step


def test_units_count_accumulated_calls():
    accumulated = figures(functools.partial(training_step, accumulated=4))
    assert accumulated["units_per_step"] == 4 * 4 * 10.0
    assert accumulated["optimizer_steps"] == 3


def test_training_function_is_stopped():
    steps = []

    def train(micro_batch_size):
        step = training_step()
        while True:
            step()
            steps.append(micro_batch_size)

    trained = figures(train)
    assert trained["trains"]
    assert trained["steps"] == trained["optimizer_steps"] == 3
    # The third one was interrupted at its end.
    assert steps == [4, 4]


def test_training_function_may_end_by_itself():
    def train():
        step = training_step()
        for _ in range(3):
            step()

    trained = figures(train, timed_steps=9)
    assert trained["trains"]
    assert trained["steps"] == 3


def test_step_ends_after_its_facts_are_read():
    calls = []
    facts = StepFacts(
        loss=lambda: calls.append("loss") or 1.0, end=lambda: calls.append("end")
    )
    figures(lambda: step_with(facts))
    assert calls == ["loss", "end"]


def test_cause_out_of_memory_is_raised():
    def step():
        try:
            raise torch.OutOfMemoryError("no memory")
        except torch.OutOfMemoryError as error:
            raise ValueError("the batch failed") from error

    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        figures(lambda: step)


def test_exit_of_a_step_is_an_error():
    def step():
        raise SystemExit(3)

    with pytest.raises(BadConfig, match=r"ended its process: sys.exit\(3\)"):
        figures(lambda: step)
