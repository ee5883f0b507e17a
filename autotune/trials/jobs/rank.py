"""One rank of a trial, from its fork to its end."""

import contextlib
import os
from pathlib import Path
from typing import Any, NoReturn

from autotune.base.process import end_with_parent
from autotune.trials.jobs.run_job import run_job
from autotune.trials.messages import RunRequest, result_file


def run_rank(
    request: RunRequest, rank: int, server_pid: int, master_port: int
) -> NoReturn:
    """Run one rank in this forked process, and end the process.

    Args:
        request: The trial.
        rank: Number of this rank.
        server_pid: Process id of the fork server, with which the rank ends.
        master_port: Free port, for ranks that join as under torchrun.
    """
    # Before anything else, as the server may end at any time. The rank has its own
    # session, so that the server can kill all processes that the job starts.
    os.setsid()
    end_with_parent(server_pid)
    directory = Path(request.directory)
    _redirect_output(log_file(directory, rank))
    _be_first_to_be_killed()
    # All ranks are on this host, so they talk over its loopback interface. By default
    # gloo looks up the host's name, which need not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if request.local_ranks == 1:
        _see_one_gpu()
    local = request.local | _launch_settings(
        request.local_ranks, rank, directory, master_port
    )
    exit_code = 1
    try:
        has_measured = run_job(
            request.job, result_file(directory, rank), request.measured, local
        )
        if has_measured:
            exit_code = 0
    finally:
        # Without the interpreter's shutdown, which would run handlers that the server
        # registered before the fork.
        os._exit(exit_code)


def log_file(directory: Path, rank: int) -> Path:
    """Return the file that gets the output of a rank of the trial in ``directory``."""
    return directory / f"rank-{rank}.log"


def _launch_settings(
    local_ranks: int, rank: int, directory: Path, master_port: int
) -> dict[str, Any]:
    """Return the local inputs by which several ranks find each other; none for one."""
    if local_ranks == 1:
        return {}
    return {
        # The variables that torchrun sets.
        "environment": {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(local_ranks),
            "LOCAL_WORLD_SIZE": str(local_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(master_port),
        },
        "rendezvous": str(directory / "rendezvous"),
    }


def _see_one_gpu() -> None:
    """Hide all GPUs but the first from this process, unless all are hidden already.

    Libraries such as transformers' Trainer otherwise train one process on all GPUs,
    with ``DataParallel``, and the measured figures would not be those of one rank.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.partition(",")[0]


def _redirect_output(log: Path) -> None:
    """Connect standard input to nothing, and standard output and error to a log."""
    null_descriptor = os.open(os.devnull, os.O_RDONLY)
    log_descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(null_descriptor, 0)
    os.dup2(log_descriptor, 1)
    os.dup2(log_descriptor, 2)


def _be_first_to_be_killed() -> None:
    """If the host runs out of memory, let the kernel kill this process first."""
    with contextlib.suppress(OSError):
        # 1000 is the highest score.
        Path("/proc/self/oom_score_adj").write_text("1000")
