"""Trials on several ranks, on one node or more.

torchrun starts the ranks (``autotune.trials.jobs.multirank_worker``) once for all
trials. The ranks read trials from files, and write their results to files.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

from autotune.base.process import start_child
from autotune.cluster.torchrun import Start
from autotune.errors import MachineLacks
from autotune.trials.messages import (
    END_FILE,
    JOINED_FILE,
    REQUEST_FILE,
    JobResult,
    JobStatus,
    RankAccount,
    result_file,
)
from autotune.trials.outcomes import Crashed, Measured, Outcome, TimedOut
from autotune.trials.rank_outcomes import classify
from autotune.trials.trial_machine import START_TIMEOUT_S, StartedMachine
from autotune.trials.values import Trial
from trainer.formats.cpu_environment import CPU_ENVIRONMENT
from trainer.formats.files import write_atomically
from trainer.formats.tables import read_json

MODULE = "autotune.trials.jobs.multirank_worker"
"""Module that each rank runs."""
POLL_S = 0.02
"""Time between two looks at the ranks' files, in seconds."""
MAX_RESULT_BYTES = 64 * 2**20
"""Largest file with a rank's result that is read."""
END_TIMEOUT_S = 40.0
"""Time that torchrun has to end, in seconds; longer than it gives its ranks."""
_LOG_TAIL_CHARACTERS = 4000
"""Characters of the log, from its end, in which the error is looked for."""
_MAX_ERROR_CHARACTERS = 500
"""Characters of an error's line that a message quotes, from its beginning."""
_ERROR = re.compile(r"\bError\b|\w+Error:|error:|refused|failed")
"""Part of a line of the log that reports an error."""


