"""Fixtures of all tests: skips that CI accepts, and small real datasets."""

import errno
import gc
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import hypothesis
import numpy as np
import pytest

from autotune.errors import MachineLacks
from testbed.browser import chromium
from testbed.capabilities.table import covering_sample
from testbed.datasets import write_dataset
from testbed.programs import TORCHAO

# What no set-up can provide: a GPU on a machine without one, or its absence on a
# machine with one, and files that root may not read.
ACCEPTED_SKIPS = (
    "needs an NVIDIA GPU",
    "this machine has the driver's library",
    "root may",
    "no package index answers",
)

# Started first, so that the files that run at the same time end together.
LONGEST = (
    "test_quickstart.py",
    "test_typed_readme.py",
    "test_typed_data.py",
    "test_train_faults.py",
    "test_data_faults.py",
    "test_chain.py",
    "cuda/test_training.py",
    "cuda/test_commands.py",
    "cuda/test_own_code.py",
    "cuda/test_memory.py",
    "test_gpu_check.py",
)

# Machines are shared: what an example computes is tested, and how long it takes is not.
hypothesis.settings.register_profile("any machine", deadline=None, max_examples=50)
# Make soak.
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=400)
hypothesis.settings.load_profile("any machine")


@pytest.fixture
def deny_reading(monkeypatch) -> Callable[..., None]:
    """Let files of a name fail to open, by default for lack of permission.

    Mode bits would not do, as root may read everything.
    """

    def deny(name: str, error_number: int = errno.EACCES) -> None:
        def check(path: object) -> None:
            if Path(str(path)).name == name:
                raise OSError(error_number, os.strerror(error_number), str(path))

        path_open = Path.open
        os_open = os.open

        def checked_path_open(self, *arguments, **options):
            check(self)
            return path_open(self, *arguments, **options)

        def checked_os_open(path, *arguments, **options):
            check(path)
            return os_open(path, *arguments, **options)

        monkeypatch.setattr(Path, "open", checked_path_open)
        monkeypatch.setattr(os, "open", checked_os_open)

    return deny


@pytest.fixture
def torchao(monkeypatch):
    monkeypatch.syspath_prepend(TORCHAO)


def pytest_configure(config):
    """Keep tests that run beside others on one core.

    Threads of two processes that spin for one core would cost most of it.
    """
    # A shell starts programs in the background with SIGINT ignored, and their children
    # inherit that: tests of Ctrl-C would wait in vain.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        cpus = sorted(os.sched_getaffinity(0))
        number = int(worker["workerid"].removeprefix("gw"))
        share = len(cpus) // worker["workercount"]
        worker_cpus = cpus[number * share : (number + 1) * share]
        if not worker_cpus:
            worker_cpus = [cpus[number % len(cpus)]]
        os.sched_setaffinity(0, worker_cpus)


def pytest_report_header() -> list[str]:
    """Name the cells of the table of capabilities that run without ``make soak``."""
    return [
        f"capabilities on {device}: {', '.join(sorted(covering_sample(device)))}"
        for device in ("cpu", "cuda")
    ]


def pytest_collection_finish():
    """Exempt all tests and modules from garbage collection.

    Some trials in this process collect twice, which would take half a second each time.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    items.sort(
        key=lambda item: [item.path.match(name) for name in LONGEST], reverse=True
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Report a skip as a failure in CI.

    A requirement that is missing there was forgotten when the machine was set up.
    """
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
    """Return a dataset of 400 samples that a model learns quickly.

    In each sample every word follows from the one before it.
    """
    rng = np.random.default_rng(0)
    starts = [(int(rng.integers(5, 60)), int(rng.integers(8, 40))) for _ in range(400)]
    samples = [
        [5 + (start + step) % 60 for step in range(length)] for start, length in starts
    ]
    return write_dataset(
        tmp_path_factory.mktemp("patterned") / "data", samples, vocab_size=128
    )
