"""One rank of a trial, from its fork to its end."""

import contextlib
import os
from pathlib import Path
from typing import Any, NoReturn

from autotune.base.process import end_with_parent
from autotune.trials.jobs.run_job import run_job
from autotune.trials.messages import TrialRequest, result_file


def run_rank(request: TrialRequest, rank: int, server_pid: int) -> NoReturn:
    """Run one rank in this forked process, and end the process.

    Args:
        request: The trial.
        rank: Number of this rank.
        server_pid: Process id of the fork server, with which the rank ends.
    """
    # Its own session, so that the server can end all processes that the job
    # starts. Before anything else: the server may go at any time.
    os.setsid()
    end_with_parent(server_pid)
    directory = Path(request.directory)
    _redirect_output(log_file(directory, rank))
    _be_first_to_be_killed()
    # All ranks are on this host; gloo would otherwise go by the host's name, which need
    # not lead anywhere.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    local = request.local | _launch_settings(request.local_ranks, rank, directory)
    exit_code = 1
    try:
        has_measured = run_job(
            request.job, result_file(directory, rank), request.measured, local
        )
        if has_measured:
            exit_code = 0
    finally:
        # No interpreter shutdown: handlers of the server are not the child's to run.
        os._exit(exit_code)


def log_file(directory: Path, rank: int) -> Path:
    """Return the file that gets the output of a rank of the trial in ``directory``."""
    return directory / f"rank-{rank}.log"


def _launch_settings(local_ranks: int, rank: int, directory: Path) -> dict[str, Any]:
    """Return the job's inputs by which several ranks find each other."""
    if local_ranks == 1:
        return {}
    return {
        # As torchrun sets them.
        "environment": {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(local_ranks),
            "LOCAL_WORLD_SIZE": str(local_ranks),
        },
        "rendezvous": str(directory / "rendezvous"),
    }


def _redirect_output(log: Path) -> None:
    """Let this process read nothing, and write to a log."""
    null_descriptor = os.open(os.devnull, os.O_RDONLY)
    log_descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(null_descriptor, 0)
    os.dup2(log_descriptor, 1)
    os.dup2(log_descriptor, 2)


def _be_first_to_be_killed() -> None:
    """Let the trial end if the host runs out of memory, and not your other programs."""
    with contextlib.suppress(OSError):
        # 1000 is the highest score: the kernel kills this process first.
        Path("/proc/self/oom_score_adj").write_text("1000")
