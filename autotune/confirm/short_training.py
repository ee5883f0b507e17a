"""A short training by the trainer's own loop, and the rate that it delivers."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.base.process import start_child
from autotune.base.units import format_seconds
from autotune.cluster.torchrun import torchrun_command
from autotune.confirm.values import DeliveredTraining
from trainer.errors import TrainerError
from trainer.record.progress import Update
from trainer.record.run_record import StepRow, read_run

LOGGED_ROWS = 8
"""Logged rows that fit into the time, if the training logged nothing but steps. Its
start takes some of them."""
END_TIMEOUT_S = 30.0
"""Time that ranks have to end after a signal, in seconds."""
_POLL_S = 0.1
_MAX_LOG_CHARACTERS = 500
"""Characters of the log that a reason quotes, from its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortTraining:
    """Training with a profile that ends after some time."""

    profile: Path
    """Profile to train from."""
    data: Path
    """Directory of the dataset."""
    ranks: int
    """Ranks on this node."""
    torch_version: str
    """Version of torch that the ranks use."""
    seconds: float
    """Time from the start of the processes until they are ended."""
    step_s: float
    """Expected time of an optimizer step."""
    default_log_interval_steps: int
    """Optimizer steps between logged metrics, as in the profile."""

    def run(self, update: Update) -> DeliveredTraining | str:
        """Train, and return the delivered rate, or the reason why there is none.

        Args:
            update: Shows the time that has passed.
        """
        with tempfile.TemporaryDirectory(prefix="autotune-") as scratch:
            directory = Path(scratch)
            with (directory / "log").open("wb") as log:
                exit_code = self._train(directory / "run", log, update)
            try:
                rows = read_run(directory / "run").steps
            except TrainerError:
                rows = ()
            delivered = delivered_by(rows)
            if delivered is not None:
                return delivered
            if exit_code is None:
                return (
                    f"{format_seconds(self.seconds)} are too short for a start and"
                    f" steps of about {format_seconds(self.step_s)}"
                )
            said = (directory / "log").read_text(errors="replace")
            return f"training ended with code {exit_code}: {_end_of(said)}"

    def _train(self, run: Path, log: Any, update: Update) -> int | None:
        """Train until the time is over; return the exit code if it ended before."""
        command = torchrun_command(
            sys.executable,
            self._trainer_arguments(run),
            ranks=self.ranks,
            torch_version=self.torch_version,
            shutdown_s=round(END_TIMEOUT_S / 2),
        )
        # Torchrun would set it as well, with a warning.
        threads = {"OMP_NUM_THREADS": "1"} if self.ranks > 1 else {}
        process = start_child(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C reaches only this process, which then ends the training.
            start_new_session=True,
            end_signal=signal.SIGTERM,  # torchrun ends its ranks itself
            env=threads | os.environ,
        )
        started_s = time.monotonic()
        try:
            while process.poll() is None:
                passed_s = time.monotonic() - started_s
                if passed_s > self.seconds:
                    return None
                update(passed_s, self.seconds, "training by the trainer's own loop")
                time.sleep(_POLL_S)
            return int(process.returncode)
        finally:
            _end(process)

    def _trainer_arguments(self, run: Path) -> list[str]:
        """Return the command of each rank."""
        affordable_steps = int(self.seconds / (LOGGED_ROWS * self.step_s))
        interval_steps = min(self.default_log_interval_steps, max(1, affordable_steps))
        settings = {
            "log_interval_steps": interval_steps,
            "log_to": "[]",
            "checkpoint.enabled": "false",
            "evaluation.max_sequences": 1,
        }
        words = ["-m", "trainer", str(self.profile), "--data", str(self.data)]
        words += ["--out", str(run), "--resume", "never"]
        for key, value in settings.items():
            words += ["--set", f"train.{key}={value}"]
        return words


def delivered_by(rows: Sequence[StepRow]) -> DeliveredTraining | None:
    """Return the rate of logged steps; None if only the first ones were logged.

    The first row includes the warm-up of libraries and of the data loading.
    """
    if len(rows) < 2:
        return None
    steps = rows[-1].step - rows[0].step
    seconds = 0.0
    tokens = 0.0
    flops_share_s = 0.0
    for previous, row in itertools.pairwise(rows):
        row_steps = row.step - previous.step
        seconds += row_steps * row.step_s
        tokens += row_steps * row.non_padding_tokens
        flops_share_s += row_steps * row.step_s * (row.mfu or 0.0)
    return DeliveredTraining(
        tokens_per_s=tokens / seconds,
        steps=steps,
        seconds=round(seconds, 3),
        mfu=flops_share_s / seconds or None,
    )


def _end(process: "subprocess.Popen[Any]") -> None:
    """End torchrun and its ranks, unless they have ended."""
    for end_signal in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, end_signal)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=END_TIMEOUT_S)


def _end_of(log: str) -> str:
    """Return the end of a log, as one line."""
    return " ".join(log[-_MAX_LOG_CHARACTERS:].split())
