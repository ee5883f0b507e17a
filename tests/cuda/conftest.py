"""Pretended GPUs for tests; ``testbed/nullgpu/README.md`` explains what they prove."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testbed.datasets import write_dataset
from testbed.nullgpu.environment import Environment, find
from testbed.nullgpu.machine import Machine


@pytest.fixture(scope="session")
def cuda_environment() -> Environment:
    version = os.environ.get("NULLGPU_TORCH", "newest")
    environment = find(version)
    if environment:
        return environment
    reason = f"the {version} CUDA environment is not made; next: make test-cuda"
    if os.environ.get("NULLGPU_REQUIRED"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def null_gpus(cuda_environment, tmp_path_factory) -> Callable[..., Machine]:
    """Return a function that makes a machine with pretended GPUs, for several tests.

    Its options are those of ``Machine``.
    """

    def make(*, state: Path | None = None, **options) -> Machine:
        folder = state or tmp_path_factory.mktemp("machine")
        return Machine(environment=cuda_environment, folder=folder, **options)

    return make


@pytest.fixture
def null_gpu(null_gpus) -> Iterator[Callable[..., Machine]]:
    """Return a function that makes a machine with pretended GPUs.

    All faults that are planned for it must occur in the test.
    """
    machines: list[Machine] = []

    def make(**options) -> Machine:
        machines.append(null_gpus(**options))
        return machines[-1]

    yield make
    missed_faults = [fault for machine in machines for fault in machine.missed()]
    assert not missed_faults, f"planned faults that did not occur: {missed_faults}"


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """Four hundred samples of random tokens."""
    rng = random.Random(0)
    samples = []
    for _ in range(400):
        length = rng.randrange(8, 60)
        samples.append([rng.randrange(5, 128) for _ in range(length)])
    directory = tmp_path_factory.mktemp("corpus") / "data"
    return write_dataset(directory, samples, vocab_size=128)
