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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.base.process import start_child
from autotune.cluster.torchrun import torchrun_command
from autotune.subjects.mlm.confirm.values import ShortTrainingRequest
from autotune.trials.job_figures import ShortTrainingFigures
from autotune.trials.outcomes import Crashed, Measured, Outcome
from autotune.trials.values import Trial
from trainer.formats.errors import TrainerError
from trainer.formats.gpu_activity import GPU_ACTIVITY_VARIABLE
from trainer.formats.run_record import StepRow, read_run

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
    """Runner of short trainings from a profile."""

    profile: Path
    """Profile to train from."""
    data: Path
    """Directory of the dataset."""
    torch_version: str
    """Version of torch that the ranks use."""

    def run_trial(self, trial: Trial) -> Outcome:
        """Train for the time of a ``ShortTrainingRequest``, and return its figures.

        They have no rate if the time was too short. A training that fails is a crash,
        with the end of its log.
        """
        request = ShortTrainingRequest.of(trial.measured)
        with tempfile.TemporaryDirectory(prefix="autotune-") as scratch:
            directory = Path(scratch)
            with (directory / "log").open("wb") as log:
                exit_code = self._train(request, directory / "run", log)
            try:
                rows = read_run(directory / "run").steps
            except TrainerError:
                rows = ()
            if exit_code is not None and len(rows) < 2:
                said = (directory / "log").read_text(errors="replace")
                return Crashed(
                    detail=f"training ended with code {exit_code}: {_end_of(said)}"
                )
        return Measured(figures=asdict(figures_of(rows)))

    def _train(self, request: ShortTrainingRequest, run: Path, log: Any) -> int | None:
        """Train until the time is over; return the exit code if it ended before."""
        command = torchrun_command(
            sys.executable,
            self._trainer_arguments(request, run),
            ranks=request.local_ranks,
            torch_version=self.torch_version,
            shutdown_s=round(END_TIMEOUT_S / 2),
        )
        # Torchrun would set it as well, with a warning.
        threads = {"OMP_NUM_THREADS": "1"} if request.local_ranks > 1 else {}
        process = start_child(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C reaches only this process, which then ends the training.
            start_new_session=True,
            end_signal=signal.SIGTERM,  # torchrun ends its ranks itself
            # The sampler of trials still reads the GPUs' counters, which two programs
            # must not do at once.
            env=threads | os.environ | {GPU_ACTIVITY_VARIABLE: "0"},
        )
        started_s = time.monotonic()
        try:
            while process.poll() is None:
                if time.monotonic() - started_s > request.seconds:
                    return None
                time.sleep(_POLL_S)
            return int(process.returncode)
        finally:
            _end(process)

    def _trainer_arguments(self, request: ShortTrainingRequest, run: Path) -> list[str]:
        """Return the command of each rank."""
        affordable_steps = int(request.seconds / (LOGGED_ROWS * request.step_s))
        interval_steps = min(request.config.logged_steps, max(1, affordable_steps))
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


def figures_of(rows: Sequence[StepRow]) -> ShortTrainingFigures:
    """Return the rate of logged steps, without the first logged ones.

    The first row includes the warm-up of libraries and of the data loading. There is no
    rate without tokens: a pretended GPU may sum those of its ranks to 0.
    """
    if len(rows) < 2:
        return ShortTrainingFigures(tokens_per_s=None, steps=0, seconds=0.0, mfu=None)
    steps = rows[-1].step - rows[0].step
    seconds = 0.0
    tokens = 0.0
    flops_share_s = 0.0
    for previous, row in itertools.pairwise(rows):
        row_steps = row.step - previous.step
        seconds += row_steps * row.step_s
        tokens += row_steps * row.non_padding_tokens
        flops_share_s += row_steps * row.step_s * (row.mfu or 0.0)
    return ShortTrainingFigures(
        tokens_per_s=tokens / seconds or None,
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
