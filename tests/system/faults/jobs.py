"""Trainings under torchrun, to be disturbed and compared with undisturbed ones."""

import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil

from autotune.base.process import start_child
from testbed.datasets import write_dataset
from tests.system.faults.kills import kill_tree, until
from trainer.checkpoint.format import CHECKPOINTS_DIRECTORY
from trainer.checkpoint.stored_checkpoints import list_checkpoints, read_checkpoint
from trainer.formats.cpu_environment import CPU_ENVIRONMENT
from trainer.formats.events import EventRow
from trainer.formats.run_record import (
    EVENTS_FILE,
    MODEL_DIRECTORY,
    STEPS_FILE,
    Run,
    RunExit,
    read_exit,
    read_run,
)

ROOT = Path(__file__).parents[3]
JOB = Path(__file__).with_name("train_job.py")
STEPS = 36
PACE_S = 0.02
END_S = 600.0
"""Longest time of a job. It takes 20 s on idle cores, and 120 s beside ten others."""
# Several buckets of gradients, accumulation, dropout, more than one epoch.
PROFILE = f"""\
schema_version = 3
[train]
seq_length_tokens = 64
layout = "packed"
micro_batch_size = 2
global_batch_size = 12
max_steps = {STEPS}
warmup_steps = 5
learning_rate = 1e-3
[train.parallel]
bucket_cap_mib = 1
[train.checkpoint]
interval_steps = 2
[train.model]
name = "tiny"
[train.model.config]
model_type = "bert"
num_hidden_layers = 4
hidden_size = 128
num_attention_heads = 2
intermediate_size = 256
hidden_dropout_prob = 0.1
attention_probs_dropout_prob = 0.1
"""
LOCAL_DISK = "LOCAL_DISK"
"""Environment variable that names a directory to stage data to."""
NO_DROPOUT = {
    "train.model.config.hidden_dropout_prob": 0.0,
    "train.model.config.attention_probs_dropout_prob": 0.0,
}

Settings = Mapping[str, object]
StepSamples = dict[int, list[tuple[int, int]]]


