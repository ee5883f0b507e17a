"""SLURM: the job of this process, submission, state and exit of jobs."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.cluster.slurm_facts import SlurmFacts
from autotune.errors import (
    EXIT_TERMINATED,
    ExceedsMemory,
    MachineLacks,
    StartAgain,
    StoppedWaiting,
)

ASK_TIMEOUT_S = 60.0
_LONGEST_WORDS = 500
_POLL_S = (0.5, 10.0)
"""Shortest and longest time between two queries, in seconds, to spare the
controller."""
_POLL_GROWTH = 1.15
_UNANSWERED = 30
"""Unanswered queries in a row after which waiting ends."""
_TAIL_BYTES = 4096
RUNNING_STATES = frozenset(
    {
        "PENDING",
        "CONFIGURING",
        "RUNNING",
        "SUSPENDED",
        "COMPLETING",
        "REQUEUED",
        "REQUEUE_HOLD",
        "RESIZING",
        "SIGNALING",
        "STAGE_OUT",
        "STOPPED",
        "SPECIAL_EXIT",
        "REQUEUE_FED",
        "RESV_DEL_HOLD",
    }
)

Told = Callable[[str], None]


def read_slurm(
    environment: Mapping[str, str] = os.environ,
    which: Callable[[str], str | None] = shutil.which,
) -> SlurmFacts:
    """Describe this process's job, if any, and the SLURM commands that ``which`` finds.

    No command is executed.
    """
    end_time, on_node = (
        _whole(environment, "SLURM_JOB_END_TIME"),
        _whole(environment, "SLURM_GPUS_ON_NODE"),
    )
    return SlurmFacts(
        job_id=environment.get("SLURM_JOB_ID") or None,
        end_time_s=None if end_time is None else float(end_time),
        nodes=_whole(environment, "SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
        tasks=_whole(environment, "SLURM_NTASKS"),
        gpus_per_node=(
            _gres_count(environment.get("SLURM_GPUS_PER_NODE", ""))
            if on_node is None
            else on_node
        ),
        node_name=environment.get("SLURMD_NODENAME") or None,
        commands=tuple(
            name for name in ("sbatch", "srun", "sinfo") if which(name) is not None
        ),
    )


def _whole(environment: Mapping[str, str], *names: str) -> int | None:
    """Return the first of these variables that is a whole number."""
    texts = (environment.get(name, "").strip() for name in names)
    return next(
        (int(text) for text in texts if text.isascii() and text.isdecimal()), None
    )


def _gres_count(text: str) -> int | None:
    """Return the total of a request such as ``2``, ``h100:2`` or ``h100:2,a100:1``.

    Returns:
        The total, or None if the text is no such request.
    """
    counts = [part.rpartition(":")[2].strip() for part in text.split(",")]
    return (
        sum(map(int, counts))
        if all(count.isascii() and count.isdecimal() for count in counts)
        else None
    )


class _NoAnswer(MachineLacks):
    """A SLURM command did not answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """State of a job in SLURM."""

    state: str
    """SLURM's state, such as ``PENDING``, ``RUNNING`` or ``NODE_FAIL``."""
    reason: str = ""
    exit_code: int | None = None
    """Exit code of the script; None while it runs, or if a signal ended it."""
    signal: int = 0
    """Signal that ended the script; 0 for none."""
    nodes: str = ""


