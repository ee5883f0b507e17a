"""The fork server: loads torch once, then forks the processes of each trial.

A trial has a process for each local rank; they are watched and ended together.

It speaks JSON lines: a request on standard input, a reply on standard output. It runs
no computation itself, so that no thread pool and no CUDA context exists when it forks.
When its standard input closes, it kills what runs and ends.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import json
import os
import re
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch

from autotune.base.process import end_with_parent, keep_orphans
from autotune.trials.values import JOB_MODULES
from trainer.errors import TrainerError
from trainer.files import write_atomically
from trainer.health.failures import is_vague, out_of_memory

POLL_S = 0.01
GRACE_S = 2.0
"""Time that the other ranks have after a rank's failure to notice it and write their
accounts, in seconds."""
MOST_LOG_LETTERS = 4000
"""Letters of a rank's log that its account quotes, from its end."""
MOST_TRACEBACK_LETTERS = 2000
_LOST_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken"
    r" pipe|gloo/transport|ncclRemote"
)
"""Messages of gloo and NCCL if another rank is gone."""


def preload_trainer() -> None:
    """Import the trainer, its jobs, and modules that torch imports in a first step."""
    # Transformers imports torchao if it is installed, which starts CUDA, and breaks it
    # in forked processes.
    sys.modules["torchao"] = None  # type: ignore[assignment]
    for module in (
        "trainer.loop",
        "autotune.memory.jobs.step",
        "autotune.workers.job",
        "torch._dynamo",
    ):
        importlib.import_module(module)
    del sys.modules["torchao"]


@functools.cache
def preload_model(model_type: str | None) -> None:
    """Import the code of a model type, if there is one.

    Building its default shape on the meta device imports all of it.
    """
    if model_type is None:
        return
    import transformers

    try:
        with torch.device("meta"):
            config = transformers.AutoConfig.for_model(model_type)
            transformers.AutoModelForMaskedLM.from_config(config)
    except Exception as error:  # noqa: BLE001 - only a head start is lost: some types have no default shape
        sys.stderr.write(f"no head start for {model_type}: {error}\n")


@dataclass(slots=True, kw_only=True)
class RankProcess:
    """One rank, in its own process session."""

    pid: int
    exit_code: int | None = None
    ended_s: float | None = None
    killed: bool = False
    """True if this server killed it."""

    def is_running(self) -> bool:
        """Return whether it still runs.

        If not, end all processes that it left running.
        """
        if self.exit_code is None:
            # Without reaping it: its id must not be reused before its group has ended.
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended:
                self.reap()
        return self.exit_code is None

    def reap(self) -> None:
        """Wait for its end, and end its process group before its id can be reused."""
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.exit_code = os.waitstatus_to_exitcode(status)
        self.ended_s = time.monotonic()


def run_trial(
    request: dict[str, Any], parent_gone: Callable[[float], bool]
) -> dict[str, Any]:
    """Run a trial in as many processes as it has local ranks.

    Args:
        request: ``job``, ``measured``, ``local``, ``timeout_s`` and ``directory``,
            which is the trial's own.
        parent_gone: Waits for some seconds, and returns True if the parent no longer
            wants the answer.

    Returns:
        The accounts that ``classify`` reads, and ``timed_out``.
    """
    server_pid = os.getpid()
    kernel_kills_before = _kernel_kills()
    local_ranks = request["measured"].get("local_ranks", 1)
    processes: list[RankProcess] = []
    for rank in range(local_ranks):
        pid = os.fork()
        if pid == 0:
            _run_rank(request, rank, local_ranks, server_pid)
        processes.append(RankProcess(pid=pid))
    deadline_s = time.monotonic() + request["timeout_s"]
    timed_out = _watch(processes, deadline_s, parent_gone)
    _kill_orphans()
    accounts = [
        _account(process, Path(request["directory"]), rank)
        for rank, process in enumerate(processes)
    ]
    return {
        "timed_out": timed_out,
        "killed_by_kernel": _kernel_kills() > kernel_kills_before,
        "ranks": accounts,
    }


