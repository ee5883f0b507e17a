"""The scripts of jobs under real bash, with fakes of SLURM's commands and autotune."""

import subprocess
from pathlib import Path

import pytest

from autotune.cluster.job_script import measure_script, read_template
from autotune.cluster.site_file import NetworkSettings, SiteFile
from tests.autotune.cluster.conftest import SRUN
from tests.autotune.cluster.test_job_script import JOB, NO_SITE, TRAINING, script_of

PYTHON = """
case $3:$5 in
    autotune:meet) echo 10.0.0.1:20012 ;;
    autotune:address) echo "10.0.0.$(($SLURM_NODEID + 1)) eth7" ;;
    autotune:ended) exit 75 ;;
    autotune.cluster.job:*)
        echo "$@ gloo ${GLOO_SOCKET_IFNAME:-n/a} until ${SLURM_JOB_END_TIME:-n/a}";;
esac
"""


@pytest.fixture(autouse=True)
def commands(put, tmp_path):
    """Put fakes of the commands first on the PATH of the script."""
    put("srun", SRUN)
    put("sleep", "exit 0")
    put("squeue", "exit 1")
    put("scontrol", f'echo "$@" >> {tmp_path}/scontrol.said')
    put("python", PYTHON)


def ran(
    script: str, directory: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": f"{directory / 'bin'}:/usr/bin:/bin",
        "SLURM_JOB_ID": "12",
        "SLURMD_NODENAME": "n4",
    }
    return subprocess.run(
        ["bash", "-c", script],
        cwd=directory,
        env=environment | {"SLURM_NODEID": "0"} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def trained(
    directory: Path, site: SiteFile = NO_SITE, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a training script once; the trainer exits with code 75."""
    (directory / "runs" / "one" / "logs").mkdir(parents=True)
    return ran(script_of(TRAINING, site), directory, **variables)


def log_of(directory: Path) -> str:
    return (directory / "runs" / "one" / "logs" / "12-n4.log").read_text()


@pytest.mark.parametrize(
    ("site", "variables", "interface"),
    [
        (NO_SITE, {}, "eth7"),
        (NO_SITE, {"GLOO_SOCKET_IFNAME": "ib1"}, "ib1"),
        (SiteFile(network=NetworkSettings(interface="ib0")), {}, "ib0"),
        (
            SiteFile(network=NetworkSettings(nccl={"GLOO_SOCKET_IFNAME": "ib2"})),
            {},
            "ib2",
        ),
    ],
    ids=["own interface", "variable", "site interface", "site NCCL variable"],
)
def test_torchrun_meets_at_the_scripts_node(tmp_path, site, variables, interface):
    trained(tmp_path, site, **variables)
    for words in (
        "--rdzv-endpoint=10.0.0.1:20012",
        "--node-rank=0",
        "--local-addr=10.0.0.1",
        f"gloo {interface}",
    ):
        assert f" {words} " in log_of(tmp_path)


def test_asks_a_silent_slurm_again_before_requeueing(put, tmp_path):
    put(
        "squeue",
        f'echo >> {tmp_path}/asked; [ "$(wc -l < {tmp_path}/asked)" -gt 3 ] && echo'
        " RUNNING",
    )
    assert trained(tmp_path).returncode == 75
    assert (tmp_path / "scontrol.said").read_text() == "requeue 12\n"


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        ("exit 1", "unknown"),
        ("echo COMPLETING", "COMPLETING"),
        ("true", "unknown"),
        ("echo RUNNING", "RUNNING"),
    ],
)
def test_names_the_command_that_resumes(put, tmp_path, answer, state):
    put("squeue", answer)
    put("scontrol", "echo 'requeue is disabled' >&2; exit 1")
    process = trained(tmp_path)
    assert process.returncode == 75
    assert (
        f"not requeued (state {state}); resume with: sbatch runs/one/train.sbatch"
        in process.stderr
    )
    # Elsewhere SLURM is not asked to.
    assert ("requeue is disabled" in process.stderr) == (state == "RUNNING")


@pytest.mark.parametrize(
    ("answer", "variables", "end"),
    [
        ("echo 1795349000", {}, "1795349000"),
        ("echo N/A", {}, "n/a"),
        ("exit 1", {}, "n/a"),
        ("echo 1795349000", {"SLURM_JOB_END_TIME": "7"}, "7"),
    ],
    ids=["end", "no limit", "no answer", "known end"],
)
def test_job_is_told_its_end(put, tmp_path, answer, variables, end):
    put("squeue", answer)
    trained(tmp_path, **variables)
    assert log_of(tmp_path).endswith(f"until {end}\n")
    job = JOB | {"command": ["python", "-P", "-m", "autotune.cluster.job", "measures"]}
    script = measure_script(
        SiteFile(), read_template("measure", SiteFile(), None), **job
    )
    assert (
        ran(script, tmp_path, **variables).stdout
        == f"-P -m autotune.cluster.job measures gloo n/a until {end}\n"
    )
