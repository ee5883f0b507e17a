"""Where tasks run: in this process, or on the workers of ``dask.distributed``, here or on a cluster."""

import contextlib
import importlib.metadata
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from autotune.cluster.jobqueue import slurm_cluster
from autotune.corpus.workplace import Receipt, Workplace
from autotune.errors import AutotuneError, BadInput, InternalError, MachineLacks
from trainer.errors import TrainerError

WORKER_MEMORY_BYTES = 2**30
AHEAD = 3
"""Tasks that each worker has, so that none waits; never all of them, as there may be many."""
_CLOSE_S = 3.0
_CONNECT_S = 20.0
_START_S = 600.0
"""Longest wait for the first job of a queue; the others join as they start."""
_DEFAULT_JOBS = 8
_WORKER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


Work = Callable[..., Receipt]
"""What a task does: called with the workplace, the unfinished task, and the task's arguments by name. It reads files of
the workplace and writes into the task's directory; the same arguments give the same files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One piece of work of a stage. Sent by pickle: ``work`` is a function of a module."""

    stage: str
    name: str
    work: Work
    arguments: Mapping[str, Any] = field(default_factory=dict)


OnDone = Callable[[Task, Receipt], None]


class Engine(Protocol):
    """Runs tasks, in any order and place."""

    def run(self, workplace: Workplace, tasks: Iterable[Task], on_done: OnDone, *, ahead: int = AHEAD) -> None:
        """Run all, and report each as it is finished.

        Args:
            workplace: Where the results go.
            tasks: Drawn as there is room for more, so that it may stop early.
            on_done: Called in this process.
            ahead: Tasks handed out at once, for each worker.

        Raises:
            AutotuneError: What a task raises.
            OSError: What a task raises.
        """
        ...


def perform(workplace: Workplace, task: Task) -> Receipt:
    """Do one task, or take its result if it is there already."""
    done = workplace.receipt(task.stage, task.name)
    if done is not None:
        return done
    with workplace.unfinished(task.stage, task.name) as unfinished:
        return unfinished.finish(task.work(workplace, unfinished, **task.arguments))


class InProcessEngine:
    """One task after the other, here.

    Args:
        threads: Whether libraries may use more than one.
    """

    def __init__(self, *, threads: bool = True) -> None:
        if not threads:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def run(self, workplace: Workplace, tasks: Iterable[Task], on_done: OnDone, *, ahead: int = AHEAD) -> None:
        """See ``Engine``."""
        for task in tasks:
            on_done(task, perform(workplace, task))


class DaskEngine:
    """The workers of a dask client."""

    def __init__(self, client: Any, workers: int) -> None:  # noqa: ANN401 - distributed.Client, imported late
        self._client, self._workers = client, workers

    def run(self, workplace: Workplace, tasks: Iterable[Task], on_done: OnDone, *, ahead: int = AHEAD) -> None:
        """See ``Engine``."""
        from distributed import as_completed

        waiting = iter(tasks)
        running: dict[str, Task] = {}

        def submit(task: Task) -> Any:  # noqa: ANN401 - a distributed.Future
            future = self._client.submit(_perform_there, workplace, task, pure=False, retries=0)
            running[future.key] = task
            return future

        completed = as_completed([submit(task) for task in islice(waiting, ahead * self._workers)])
        for future in completed:
            task = running.pop(future.key)
            on_done(task, _result(future, task))
            for following in islice(waiting, 1):
                completed.add(submit(following))


def _perform_there(workplace: Workplace, task: Task) -> tuple[str, Any]:
    """Errors travel as values: dask would log them, and lose the fields that pickle does not know of."""
    try:
        return "done", perform(workplace, task)
    except (AutotuneError, TrainerError) as error:
        return "refused", (type(error), error.message, error.next_step)
    except OSError as error:
        return "failed", (error.errno, error.strerror, str(error.filename or workplace.path))


def _result(future: Any, task: Task) -> Receipt:  # noqa: ANN401 - a distributed.Future
    from distributed.scheduler import KilledWorker

    try:
        kind, value = future.result()
    except KilledWorker as error:
        raise InternalError(
            f"the worker died of task {task.stage}/{task.name} again and again",
            next_step="The same command goes on. If the machine is short of memory, use fewer --workers.",
        ) from error
    if kind == "refused":
        error_type, message, next_step = value
        raise error_type(message, next_step=next_step)
    if kind == "failed":
        raise OSError(*value)
    receipt: Receipt = value
    return receipt