def _watch(
    processes: list[RankProcess],
    deadline_s: float,
    parent_gone: Callable[[float], bool],
) -> bool:
    """Wait until all ranks have ended, or end them.

    Return whether the deadline was the reason.
    """
    a_rank_failed = False
    while True:
        running = [process for process in processes if process.is_running()]
        if not running:
            return False
        if not a_rank_failed and any(process.exit_code for process in processes):
            # The others wait for it, some until they are killed.
            a_rank_failed = True
            deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
        is_late = time.monotonic() > deadline_s
        is_unwanted = parent_gone(0 if is_late else POLL_S)
        if is_late or is_unwanted:
            _kill(running)
            if is_unwanted:
                raise SystemExit(0)
            return not a_rank_failed


def _kill(processes: list[RankProcess]) -> None:
    for process in processes:
        process.killed = True
        # Its group follows; it may not have made one yet.
        os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        process.reap()


def _kill_orphans() -> None:
    """End processes that a trial left running in other sessions.

    The end of their parents made them this one's.
    """
    while orphans := psutil.Process().children():
        for orphan in orphans:
            with contextlib.suppress(psutil.NoSuchProcess):
                orphan.kill()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(orphan.pid, 0)


def _account(process: RankProcess, directory: Path, rank: int) -> dict[str, Any]:
    """Return the account of a rank for ``classify``.

    Without a result, it ended when its end was noticed.
    """
    result_file = _result_file(directory, rank)
    result = json.loads(result_file.read_text()) if result_file.exists() else None
    log_file = _log_file(directory, rank)
    log = log_file.read_text(errors="replace") if log_file.exists() else ""
    return {
        "result": result,
        "exit_code": process.exit_code,
        "killed": process.killed,
        "ended_s": process.ended_s if result is None else result["ended_s"],
        "log_tail": log[-MOST_LOG_LETTERS:],
    }


def _result_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.json"


def _log_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.log"


def _run_rank(
    request: dict[str, Any], rank: int, local_ranks: int, server_pid: int
) -> NoReturn:
    """Run one rank in this forked process, and end it."""
    os.setsid()
    end_with_parent(server_pid)
    directory = Path(request["directory"])
    local = request["local"]
    if local_ranks > 1:
        # As torchrun sets them.
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(local_ranks),
            "LOCAL_WORLD_SIZE": str(local_ranks),
        }
        local |= {
            "environment": environment,
            "rendezvous": str(directory / "rendezvous"),
        }
    _redirect_output(_log_file(directory, rank))
    with contextlib.suppress(OSError):
        # If the host runs out of memory, a trial ends, and not your other programs.
        Path("/proc/self/oom_score_adj").write_text("1000")
    # All ranks are on this host; gloo would otherwise go by the host's name, which need
    # not lead anywhere.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    exit_code = 1
    try:
        result_file = _result_file(directory, rank)
        if run_job(request["job"], result_file, request["measured"], local):
            exit_code = 0
    finally:
        # No interpreter shutdown: handlers of the server are not the child's to run.
        os._exit(exit_code)


def _redirect_output(log_file: Path) -> None:
    """Let this process read nothing, and write to a log."""
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)


def _kernel_kills() -> int:
    """Return how often the kernel has killed a process for memory.

    The count is that of this control group (v2, then v1), or else of this host.
    """
    counters: list[str] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers == "":
                counters.append(f"/sys/fs/cgroup/{group}/memory.events")
            elif controllers == "memory":
                counters.append(f"/sys/fs/cgroup/memory{group}/memory.oom_control")
    counters.append("/proc/vmstat")
    for counter in counters:
        with contextlib.suppress(OSError):
            count = re.search(
                r"^oom_kill (\d+)$", Path(counter).read_text(), re.MULTILINE
            )
            if count:
                return int(count[1])
    return 0


