"""Trials on several ranks, on one node or more: torchrun starts the ranks once, for all trials."""

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
from typing import Any

from autotune.base.process import start_child
from autotune.cluster.torchrun import Start
from autotune.errors import MachineLacks
from autotune.trials.fork_server import (
    ENVIRONMENT,
    START_TIMEOUT_S,
    StartedMachine,
    classify,
)
from autotune.trials.values import Crashed, Measured, Outcome, TimedOut, Trial
from trainer.config.tables import read_json
from trainer.files import write_atomically

MODULE = "autotune.trials.jobs.multirank_worker"
POLL_S = 0.02
END_TIMEOUT_S = 40.0
"""Time that ranks have to end, in seconds; longer than torchrun gives them."""


class MultirankMachine(StartedMachine):
    """Machine that runs trials one after the other on ranks that have joined once.

    A failure restarts the ranks.

    ``scratch`` is a directory for this machine alone, visible to the first node's ranks
    and better to all nodes'.
    """

    def __init__(self, start: Start, device: str, scratch: Path) -> None:
        super().__init__()
        self._start, self._device, self._scratch = start, device, scratch
        self._process: subprocess.Popen[bytes] | None = None
        self._directory = scratch
        self._starts = self._trials = 0

    def _run(self, trial: Trial) -> Outcome:
        process = self._started()
        place = self._directory / str(self._trials)
        self._trials += 1
        place.mkdir()
        write_atomically(place / "trial.json", json.dumps(asdict(trial)), durable=False)
        deadline_s = time.monotonic() + trial.timeout_s
        while (
            not (told := _read(place / "rank-0.json")) or told["status"] != "measured"
        ):
            if process.poll() is not None:
                self._process = None
                every = map(_read, sorted(place.glob("rank-*.json")))
                results = [one for one in every if one and one["status"] != "measured"]
                ended: dict[str, Any] = {
                    "exit_code": 0,
                    "killed": False,
                    "log_tail": "",
                }
                failed = [
                    ended | {"result": one, "ended_s": one["ended_s"]}
                    for one in results
                ]
                return classify(failed) if failed else Crashed(detail=self._why())
            if time.monotonic() > deadline_s:
                self._kill(process)
                return TimedOut(detail=f"killed after {trial.timeout_s:g} s")
            time.sleep(POLL_S)
        return Measured(figures=told["figures"])

    def close(self) -> None:
        """Let the ranks exit, or end them."""
        process, self._process = self._process, None
        if process is not None:
            with self._waiting():
                (self._directory / "end").touch()
                try:
                    process.wait(timeout=END_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    self._kill(process)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._starts += 1
        self._trials = 0
        self._directory = (self._scratch / f"start-{self._starts}").resolve()
        self._directory.mkdir(parents=True, mode=0o700)
        command = [*self._start(["-m", MODULE, str(self._directory), self._device])]
        of_nccl = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
        of_nccl["NCCL_DEBUG_FILE"] = f"{self._directory}/nccl.%h.%p"
        with (self._directory / "log").open("wb") as log:
            try:
                self._process = start_child(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # Ctrl-C is for this process, which then ends the ranks.
                    start_new_session=True,
                    end_signal=signal.SIGTERM,  # a launcher ends its ranks itself
                    env=os.environ
                    | ENVIRONMENT
                    | (of_nccl if self._device == "cuda" else {}),
                )
            except FileNotFoundError as error:
                next_step = "Install it, or measure on this node alone with --ranks."
                raise MachineLacks(
                    f"{command[0]!r} not found", next_step=next_step
                ) from error
        joined, deadline_s = (
            self._directory / "joined.json",
            time.monotonic() + START_TIMEOUT_S,
        )
        while not joined.is_file():
            ended = self._process.poll() is not None
            if ended or time.monotonic() > deadline_s:
                self._kill(self._process)
                what = (
                    "could not be started"
                    if ended
                    else f"did not connect within {START_TIMEOUT_S:g} s"
                )
                raise MachineLacks(
                    f"the ranks {what}: {self._why()}",
                    next_step=(
                        "Check that the nodes reach each other; set network.interface"
                        " in the site file to choose the interface."
                    ),
                )
            time.sleep(POLL_S)
        self.versions = read_json(joined)["versions"]
        return self._process

    def _why(self) -> str:
        """Return the most informative line of the log."""
        log = (self._directory / "log").read_text(errors="replace")[-4000:].splitlines()
        lines = [
            line
            for line in log
            if re.search(r"\bError\b|\w+Error:|error:|refused|failed", line)
        ]
        return (lines or log or ["the log is empty"])[-1].strip()[:500]

    def _kill(self, process: "subprocess.Popen[bytes]") -> None:
        """End the processes that were started here, ranks of this node included.

        Srun ends those of other nodes.
        """
        self._process = None
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=END_TIMEOUT_S)
                break


def _read(file: Path) -> dict[str, Any]:
    """Read a rank's account; return an empty dictionary if there is none."""
    found: dict[str, Any] = (
        read_json(file, max_bytes=64 * 2**20) if file.is_file() else {}
    )
    return found
