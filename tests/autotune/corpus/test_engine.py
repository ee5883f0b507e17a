import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from distributed import LocalCluster

from autotune.cluster.site_file import SiteFile, SlurmSettings, read_site
from autotune.corpus.engine import (
    AHEAD,
    Task,
    cluster_engine,
    in_process,
    job_settings,
    local_engine,
    slurm_engine,
)
from autotune.corpus.workplace import open_workplace
from autotune.errors import BadInput, InternalError, MachineLacks
from trainer.formats.errors import BadConfig


def write(workplace, directory, *, number):
    (directory / "file").write_text(str(number))
    return {"number": number, "pid": os.getpid()}


def refuse(workplace, directory, *, error):
    raise error


def die(workplace, directory):
    os.kill(os.getpid(), signal.SIGKILL)


def die_once(workplace, directory, *, mark):
    if not Path(mark).exists():
        Path(mark).touch()
        die(workplace, directory)
    return write(workplace, directory, number=9)


def opened(directory):
    return open_workplace(directory / "data", "k")


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    with (
        opened(tmp_path_factory.mktemp("engine")) as workplace,
        local_engine(workplace, 2) as engine,
    ):
        yield engine, workplace


@pytest.fixture(params=["in process", "local"])
def engine(request, tmp_path):
    """An engine in this process or in others; both have one contract."""
    if request.param == "local":
        yield request.getfixturevalue("local")
        return
    with opened(tmp_path) as workplace:
        yield in_process(workplace), workplace


def run(engine, tasks):
    receipts = {}
    engine(tasks, lambda task, receipt: receipts.update({task.number: receipt}), AHEAD)
    return receipts


def tasks(stage, count, *, first=0):
    """Return tasks with numbers from ``first`` on; those of one run are unique."""
    return [
        Task(stage=stage, number=n, work=write, arguments={"number": n})
        for n in range(first, first + count)
    ]


def test_reports_every_task_once(engine):
    runner, workplace = engine
    receipts = run(runner, tasks("every", 20))
    assert {name: receipt["number"] for name, receipt in receipts.items()} == {
        n: n for n in range(20)
    }
    assert (workplace.directory("every", 7) / "file").read_text() == "7"
    # By the same processes: nothing is done again.
    assert run(runner, tasks("every", 20)) == receipts


@pytest.mark.parametrize(
    "error",
    [
        MachineLacks("no library", next_step="install it"),
        BadConfig("no tokenizer", next_step="give one"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    ],
    ids=["missing library", "bad configuration", "full disk"],
)
def test_task_error_comes_back_unchanged(engine, error):
    refusing = Task(
        stage=f"refuse-{type(error).__name__}",
        number=0,
        work=refuse,
        arguments={"error": error},
    )
    with pytest.raises(type(error)) as caught:
        run(engine[0], [refusing])
    for name in ("errno", "message", "next_step"):
        assert getattr(caught.value, name, None) == getattr(error, name, None)


def test_draws_tasks_only_as_needed(engine):
    drawn = []
    waiting = []

    def many():
        for task in tasks("drawn", 40):
            drawn.append(task.number)
            yield task

    engine[0](
        many(), lambda task, receipt: waiting.append(len(drawn) - len(waiting)), AHEAD
    )
    assert len(drawn) == 40
    assert max(waiting) <= 2 * AHEAD + 1


def test_names_a_task_that_kills_workers(tmp_path):
    before = set(psutil.Process().children())
    with opened(tmp_path) as workplace, local_engine(workplace, 2) as engine:
        deadly = Task(stage="deadly", number=7, work=die)
        with pytest.raises(InternalError, match="deadly/7"):
            run(engine, [*tasks("harmless", 3), deadly, *tasks("other", 3, first=10)])
        started = set(psutil.Process().children()) - before
    still_running = [
        child
        for child in started
        if child.is_running() and "resource_tracker" not in " ".join(child.cmdline())
    ]
    assert still_running == []


def test_tasks_of_killed_workers_are_done(tmp_path):
    with opened(tmp_path) as workplace, local_engine(workplace, 2) as engine:
        once = Task(
            stage="once",
            number=9,
            work=die_once,
            arguments={"mark": str(tmp_path / "m")},
        )
        done = run(engine, [*tasks("before", 4), once, *tasks("after", 4, first=10)])
    assert set(done) == {0, 1, 2, 3, 9, 10, 11, 12, 13}


def test_workers_are_processes_that_stay(local):
    engine, _ = local
    pids = {receipt["pid"] for receipt in run(engine, tasks("pids", 12)).values()}
    more = {receipt["pid"] for receipt in run(engine, tasks("more", 12)).values()}
    assert os.getpid() not in pids
    assert len(pids | more) == 2


def test_local_workers_open_no_socket(local):
    engine, _ = local
    run(engine, tasks("sockets", 4))
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        assert process.net_connections("all") == []


def test_missing_scheduler_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("autotune.corpus.engine._CONNECT_S", 0.5)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "site.toml").touch()
    with opened(tmp_path) as workplace:
        with pytest.raises(BadInput, match="does not respond"):
            cluster_engine(workplace, "tcp://127.0.0.1:9").__enter__()
        with pytest.raises(MachineLacks, match="sbatch"):
            slurm_engine(workplace, tmp_path / "site.toml", 1).__enter__()


