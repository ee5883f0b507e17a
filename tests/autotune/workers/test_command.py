"""Time limits of the commands that sweep a probed profile."""

import contextlib
import time

import pytest

from autotune.baseline import stage as baseline_stage
from autotune.errors import BadInput
from autotune.network import stage as network_stage
from autotune.trials import session
from autotune.workers import stage as workers_stage
from autotune.workers.values import SweepRequest

NOT_MEASURED = BadInput("not measured", next_step="Nothing.")
PHASES = {
    "workers": (workers_stage, "count_workers"),
    "baseline": (baseline_stage, "compare_recipes"),
    "network": (network_stage, "tune_network"),
}


@pytest.fixture(params=PHASES)
def sweep(request, monkeypatch, workdir_with_data, says):
    """Return a function that runs a sweep with a time limit, without measuring.

    It returns the request of the sweep and what the command wrote.
    """
    requests = []

    def record_request(*arguments, **_):
        requests.extend(
            argument for argument in arguments if isinstance(argument, SweepRequest)
        )
        raise NOT_MEASURED

    monkeypatch.setattr(*PHASES[request.param], record_request)
    monkeypatch.setattr(
        session, "open_session", lambda *_, **__: contextlib.nullcontext()
    )

    def run_with_limit(time_limit):
        text = says(
            request.param,
            "p.toml",
            "--data=data",
            "--time-limit",
            time_limit,
            "--here",
            code=NOT_MEASURED.exit_code,
        )
        return requests[0], text

    return run_with_limit


def test_time_limit_is_a_deadline(sweep):
    started_s = time.time()
    request, _ = sweep("10min")
    assert started_s + 600 <= request.budget_ends_s <= time.time() + 600


def test_warns_of_too_short_time_limit(sweep):
    _, text = sweep("6s")
    assert "takes at least" in text
    assert "warning: --time-limit 6s is shorter" in text
    assert "next: use --time-limit " in text


def test_sufficient_time_limit_causes_no_warning(sweep):
    _, text = sweep("10min")
    assert "takes at least" in text
    assert "warning: --time-limit" not in text
