"""Trainings under torchrun that are there to be disturbed, and what they come to when
nobody does."""

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
from trainer.checkpoint.format import (
    CHECKPOINTS_DIRECTORY,
    list_checkpoints,
    read_checkpoint,
)
from trainer.health.events import EventRow
from trainer.record.run_record import (
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
END_S = 120.0
"""No job takes so long."""
# Several buckets of gradients, accumulation, dropout, more than one epoch.
PROFILE = f"""\
schema_version = 2
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
"""Names the environment variable of a place to stage data to."""
NO_DROPOUT = {
    f"train.model.config.{name}_dropout_prob": 0.0
    for name in ("hidden", "attention_probs")
}

Settings = Mapping[str, object]
StepSamples = dict[int, list[tuple[int, int]]]


class Workplace:
    """A dataset, a profile, and the jobs that use them, in a ``place`` of its own."""

    def __init__(
        self,
        place: Path,
        *,
        python: Path = Path(sys.executable),
        variables: Mapping[str, str] | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.place = place
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
            place / "data", samples[100:], vocab_size=128, validation=samples[:100]
        )
        self.local_disk = place / "local"
        self.local_disk.mkdir()
        self.profile = place / "profile.toml"
        self.profile.write_text(PROFILE)
        self._undisturbed: dict[str, Job] = {}
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._numbers = itertools.count(1)

    def job(self, ranks: int = 2, settings: Settings | None = None) -> "Job":
        directory = self.place / f"run-{next(self._numbers)}"
        return Job(
            place=self,
            directory=directory,
            ranks=ranks,
            settings=self._settings | dict(settings or {}),
        )

    def undisturbed(self, ranks: int = 2, settings: Settings | None = None) -> "Job":
        """One that came to its end; made once, however many loops ask for it at the
        same time."""
        key = json.dumps([ranks, settings or {}])
        with self._locks[key]:
            if key not in self._undisturbed:
                job = self.job(ranks, settings)
                job.finish()
                self._undisturbed[key] = job
            return self._undisturbed[key]


@dataclass(kw_only=True)
class Job:
    """One run, however often it is started."""

    place: Workplace
    directory: Path
    ranks: int
    settings: dict[str, object]
    starts: int = 0
    notes: list[Path] = field(default_factory=list)
    """Of each start, what its ranks wrote down."""
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
        sets = [
            f"--set={key}={json.dumps(value)}"
            for key, value in (self.settings | dict(settings or {})).items()
        ]
        command = [
            str(self.place.python),
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={self.ranks}",
            str(JOB),
            str(self.place.profile),
            "--data",
            str(self.place.data),
            "--out",
            str(self.directory),
            *sets,
        ]
        # Threads that wait by spinning would make a step a hundred times slower when
        # somebody else uses a core.
        environment = os.environ | {
            "OMP_WAIT_POLICY": "PASSIVE",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        environment |= self.place.variables | {
            "FAULTS_REQUEST": request,
            LOCAL_DISK: str(self.place.local_disk),
        }
        with self.log.open("ab") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            return start_child(
                command, start_new_session=True, env=environment, **streams
            )

    def end(self, process: "subprocess.Popen[bytes]", within_s: float = END_S) -> None:
        """Wait until it and all that names its run, such as loaders of a killed rank,
        are gone."""
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
        alive = [
            one
            for one in psutil.process_iter(["cmdline", "status"])
            if one.info["status"] != psutil.STATUS_ZOMBIE
        ]
        return [
            one for one in alive if str(self.directory) in (one.info["cmdline"] or ())
        ]

    def finish(self, faults: Sequence[dict[str, Any]] = ()) -> Run:
        process = self.start(faults)
        self.end(process)
        assert process.returncode == 0, self.told()
        record = self.record()
        assert (record.end.exit_code, record.end.reason, record.end.steps) == (
            0,
            "finished",
            STEPS,
        )
        return record

    def leave(
        self, process: "subprocess.Popen[bytes]", within_s: float = END_S
    ) -> RunExit:
        """Wait until it has left before its end; how it says it did."""
        self.end(process, within_s)
        assert process.returncode != 0
        left = read_exit(self.directory)
        assert left is not None, self.told()
        return left

    def record(self) -> Run:
        return read_run(self.directory)

    def told(self) -> str:
        return (
            f"{self.log}:\n{self.log.read_text(errors='replace')[-4000:]}"
            if self.log.exists()
            else ""
        )

    def steps_written(self) -> int:
        """Lines of the record so far, those of steps that are taken again included."""
        file = self.directory / STEPS_FILE
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def start_and_take(
        self,
        steps: int,
        faults: Sequence[dict[str, Any]] = (),
        *,
        settings: Settings | None = None,
    ) -> "subprocess.Popen[bytes]":
        """Start, and wait until this start has taken so many steps."""
        before = self.steps_written()
        process = self.start(faults, settings=settings)
        self.wait_until(process, lambda: self.steps_written() >= before + steps)
        return process

    def wait_until(
        self, process: "subprocess.Popen[bytes]", come: Callable[[], object]
    ) -> None:
        deadline_s = time.monotonic() + END_S
        while not come():
            assert process.poll() is None, (
                f"ended with {process.returncode}; {self.told()}"
            )
            if time.monotonic() > deadline_s:
                kill_tree(process)
                raise AssertionError(f"nothing came; {self.told()}")
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
        """Epoch and number of all samples of every step, over all ranks, in order; a
        step that was taken again counts as it was taken last.
        """
        found: StepSamples = {}
        for notes in self.notes:
            joined: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
            for file in notes.glob("samples-*.jsonl"):
                of_rank: StepSamples = {}
                for line in file.read_bytes().split(b"\n")[:-1]:
                    step, pairs = json.loads(line)
                    of_rank = {
                        known: of_rank[known] for known in of_rank if known < step
                    }
                    of_rank[step] = [(epoch, sample) for epoch, sample in pairs]
                for step, pairs in of_rank.items():
                    joined[step] += pairs
            first = min(joined, default=STEPS + 1)
            found = {
                step: pairs for step, pairs in found.items() if step < first
            } | joined
        return {step: sorted(pairs) for step, pairs in sorted(found.items())}

    def weights_sha256(self) -> list[str]:
        return [
            path.read_text() for path in sorted(self.notes[-1].glob("weights-*.txt"))
        ]


def check_the_same(job: Job, expected: Job) -> None:
    """That a run came to the end that another came to, bit for bit, and each step is in
    its record once."""
    found, whole = job.record(), expected.record()
    assert [row.step for row in found.steps] == list(range(1, STEPS + 1))
    of_a_step = attrgetter(
        "loss", "grad_norm", "learning_rate", "non_padding_tokens", "skipped_steps"
    )
    for row, other in zip(found.steps, whole.steps, strict=True):
        assert of_a_step(row) == of_a_step(other), f"step {row.step}; {job.told()}"
    of_the_end = attrgetter("step", "loss", "masked_accuracy")
    assert of_the_end(found.evaluations[-1]) == of_the_end(whole.evaluations[-1])
    assert job.model == expected.model
    assert job.samples() == expected.samples()
    assert list(job.checkpoints.glob(".step-*")) == []
    resumed = [event for event in found.events if event.kind == "resumed"]
    passed_over = [
        (one.message.split()[1], after.message.split()[2])
        for one, after in itertools.pairwise(resumed)
        if one.level == "error"
    ]
    assert passed_over == job.corrupt