def test_uses_a_running_scheduler(tmp_path):
    options = {
        "n_workers": 1,
        "threads_per_worker": 1,
        "processes": True,
        "dashboard_address": "127.0.0.1:0",
    }
    with (
        LocalCluster(host="127.0.0.1", **options) as cluster,
        opened(tmp_path) as workplace,
    ):
        with cluster_engine(workplace, cluster.scheduler_address) as runner:
            assert len(run(runner, tasks("there", 5))) == 5
        (workplace.path / "lock").rename(workplace.path / "elsewhere")
        with pytest.raises(MachineLacks, match="does not see"):
            cluster_engine(workplace, cluster.scheduler_address).__enter__()


def test_explains_workers_that_cannot_start(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    with opened(tmp_path) as workplace:
        # Enough for this process, and too few for the pipes of another one.
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files + 6, limits[1]))
        try:
            with pytest.raises(MachineLacks, match="cannot start workers") as caught:
                local_engine(workplace, 2).__enter__()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "same command again to resume" in caught.value.next_step


def test_scheduler_without_dask_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with opened(tmp_path) as workplace, pytest.raises(MachineLacks) as caught:
        cluster_engine(workplace, "tcp://127.0.0.1:9").__enter__()
    assert "pip install distributed" in caught.value.next_step


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


def test_job_follows_the_site_file(tmp_path):
    from dask_jobqueue.slurm import SLURMCluster

    (tmp_path / "site.toml").write_text(SITE)
    settings = job_settings(read_site(tmp_path / "site.toml"), tmp_path / "logs")
    with SLURMCluster(**settings) as cluster:
        script = cluster.job_script()
    assert {
        "#SBATCH -A project1",
        "#SBATCH -p cpu",
        "#SBATCH --constraint=avx512",
        "#SBATCH --exclude=node[7-9]",
        "#SBATCH --cpus-per-task=2",
        "#SBATCH --mem=4096M",
        "#SBATCH -t 1-02:00:00",
        "module load python/3.11",
        "source /opt/env/bin/activate",
    } <= set(script.splitlines())
    prefix = "apptainer exec /images/tools.sif "
    for words in (
        prefix,
        "distributed.cli.dask_worker",
        "--nthreads 1",
        "--local-directory /local",
    ):
        assert words in script


def test_job_settings_follow_the_site(tmp_path):
    site = SiteFile(
        python="/opt/env/bin/python",
        slurm=SlurmSettings(mem="16G", extra=["--reservation=course"]),
    )
    settings = job_settings(site, tmp_path)
    assert (settings["job_mem"], settings["python"]) == (
        "16G",
        "/opt/env/bin/python -P",
    )
    assert settings["job_extra_directives"] == ["--reservation=course"]


def test_job_settings_have_defaults(tmp_path):
    settings = job_settings(SiteFile(), tmp_path)
    assert (
        settings["job_mem"],
        settings["account"],
        settings["job_extra_directives"],
    ) == ("2048M", None, [])


def test_import_keeps_ctrl_c():
    code = (
        "import signal; from autotune.corpus.engine import"
        " _slurm_cluster\n_slurm_cluster(); assert signal.getsignal(signal.SIGINT) is"
        " signal.default_int_handler"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
