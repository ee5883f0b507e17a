"""Ranks of a trial, which the fork server forks, watches and ends."""

import contextlib
import json
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

import psutil

from autotune.trials.jobs.kernel_kills import count_kernel_kills
from autotune.trials.jobs.rank import log_file, run_rank
from autotune.trials.messages import (
    JobResult,
    RankAccount,
    RunReply,
    RunRequest,
    result_file,
)

POLL_S = 0.01
"""Time between two looks at the ranks, in seconds; the end of a trial is noticed at
most this much later."""
GRACE_S = 2.0
"""Time that the other ranks have after a rank's failure to notice it and write their
results, in seconds."""
MAX_LOG_CHARACTERS = 4000
"""Characters of a rank's log that its account quotes, from its end."""


class ParentGone(Exception):
    """The parent of the fork server no longer wants the answer."""


class Ending(Enum):
    """Reason for which the server no longer waits for the ranks of a trial."""

    ALL_ENDED = auto()
    """All ranks ended."""
    TIMED_OUT = auto()
    """The trial reached its time limit."""
    RANK_FAILED = auto()
    """A rank failed, and the others did not end within their time of grace."""
    PARENT_GONE = auto()
    """The parent no longer wants the answer."""


@dataclass(slots=True, kw_only=True)
class RankProcess:
    """The process of one rank, which leads a process session."""

    pid: int
    exit_code: int | None = None
    """Exit code, negative for a signal; None until the process has been reaped."""
    ended_s: float = math.nan
    """Time at which the end was noticed, by the monotonic clock; NaN until then."""
    killed: bool = False
    """True if the fork server killed it."""

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs.

        If the process has ended, reap it and all processes that it left running.
        """
        if self.exit_code is None:
            # WNOWAIT: the id must not be reused before the process group has ended.
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended:
                self.reap()
        return self.exit_code

    def reap(self) -> None:
        """Wait for the end of the process, and end all processes of its group."""
        # WNOWAIT, as in ``poll``.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.exit_code = os.waitstatus_to_exitcode(status)
        self.ended_s = time.monotonic()


def run_trial(request: RunRequest, parent_gone: Callable[[float], bool]) -> RunReply:
    """Run a trial in as many processes as it has local ranks, and leave none of them.

    Args:
        request: The trial.
        parent_gone: Waits for some seconds, and returns True if the parent no longer
            wants the answer.

    Raises:
        ParentGone: If the parent no longer wants the answer.
    """
    kernel_kills_before = count_kernel_kills()
    processes = _fork_ranks(request)
    ending = wait_for_ranks(processes, request.timeout_s, parent_gone)
    _kill([process for process in processes if process.exit_code is None])
    # Also if the parent is gone, as orphans would outlive this process.
    _kill_orphans()
    if ending is Ending.PARENT_GONE:
        raise ParentGone
    directory = Path(request.directory)
    return RunReply(
        timed_out=ending is Ending.TIMED_OUT,
        killed_by_kernel=count_kernel_kills() > kernel_kills_before,
        ranks=[
            _account(process, directory, rank) for rank, process in enumerate(processes)
        ],
    )


def _fork_ranks(request: RunRequest) -> list[RankProcess]:
    """Start a process for each rank of a trial; they are in the order of the ranks."""
    server_pid = os.getpid()
    master_port = _free_port()
    processes = []
    for rank in range(request.local_ranks):
        pid = os.fork()
        if pid == 0:
            # This is the child, which ends in this call.
            run_rank(request, rank, server_pid, master_port)
        processes.append(RankProcess(pid=pid))
    return processes


def _free_port() -> int:
    """Return a port of the loopback interface that no program listens on.

    Another program may take it before the ranks do. The trial then crashes, and a
    crashed trial is repeated.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def wait_for_ranks(
    processes: Sequence[RankProcess],
    timeout_s: float,
    parent_gone: Callable[[float], bool],
) -> Ending:
    """Wait until all ranks have ended, or until those that run have to be ended.

    Args:
        processes: Processes of the ranks.
        timeout_s: Time limit of the trial.
        parent_gone: As for ``run_trial``.
    """
    time_limit_s = time.monotonic() + timeout_s
    # Set at the first failure: some ranks wait for one that failed until they are
    # killed.
    grace_ends_s = math.inf
    while _any_runs(processes):
        has_failure = any(process.exit_code for process in processes)
        if has_failure and grace_ends_s == math.inf:
            grace_ends_s = time.monotonic() + GRACE_S
        is_late = time.monotonic() > min(time_limit_s, grace_ends_s)
        if parent_gone(0 if is_late else POLL_S):
            return Ending.PARENT_GONE
        if is_late:
            return Ending.RANK_FAILED if has_failure else Ending.TIMED_OUT
    return Ending.ALL_ENDED


def _any_runs(processes: Sequence[RankProcess]) -> bool:
    """Poll all processes; return whether any runs."""
    # A list, as ``any`` would stop at the first one that runs.
    exit_codes = [process.poll() for process in processes]
    return None in exit_codes


def _kill(processes: Sequence[RankProcess]) -> None:
    """Kill processes that run, and reap them."""
    for process in processes:
        process.killed = True
        # ``reap`` kills the process group, which a new process may not have yet.
        os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        process.reap()


def _kill_orphans() -> None:
    """End processes that a trial left running in other sessions.

    They became children of this process when their parents ended.
    """
    while orphans := psutil.Process().children():
        for orphan in orphans:
            with contextlib.suppress(psutil.NoSuchProcess):
                orphan.kill()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(orphan.pid, 0)


def _account(process: RankProcess, directory: Path, rank: int) -> RankAccount:
    """Return the account of a rank that has ended, with what it wrote to its files."""
    result = _read_result(result_file(directory, rank))
    log = log_file(directory, rank)
    log_text = log.read_text(errors="replace") if log.exists() else ""
    return RankAccount(
        result=result,
        exit_code=process.exit_code,
        killed=process.killed,
        ended_s=process.ended_s if result is None else result.ended_s,
        log_tail=log_text[-MAX_LOG_CHARACTERS:],
    )


def _read_result(file: Path) -> JobResult | None:
    """Return the result that a rank wrote; None if the rank ended before."""
    if not file.exists():
        return None
    return JobResult.from_json(json.loads(file.read_text()))