@contextlib.contextmanager
def local_engine(workplace: Workplace, workers: int) -> Iterator[Engine]:
    """Workers on this machine: processes of one thread each, that listen on the loopback interface only."""
    import dask
    from distributed import Client, LocalCluster

    # What dask logs when a worker is ended is not news to whoever pressed Ctrl-C; errors of tasks come back as values.
    quiet = {
        "distributed.worker.memory.target": False,
        "distributed.worker.memory.spill": False,
        "distributed.admin.tick.limit": "1h",
        "distributed.nanny.pre-spawn-environ": _WORKER_ENVIRONMENT,
        "distributed.logging": {"distributed": "critical", "distributed.nanny": "critical", "tornado": "critical"},
    }
    with dask.config.set(quiet), _quiet_logs(), contextlib.ExitStack() as closing:
        cluster = _started(
            LocalCluster,
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            memory_limit=WORKER_MEMORY_BYTES,
            host="127.0.0.1",
            # Its web server starts whatever is asked for, but not beyond this machine.
            dashboard_address="127.0.0.1:0",
            scheduler_kwargs={"dashboard": False},
            worker_dashboard_address=None,
            local_directory=str(workplace.path / "dask"),
            silence_logs=logging.CRITICAL,
        )
        closing.callback(_close, cluster)
        client = _started(Client, cluster)
        closing.callback(_close, client)
        yield DaskEngine(client, workers)


def _close(what: Any) -> None:  # noqa: ANN401 - dask has no types
    """End a client or workers; on a busy machine that may take longer, and what they made is there all the same."""
    with contextlib.suppress(TimeoutError):
        what.close(timeout=_CLOSE_S)


def _started(what: Callable[..., Any], *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - dask has no types
    try:
        return what(*arguments, **options)
    except (OSError, RuntimeError) as error:  # RuntimeError: a worker that ended while it started
        raise MachineLacks(
            f"cannot start workers: {error}",
            next_step="If memory or processes are short, use fewer --workers. The same command goes on.",
        ) from error


@contextlib.contextmanager
def cluster_engine(workplace: Workplace, address: Any, workers: int | None = None) -> Iterator[Engine]:  # noqa: ANN401
    """The workers of a scheduler that exists, by its address or as a dask cluster object.

    Raises:
        BadInput: If it does not answer or has no workers.
        MachineLacks: If a worker lacks this package, has another version, or does not see the work directory.
    """
    from distributed import Client

    try:
        client = Client(address, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise BadInput(
            f"no scheduler answers at {address}: {error}", next_step="Check --scheduler, such as tcp://HOST:8786"
        ) from error
    try:
        if workers:
            try:
                client.wait_for_workers(1, timeout=_START_S)
            except TimeoutError as error:
                raise BadInput(
                    f"no worker has started after {_START_S:g} s", next_step="See the queue: squeue --me"
                ) from error
        there = client.scheduler_info(n_workers=-1)["workers"]
        if not there:
            raise BadInput(f"the scheduler at {address} has no workers", next_step="Start some: dask worker ADDRESS")
        _check_workers(client, workplace)
        yield DaskEngine(client, workers or len(there))
    finally:
        _close(client)


@contextlib.contextmanager
def slurm_engine(workplace: Workplace, site_file: Path, jobs: int | None) -> Iterator[Engine]:
    """Workers that are SLURM jobs, set up by a site file; they are cancelled at the end.

    Raises:
        BadConfig: If the site file cannot be used.
        BadInput: If no job starts in time.
        MachineLacks: If this is no place to submit jobs from, or a job does not see the work directory.
    """
    wanted = jobs or _DEFAULT_JOBS
    logs = workplace.path / "jobs"
    with (
        slurm_cluster(site_file, wanted, WORKER_MEMORY_BYTES, logs) as cluster,
        cluster_engine(workplace, cluster, wanted) as engine,
    ):
        yield engine


def _check_workers(client: Any, workplace: Workplace) -> None:  # noqa: ANN401 - distributed.Client
    try:
        found: dict[str, tuple[str, bool]] = client.run(_describe_worker, workplace.path)
    except (ImportError, AttributeError) as error:
        raise MachineLacks(
            f"a worker cannot load this package: {error}",
            next_step="Install the same encoder-autotune on every worker.",
        ) from error
    version = importlib.metadata.version("encoder-autotune")
    for worker, (theirs, sees) in sorted(found.items()):
        if theirs != version:
            raise MachineLacks(
                f"worker {worker} has version {theirs} of encoder-autotune, this process {version}",
                next_step="Install the same version everywhere.",
            )
        if not sees:
            raise MachineLacks(
                f"worker {worker} does not see {workplace.path}",
                next_step="Choose an --out on a file system that all workers share.",
            )


def _describe_worker(work_directory: Path) -> tuple[str, bool]:
    os.environ.update(_WORKER_ENVIRONMENT)
    return importlib.metadata.version("encoder-autotune"), (work_directory / "lock").is_file()


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("distributed", "tornado", "asyncio")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
