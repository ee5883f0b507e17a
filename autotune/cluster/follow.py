"""Follows a job until it is over, and says what its end means."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autotune.cluster.submit import JobState, ask_state
from autotune.errors import (
    EXIT_TERMINATED,
    AutotuneError,
    DoesNotFit,
    MachineLacks,
    StartAgain,
    StoppedWaiting,
)

_POLL_S = (0.5, 10.0)
"""Shortest and longest time between two questions: a controller serves many people."""
_POLL_GROWTH = 1.15
_UNANSWERED = 30
"""Questions in a row without an answer before waiting is given up."""
_TAIL_BYTES = 4096
_SIGNAL_CODES = 128
RUNNING_STATES = frozenset({
    "PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "RESIZING", "SIGNALING",
    "STAGE_OUT", "STOPPED", "SPECIAL_EXIT", "REQUEUE_FED", "RESV_DEL_HOLD",
})  # fmt: skip

Told = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a job ended."""

    code: int
    """What to exit with."""
    words: str = ""
    """What there is to say; empty when it succeeded."""


def follow(job: str, log: Path, told: Told, *, ask: Callable[[str], JobState | None] = ask_state) -> Ended:
    """Wait for a job's end, and tell how it is doing.

    Args:
        job: Its id.
        log: Where its output goes.
        told: Is given what is new: queued and why, where it runs, the last line of its log.
        ask: Asks SLURM.

    Raises:
        AutotuneError: If the job did not end by itself.
        StoppedWaiting: If somebody pressed Ctrl-C; the job goes on.
    """
    try:
        last = _wait(job, log, told, ask)
    except KeyboardInterrupt as error:
        raise StoppedWaiting(
            f"stopped waiting; job {job} goes on, and writes to {log}",
            next_step=f"Look after it: autotune launch status; end it: scancel {job}",
        ) from error
    return verdict(job, last, log, last_lines(log))


def _wait(job: str, log: Path, told: Told, ask: Callable[[str], JobState | None]) -> JobState:
    pause_s, unanswered, told_before, state_before = _POLL_S[0], 0, "", ""
    while True:
        state = ask(job)
        unanswered = 0 if state is not None else unanswered + 1
        if unanswered > _UNANSWERED:
            raise MachineLacks(
                f"SLURM does not answer any more; job {job} may go on", next_step=f"Ask later: scontrol show job {job}"
            )
        if state is not None:
            now = describe(state, last_lines(log, count=1))
            if now != told_before:
                told(now)
                told_before = now
            if state.state != state_before:  # not with every line of the log: that may be one a second, for hours
                pause_s, state_before = _POLL_S[0], state.state
            if state.state not in RUNNING_STATES:
                return state
        time.sleep(pause_s)
        pause_s = min(_POLL_S[1], pause_s * _POLL_GROWTH)


def describe(state: JobState, line: str) -> str:
    """One line about a job that is not over. Pure."""
    if state.state == "PENDING":
        return f"queued{f' ({state.reason})' if state.reason else ''}"
    if state.state == "RUNNING":
        return f"running on {state.nodes}{f': {line}' if line else ''}"
    return state.state.lower().replace("_", " ")


def verdict(job: str, state: JobState, log: Path, tail: str) -> Ended:
    """What a job's end means. Pure.

    Raises:
        AutotuneError: If it did not end by itself; the exit code says whether the same command goes on.
    """
    shown = f"; the end of {log}:\n{_indented(tail)}" if tail else f"; {log} says nothing"
    nodes, again = state.nodes or "its node", "Run the same command again: it goes on from what was finished."
    ends: dict[str, AutotuneError] = {
        "TIMEOUT": StartAgain(f"job {job} ran into its time limit{shown}", next_step=again),
        "DEADLINE": StartAgain(f"job {job} met its deadline{shown}", next_step=again),
        "PREEMPTED": StartAgain(f"job {job} was pre-empted{shown}", next_step=again),
        "NODE_FAIL": StartAgain(f"job {job} lost {nodes}: the node died{shown}", next_step=again),
        "BOOT_FAIL": StartAgain(f"job {job}: {nodes} did not come up", next_step=again),
        "OUT_OF_MEMORY": DoesNotFit(
            f"job {job} was ended for taking more memory than it asked for{shown}",
            next_step="Raise slurm.memory_mib_per_cpu or slurm.mem in the site file.",
        ),
    }
    if state.state in ends:
        raise ends[state.state]
    if state.state == "CANCELLED":
        return Ended(code=EXIT_TERMINATED, words=f"job {job} was cancelled by somebody else than this command{shown}")
    if state.state == "COMPLETED":
        return Ended(code=0)
    code = state.exit_code if state.exit_code else _SIGNAL_CODES + state.signal
    why = f"signal {state.signal}" if state.signal else f"exit code {code}"
    return Ended(code=code, words=f"job {job} failed ({why}){shown}")


def last_lines(log: Path, count: int = 8) -> str:
    """The end of a log; empty while there is none. Control characters of a terminal are left out."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line for line in text.replace("\r", "\n").splitlines() if line.strip()]
    return "\n".join("".join(c for c in line if c.isprintable()) for line in lines[-count:])


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