class Workplace:
    """A dataset, a profile, and the jobs that use them, in its own directory."""

    def __init__(
        self,
        directory: Path,
        *,
        python: Path = Path(sys.executable),
        variables: Mapping[str, str] | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.directory = directory
        self.python = python
        self.variables = dict(variables or {})
        self._settings = dict(settings or {})
        rng = random.Random(0)
        starts = [(rng.randrange(5, 65), rng.randrange(8, 40)) for _ in range(900)]
        samples = [
            [5 + (start + step) % 60 for step in range(length)]
            for start, length in starts
        ]
        self.data = write_dataset(
            directory / "data", samples[100:], vocab_size=128, validation=samples[:100]
        )
        self.local_disk = directory / "local"
        self.local_disk.mkdir()
        self.profile = directory / "profile.toml"
        self.profile.write_text(PROFILE)
        self._undisturbed: dict[str, Job] = {}
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._numbers = itertools.count(1)

    def job(self, ranks: int = 2, settings: Settings | None = None) -> "Job":
        directory = self.directory / f"run-{next(self._numbers)}"
        return Job(
            workplace=self,
            directory=directory,
            ranks=ranks,
            settings=self._settings | dict(settings or {}),
        )

    def undisturbed(self, ranks: int = 2, settings: Settings | None = None) -> "Job":
        """Return a job that ran to its end.

        It is run once, even if several loops need it at the same time.
        """
        key = json.dumps([ranks, settings or {}])
        with self._locks[key]:
            if key not in self._undisturbed:
                job = self.job(ranks, settings)
                job.finish()
                self._undisturbed[key] = job
            return self._undisturbed[key]


@dataclass(kw_only=True)
class Job:
    """One run, which may be started several times."""

    workplace: Workplace
    directory: Path
    ranks: int
    settings: dict[str, object]
    starts: int = 0
    notes: list[Path] = field(default_factory=list)
    """Directory of each start, with the notes of its ranks."""
    corrupt: list[tuple[str, str]] = field(default_factory=list)
    """Checkpoints that were corrupted on purpose, and those before them."""

    def __post_init__(self) -> None:
        self.log = self.directory.with_suffix(".log")
        self.checkpoints = self.directory / CHECKPOINTS_DIRECTORY

    @property
    def model(self) -> bytes:
        return (self.directory / MODEL_DIRECTORY / "model.safetensors").read_bytes()

    def start(
        self,
        faults: Sequence[dict[str, Any]] = (),
        *,
        pace_s: float = PACE_S,
        settings: Settings | None = None,
    ) -> "subprocess.Popen[bytes]":
        self.starts += 1
        notes = self.directory.with_suffix(f".notes-{self.starts}")
        notes.mkdir()
        self.notes.append(notes)
        request = json.dumps(
            {"faults": list(faults), "pace_s": pace_s, "notes": str(notes)}
        )
        all_settings = self.settings | dict(settings or {})
        set_options = [
            f"--set={key}={json.dumps(value)}" for key, value in all_settings.items()
        ]
        command = [
            str(self.workplace.python),
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={self.ranks}",
            str(JOB),
            str(self.workplace.profile),
            "--data",
            str(self.workplace.data),
            "--out",
            str(self.directory),
            *set_options,
        ]
        # The job may import torch before the trainer sets them.
        environment = {
            **CPU_ENVIRONMENT,
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        environment |= self.workplace.variables | {
            "FAULTS_REQUEST": request,
            LOCAL_DISK: str(self.workplace.local_disk),
        }
        with self.log.open("ab") as log:
            return start_child(
                command,
                start_new_session=True,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def end(self, process: "subprocess.Popen[bytes]", within_s: float = END_S) -> None:
        """Wait until no process of the run is left.

        Loaders of a killed rank may outlive torchrun.
        """
        try:
            process.wait(within_s)
        except subprocess.TimeoutExpired:
            kill_tree(process)
            raise AssertionError(
                f"not over after {within_s:g} s; {self.told()}"
            ) from None
        until(
            lambda: not self._processes(),
            "gone",
            30,
            lambda: f"left behind: {self._processes()}",
        )

    def _processes(self) -> list[psutil.Process]:
        """Return the processes that name this run on their command lines."""
        alive = [
            process
            for process in psutil.process_iter(["cmdline", "status"])
            if process.info["status"] != psutil.STATUS_ZOMBIE
        ]
        return [
            process
            for process in alive
            if str(self.directory) in (process.info["cmdline"] or ())
        ]

    def finish(self, faults: Sequence[dict[str, Any]] = ()) -> Run:
        process = self.start(faults)
        self.end(process)
        assert process.returncode == 0, self.told()
        record = self.record()
        assert record.end.exit_code == 0
        assert record.end.reason == "finished"
        assert record.end.steps == STEPS
        return record

    def leave(
        self, process: "subprocess.Popen[bytes]", within_s: float = END_S
    ) -> RunExit:
        """Wait until it has exited before its end; return its account of that."""
        self.end(process, within_s)
        assert process.returncode != 0
        run_exit = read_exit(self.directory)
        assert run_exit is not None, self.told()
        return run_exit

    def record(self) -> Run:
        return read_run(self.directory)

    def told(self) -> str:
        """Return the end of the log, for messages."""
        if not self.log.exists():
            return ""
        return f"{self.log}:\n{self.log.read_text(errors='replace')[-4000:]}"

    def steps_written(self) -> int:
        """Return the number of steps in the record, with those that were repeated."""
        file = self.directory / STEPS_FILE
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def start_and_take(
        self,
        steps: int,
        faults: Sequence[dict[str, Any]] = (),
        *,
        settings: Settings | None = None,
    ) -> "subprocess.Popen[bytes]":
        """Start, and wait until this start has taken this number of steps."""
        before = self.steps_written()
        process = self.start(faults, settings=settings)
        self.wait_until(process, lambda: self.steps_written() >= before + steps)
        return process

    def wait_until(
        self, process: "subprocess.Popen[bytes]", is_true: Callable[[], object]
    ) -> None:
        """Wait for something that must happen before the process ends."""
        deadline_s = time.monotonic() + END_S
        while not is_true():
            assert process.poll() is None, (
                f"ended with {process.returncode}; {self.told()}"
            )
            if time.monotonic() > deadline_s:
                kill_tree(process)
                raise AssertionError(f"not within {END_S:g} s; {self.told()}")
            time.sleep(0.01)

    def events(self) -> list[EventRow]:
        file = self.directory / EVENTS_FILE
        lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
        return [EventRow.model_validate_json(line) for line in lines]

    def rank_processes(
        self, process: "subprocess.Popen[bytes]"
    ) -> dict[int, psutil.Process]:
        children = psutil.Process(process.pid).children()
        return {
            int(child.environ()["RANK"]): child
            for child in children
            if str(JOB) in child.cmdline()
        }

    def check_checkpoints(self) -> None:
        for path in list_checkpoints(self.checkpoints):
            read_checkpoint(path)

    def samples(self) -> StepSamples:
        """Return epoch and number of all samples of every step, over all ranks.

        Steps and samples are sorted. Of a step that was repeated, the last time counts.
        """
        samples: StepSamples = {}
        for notes in self.notes:
            of_start: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
            for file in notes.glob("samples-*.jsonl"):
                for step, pairs in _samples_of_rank(file).items():
                    of_start[step] += pairs
            samples = _steps_before(samples, min(of_start, default=STEPS + 1))
            samples |= of_start
        return {step: sorted(pairs) for step, pairs in sorted(samples.items())}

    def weights_sha256(self) -> list[str]:
        return [
            path.read_text() for path in sorted(self.notes[-1].glob("weights-*.txt"))
        ]


def _samples_of_rank(file: Path) -> StepSamples:
    """Read the samples that one rank noted in one start."""
    samples: StepSamples = {}
    for line in file.read_bytes().split(b"\n")[:-1]:
        step, pairs = json.loads(line)
        # A rollback repeats steps.
        samples = _steps_before(samples, step)
        samples[step] = [(epoch, sample) for epoch, sample in pairs]
    return samples


def _steps_before(samples: StepSamples, end_step: int) -> StepSamples:
    return {step: pairs for step, pairs in samples.items() if step < end_step}


def check_the_same(job: Job, expected: Job) -> None:
    """Check that a run ended as another, bit for bit, with each step recorded once."""
    record = job.record()
    expected_record = expected.record()
    assert [row.step for row in record.steps] == list(range(1, STEPS + 1))
    step_figures = attrgetter(
        "loss", "grad_norm", "learning_rate", "non_padding_tokens", "skipped_steps"
    )
    for row, expected_row in zip(record.steps, expected_record.steps, strict=True):
        assert step_figures(row) == step_figures(expected_row), (
            f"step {row.step}; {job.told()}"
        )
    final_figures = attrgetter("step", "loss", "masked_accuracy")
    assert final_figures(record.evaluations[-1]) == final_figures(
        expected_record.evaluations[-1]
    )
    assert job.model == expected.model
    assert job.samples() == expected.samples()
    assert list(job.checkpoints.glob(".step-*")) == []
    resumptions = [event for event in record.events if event.kind == "resumed"]
    # A corrupt checkpoint is reported before the one that is used instead.
    passed_over = [
        (event.message.split()[1], following.message.split()[2])
        for event, following in itertools.pairwise(resumptions)
        if event.level == "error"
    ]
    assert passed_over == job.corrupt
