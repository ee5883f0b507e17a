"""Saves that are due, by steps, by time and on request, and how long they take."""

from types import SimpleNamespace

import pytest

from tests.trainer.checkpoint.saves import save
from trainer.checkpoint.manager import state_bytes


@pytest.fixture
def clock(monkeypatch):
    """Clock of managers and their writers, which tests move by its ``now_s``."""
    clock = SimpleNamespace(now_s=1000.0)
    clock.monotonic = clock.perf_counter = lambda: clock.now_s
    for module in ("manager", "async_writer"):
        monkeypatch.setattr(f"trainer.checkpoint.{module}.time", clock)
    return clock


@pytest.mark.parametrize(
    ("settings", "due_steps"),
    [
        pytest.param({}, [], id="no interval"),
        pytest.param({"interval_steps": 3}, [3, 6, 9], id="one interval"),
        pytest.param(
            {"interval_steps": 3, "keep_every_steps": 4},
            [3, 4, 6, 8, 9],
            id="two intervals",
        ),
        pytest.param(
            {"interval_steps": 3, "keep_every_steps": 4, "enabled": False},
            [],
            id="disabled",
        ),
    ],
)
def test_save_is_due_at_multiples_of_its_intervals(manager_of, settings, due_steps):
    manager = manager_of(**settings)
    steps = range(1, 10)
    assert [
        step for step in steps if manager.is_due(step, requested_at=None)
    ] == due_steps


def test_requested_save_is_due_once(manager_of):
    manager = manager_of()
    assert manager.is_due(5, requested_at=4)
    save(manager, 5)
    assert not manager.is_due(5, requested_at=4)
    assert not manager.is_due(6, requested_at=5)
    assert manager.is_due(7, requested_at=6)


def test_save_is_due_after_its_interval(manager_of, clock):
    manager = manager_of(interval_s=60.0)
    clock.now_s += 59
    assert not manager.is_due_by_time()
    clock.now_s += 1
    assert manager.is_due_by_time()
    save(manager, 5)
    assert not manager.is_due_by_time()
    clock.now_s += 60
    assert manager.is_due_by_time()


def test_disabled_save_is_never_due_by_time(manager_of, clock):
    manager = manager_of(interval_s=60.0, enabled=False)
    clock.now_s += 120
    assert not manager.is_due_by_time()


def test_duration_is_estimated_before_the_first_save(manager_of, training):
    # A second, and the bytes of the state at 100 MB/s.
    expected_s = 1 + state_bytes(training) / 100e6
    assert manager_of().expected_duration_s == pytest.approx(expected_s)


def test_duration_is_that_of_the_last_save(manager_of, events):
    manager = manager_of()
    for step in (1, 2):
        save(manager, step)
        assert manager.expected_duration_s == events[-1].values["seconds"]


@pytest.mark.parametrize(
    "has_saved_before",
    [
        pytest.param(False, id="estimated"),
        pytest.param(True, id="measured"),
    ],
)
def test_failed_save_leaves_the_expected_duration(
    manager_of, events, fail_to_save, has_saved_before
):
    manager = manager_of()
    if has_saved_before:
        save(manager, 1)
    duration_s = manager.expected_duration_s
    fail_to_save(manager, 2)
    assert events[-1].kind == "save_failed"
    assert manager.expected_duration_s == duration_s


def test_disabled_saves_take_no_time(manager_of):
    assert manager_of(enabled=False).expected_duration_s == 0


def test_state_has_three_values_per_trained_weight(training):
    parameters = list(training.module.parameters())
    weights = sum(parameter.numel() for parameter in parameters)
    bytes_per_value = 4
    assert state_bytes(training) == 3 * bytes_per_value * weights
    parameters[0].requires_grad_(False)
    frozen_weights = parameters[0].numel()
    values = 3 * (weights - frozen_weights) + frozen_weights
    assert state_bytes(training) == bytes_per_value * values
