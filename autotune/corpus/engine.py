"""Engines that run tasks: in this process, on other processes, or on a cluster.

Several machines are workers of ``dask.distributed``: those of a scheduler that runs, or
SLURM jobs.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from autotune.base.next_steps import install_step
from autotune.base.process import end_with_parent
from autotune.cluster.site_file import SiteFile, read_site
from autotune.corpus.workplace import Receipt, Workplace
from autotune.errors import AutotuneError, BadInput, InternalError, MachineLacks
from trainer.formats.errors import TrainerError

WORKER_MEMORY_BYTES = 2**30
"""Memory of a worker that is a SLURM job."""
_SITE_JOBS = 8
"""Number of such workers by default."""
AHEAD = 3
"""Number of tasks queued per worker, so that none waits."""
_CONNECT_S = 20.0
"""Longest wait for a scheduler, in seconds."""
_START_S = 600.0
"""Longest wait for the first job of a queue, in seconds; the others join as they
start."""
_WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment variables by which a worker uses one CPU."""
_RESUME_WITH_FEWER = (
    "If memory is short, use fewer --workers. Run the same command again to resume."
)

Failure = Callable[[], Exception]
"""Function that makes the error of a task again: pickle would lose its fields."""
Work = Callable[..., Receipt]
"""Function of a task: called with the workplace, a directory for its files, and the
task's arguments by name. It may read other files of the workplace; the same arguments
give the same files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One unit of work of a stage.

    It is sent by pickle, so ``work`` is a function of a module.
    """

    stage: str
    number: int
    """Number of the task in its stage."""
    work: Work
    arguments: Mapping[str, Any] = field(default_factory=dict)


OnDone = Callable[[Task, Receipt], None]
Engine = Callable[[Iterable[Task], OnDone, int], None]
"""Function that runs tasks in any order, reports each finished one to ``OnDone`` in
this process, and raises errors of tasks. Tasks are taken as workers become free; each
worker holds up to ``int``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Workers to run tasks on: processes here, or those of a scheduler or a site."""

    count: int | None = None
    """Number of workers; None is one per CPU that this process may use, or 8 jobs with
    a site."""
    scheduler: str | None = None
    """Address of a dask scheduler whose workers to use."""
    site: Path | None = None
    """Site file by which to submit workers as SLURM jobs."""


def open_engine(
    workplace: Workplace, workers: Workers, tasks: int
) -> AbstractContextManager[Engine]:
    """Start an engine, for at most ``tasks`` tasks in a stage.

    It stops at the end of the block.
    """
    if workers.scheduler:
        return cluster_engine(workplace, workers.scheduler)
    if workers.site:
        return slurm_engine(workplace, workers.site, workers.count or _SITE_JOBS)
    count = workers.count or len(os.sched_getaffinity(0))
    if min(count, tasks) == 1:
        return contextlib.nullcontext(in_process(workplace, threads=count > 1))
    return local_engine(workplace, count)


def _perform(workplace: Workplace, task: Task) -> Receipt:
    """Run a task unless it is finished."""
    work = functools.partial(task.work, workplace, **task.arguments)
    return workplace.perform(task.stage, task.number, work)


def in_process(workplace: Workplace, *, threads: bool = True) -> Engine:
    """Return an engine that runs tasks one after another in this process.

    Libraries may use several ``threads``.
    """
    if not threads:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def run(tasks: Iterable[Task], on_done: OnDone, ahead: int) -> None:
        for task in tasks:
            on_done(task, _perform(workplace, task))

    return run


def _on_dask_workers(workplace: Workplace, client: Any, workers: int) -> Engine:
    """Return an engine on the workers of a dask client."""
    from distributed import as_completed
    from distributed.scheduler import KilledWorker

    def run(tasks: Iterable[Task], on_done: OnDone, ahead: int) -> None:
        remaining = iter(tasks)
        running: dict[Any, Task] = {}

        def submit(count: int) -> list[Any]:
            """Submit the next tasks; return their futures."""
            futures = []
            for task in islice(remaining, count):
                future = client.submit(
                    _perform_there, workplace, task, pure=False, retries=0
                )
                running[future] = task
                futures.append(future)
            return futures

        # Without a loop, it looks for a default client, which this one is not.
        completed = as_completed(submit(ahead * workers), loop=client.loop)
        for future in completed:
            task = running.pop(future)
            try:
                receipt: Receipt | Failure = future.result()
            except KilledWorker as error:
                raise _killed_repeatedly(task) from error
            if callable(receipt):
                raise receipt()
            on_done(task, receipt)
            for next_future in submit(1):
                completed.add(next_future)

    return run


def _killed_repeatedly(task: Task) -> InternalError:
    return InternalError(
        f"workers were killed repeatedly in task {task.stage}/{task.number}",
        next_step=_RESUME_WITH_FEWER,
    )


