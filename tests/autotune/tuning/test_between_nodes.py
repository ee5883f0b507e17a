import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.core.profile import profile_to_toml
from autotune.search.workers import SweepRequest
from autotune.tuning import tune
from autotune.tuning.tune import BASELINE_MINUTES, measure_between_nodes
from tests.autotune.profiles import example_profile
from tests.fakes import FakeClock


class Measured:
    """What measures between nodes, which only notes how it was called."""

    def __init__(self, clock):
        self.clock, self.calls = clock, []

    def tune_network(self, stored, asked, nodes):
        self.clock.sleep(40.0)
        self.calls.append(("network", stored.path.stem, asked))
        assert nodes == 2
        # The exchange that was chosen is in the profile from here on.
        train = stored.profile.train.model_copy(update={"micro_batch_rows": 1})
        stored.path.write_text(profile_to_toml(stored.profile.model_copy(update={"train": train})))
        return SimpleNamespace(choice="ddp"), 30.0

    def compare_recipes(self, bench, stored, asked):
        self.clock.sleep(10.0)
        self.calls.append(("baseline", stored.path.stem, asked))
        assert stored.profile.train.micro_batch_rows == 1  # as the network left it

    def build_report(self, profiles, reports, out, *, data):
        self.calls.append(("report", [path.stem for path in profiles], out.name))

    @contextlib.contextmanager
    def open_bench(self, device, data):
        yield SimpleNamespace(server=SimpleNamespace(waited_s=8.0))


@pytest.fixture
def measured(monkeypatch):
    clock = FakeClock()
    found = Measured(clock)
    for name in ("tune_network", "compare_recipes", "build_report", "open_bench"):
        monkeypatch.setattr(tune, name, getattr(found, name))
    monkeypatch.setattr(tune, "SystemClock", lambda: clock)
    monkeypatch.setattr(tune, "nodes_here", lambda: 2)
    return found


@pytest.fixture
def measure(tmp_path):
    def make(minutes=10.0, **told):
        paths = [str(tmp_path / f"{name}-cpu.toml") for name in ("a", "b")]
        for path in paths:
            Path(path).write_text(profile_to_toml(example_profile()))
        found = {"profiles": paths, "report": "r/report.html", "with_baseline": True} | told
        (tmp_path / "tune-7.json").write_text(json.dumps(found))
        request = SweepRequest(data=tmp_path / "data", reports=tmp_path / "r", minutes=minutes, trial_timeout_s=60.0)
        return measure_between_nodes(tmp_path / "tune-7.json", request)

    return make


def test_the_network_of_each_profile_is_measured_then_what_that_is_worth_and_the_report_written_anew(measured, measure):
    result = measure()
    assert [call[:2] for call in measured.calls] == [
        ("network", "a-cpu"), ("baseline", "a-cpu"), ("network", "b-cpu"), ("baseline", "b-cpu"),
        ("report", ["a-cpu", "b-cpu"]),
    ]  # fmt: skip
    assert (measured.calls[0][2].minutes, measured.calls[0][2].trial_timeout_s) == (10.0, 60.0)
    assert measured.calls[1][2].minutes == BASELINE_MINUTES
    assert [path.rpartition("/")[2] for path in result.profiles] == ["a-cpu.toml", "b-cpu.toml"]
    assert result.report == "r/report.html"
    assert (result.seconds, result.seconds_in_children) == (100.0, 2 * 30.0 + 2 * 8.0)
    assert "autotune launch slurm" in result.next_steps[-1]
    assert "--nodes 2" in result.next_steps[-1]


def test_what_was_not_known_before_is_not_measured_now_and_nothing_takes_longer_than_the_network(measured, measure):
    measure(minutes=1.0)
    assert measured.calls[1][2].minutes == 1.0
    measured.calls.clear()
    measure(with_baseline=False, report=None)
    assert [call[0] for call in measured.calls] == ["network", "network"]
