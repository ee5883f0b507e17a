"""Gives scripts to ``sbatch``, and asks SLURM how their jobs are doing. What SLURM itself says is passed on."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import MachineLacks

ASK_TIMEOUT_S = 60.0
_LONGEST_WORDS = 500


class _NoAnswer(MachineLacks):
    """A command of SLURM's took too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """What SLURM knows of a job."""

    state: str
    """Such as ``PENDING``, ``RUNNING`` or ``NODE_FAIL``."""
    reason: str = ""
    """Why it waits, or why it ended."""
    exit_code: int | None = None
    """Of the script; None while it runs, or where a signal ended it."""
    signal: int = 0
    """What ended the script."""
    nodes: str = ""


def submit(script: Path, arguments: Sequence[str] = (), *, after: str | None = None) -> str:
    """Submit a script; gives the job's id.

    Args:
        script: The file.
        arguments: Of the script.
        after: A job that must have succeeded before this one begins; if it does not, this one leaves the queue.

    Raises:
        MachineLacks: If there is no ``sbatch``, or it refuses.
    """
    if shutil.which("sbatch") is None:
        raise MachineLacks(
            "cannot submit the job: sbatch is not here",
            next_step=f"Run this on a login node of the cluster; the script is {script}.",
        )
    options = [] if after is None else [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"]
    done = _run(["sbatch", "--parsable", *options, str(script), *arguments])
    job = re.match(r"\d+", done.stdout.strip())
    if done.returncode or job is None:
        raise MachineLacks(
            f"sbatch refused the job: {(done.stderr or done.stdout).strip()[:_LONGEST_WORDS]}",
            next_step=f"Change the site file, or {script}, and submit that by hand: sbatch {script}",
        )
    return job[0]


def ask_state(job: str) -> JobState | None:
    """How a job is doing; None when SLURM does not answer at the moment.

    Raises:
        MachineLacks: If SLURM has forgotten the job, as it does some minutes after its end.
    """
    try:
        done = _run(["scontrol", "--oneliner", "show", "job", job])
    except _NoAnswer:
        return None
    if done.returncode == 0:
        return parse_state(done.stdout)
    if "Invalid job id" in done.stderr:
        raise MachineLacks(
            f"SLURM knows no job {job} any more: {done.stderr.strip()[:_LONGEST_WORDS]}",
            next_step=f"Look at its log; where accounting is kept: sacct -j {job}",
        )
    return None


def parse_state(text: str) -> JobState | None:
    """Read what ``scontrol show job`` prints; None if it is something else. Pure."""
    # Values may hold blanks (comments, names of files); the fields that are asked for come first, and hold none.
    found: dict[str, str] = {}
    for name, value in re.findall(r"(?:^|\s)(JobState|Reason|ExitCode|NodeList)=(\S*)", text):
        found.setdefault(name, value)
    state, ended = found.get("JobState"), re.fullmatch(r"(\d+):(\d+)", found.get("ExitCode", ""))
    if state is None:
        return None
    code, number = (int(ended[1]), int(ended[2])) if ended else (None, 0)
    return JobState(
        state=state,
        reason=_unless_none(found.get("Reason", "")),
        exit_code=None if number else code,
        signal=number,
        nodes=_unless_none(found.get("NodeList", "")),
    )


def queued_jobs() -> dict[str, tuple[str, str]] | None:
    """This user's jobs by name: id and state; None where SLURM cannot be asked."""
    if shutil.which("squeue") is None:
        return None
    try:
        done = _run(["squeue", "--me", "--noheader", "--format=%i|%T|%j"])
    except MachineLacks:
        return None
    if done.returncode:
        return None
    rows = [line.strip().split("|", 2) for line in done.stdout.splitlines()]
    return {row[2]: (row[0], row[1]) for row in rows if len(row) == 3}


def _unless_none(text: str) -> str:
    return "" if text in ("None", "(null)") else text


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=ASK_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise _NoAnswer(
            f"{command[0]} did not answer within {ASK_TIMEOUT_S:g} s",
            next_step="Try again later: SLURM is busy or away.",
        ) from error
    except OSError as error:
        raise MachineLacks(
            f"cannot run {command[0]}: {error.strerror}", next_step="Run this on a login node of the cluster."
        ) from error
