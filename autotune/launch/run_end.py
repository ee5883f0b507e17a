"""How a start of a training run ended, for the script of its job: by the run's ``exit.json``, and by nothing else."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from autotune.cluster.slurm import Ended
from trainer.errors import TrainerError, TrainingFailed
from trainer.health.watchdog import REQUEUE
from trainer.record.run_record import EARLIER_DIRECTORY, EXIT_FILE, RunExit, read_exit

PATIENCE_S = 70.0
"""What another node wrote may be seen so late: NFS believes for up to 60 s what it knows of a directory."""
PATIENCE_HERE_S = 5.0
"""On one node files are seen at once; but ranks that outlive their torchrun take a moment to notice, and to leave."""
_POLL_S = 0.25
MOST_FRUITLESS_STARTS = 3
_KILLED = 70


def run_end_of(
    run: Path,
    said_before: str,
    job_code: int,
    *,
    patience_s: float = PATIENCE_S,
    sleep: Callable[[float], None] = time.sleep,
) -> Ended:
    """Say how this start of a run ended.

    ``said_before`` is what ``exit.json`` held before this start: of an earlier one, which does not count. ``job_code``
    is what srun returned: torchrun's, which is 1 whatever its ranks return. A word that is not there yet is waited for.
    """
    if job_code == 0 and (end := _read(run)) is not None and end.exit_code == 0:
        return Ended(code=0, words=_words(end))  # as before, perhaps: there was nothing left to do
    waited_s = 0.0
    while _text(run).strip() in ("", said_before.strip()):
        if waited_s >= patience_s:
            code = _KILLED if job_code in (0, REQUEUE) else job_code
            return Ended(
                code=code,
                words=f"this start left no word in {run / EXIT_FILE}: it never began to train, or was killed; torchrun "
                f"gave {job_code}. Its nodes' logs may say why; nothing is started again by itself",
            )
        sleep(_POLL_S)
        waited_s += _POLL_S
    end = _read(run)
    if end is None:
        return Ended(code=_KILLED, words=f"{run / EXIT_FILE} cannot be read; nothing is started again by itself")
    return _given_up(run, end) or Ended(code=end.exit_code, words=_words(end))


def has_work_left(run: Path, link: int) -> Ended:
    """Say whether job number ``link`` of a chain has anything to do: 75 if it has, else how the run ended."""
    end = _read(run)
    if end is None:
        code, words = REQUEUE, "the one before it was killed; goes on"
    elif (given_up := _given_up(run, end)) is not None:
        code, words = given_up.code, f"nothing to do: {given_up.words}"
    elif end.requeue:
        code, words = REQUEUE, f"goes on after step {end.steps}"
    else:
        code, words = end.exit_code, f"nothing to do: {_words(end)}"
    return Ended(code=code, words=f"job {link} of the chain: {words}")


def _words(end: RunExit) -> str:
    has_work_left = f"; goes on from {end.checkpoint or 'its beginning'}" if end.requeue else ""
    return f"the run ended with code {end.exit_code} at step {end.steps}: {end.reason}{has_work_left}"


def _given_up(run: Path, end: RunExit) -> Ended | None:
    """Return how a run ends that would go on, and has gone nowhere too often; None for all others."""
    if end.exit_code != REQUEUE or _fruitless_starts(run, end) < MOST_FRUITLESS_STARTS:
        return None
    newest = "no checkpoint" if end.checkpoint is None else f"no newer checkpoint than {end.checkpoint}"
    return Ended(
        code=TrainingFailed.exit_code,
        words=f"{MOST_FRUITLESS_STARTS} starts in a row left {newest}; the last: {end.reason}. It is not started again "
        "by itself",
    )


def _fruitless_starts(run: Path, end: RunExit) -> int:
    """Return how many starts in a row, this one included, left the next one to begin where this one did.

    By the checkpoint, not by the step: steps that are taken again and lost again lead nowhere.
    """
    earlier = [path for path in (run / EARLIER_DIRECTORY).glob("*") if path.name.isdecimal()]
    count = 1
    for path in sorted(earlier, key=lambda path: int(path.name), reverse=True):
        before = _read(path)
        if before is None or (before.exit_code, before.checkpoint) != (end.exit_code, end.checkpoint):
            break
        count += 1
    return count


def _read(run: Path) -> RunExit | None:
    _look_again(run)
    with contextlib.suppress(TrainerError):
        return read_exit(run)
    return None


def _text(run: Path) -> str:
    _look_again(run)
    with contextlib.suppress(OSError):
        return (run / EXIT_FILE).read_text(encoding="utf-8", errors="replace")
    return ""


def _look_again(directory: Path) -> None:
    """Opening a directory makes NFS ask its server what is there, instead of believing what it saw last."""
    with contextlib.suppress(OSError):
        list(directory.iterdir())
