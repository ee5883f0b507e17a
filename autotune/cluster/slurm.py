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
"""Longest wait for the answer of a SLURM command, in seconds."""
_MAX_MESSAGE_CHARACTERS = 500
"""Length after which a message of SLURM is cut."""
_FIRST_POLL_S = 0.5
"""Time between the first two queries, in seconds."""
_LONGEST_POLL_S = 10.0
"""Longest time between two queries, in seconds, to spare the controller."""
_POLL_GROWTH = 1.15
"""Factor by which the time between queries grows."""
_UNANSWERED = 30
"""Unanswered queries in a row after which waiting ends."""
_TAIL_BYTES = 4096
"""Bytes at the end of a log that are read."""
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
"""States of jobs that have not ended."""

Report = Callable[[str], None]
"""Function that receives a line of news about a job."""


def read_slurm(
    environment: Mapping[str, str] = os.environ,
    which: Callable[[str], str | None] = shutil.which,
) -> SlurmFacts:
    """Describe this process's job, if any, and the SLURM commands that ``which`` finds.

    No command is executed.
    """
    end_time_s = _whole_number(environment, "SLURM_JOB_END_TIME")
    gpus_per_node = _whole_number(environment, "SLURM_GPUS_ON_NODE")
    if gpus_per_node is None:
        gpus_per_node = _gres_count(environment.get("SLURM_GPUS_PER_NODE", ""))
    commands = [name for name in ("sbatch", "srun", "sinfo") if which(name) is not None]
    return SlurmFacts(
        job_id=environment.get("SLURM_JOB_ID") or None,
        end_time_s=None if end_time_s is None else float(end_time_s),
        nodes=_whole_number(environment, "SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
        tasks=_whole_number(environment, "SLURM_NTASKS"),
        gpus_per_node=gpus_per_node,
        node_name=environment.get("SLURMD_NODENAME") or None,
        commands=tuple(commands),
    )


def _whole_number(environment: Mapping[str, str], *names: str) -> int | None:
    """Return the first of these variables that is a whole number; None if none is."""
    for name in names:
        text = environment.get(name, "").strip()
        if text.isascii() and text.isdecimal():
            return int(text)
    return None


def _gres_count(text: str) -> int | None:
    """Return the total of a request such as ``2``, ``h100:2`` or ``h100:2,a100:1``.

    Returns:
        The total, or None if the text is no such request.
    """
    total = 0
    for part in text.split(","):
        count = part.rpartition(":")[2].strip()
        if not (count.isascii() and count.isdecimal()):
            return None
        total += int(count)
    return total


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
        raise MachineLacks(
            "cannot submit the job: sbatch not found",
            next_step=(
                f"Run this on a login node of the cluster; the script is {script}."
            ),
        )
    options: list[str] = []
    if after is not None:
        options = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"]
    finished = _run(["sbatch", "--parsable", *options, str(script), *arguments])
    job_id = re.match(r"\d+", finished.stdout.strip())
    if finished.returncode or job_id is None:
        message = _cut(finished.stderr or finished.stdout)
        raise MachineLacks(
            f"sbatch rejected the job: {message}",
            next_step=(
                f"Correct the site file; or edit {script} and submit it: sbatch"
                f" {script}"
            ),
        )
    return job_id[0]


def _cut(message: str) -> str:
    """Return a message of SLURM without blanks around it, and not too long."""
    return message.strip()[:_MAX_MESSAGE_CHARACTERS]


def ask_state(job: str) -> JobState | None:
    """Return a job's state.

    Returns:
        The state, or None if SLURM does not answer at the moment.

    Raises:
        MachineLacks: If SLURM no longer knows the job, which happens some minutes after
            its end.
    """
    try:
        finished = _run(["scontrol", "--oneliner", "show", "job", job])
    except _NoAnswer:
        return None
    if finished.returncode == 0:
        return parse_state(finished.stdout)
    if "Invalid job id" in finished.stderr:
        raise MachineLacks(
            f"SLURM no longer knows job {job}: {_cut(finished.stderr)}",
            next_step=f"Read its log, or query the accounting: sacct -j {job}",
        )
    return None


def parse_state(text: str) -> JobState | None:
    """Parse the output of ``scontrol show job``; None if it is something else. Pure."""
    # Values may contain spaces (comments, names of files); the fields used here come
    # first and contain none.
    pairs = re.findall(r"(?:^|\s)(JobState|Reason|ExitCode|NodeList)=(\S*)", text)
    fields: dict[str, str] = {}
    for name, value in pairs:
        fields.setdefault(name, "" if value in ("None", "(null)") else value)
    if "JobState" not in fields:
        return None
    exit_code = None
    signal_number = 0
    code_and_signal = re.fullmatch(r"(\d+):(\d+)", fields.get("ExitCode", ""))
    if code_and_signal is not None:
        signal_number = int(code_and_signal[2])
        if signal_number == 0:
            exit_code = int(code_and_signal[1])
    return JobState(
        state=fields["JobState"],
        reason=fields.get("Reason", ""),
        exit_code=exit_code,
        signal=signal_number,
        nodes=fields.get("NodeList", ""),
    )


def queued_jobs() -> dict[str, tuple[str, str]] | None:
    """Return this user's jobs by name, with id and state.

    Returns:
        The jobs, or None if SLURM cannot be queried.
    """
    try:
        finished = _run(["squeue", "--me", "--noheader", "--format=%i|%T|%j"])
    except MachineLacks:
        return None
    if finished.returncode:
        return None
    jobs = {}
    for line in finished.stdout.splitlines():
        fields = line.strip().split("|", 2)
        if len(fields) == 3:
            job_id, state, name = fields
            jobs[name] = (job_id, state)
    return jobs


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a SLURM command, whatever its exit code.

    Raises:
        MachineLacks: If it cannot be run, or does not answer in time.
    """
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=ASK_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise _NoAnswer(
            f"{command[0]} did not answer within {ASK_TIMEOUT_S:g} s",
            next_step="Try again later; SLURM is busy or down.",
        ) from error
    except OSError as error:
        raise MachineLacks(
            f"cannot run {command[0]}: {error.strerror}",
            next_step="Run this on a login node of the cluster.",
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """End of a job, or of one start of a training run."""

    code: int
    """Exit code of the command that waited for it."""
    words: str = ""
    """Description of the end; empty for success."""


def follow(
    job: str,
    log: Path,
    report: Report,
    *,
    ask: Callable[[str], JobState | None] = ask_state,
) -> Ended:
    """Wait for a job's end.

    Args:
        job: Id of the job.
        log: Its log.
        report: Receives news: queued and why, its nodes, the last line of its log.
        ask: Function that returns a job's state.

    Raises:
        AutotuneError: If SLURM ended the job, or stops answering.
        StoppedWaiting: On Ctrl-C; the job continues.
    """
    try:
        last_state = _wait(job, log, report, ask)
    except KeyboardInterrupt as error:
        raise StoppedWaiting(
            f"stopped waiting; job {job} continues and writes to {log}",
            next_step=f"Follow it: autotune status; cancel it: scancel {job}",
        ) from error
    return verdict(job, last_state, log, last_lines(log))


def _wait(
    job: str, log: Path, report: Report, ask: Callable[[str], JobState | None]
) -> JobState:
    """Query a job until it has ended, and return its last state."""
    pause_s = _FIRST_POLL_S
    unanswered = 0
    last_news = ""
    last_state = ""
    while True:
        state = ask(job)
        if state is None:
            unanswered += 1
            if unanswered > _UNANSWERED:
                raise MachineLacks(
                    f"SLURM stopped answering; job {job} may still run",
                    next_step=f"Query it later: scontrol show job {job}",
                )
        else:
            unanswered = 0
            news = describe(state, last_lines(log, count=1))
            if news != last_news:
                report(news)
                last_news = news
            if state.state not in RUNNING_STATES:
                return state
            # Query faster after a change of state, but not for every line of the log,
            # which may be one per second.
            if state.state != last_state:
                pause_s = _FIRST_POLL_S
                last_state = state.state
        time.sleep(pause_s)
        pause_s = min(_LONGEST_POLL_S, pause_s * _POLL_GROWTH)


def describe(state: JobState, line: str) -> str:
    """Describe an unfinished job on one line. Pure."""
    if state.state == "PENDING":
        return f"queued ({state.reason})" if state.reason else "queued"
    if state.state == "RUNNING":
        running = f"running on {state.nodes}"
        return f"{running}: {line}" if line else running
    return state.state.lower().replace("_", " ")


def verdict(job: str, state: JobState, log: Path, tail: str) -> Ended:
    """Return the result of a finished job. Pure.

    Raises:
        AutotuneError: If a limit, pre-emption or a node failure ended it. The exit code
            shows if a rerun resumes.
    """
    log_end = f"; {log} is empty"
    if tail:
        indented = "\n".join(f"    {line}" for line in tail.splitlines())
        log_end = f"; the end of {log}:\n{indented}"
    interruptions = {
        "TIMEOUT": "reached its time limit",
        "DEADLINE": "reached its deadline",
        "PREEMPTED": "was pre-empted",
        "NODE_FAIL": f"lost {state.nodes or 'its node'}: the node failed",
        "BOOT_FAIL": f"did not start: {state.nodes or 'its node'} failed to boot",
    }
    if state.state in interruptions:
        raise StartAgain(
            f"job {job} {interruptions[state.state]}{log_end}",
            next_step="Run the same command again to resume.",
        )
    if state.state == "OUT_OF_MEMORY":
        raise ExceedsMemory(
            f"job {job} exceeded its memory limit and was killed{log_end}",
            next_step="Raise slurm.memory_mib_per_cpu or slurm.mem in the site file.",
        )
    if state.state == "CANCELLED":
        return Ended(code=EXIT_TERMINATED, words=f"job {job} was cancelled{log_end}")
    if state.state == "COMPLETED":
        return Ended(code=0)
    code = state.exit_code or 128 + state.signal  # as shells report signals
    cause = f"signal {state.signal}" if state.signal else f"exit code {code}"
    return Ended(code=code, words=f"job {job} failed ({cause}){log_end}")


def last_lines(log: Path, count: int = 8) -> str:
    """Return the end of a log without control characters.

    It is empty if there is no log yet.
    """
    try:
        with log.open("rb") as file:
            size_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(0, size_bytes - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line for line in text.replace("\r", "\n").splitlines() if line.strip()]
    printable_lines = [
        "".join(character for character in line if character.isprintable())
        for line in lines[-count:]
    ]
    return "\n".join(printable_lines)
