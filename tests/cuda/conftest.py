"""Pretended GPUs for tests; ``testbed/nullgpu/README.md`` says what they prove."""

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
    which = os.environ.get("NULLGPU_TORCH", "newest")
    if found := find(which):
        return found
    reason = f"the {which} CUDA environment is not made; next: make test-cuda"
    if os.environ.get("NULLGPU_REQUIRED"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def null_gpus(cuda_environment, tmp_path_factory) -> Callable[..., Machine]:
    """A function that sets up a machine with pretended GPUs, for several tests; see
    ``Machine``."""

    def make(*, state: Path | None = None, **options) -> Machine:
        folder = state or tmp_path_factory.mktemp("machine")
        return Machine(environment=cuda_environment, folder=folder, **options)

    return make


@pytest.fixture
def null_gpu(null_gpus) -> Iterator[Callable[..., Machine]]:
    """A function that sets up a machine with pretended GPUs, each of whose planned
    faults must occur."""
    machines: list[Machine] = []

    def make(**options) -> Machine:
        machines.append(null_gpus(**options))
        return machines[-1]

    yield make
    missed = [plan for machine in machines for plan in machine.missed()]
    assert not missed, f"faults that were planned and did not occur: {missed}"


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """Four hundred samples of random words."""
    draw = random.Random(0)
    samples = [
        [draw.randrange(5, 128) for _ in range(draw.randrange(8, 60))]
        for _ in range(400)
    ]
    return write_dataset(
        tmp_path_factory.mktemp("corpus") / "data", samples, vocab_size=128
    )
