"""Result of one start of a training run, for its job script.

It is read from the run's ``exit.json`` alone.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from autotune.cluster.slurm import Ended
from trainer.formats.errors import TrainerError, TrainingFailed
from trainer.formats.run_record import EARLIER_DIRECTORY, EXIT_FILE, RunExit, read_exit
from trainer.health.watchdog import REQUEUE

PATIENCE_S = 70.0
"""Longest wait for another node's write, in seconds, as NFS caches directory entries
for up to 60 s."""
PATIENCE_HERE_S = 5.0
"""Longest wait on one node, in seconds, as ranks that outlive their torchrun take a
moment to exit."""
_POLL_S = 0.25
"""Time between two looks for ``exit.json``, in seconds."""
MOST_FRUITLESS_STARTS = 3
"""Starts in a row without a newer checkpoint after which a run is given up."""
_KILLED = 70
"""Exit code if training was killed, or left no record of its end."""
_SIGNAL_EXIT = 128
"""Exit codes from here on are of processes that a signal ended."""


def run_end_of(
    run: Path,
    exit_text_before: str,
    job_code: int,
    *,
    patience_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> Ended:
    """Return how this start of a run ended.

    Args:
        run: Directory of the run.
        exit_text_before: Content of ``exit.json`` before this start, which does not
            count; a new one is waited for.
        job_code: Exit code of srun: that of the first rank that failed, or 1.
        patience_s: Longest wait for a new ``exit.json``.
        sleep: Function that waits.
    """
    if job_code == 0:
        # If nothing was left to do, the record is from before.
        end = _read(run)
        if end is not None and end.exit_code == 0:
            return Ended(code=0, words=_words(end))
    waited_s = 0.0
    while exit_text(run).strip() in ("", exit_text_before.strip()):
        if waited_s >= patience_s:
            return _end_without_record(run, job_code)
        sleep(_POLL_S)
        waited_s += _POLL_S
    end = _read(run)
    if end is None:
        return Ended(
            code=_KILLED,
            words=f"cannot read {run / EXIT_FILE}; the job is not restarted",
        )
    return _given_up(run, end) or Ended(code=end.exit_code, words=_words(end))


def _end_without_record(run: Path, job_code: int) -> Ended:
    """Return the end of a start that wrote no ``exit.json``."""
    if is_of_a_rank(job_code):
        return Ended(
            code=job_code,
            words=(
                "training did not begin, for the reason in the log (exit code"
                f" {job_code}); the job is not restarted"
            ),
        )
    return Ended(
        code=_KILLED if job_code in (0, REQUEUE) else job_code,
        words=(
            f"{run / EXIT_FILE} was not written: training was killed or never"
            f" started (torchrun exit code {job_code}). See the nodes' logs; the job is"
            " not restarted"
        ),
    )


def is_of_a_rank(code: int) -> bool:
    """Return True if a rank chose this exit code itself, and printed the reason."""
    return 1 < code < _SIGNAL_EXIT and code != REQUEUE


def has_work_left(run: Path, link: int) -> Ended:
    """Return code 75 if a job of a chain has work left, else how the run ended.

    ``link`` is the job's number in the chain.
    """
    job = f"job {link} of the chain"
    end = _read(run)
    if end is None:
        words = f"{job}: the previous job was killed; resuming"
        return Ended(code=REQUEUE, words=words)
    failure = _given_up(run, end)
    if failure is not None:
        return Ended(code=failure.code, words=f"{job}: nothing to do: {failure.words}")
    if end.requeue:
        return Ended(code=REQUEUE, words=f"{job}: resuming after step {end.steps}")
    return Ended(code=end.exit_code, words=f"{job}: nothing to do: {_words(end)}")


def _words(end: RunExit) -> str:
    words = (
        f"the run exited with code {end.exit_code} at step {end.steps}: {end.reason}"
    )
    if end.requeue:
        words += f"; resumes from {end.checkpoint or 'the beginning'}"
    return words


def _given_up(run: Path, end: RunExit) -> Ended | None:
    """Return a failure if a run to be resumed has made no progress too often.

    Returns:
        The failure, or None for all other runs.
    """
    if end.exit_code != REQUEUE or _fruitless_starts(run, end) < MOST_FRUITLESS_STARTS:
        return None
    missing = "no checkpoint"
    if end.checkpoint is not None:
        missing = f"no newer checkpoint than {end.checkpoint}"
    return Ended(
        code=TrainingFailed.exit_code,
        words=(
            f"{MOST_FRUITLESS_STARTS} starts in a row wrote {missing}; the last:"
            f" {end.reason}. It is not restarted"
        ),
    )


def _fruitless_starts(run: Path, end: RunExit) -> int:
    """Return the number of starts in a row without a newer checkpoint.

    This start is included.
    """
    earlier_starts = [
        path for path in (run / EARLIER_DIRECTORY).glob("*") if path.name.isdecimal()
    ]
    earlier_starts.sort(key=lambda path: int(path.name), reverse=True)
    count = 1
    for start in earlier_starts:
        earlier_end = _read(start)
        if earlier_end is None:
            break
        if earlier_end.exit_code != end.exit_code:
            break
        if earlier_end.checkpoint != end.checkpoint:
            break
        count += 1
    return count


def _read(run: Path) -> RunExit | None:
    """Return the record of a run's end; None if there is none that can be read."""
    _refresh_listing(run)
    with contextlib.suppress(TrainerError):
        return read_exit(run)
    return None


def exit_text(run: Path) -> str:
    """Return the content of a run's ``exit.json``; empty if there is none."""
    _refresh_listing(run)
    with contextlib.suppress(OSError):
        return (run / EXIT_FILE).read_text(encoding="utf-8", errors="replace")
    return ""


def _refresh_listing(directory: Path) -> None:
    """List a directory, which makes NFS query its server instead of using its cache."""
    with contextlib.suppress(OSError):
        list(directory.iterdir())
