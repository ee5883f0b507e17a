"""Time limits of the commands that sweep a probed profile."""

import contextlib
import time
from types import ModuleType

import pytest

from autotune.baseline import stage as baseline_stage
from autotune.errors import BadInput
from autotune.network import stage as network_stage
from autotune.subjects import bench as subject_bench
from autotune.trials.sweep_request import SweepRequest
from autotune.workers import stage as workers_stage

NOT_MEASURED = BadInput("not measured", next_step="Nothing.")
"""Error by which a phase ends as soon as it has its request."""
TEN_MINUTES_S = 600.0


def replace_phase(monkeypatch, stage: ModuleType, phase: str) -> list[SweepRequest]:
    """Let a phase end when it is called; return the list that gets its request."""
    requests = []

    def record_request(*arguments, **_):
        requests.extend(
            argument for argument in arguments if isinstance(argument, SweepRequest)
        )
        raise NOT_MEASURED

    monkeypatch.setattr(stage, phase, record_request)
    return requests


@pytest.fixture(
    params=[
        pytest.param(("workers", workers_stage, "sweep_loader"), id="workers"),
        pytest.param(("baseline", baseline_stage, "compare_recipes"), id="baseline"),
        pytest.param(("network", network_stage, "measure_network"), id="network"),
    ]
)
def sweep(request, monkeypatch, workdir_with_data, says):
    """Return a function that calls a command with a time limit, without measuring.

    It returns the request of the sweep, and the text that the command wrote.
    """
    command, stage, phase = request.param
    requests = replace_phase(monkeypatch, stage, phase)
    monkeypatch.setattr(
        subject_bench, "open_subject", lambda *_, **__: contextlib.nullcontext()
    )

    def call(time_limit: str) -> tuple[SweepRequest, str]:
        text = says(
            command,
            "p.toml",
            "--data=data",
            "--time-limit",
            time_limit,
            "--here",
            code=NOT_MEASURED.exit_code,
        )
        (sweep_request,) = requests
        return sweep_request, text

    return call


def test_time_limit_is_a_deadline(sweep):
    started_s = time.time()
    request, _ = sweep("10min")
    ended_s = time.time()
    assert started_s + TEN_MINUTES_S <= request.budget_ends_s <= ended_s + TEN_MINUTES_S


def test_warns_of_too_short_time_limit(sweep):
    _, text = sweep("6s")
    assert "takes at least" in text
    assert "warning: --time-limit 6s is shorter" in text
    assert "next: use --time-limit " in text


def test_sufficient_time_limit_causes_no_warning(sweep):
    _, text = sweep("10min")
    assert "takes at least" in text
    assert "warning: --time-limit" not in text