def _perform_there(workplace: Workplace, task: Task) -> Receipt | Failure:
    """Perform a task on a worker; return errors, as dask would log raised ones."""
    try:
        return _perform(workplace, task)
    except (AutotuneError, TrainerError) as error:
        return functools.partial(type(error), error.message, next_step=error.next_step)
    except OSError as error:
        return functools.partial(
            OSError, error.errno, error.strerror, str(error.filename or workplace.path)
        )


@contextlib.contextmanager
def local_engine(workplace: Workplace, workers: int) -> Iterator[Engine]:
    """Start worker processes on this machine, which are killed at the end of the block.

    They talk to this process through pipes: no socket listens, so that no other user of
    the machine can send them work.

    Raises:
        MachineLacks: If processes cannot be started.
    """
    engine = _LocalEngine(workplace, workers)
    try:
        yield engine
    finally:
        engine.close()


class _LocalEngine:
    """Engine on a pool of processes, which is replaced when one of them is killed.

    A broken pool does not say which task its killed process had. So all tasks that it
    had been given run once more, each alone, until one kills its process again.
    """

    def __init__(self, workplace: Workplace, workers: int) -> None:
        self._workplace = workplace
        self._workers = workers
        self._processes_before = set(multiprocessing.active_children())
        self._pool = self._open_pool()

    def __call__(self, tasks: Iterable[Task], on_done: OnDone, ahead: int) -> None:
        remaining = iter(tasks)
        suspects = self._run(remaining, on_done, ahead * self._workers)
        while suspects:
            for task in suspects:
                if self._run(iter([task]), on_done, 1):
                    raise _killed_repeatedly(task)
            suspects = self._run(remaining, on_done, ahead * self._workers)

    def close(self) -> None:
        """Kill the processes: a task's files count only when it is complete."""
        for process in set(multiprocessing.active_children()) - self._processes_before:
            process.kill()
        self._pool.shutdown(cancel_futures=True)

    def _run(
        self, tasks: Iterator[Task], on_done: OnDone, most_queued: int
    ) -> list[Task]:
        """Run tasks until none is left, or until a process is killed.

        Returns:
            The unfinished tasks among those that the pool was given, if a process was
            killed; otherwise an empty list.
        """
        unfinished: dict[int, Task] = {}
        running: dict[Future[Receipt | Failure], Task] = {}

        def submit(count: int) -> None:
            for task in islice(tasks, count):
                unfinished[task.number] = task
                future = self._pool.submit(_perform_there, self._workplace, task)
                running[future] = task

        try:
            submit(most_queued)
            while running:
                completed, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in completed:
                    receipt = future.result()
                    if callable(receipt):
                        raise receipt()
                    task = running.pop(future)
                    del unfinished[task.number]
                    on_done(task, receipt)
                    submit(1)
        except BrokenProcessPool:
            self.close()
            self._pool = self._open_pool()
        return list(unfinished.values())

    def _open_pool(self) -> ProcessPoolExecutor:
        try:
            pool = ProcessPoolExecutor(
                self._workers,
                # A fork would copy locks that other threads of this process hold.
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_begin_worker,
                initargs=(os.getpid(),),
            )
            with _environment(_WORKER_ENVIRONMENT):
                # The first task starts all processes.
                pool.submit(os.getpid)
        except OSError as error:
            raise MachineLacks(
                f"cannot start workers: {error}", next_step=_RESUME_WITH_FEWER
            ) from error
        return pool


def _begin_worker(parent: int) -> None:
    """Let a worker end with this process, which alone handles Ctrl-C."""
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that are started in the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _close(client: Any) -> None:
    """Close a client.

    Ignore a timeout, as a busy machine takes longer and the results are on disk.
    """
    with contextlib.suppress(TimeoutError):
        client.close(timeout=3.0)