def serve(preload: dict[str, Any] | None = None) -> None:
    """Answer requests until standard input closes.

    Args:
        preload: Replaces what the trainer's trials need: the ``function`` of a
            ``module``, which is called with ``options``, and whose result is the field
            ``preloaded`` of the first reply.
    """
    # Replies go to standard output; output of libraries goes to the log.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(reply: dict[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    def input_closed(within_s: float) -> bool:
        # The parent sends nothing during a trial, so readable input is its end.
        readable, _, _ = select.select([0], [], [], within_s)
        return bool(readable)

    keep_orphans()
    send(_load(preload))
    # Unbuffered, so that its end is seen in a trial.
    with open(0, "rb", buffering=0) as requests:
        for line in iter(requests.readline, b""):
            request = json.loads(line)
            if "modules" in request:
                send({"threads": _threads_started_by_import(request["modules"])})
                continue
            preload_model(_model_type(request["measured"]))
            send(run_trial(request, input_closed))


def _load(preload: dict[str, Any] | None) -> dict[str, Any]:
    """Import everything that trials need; return the versions of libraries."""
    versions: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if preload is None:
        preload_trainer()
        versions["transformers"] = importlib.metadata.version("transformers")
    else:
        module = importlib.import_module(preload["module"])
        function = getattr(module, preload["function"])
        versions["preloaded"] = function(**preload["options"])
    return versions


def _threads_started_by_import(modules: list[str]) -> int:
    """Import modules that trials would import late, as far as they can be imported."""
    threads_before = psutil.Process().num_threads()
    for module in modules:
        with contextlib.suppress(Exception, SystemExit):
            importlib.import_module(module)
    return psutil.Process().num_threads() - threads_before


def _model_type(measured: dict[str, Any]) -> str | None:
    model = measured.get("config", {}).get("model", {})
    model_type: str | None = model.get("config", {}).get("model_type")
    return model_type


def run_job(
    job: str,
    result_file: Path,
    measured: dict[str, Any],
    local: dict[str, Any],
    *more: object,
) -> bool:
    """Run a job and write its result: ``status``, details and ``ended_s`` (monotonic).

    With ``first_attempt`` in ``local``, the trial is tried again after a crash. A fault
    that may not be of memory is then a crash: near the limit little is free, and a
    broken kernel would pass for a smaller limit.

    Args:
        job: Name of a job, or of a module with a function ``run``, which gets
            ``measured``, ``local`` and ``more`` and returns figures.
        result_file: File to write.
        measured: Input that defines the measurement.
        local: Input that depends on this machine.
        more: Further arguments of ``run``.

    Returns:
        True if the job measured its figures.
    """
    result: dict[str, Any]
    pid = os.getpid()
    try:
        module = importlib.import_module(JOB_MODULES.get(job, job))
        result = {"status": "measured", "figures": module.run(measured, local, *more)}
        _lift_limit()
    except Exception as error:  # noqa: BLE001 - the border of the process: every failure becomes an outcome
        _lift_limit()
        result = _failure(error, local.get("first_attempt", False))
    if os.getpid() != pid:
        # A copy of the trial, which its own code has forked: there is one account, the
        # original's.
        os._exit(1)
    result["ended_s"] = time.monotonic()
    write_atomically(result_file, json.dumps(result), durable=False)
    return bool(result["status"] == "measured")


def _failure(error: Exception, first_attempt: bool) -> dict[str, Any]:
    """Return the result of a job that raised an error."""
    if isinstance(error, TrainerError):
        return {
            "status": "rejected",
            "message": error.message,
            "next_step": error.next_step,
            "exit_code": error.exit_code,
        }
    memory_message = out_of_memory(error)
    if memory_message is not None:
        is_doubtful = first_attempt and is_vague(memory_message)
        return {
            "status": "crashed" if is_doubtful else "out_of_memory",
            "detail": memory_message,
        }
    # Not this rank's failure: that of the rank which it has lost.
    lost_peer = isinstance(error, RuntimeError) and _LOST_PEER.search(str(error))
    return {
        "status": "lost_peer" if lost_peer else "crashed",
        "detail": traceback.format_exc()[-MOST_TRACEBACK_LETTERS:],
    }


def _lift_limit() -> None:
    """Lift the memory limit, as writing the account needs memory too."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


if __name__ == "__main__":
    # Imported for children, which must not import anything near their memory limit.
    psutil.Process()
    serve(*[json.loads(argument) for argument in sys.argv[1:]])
    # Nothing is left to do, and taking torch apart would delay the parent by most of a
    # second.
    os._exit(0)