class MultirankMachine(StartedMachine):
    """Machine that runs trials one after the other on ranks that have joined once.

    A trial that fails ends the ranks; the next trial starts them again.
    """

    def __init__(self, start: Start, device: str, scratch: Path) -> None:
        """Prepare the ranks; the first trial, or ``start``, starts them.

        Args:
            start: Makes the command that starts the ranks.
            device: Device of the ranks, ``cpu`` or ``cuda``.
            scratch: Directory for this machine alone. The first node must see it;
                errors of other nodes' ranks are reported only if these see it too.
        """
        super().__init__(CPU_ENVIRONMENT if device == "cpu" else None)
        self._start = start
        self._device = device
        self._scratch = scratch
        self._process: subprocess.Popen[bytes] | None = None
        """Process of torchrun, or of the program that starts it on all nodes; None
        while there are no ranks."""
        self._directory = scratch
        """Directory for trials since the last start of the ranks."""
        self._starts = 0
        """Number of starts of the ranks so far."""
        self._trials = 0
        """Number of trials since the last start of the ranks."""

    def _run(self, trial: Trial) -> Outcome:
        process = self._ensure_started()
        directory = self._directory / str(self._trials)
        self._trials += 1
        directory.mkdir()
        write_atomically(
            directory / REQUEST_FILE, json.dumps(asdict(trial)), durable=False
        )
        deadline_s = time.monotonic() + trial.timeout_s
        while True:
            result = _read_result(result_file(directory, 0))
            if result is not None and result.status is JobStatus.MEASURED:
                return Measured(figures=result.figures)
            if process.poll() is not None:
                self._process = None
                return self._failure(directory)
            if time.monotonic() > deadline_s:
                self._kill(process)
                return TimedOut(detail=f"killed after {trial.timeout_s:g} s")
            time.sleep(POLL_S)

    def _failure(self, directory: Path) -> Outcome:
        """Return the outcome of a trial that ended the ranks.

        Args:
            directory: Directory of the trial.
        """
        failed_ranks: list[RankAccount] = []
        for file in sorted(directory.glob("rank-*.json")):
            result = _read_result(file)
            if result is not None and result.status is not JobStatus.MEASURED:
                # Processes and logs of the ranks are torchrun's, so nothing is known of
                # them but their results.
                account = RankAccount(
                    result=result,
                    exit_code=None,
                    killed=False,
                    ended_s=result.ended_s,
                    log_tail="",
                )
                failed_ranks.append(account)
        if not failed_ranks:
            return Crashed(detail=self._error_line())
        return classify(failed_ranks)

    def close(self) -> None:
        """Let the ranks exit, or end them."""
        if self._process is not None:
            with self.waiting():
                (self._directory / END_FILE).touch()
                try:
                    self._process.wait(timeout=END_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    self._kill(self._process)
            self._process = None
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _ensure_started(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._starts += 1
        self._trials = 0
        self._directory = (self._scratch / f"start-{self._starts}").resolve()
        self._directory.mkdir(parents=True, mode=0o700)
        self._process = self._start_ranks()
        self._wait_until_joined(self._process)
        return self._process

    def _start_ranks(self) -> "subprocess.Popen[bytes]":
        """Start the ranks, with their output in the file ``log``.

        Raises:
            MachineLacks: If the program that starts them is not installed.
        """
        command = [*self._start(["-m", MODULE, str(self._directory), self._device])]
        environment = self.environment
        if self._device == "cuda":
            # NCCL writes which network it uses to files; the ``links`` job reads them.
            environment |= {
                "NCCL_DEBUG": "INFO",
                "NCCL_DEBUG_SUBSYS": "INIT,NET",
                "NCCL_DEBUG_FILE": f"{self._directory}/nccl.%h.%p",
            }
        with (self._directory / "log").open("wb") as log:
            try:
                return start_child(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # Ctrl-C reaches only this process, which then ends the ranks.
                    start_new_session=True,
                    end_signal=signal.SIGTERM,  # a launcher ends its ranks itself
                    env=environment,
                )
            except FileNotFoundError as error:
                raise MachineLacks(
                    f"{command[0]!r} not found",
                    next_step="Install it, or measure on this node alone with --ranks.",
                ) from error

    def _wait_until_joined(self, process: "subprocess.Popen[bytes]") -> None:
        """Wait until the ranks have joined, and read their versions.

        Raises:
            MachineLacks: If the ranks end, or have not joined in time.
        """
        joined_file = self._directory / JOINED_FILE
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not joined_file.is_file():
            if process.poll() is not None:
                raise self._error_of_start(process, "could not be started")
            if time.monotonic() > deadline_s:
                problem = f"did not connect within {START_TIMEOUT_S:g} s"
                raise self._error_of_start(process, problem)
            time.sleep(POLL_S)
        self.versions = read_json(joined_file)["versions"]

    def _error_of_start(
        self, process: "subprocess.Popen[bytes]", problem: str
    ) -> MachineLacks:
        """End the ranks, and return the error that they did not join."""
        self._kill(process)
        return MachineLacks(
            f"the ranks {problem}: {self._error_line()}",
            next_step=(
                "Check that the nodes reach each other; set network.interface in the"
                " site file to choose the interface."
            ),
        )

    def _error_line(self) -> str:
        """Return the last line of the log that reports an error, or its last line."""
        log = (self._directory / "log").read_text(errors="replace")
        lines = log[-_LOG_TAIL_CHARACTERS:].splitlines()
        if not lines:
            return "the log is empty"
        error_lines = [line for line in lines if _ERROR.search(line)]
        line = error_lines[-1] if error_lines else lines[-1]
        return line.strip()[:_MAX_ERROR_CHARACTERS]

    def _kill(self, process: "subprocess.Popen[bytes]") -> None:
        """End the processes that were started here, ranks of this node included.

        The program that starts ranks on other nodes, such as srun, ends them there.
        """
        self._process = None
        if not _end_group(process, signal.SIGTERM):
            _end_group(process, signal.SIGKILL)


def _end_group(process: "subprocess.Popen[bytes]", end_signal: signal.Signals) -> bool:
    """Send a signal to a process group; return whether its leader ends in time."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, end_signal)
    try:
        process.wait(timeout=END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _read_result(file: Path) -> JobResult | None:
    """Return the result that a rank wrote; None if it has written none."""
    if not file.is_file():
        return None
    return JobResult.from_json(read_json(file, max_bytes=MAX_RESULT_BYTES))