@contextlib.contextmanager
def cluster_engine(
    workplace: Workplace, address: Any, workers: int | None = None
) -> Iterator[Engine]:
    """Use the workers of a scheduler.

    Args:
        workplace: Work directory, which all workers must see.
        address: Address of the scheduler, or a dask cluster object.
        workers: Number of workers that will join; None counts those that are there.

    Raises:
        BadInput: If the scheduler does not respond or has no workers.
        MachineLacks: If dask is missing, or a worker lacks this package, has another
            version, or does not see the work directory.
    """
    if importlib.util.find_spec("distributed") is None:
        raise MachineLacks(
            "--scheduler requires dask.distributed",
            next_step=install_step("distributed"),
            docs="missing-extra",
        )
    from distributed import Client

    try:
        client = Client(address, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise BadInput(
            f"the scheduler at {address} does not respond: {error}",
            next_step="Check --scheduler, such as tcp://HOST:8786",
        ) from error
    try:
        if workers:
            try:
                client.wait_for_workers(1, timeout=_START_S)
            except TimeoutError as error:
                raise BadInput(
                    f"no worker started within {_START_S:g} s",
                    next_step="Check the queue: squeue --me",
                ) from error
        present = client.scheduler_info(n_workers=-1)["workers"]
        if not present:
            raise BadInput(
                f"the scheduler at {address} has no workers",
                next_step=f"Start some: dask worker {address}",
            )
        _check_workers(client, workplace)
        yield _on_dask_workers(workplace, client, workers or len(present))
    finally:
        _close(client)


@contextlib.contextmanager
def slurm_engine(workplace: Workplace, site_file: Path, jobs: int) -> Iterator[Engine]:
    """Submit workers as SLURM jobs, set up by a site file.

    They are cancelled at the end.

    Raises:
        BadConfig: If the site file cannot be used.
        BadInput: If no job starts in time.
        MachineLacks: If dask-jobqueue or ``sbatch`` is missing, or a job does not see
            the work directory.
    """
    site = read_site(site_file)
    if importlib.util.find_spec("dask_jobqueue") is None:
        raise MachineLacks(
            "--slurm-workers requires dask-jobqueue",
            next_step=install_step("dask-jobqueue"),
            docs="missing-extra",
        )
    if shutil.which("sbatch") is None:
        raise MachineLacks(
            "cannot submit jobs: sbatch not found",
            next_step="Run this on a login node of the cluster.",
        )
    slurm_cluster = _slurm_cluster()
    settings = job_settings(site, workplace.path / "jobs")
    with contextlib.closing(slurm_cluster(**settings)) as cluster:
        cluster.scale(jobs=jobs)
        with cluster_engine(workplace, cluster, jobs) as engine:
            yield engine


def _slurm_cluster() -> Any:
    """Import ``SLURMCluster``, and keep the handler of Ctrl-C.

    The library replaces it by an exit with code 0.
    """
    before = signal.getsignal(signal.SIGINT)
    from dask_jobqueue.slurm import SLURMCluster

    signal.signal(signal.SIGINT, before)
    return SLURMCluster


def job_settings(site: SiteFile, log_directory: Path) -> dict[str, Any]:
    """Return the arguments of ``dask_jobqueue.SLURMCluster``. Pure.

    Each job has one worker process.
    """
    slurm = site.slurm
    directives = []
    if slurm.constraint:
        directives.append(f"--constraint={slurm.constraint}")
    if slurm.exclude:
        directives.append(f"--exclude={slurm.exclude}")
    python = shlex.quote(site.python or sys.executable)
    # The worker's limit, and as much for its extraction process.
    memory_mib = 2 * WORKER_MEMORY_BYTES // 2**20
    site_memory_mib = slurm.memory_mib_per_cpu * slurm.cpus_per_task
    return {
        "cores": 1,
        "processes": 1,
        "job_cpu": slurm.cpus_per_task,
        "memory": f"{memory_mib}MiB",
        "job_mem": slurm.mem or f"{max(memory_mib, site_memory_mib)}M",
        "account": slurm.account,
        "queue": slurm.partition,
        "walltime": slurm.time,
        "interface": site.network.interface,
        "python": f"{site.command_prefix} {python} -P".strip(),
        "job_script_prologue": list(site.prologue),
        "job_extra_directives": directives + slurm.extra,
        "log_directory": str(log_directory),
        "local_directory": site.node_local_path,
        "scheduler_options": {"dashboard_address": None},
    }


def _check_workers(client: Any, workplace: Workplace) -> None:
    """Check that all workers have this version and see the work directory.

    Raises:
        MachineLacks: If one has or does not.
    """
    same_version = "Install the same version of encoder-autotune on every worker."
    try:
        workers: dict[str, tuple[str, bool]] = client.run(
            _describe_worker, workplace.path
        )
    except (ImportError, AttributeError) as error:
        raise MachineLacks(
            f"a worker cannot import this package: {error}", next_step=same_version
        ) from error
    version = importlib.metadata.version("encoder-autotune")
    for worker, (worker_version, sees_directory) in sorted(workers.items()):
        if worker_version != version:
            raise MachineLacks(
                f"worker {worker} has encoder-autotune {worker_version}, this process"
                f" {version}",
                next_step=same_version,
            )
        if not sees_directory:
            raise MachineLacks(
                f"worker {worker} does not see {workplace.path}",
                next_step="Choose an --out on a file system that all workers share.",
            )


def _describe_worker(work_directory: Path) -> tuple[str, bool]:
    """Return a worker's version, and whether it sees the work directory."""
    os.environ.update(_WORKER_ENVIRONMENT)
    return (
        importlib.metadata.version("encoder-autotune"),
        (work_directory / "lock").is_file(),
    )
