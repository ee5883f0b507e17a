import time

import pytest

from autotune.core.outcome import Crashed, Measured
from autotune.core.trial import Trial
from autotune.measure.jobs import matmul
from autotune.measure.machine import ForkServerMachine


def load(**changes: object) -> dict[str, object]:
    base = {"device": "cpu", "dtype": "float32", "size": 64, "seconds": 0.6, "duty_share": 1.0, "copy_bytes": 0}
    return base | changes


@pytest.fixture(scope="module")
def machine():
    # Threads that wait for others without spinning: whatever else runs here must not make a short load a long one.
    with pytest.MonkeyPatch.context() as patch, ForkServerMachine() as started:
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        yield started


def test_load_runs_in_a_child_and_its_window_is_on_our_clock(machine):
    before_s = time.monotonic()
    outcome = machine.run(Trial(job="matmul", measured=load(copy_bytes=2**20), timeout_s=60))
    after_s = time.monotonic()
    assert isinstance(outcome, Measured)
    figures = outcome.figures
    assert before_s < figures["window_start_s"] < figures["window_end_s"] < after_s
    assert figures["window_end_s"] - figures["window_start_s"] >= 0.6
    assert figures["flops_per_s"] > 1e6
    assert figures["copy_bytes_per_s"] > 1e6
    assert figures["busy_share"] > 0.8
    assert figures["slices"] >= 1
    assert figures["products"] >= figures["slices"]


def test_half_a_load_is_busy_half_the_time(machine):
    outcome = machine.run(Trial(job="matmul", measured=load(duty_share=0.5), timeout_s=60))
    assert isinstance(outcome, Measured)
    assert outcome.figures["busy_share"] == pytest.approx(0.5, abs=0.15)


def test_the_rate_counts_two_operations_per_multiplication(machine):
    outcome = machine.run(Trial(job="matmul", measured=load(size=128), timeout_s=60))
    assert isinstance(outcome, Measured)
    figures = outcome.figures
    flops = 2 * 128**3 * figures["products"]
    assert figures["flops_per_s"] == pytest.approx(flops / (figures["slices"] * figures["slice_s"]), rel=1e-6)


def test_unknown_dtype_is_a_crash(machine):
    outcome = machine.run(Trial(job="matmul", measured=load(dtype="float8"), timeout_s=60))
    assert isinstance(outcome, Crashed)


class ScriptedDevice:
    """Spans that take as long as a script says, on a clock that only they and sleeping move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slice_s: float) -> None:
        self.now_s = 0.0
        self.finished: list[float] = []
        self._slice_s = slice_s
        monkeypatch.setattr(matmul.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(matmul.time, "sleep", self._pass)

    def _pass(self, seconds: float) -> None:
        self.now_s += seconds

    def run(self, work) -> None:
        work()
        self.now_s += self._slice_s
        self.finished.append(self._slice_s)

    def wait(self, *, unfinished: int = 0) -> None:
        del unfinished

    def durations_s(self) -> list[float]:
        return self.finished


@pytest.mark.parametrize("duty_share", [0.1, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("slice_s", [0.05, 0.2])
def test_rest_follows_each_slice_in_proportion(monkeypatch, duty_share, slice_s):
    device = ScriptedDevice(monkeypatch, slice_s)
    matmul._load(lambda: None, device, 40.0, duty_share)
    assert sum(device.finished) / device.now_s == pytest.approx(duty_share, rel=1e-6)
    assert device.now_s >= 40.0


def test_no_duty_is_a_rest(monkeypatch):
    device = ScriptedDevice(monkeypatch, 0.05)
    matmul._load(lambda: pytest.fail("it worked"), device, 3.0, 0.0)
    assert (device.now_s, device.finished) == (3.0, [])


def test_an_idle_load_has_no_rate():
    figures = matmul.run(load(seconds=0.01, duty_share=0.0), {})
    assert figures["flops_per_s"] is None
    assert figures["slice_s"] is None
    assert figures["busy_share"] == 0


@pytest.mark.parametrize("duty_share", [-0.1, 1.1])
def test_a_duty_beyond_its_range_is_refused(duty_share):
    with pytest.raises(ValueError, match="between 0 and 1"):
        matmul.run(load(duty_share=duty_share), {})
