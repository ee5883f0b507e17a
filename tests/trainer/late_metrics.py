"""Metrics that are read as late on a CPU as on a GPU."""

import pytest

from trainer.health import controller


def read_metrics_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let metrics of a step be read two steps later.

    The delay is private, as only the type of the device decides about it.
    """
    steps_behind = controller._STEPS_BEHIND
    monkeypatch.setitem(steps_behind, "cpu", steps_behind["cuda"])
