import errno
import os
import signal
import subprocess
import sys

import psutil
import pytest

from autotune.cluster.site import SiteFile, SlurmSettings, read_site
from autotune.corpus.engine import (
    AHEAD,
    InProcessEngine,
    Task,
    cluster_engine,
    job_settings,
    local_engine,
    slurm_engine,
)
from autotune.corpus.workplace import Workplace, open_workplace
from autotune.errors import BadInput, InternalError, MachineLacks
from trainer.errors import BadConfig


def write(workplace, task, *, number):
    (task.directory / "file").write_text(str(number))
    return {"number": number, "pid": os.getpid()}


def refuse(workplace, task, *, error):
    raise error


def die(workplace, task):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    out = tmp_path_factory.mktemp("engine") / "data"
    with open_workplace(out, "k") as workplace, local_engine(workplace, 2) as engine:
        yield engine, workplace


@pytest.fixture(params=["in process", "local"])
def engine(request, tmp_path):
    """Both engines keep one contract."""
    if request.param == "local":
        yield request.getfixturevalue("local")
        return
    with open_workplace(tmp_path / "data", "k") as workplace:
        yield InProcessEngine(), workplace


def run(engine, tasks):
    runner, workplace = engine
    done = {}
    runner.run(workplace, tasks, lambda task, receipt: done.update({task.number: receipt}))
    return done


def tasks(stage, count):
    return [Task(stage=stage, number=n, work=write, arguments={"number": n}) for n in range(count)]


def test_every_task_is_done_and_reported_once(engine):
    done = run(engine, tasks("every", 20))
    assert {name: receipt["number"] for name, receipt in done.items()} == {n: n for n in range(20)}
    assert (engine[1].directory("every", 7) / "file").read_text() == "7"


def test_a_finished_task_is_not_done_again(engine):
    first = run(engine, tasks("again", 3))
    assert run(engine, tasks("again", 3)) == first


@pytest.mark.parametrize(
    "error",
    [
        BadInput("what happened", next_step="what to do"),
        MachineLacks("no library", next_step="install it"),
        BadConfig("no tokenizer", next_step="give one"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    ],
)
def test_what_a_task_raises_comes_back_as_it_was(engine, error):
    with pytest.raises(type(error)) as caught:
        run(engine, [Task(stage=f"refuse-{type(error).__name__}", number=0, work=refuse, arguments={"error": error})])
    if isinstance(error, OSError):
        assert caught.value.errno == errno.ENOSPC
    else:
        assert (caught.value.message, caught.value.next_step) == (error.message, error.next_step)


def test_tasks_are_drawn_as_there_is_room_for_them(engine):
    drawn = []

    def many():
        for task in tasks("drawn", 40):
            drawn.append(task.number)
            yield task

    runner, workplace = engine
    waiting = []
    runner.run(workplace, many(), lambda task, receipt: waiting.append(len(drawn) - len(waiting)))
    assert len(drawn) == 40
    assert max(waiting) <= 2 * AHEAD + 1


def test_workers_are_other_processes(local):
    pids = {receipt["pid"] for receipt in run(local, tasks("pids", 12)).values()}
    assert os.getpid() not in pids
    assert len(pids) == 2


def test_a_task_that_kills_its_workers_is_named_and_nothing_is_left_running(tmp_path):
    before = set(psutil.Process().children())
    with open_workplace(tmp_path / "data", "k") as workplace, local_engine(workplace, 1) as runner:
        deadly = Task(stage="deadly", number=1, work=die)
        with pytest.raises(InternalError, match="deadly/1"):
            run((runner, workplace), [deadly])
        started = set(psutil.Process().children()) - before
    left = [child for child in started if child.is_running() and "resource_tracker" not in " ".join(child.cmdline())]
    assert left == []


def test_nothing_listens_beyond_this_machine(local):
    listening = [
        connection
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert {connection.laddr.ip for connection in listening} == {"127.0.0.1"}


def test_a_scheduler_that_is_not_there_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("autotune.corpus.engine._CONNECT_S", 0.5)
    with (
        open_workplace(tmp_path / "data", "k") as workplace,
        pytest.raises(BadInput, match="no scheduler answers"),
        cluster_engine(workplace, "tcp://127.0.0.1:9"),
    ):
        pytest.fail("there is none")


def test_a_scheduler_that_is_there_is_used_and_must_see_the_files(tmp_path):
    from distributed import LocalCluster

    options = {"n_workers": 1, "threads_per_worker": 1, "processes": True, "dashboard_address": "127.0.0.1:0"}
    with LocalCluster(host="127.0.0.1", **options) as cluster, open_workplace(tmp_path / "data", "k") as workplace:
        with cluster_engine(workplace, cluster.scheduler_address) as runner:
            assert len(run((runner, workplace), tasks("there", 5))) == 5
        (workplace.path / "lock").rename(workplace.path / "elsewhere")
        with (
            pytest.raises(MachineLacks, match="does not see"),
            cluster_engine(workplace, cluster.scheduler_address),
        ):
            pytest.fail("it cannot see the lock")


def test_workers_that_do_not_start_are_explained(tmp_path, monkeypatch):
    def failing(**settings):
        raise RuntimeError("Nanny failed to start.")

    monkeypatch.setattr("distributed.LocalCluster", failing)
    with (
        open_workplace(tmp_path / "data", "k") as workplace,
        pytest.raises(MachineLacks, match="cannot start workers: Nanny failed") as caught,
        local_engine(workplace, 2),
    ):
        pass
    assert "same command goes on" in caught.value.next_step


def test_workers_that_take_long_to_end_cost_nothing(tmp_path, monkeypatch):
    from distributed import LocalCluster

    close = LocalCluster.close

    def late(cluster, timeout=None):
        close(cluster)
        raise TimeoutError(f"timed out after {timeout} s.")

    monkeypatch.setattr(LocalCluster, "close", late)
    with open_workplace(tmp_path / "data", "k") as workplace, local_engine(workplace, 1) as engine:
        assert set(run((engine, workplace), tasks("late", 1))) == {0}


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

    settings = job_settings(read_site(site), tmp_path / "logs")
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
    settings = job_settings(site, tmp_path / "logs")
    assert settings["job_mem"] == "16G"
    assert settings["job_extra_directives"] == ["--reservation=course"]
    assert settings["python"] == "/opt/env/bin/python"


def test_ctrl_c_stays_what_it_was_when_the_library_is_imported():
    code = (
        "import signal\n"
        "from autotune.corpus.engine import _own_handler\n"
        "with _own_handler():\n"
        "    import dask_jobqueue.slurm\n"
        "    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_empty_site_file_asks_for_nothing_special():
    settings = job_settings(SiteFile(), "logs")
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
    with pytest.raises(MachineLacks, match="sbatch"), slurm_engine(Workplace(path=tmp_path), site, 1):
        pytest.fail("there is no sbatch")