def submit(
    script: Path, arguments: Sequence[str] = (), *, after: str | None = None
) -> str:
    """Submit a script.

    Args:
        script: The script.
        arguments: Its arguments.
        after: Job that must succeed before this one begins. If it fails, this one
            leaves the queue.

    Returns:
        The job's id.

    Raises:
        MachineLacks: If there is no ``sbatch``, or it rejects the job.
    """
    if shutil.which("sbatch") is None:
        what = "cannot submit the job: sbatch not found"
        raise MachineLacks(
            what,
            next_step=(
                f"Run this on a login node of the cluster; the script is {script}."
            ),
        )
    options = (
        []
        if after is None
        else [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"]
    )
    done = _run(["sbatch", "--parsable", *options, str(script), *arguments])
    job = re.match(r"\d+", done.stdout.strip())
    if done.returncode or job is None:
        what = (
            "sbatch rejected the job:"
            f" {(done.stderr or done.stdout).strip()[:_LONGEST_WORDS]}"
        )
        raise MachineLacks(
            what,
            next_step=(
                f"Correct the site file; or edit {script} and submit it: sbatch"
                f" {script}"
            ),
        )
    return job[0]


def ask_state(job: str) -> JobState | None:
    """Return a job's state.

    Returns:
        The state, or None if SLURM does not answer at the moment.

    Raises:
        MachineLacks: If SLURM no longer knows the job, which happens some minutes after
            its end.
    """
    try:
        done = _run(["scontrol", "--oneliner", "show", "job", job])
    except _NoAnswer:
        return None
    if done.returncode == 0:
        return parse_state(done.stdout)
    if "Invalid job id" in done.stderr:
        what = (
            f"SLURM no longer knows job {job}: {done.stderr.strip()[:_LONGEST_WORDS]}"
        )
        raise MachineLacks(
            what, next_step=f"Read its log, or query the accounting: sacct -j {job}"
        )
    return None


def parse_state(text: str) -> JobState | None:
    """Parse the output of ``scontrol show job``; None if it is something else. Pure."""
    # Values may contain spaces (comments, names of files); the fields used here come
    # first and contain none.
    listed = re.findall(r"(?:^|\s)(JobState|Reason|ExitCode|NodeList)=(\S*)", text)
    found = {
        name: "" if value in ("None", "(null)") else value
        for name, value in reversed(listed)
    }
    if "JobState" not in found:
        return None
    ended = re.fullmatch(r"(\d+):(\d+)", found.get("ExitCode", ""))
    code, number = (int(ended[1]), int(ended[2])) if ended else (None, 0)
    return JobState(
        state=found["JobState"],
        reason=found.get("Reason", ""),
        exit_code=None if number else code,
        signal=number,
        nodes=found.get("NodeList", ""),
    )


def queued_jobs() -> dict[str, tuple[str, str]] | None:
    """Return this user's jobs by name, with id and state.

    Returns:
        The jobs, or None if SLURM cannot be queried.
    """
    try:
        done = _run(["squeue", "--me", "--noheader", "--format=%i|%T|%j"])
    except MachineLacks:
        return None
    if done.returncode:
        return None
    rows = [line.strip().split("|", 2) for line in done.stdout.splitlines()]
    return {row[2]: (row[0], row[1]) for row in rows if len(row) == 3}


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=ASK_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        what = f"{command[0]} did not answer within {ASK_TIMEOUT_S:g} s"
        raise _NoAnswer(
            what, next_step="Try again later; SLURM is busy or down."
        ) from error
    except OSError as error:
        what = f"cannot run {command[0]}: {error.strerror}"
        raise MachineLacks(
            what, next_step="Run this on a login node of the cluster."
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """End of a job, or of one start of a training run."""

    code: int
    words: str = ""


def follow(
    job: str,
    log: Path,
    told: Told,
    *,
    ask: Callable[[str], JobState | None] = ask_state,
) -> Ended:
    """Wait for a job's end.

    Args:
        job: Id of the job.
        log: Its log.
        told: Receives news: queued and why, its nodes, the last line of its log.
        ask: Function that returns a job's state.

    Raises:
        AutotuneError: If SLURM ended the job, or stops answering.
        StoppedWaiting: On Ctrl-C; the job continues.
    """
    try:
        last = _wait(job, log, told, ask)
    except KeyboardInterrupt as error:
        what = f"stopped waiting; job {job} continues and writes to {log}"
        raise StoppedWaiting(
            what, next_step=f"Follow it: autotune status; cancel it: scancel {job}"
        ) from error
    return verdict(job, last, log, last_lines(log))


def _wait(
    job: str, log: Path, told: Told, ask: Callable[[str], JobState | None]
) -> JobState:
    pause_s, unanswered, told_before, state_before = _POLL_S[0], 0, "", ""
    while True:
        state = ask(job)
        unanswered = 0 if state is not None else unanswered + 1
        if unanswered > _UNANSWERED:
            what = f"SLURM stopped answering; job {job} may still run"
            raise MachineLacks(
                what, next_step=f"Query it later: scontrol show job {job}"
            )
        if state is not None:
            now = describe(state, last_lines(log, count=1))
            if now != told_before:
                told(now)
                told_before = now
            # Not for every line of the log, which may be one per second.
            if state.state != state_before:
                pause_s, state_before = _POLL_S[0], state.state
            if state.state not in RUNNING_STATES:
                return state
        time.sleep(pause_s)
        pause_s = min(_POLL_S[1], pause_s * _POLL_GROWTH)


def describe(state: JobState, line: str) -> str:
    """Describe an unfinished job on one line. Pure."""
    if state.state == "PENDING":
        return f"queued{f' ({state.reason})' if state.reason else ''}"
    if state.state == "RUNNING":
        return f"running on {state.nodes}{f': {line}' if line else ''}"
    return state.state.lower().replace("_", " ")


def verdict(job: str, state: JobState, log: Path, tail: str) -> Ended:
    """Return the result of a finished job. Pure.

    Raises:
        AutotuneError: If a limit, pre-emption or a node failure ended it. The exit code
            shows if a rerun resumes.
    """
    indented = "\n".join(f"    {line}" for line in tail.splitlines())
    shown = f"; the end of {log}:\n{indented}" if tail else f"; {log} is empty"
    ends = {
        "TIMEOUT": "reached its time limit",
        "DEADLINE": "reached its deadline",
        "PREEMPTED": "was pre-empted",
        "NODE_FAIL": f"lost {state.nodes or 'its node'}: the node failed",
        "BOOT_FAIL": f"did not start: {state.nodes or 'its node'} failed to boot",
    }
    if state.state in ends:
        raise StartAgain(
            f"job {job} {ends[state.state]}{shown}",
            next_step="Run the same command again to resume.",
        )
    if state.state == "OUT_OF_MEMORY":
        what = f"job {job} exceeded its memory limit and was killed{shown}"
        raise ExceedsMemory(
            what,
            next_step="Raise slurm.memory_mib_per_cpu or slurm.mem in the site file.",
        )
    if state.state == "CANCELLED":
        return Ended(code=EXIT_TERMINATED, words=f"job {job} was cancelled{shown}")
    if state.state == "COMPLETED":
        return Ended(code=0)
    code = state.exit_code or 128 + state.signal  # as shells report signals
    why = f"signal {state.signal}" if state.signal else f"exit code {code}"
    return Ended(code=code, words=f"job {job} failed ({why}){shown}")


def last_lines(log: Path, count: int = 8) -> str:
    """Return the end of a log without control characters.

    It is empty if there is no log yet.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line for line in text.replace("\r", "\n").splitlines() if line.strip()]
    return "\n".join(
        "".join(c for c in line if c.isprintable()) for line in lines[-count:]
    )
