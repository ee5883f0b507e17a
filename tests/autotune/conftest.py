"""A trial server that is started once for all commands that tests run in their own process."""

from collections.abc import Iterator

import pytest

from autotune.measure.machine import ForkServerMachine
from autotune.search import plan_memory, prediction
from autotune.tuning import bench


class Borrowed:
    """A machine that is not closed by those who use it."""

    def __init__(self, machine: ForkServerMachine) -> None:
        self._machine = machine

    def __getattr__(self, name: str):
        return getattr(self._machine, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def close(self) -> None:
        """The next test uses it."""


@pytest.fixture(scope="session")
def started_server() -> Iterator[ForkServerMachine]:
    """One with torch loaded, which takes some seconds."""
    with pytest.MonkeyPatch.context() as patch, ForkServerMachine() as machine:
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        machine.start()
        yield machine


@pytest.fixture
def warm_server(monkeypatch, started_server) -> None:
    """Commands that are called in this process find their trial server started."""
    for room in (bench, plan_memory, prediction):
        monkeypatch.setattr(room, "ForkServerMachine", lambda: Borrowed(started_server))
