"""Ranks that measure together: they join once, then run one trial after the other.

torchrun starts each rank with ``-m autotune.trials.jobs.multirank_worker DIRECTORY
DEVICE``. Trial N is in ``DIRECTORY/N/trial.json``, which the first rank reads for all;
rank R writes its result to ``rank-R.json`` beside it. A rank whose trial failed exits,
and torchrun ends the others.

Torch is imported in functions: importing it takes seconds, and ``main`` must tie the
rank to its parent before that.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.base.process import end_with_parent
from autotune.trials.jobs.run_job import run_job
from autotune.trials.messages import END_FILE, JOINED_FILE, REQUEST_FILE, result_file
from autotune.trials.values import Trial
from trainer.formats.files import write_atomically
from trainer.runtime.garbage_collection import collection_paused

if TYPE_CHECKING:
    from trainer.runtime.ranks import Ranks

POLL_S = 0.01
"""Time between two looks for the next trial, in seconds; a trial begins at most this
much later."""
LONGEST_TRIAL_S = 86400.0
"""Time that a rank waits for the others, in seconds: a day, so that it is the machine
that started the ranks which decides how long a trial may take."""


def serve(directory: Path, device: str) -> int:
    """Join the other ranks, and run trials until there are no more.

    Args:
        directory: Directory of all trials.
        device: Device of the ranks, ``cpu`` or ``cuda``.

    Returns:
        The exit code: 0 if there are no more trials, 1 after a trial that failed.
    """
    # Before joining, so that no trial waits for imports.
    with collection_paused():
        from trainer.runtime.ranks import leave_ranks

        versions = _import_libraries()
    ranks = _join(device)
    if ranks.leads:
        joined = json.dumps({"versions": versions})
        write_atomically(directory / JOINED_FILE, joined, durable=False)
    number = 0
    while True:
        trial_directory = directory / str(number)
        trial = _next_trial(ranks, trial_directory / REQUEST_FILE, directory / END_FILE)
        if trial is None:
            leave_ranks(together=True)
            return 0
        has_measured = run_job(
            trial.job,
            result_file(trial_directory, ranks.rank),
            trial.measured,
            trial.local,
            joined_ranks=ranks,
        )
        if not has_measured:
            return 1
        number += 1


def _import_libraries() -> dict[str, str | None]:
    """Import torch and transformers, and return their versions."""
    import torch
    import transformers

    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
    }


def _join(device: str) -> "Ranks":
    """Join the other ranks, and return them."""
    from trainer.runtime.ranks import join_on_device

    return join_on_device(device, timeout_s=LONGEST_TRIAL_S)


def _next_trial(ranks: "Ranks", request_file: Path, end_file: Path) -> Trial | None:
    """Return the next trial, which the first rank reads for all; None at the end."""
    request = None
    if ranks.leads:
        request = _await_request(request_file, end_file, os.getppid())
    request = ranks.broadcast_object(request)
    return None if request is None else Trial(**json.loads(request))


def _await_request(request_file: Path, end_file: Path, parent_pid: int) -> str | None:
    """Wait for the file with the next trial.

    Returns:
        Its text, or None once ``end_file`` exists or the parent process has ended.
    """
    while not request_file.is_file():
        if end_file.exists() or os.getppid() != parent_pid:
            return None
        time.sleep(POLL_S)
    return request_file.read_text()


def main() -> None:
    """Run one rank, which ends if the torchrun that started it does."""
    directory, device = sys.argv[1:]
    parent_pid = os.getppid()
    end_with_parent(parent_pid)
    # If torchrun ended before ``getppid``, this is another process's id. Torchrun's own
    # command line names the directory.
    if directory.encode() not in Path(f"/proc/{parent_pid}/cmdline").read_bytes():
        os._exit(1)
    exit_code = serve(Path(directory), device)
    sys.stdout.flush()
    # Without the interpreter's shutdown, which takes time: other ranks notice a failure
    # only when the connections of this process end.
    os._exit(exit_code)


if __name__ == "__main__":
    main()
