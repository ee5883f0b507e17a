"""What all tests share: a skip that CI does not accept, and small real datasets."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import hypothesis
import numpy as np
import pytest

from autotune.errors import MachineLacks
from testbed.browser import chromium
from testbed.datasets import write_dataset
from testbed.programs import TORCHAO

# What no set-up can give: a GPU where there is none (or its absence where there is
# one), and refusals to root.
ACCEPTED_SKIPS = (
    "needs an NVIDIA GPU",
    "this machine has the driver's library",
    "root may",
)

# Two files at a time end together where the longest come first.
LONGEST = (
    "test_quickstart.py",
    "test_typed.py",
    "test_train_faults.py",
    "test_data_faults.py",
    "test_chain.py",
    "test_gpu_check.py",
    "cuda/test_commands.py",
    "cuda/test_training.py",
)

# Machines are shared: what an example computes is tested, and how long it takes is not.
hypothesis.settings.register_profile("any machine", deadline=None, max_examples=50)
# Make soak.
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=400)
hypothesis.settings.load_profile("any machine")


@pytest.fixture
def torchao(monkeypatch):
    monkeypatch.syspath_prepend(TORCHAO)


def pytest_configure(config):
    """Tests that run beside others get a core each: threads of two processes that spin
    for one core cost most of it."""
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        cpus = sorted(os.sched_getaffinity(0))
        number = int(worker["workerid"].removeprefix("gw"))
        share = len(cpus) // worker["workercount"]
        os.sched_setaffinity(
            0, cpus[number * share : (number + 1) * share] or [cpus[number % len(cpus)]]
        )


def pytest_collection_modifyitems(items):
    items.sort(
        key=lambda item: [item.path.match(name) for name in LONGEST], reverse=True
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """In CI a skip is a failure: what is absent there was forgotten by whoever set the
    machine up."""
    report = (yield).get_result()
    if (
        os.environ.get("CI") == "true"
        and report.skipped
        and not hasattr(report, "wasxfail")
    ):
        reason = str(
            report.longrepr[2]
            if isinstance(report.longrepr, tuple)
            else report.longrepr
        )
        if not any(accepted in reason for accepted in ACCEPTED_SKIPS):
            report.outcome = "failed"
            report.longrepr = f"skipped, which CI does not accept: {reason}"


@pytest.fixture(scope="session")
def browser() -> None:
    try:
        chromium()
    except MachineLacks as error:
        pytest.skip(error.message)


@pytest.fixture
def make_dataset(tmp_path) -> Callable[..., Path]:
    return partial(write_dataset, tmp_path / "data")


@pytest.fixture(scope="session")
def patterned_dataset(tmp_path_factory) -> Path:
    """400 samples in which each word follows from the one before it, so that a model
    can learn something at once."""
    rng = np.random.default_rng(0)
    starts = [(int(rng.integers(5, 60)), int(rng.integers(8, 40))) for _ in range(400)]
    samples = [
        [5 + (start + step) % 60 for step in range(length)] for start, length in starts
    ]
    return write_dataset(
        tmp_path_factory.mktemp("patterned") / "data", samples, vocab_size=128
    )
