"""Figures of jobs, read from what child processes return."""

import pytest

from autotune.trials.job_figures import StepFigures, WindowFigures
from autotune.trials.outcomes import Measured
from testbed.examples.trials import STEP_FIGURES, WINDOW_FIGURES


@pytest.mark.parametrize(
    ("changes", "local_ranks"),
    [
        pytest.param({}, 1, id="from before ranks were counted"),
        pytest.param({"local_ranks": 2}, 2, id="counted"),
    ],
)
def test_step_figures_have_one_rank_by_default(changes, local_ranks):
    figures = StepFigures.of(Measured(figures=STEP_FIGURES | changes))
    assert figures.local_ranks == local_ranks


def test_window_figures_leave_out_gpu_series():
    gpu = {"samples": 3, "utilisation_share": 0.5, "series": {"time_s": [1.0, 2.0]}}
    outcome = Measured(figures=WINDOW_FIGURES | {"gpus": [gpu]})
    (gpu_figures,) = WindowFigures.of(outcome).gpus
    assert gpu_figures.samples == 3
    assert gpu_figures.utilisation_share == 0.5
    assert gpu_figures.power_w is None


def test_window_figures_may_have_no_gpus():
    assert WindowFigures.of(Measured(figures=WINDOW_FIGURES)).gpus == ()
