import subprocess
import sys

import pytest

from autotune.cluster.jobqueue import job_settings, slurm_cluster
from autotune.cluster.site import SiteFile, SlurmSettings, read_site
from autotune.errors import MachineLacks
from trainer.errors import BadConfig

SITE = """
prologue = ["module load python/3.11", "source /opt/env/bin/activate"]
command_prefix = "apptainer exec /images/tools.sif"
node_local_path = "/local"
[slurm]
account = "project1"
partition = "cpu"
constraint = "avx512"
exclude = "node[7-9]"
cpus_per_task = 2
time = "1-02:00:00"
[network]
interface = "lo"
"""


@pytest.fixture
def site(tmp_path):
    path = tmp_path / "site.toml"
    path.write_text(SITE)
    return path


def test_the_rendered_job_says_what_the_site_file_says(site, tmp_path):
    from dask_jobqueue.slurm import SLURMCluster

    settings = job_settings(read_site(site), 2**30, tmp_path / "logs")
    with SLURMCluster(**settings) as cluster:
        script = cluster.job_script()
    for line in (
        "#SBATCH -A project1",
        "#SBATCH -p cpu",
        "#SBATCH --constraint=avx512",
        "#SBATCH --exclude=node[7-9]",
        "#SBATCH --cpus-per-task=2",
        "#SBATCH --mem=4096M",
        "#SBATCH -t 1-02:00:00",
        "module load python/3.11",
        "source /opt/env/bin/activate",
    ):
        assert line in script.splitlines()
    assert "apptainer exec /images/tools.sif " in script
    assert "distributed.cli.dask_worker" in script
    assert "--nthreads 1" in script
    assert "--local-directory /local" in script


def test_what_a_site_asks_for_in_its_own_words_is_asked_for(tmp_path):
    site = SiteFile(python="/opt/env/bin/python", slurm=SlurmSettings(mem="16G", extra=["--reservation=course"]))
    settings = job_settings(site, 2**30, tmp_path / "logs")
    assert settings["job_mem"] == "16G"
    assert settings["job_extra_directives"] == ["--reservation=course"]
    assert settings["python"] == "/opt/env/bin/python"


def test_ctrl_c_stays_what_it_was_when_the_library_is_imported():
    code = (
        "import signal\n"
        "from autotune.cluster.jobqueue import _own_handler\n"
        "with _own_handler():\n"
        "    import dask_jobqueue.slurm\n"
        "    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_empty_site_file_asks_for_nothing_special():
    settings = job_settings(SiteFile(), 2**30, "logs")
    assert settings["account"] is None
    assert settings["job_extra_directives"] == []
    assert settings["job_mem"] == "2048M"


@pytest.mark.parametrize(
    "text", ["acount = 1", '[slurm]\ntime = "soon"', '[slurm]\naccount = "a\\nb"', 'prologue = ["x\\ny"]']
)
def test_a_site_file_that_cannot_be_used_is_refused(tmp_path, text):
    path = tmp_path / "site.toml"
    path.write_text(text)
    with pytest.raises(BadConfig):
        read_site(path)


def test_where_jobs_cannot_be_submitted_it_is_said(site, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineLacks, match="sbatch"), slurm_cluster(site, 1, 2**30, tmp_path / "logs"):
        pytest.fail("there is no sbatch")
