"""Restarted jobs of SLURM and torchrun, which resume the run of their first start."""

import os
from pathlib import Path

import pytest

from testbed.examples.checkpoints import write_run
from tests.trainer.checkpoint.starts import CONFIG, LOWER_RATE, choose
from tests.trainer.tiny_models import config_of
from trainer.checkpoint.job import job_name

pytestmark = pytest.mark.usefixtures("directory_without_runs")

SLURM = {"SLURM_JOB_ID": "17"}
RESTARTED_SLURM = SLURM | {"SLURM_RESTART_COUNT": "1"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
RESTARTED_TORCHRUN = TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"}


def write_run_of_job(name, job, config=CONFIG):
    """Write a run of a job where the job looks for its own, in ``runs``."""
    return write_run(Path("runs") / name, config, job=job)


@pytest.fixture
def runs_of_jobs(directory_without_runs):
    """Runs of several jobs, of which ``own`` belongs to ``SLURM``."""
    write_run_of_job("own", "slurm-17")
    write_run_of_job("other-job", "slurm-18")
    write_run_of_job("no-job", "")
    Path("runs/corrupt").mkdir()
    Path("runs/corrupt/run.json").write_text("{")


@pytest.mark.usefixtures("runs_of_jobs")
def test_restarted_slurm_job_resumes_its_run():
    assert job_name(SLURM) == "slurm-17"
    writer, start = choose(None, environment=RESTARTED_SLURM)
    assert (writer.directory.name, start.manifest.state.step) == ("own", 10)


@pytest.mark.usefixtures("runs_of_jobs")
@pytest.mark.parametrize(
    "environment",
    [
        pytest.param(SLURM, id="first start"),
        pytest.param({}, id="no job"),
        pytest.param({"SLURM_RESTART_COUNT": "1"}, id="no job number"),
        pytest.param(
            {"SLURM_JOB_ID": "19", "SLURM_RESTART_COUNT": "1"}, id="other job"
        ),
    ],
)
def test_other_starts_do_not_resume_its_run(environment):
    _, start = choose(None, environment=environment)
    assert start.checkpoint is None


@pytest.mark.usefixtures("runs_of_jobs")
@pytest.mark.parametrize(
    ("out", "resume"),
    [
        pytest.param(None, "never", id="--resume never"),
        pytest.param(Path("out"), "auto", id="--out"),
    ],
)
def test_options_take_precedence_over_the_job(out, resume):
    _, start = choose(out, resume, environment=RESTARTED_SLURM)
    assert start.checkpoint is None


@pytest.fixture
def runs_of_one_job(directory_without_runs):
    """Runs of the same job, oldest first, which is not the order of their names."""
    runs_by_age = [
        write_run_of_job("z-oldest", "slurm-17", CONFIG),
        write_run_of_job("a-newer", "slurm-17", CONFIG),
        write_run_of_job("m-newest", "slurm-17", LOWER_RATE),
    ]
    for modified_s, run in enumerate(runs_by_age):
        os.utime(run / "run.json", times=(modified_s, modified_s))


@pytest.mark.usefixtures("runs_of_one_job")
@pytest.mark.parametrize(
    ("config", "name"),
    [
        pytest.param(CONFIG, "a-newer", id="two runs"),
        pytest.param(LOWER_RATE, "m-newest", id="one run"),
    ],
)
def test_job_resumes_its_newest_run_with_its_configuration(config, name):
    writer, _ = choose(None, config=config, environment=RESTARTED_SLURM)
    assert writer.directory.name == name


@pytest.mark.usefixtures("runs_of_one_job")
def test_job_with_another_configuration_starts_another_run():
    config = config_of(max_steps=30)
    _, start = choose(None, config=config, environment=RESTARTED_SLURM)
    assert start.checkpoint is None


def test_restarted_torchrun_resumes_its_run():
    write_run_of_job("own", job_name(TORCHRUN))
    _, first_start = choose(None, environment=TORCHRUN)
    assert first_start.checkpoint is None
    writer, start = choose(None, environment=RESTARTED_TORCHRUN)
    assert (writer.directory.name, start.manifest.state.step) == ("own", 10)
