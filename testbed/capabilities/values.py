"""A cell of the table: a capability of a kind of subject on a device, and its run."""

import json
import os
import random
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from testbed.datasets import write_dataset
from testbed.nullgpu.environment import ROOT
from testbed.nullgpu.machine import MEASURING

PROGRAMS = ROOT / "testbed/examples/programs"
"""One small program for each kind of subject."""
PROFILE = "profile.toml"
"""Profile of the probe, which other commands read."""
TINY_MODEL = {
    "model_type": "bert",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
"""Model of the bundled trainer."""
REFUSALS = (2, 7)
"""Exit codes of a command that does not serve a subject: wrong usage, not checkable."""
OUT_OF_TIME = 8
"""Exit code of a command whose time limit ended: on a busy machine, the same command
resumes until it has its answer."""
_MOST_RESUMPTIONS = 5
DeviceName = Literal["cpu", "cuda"]


class Refused(Exception):
    """A command does not serve a subject."""


class Failed(Exception):
    """A command ended with another error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


class Run(Protocol):
    """Function that runs ``autotune`` on a machine, in the folder of a program."""

    def __call__(self, words: Sequence[str], variables: Mapping[str, str]) -> Answer:
        """Run a command.

        Args:
            words: Command and its options.
            variables: Environment variables, in addition to the machine's.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A kind of subject, and the options that name a small program of that kind."""

    kind: str
    words: str
    """The kind in words, for the page."""
    options: tuple[str, ...]
    """Options of ``probe`` and ``tune``."""
    probe_options: tuple[str, ...] = ()
    """Further options of ``probe``."""
    loader: tuple[str, ...] = ()
    """Options that name the loader, if the program has two functions."""
    baseline_options: tuple[str, ...] = ()
    """Options of ``baseline`` that give the size before tuning, if the program has
    none."""

    @property
    def is_bundled(self) -> bool:
        """True for the bundled trainer, whose settings have a table of their own."""
        return self.kind == "mlm"

    def strategy(self, name: str) -> tuple[str, ...]:
        """Return the options of ``probe`` that choose a parallel strategy."""
        if self.is_bundled:
            return ("--strategy", name)
        return ("--set", f"strategy={name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """The folder of a subject's program, and a machine that runs commands there."""

    subject: Subject
    device: DeviceName
    memory: str
    """Memory budget of a rank."""
    ranks_memory: str
    """Memory budget of a rank that others train beside."""
    folder: Path
    run: Run
    results: dict[str, "Result"] = field(default_factory=dict)
    """Results so far, by the name of the capability."""

    def prepare(self) -> None:
        """Write the programs, and the model and the dataset of the bundled trainer."""
        for program in PROGRAMS.glob("*.py"):
            shutil.copy(program, self.folder)
        (self.folder / "tiny.json").write_text(json.dumps(TINY_MODEL))
        draws = random.Random(0)
        samples = [
            [draws.randrange(5, 128) for _ in range(draws.randrange(8, 60))]
            for _ in range(400)
        ]
        write_dataset(self.folder / "data", samples, vocab_size=128)

    def table(self, name: str = PROFILE) -> dict[str, Any]:
        """Return a profile that a command has written."""
        return tomllib.loads((self.folder / name).read_text())

    def result_of(self, row: "Capability") -> "Result":
        """Return the result of a capability, after the one that it builds on.

        Raises:
            Refused: If its command does not serve the subject.
            Failed: If it ends with another error.
        """
        if row.after is not None:
            self.result_of(row.after)
        if row.name not in self.results:
            self.results[row.name] = self._run(row)
        return self.results[row.name]

    def _run(self, row: "Capability") -> "Result":
        words = (*row.command(self), "--json")
        answer = self.run(words, row.variables)
        for _ in range(_MOST_RESUMPTIONS):
            if answer.code != OUT_OF_TIME:
                break
            answer = self.run(words, row.variables)
        if answer.code:
            error = Refused if answer.code in REFUSALS else Failed
            raise error(
                f"{' '.join(words)}: exit code {answer.code}\n{answer.out[-2000:]}\n"
                f"{answer.err[-4000:]}"
            )
        return Result(answer=json.loads(answer.out), place=self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Output of the command of a capability, and the place in which it ran."""

    answer: dict[str, Any]
    place: Workplace

    @property
    def table(self) -> dict[str, Any]:
        """The profile as it is now."""
        return self.place.table()

    @property
    def evidence(self) -> dict[str, Any]:
        """The evidence of the profile as it is now."""
        evidence: dict[str, Any] = self.table["evidence"]
        return evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """A row of the table: a command, and what its answer must have."""

    name: str
    words: str
    """The capability in words, for the page."""
    command: Callable[[Workplace], Sequence[str]]
    check: Callable[[Result], None]
    after: "Capability | None" = None
    """Capability whose profile it reads."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the command."""
    not_yet: tuple[str, ...] = ()
    """Kinds of subjects that the command does not serve today."""
    nowhere: Mapping[tuple[str, DeviceName], str] = field(default_factory=dict)
    """Why a kind cannot have it on a device: a limit of its library."""
    not_simulated: Mapping[str, str] = field(default_factory=dict)
    """Why pretended GPUs cannot show it for a kind: it needs values that they do not
    compute."""
    slow: tuple[tuple[str, DeviceName], ...] = ()
    """Cells that take minutes, which only ``make soak`` runs."""
    uses_the_device: bool = True
    """False if it reads a profile or writes a study: on pretended GPUs, only ``make
    soak`` runs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A capability of a kind of subject on a device."""

    capability: Capability
    subject: Subject
    device: DeviceName

    @property
    def name(self) -> str:
        """Name as tests have it: ``probe[own]``."""
        return f"{self.capability.name}[{self.subject.kind}]"

    @property
    def impossible(self) -> str | None:
        """Why there is no such cell; None if there is."""
        kind = self.subject.kind
        if self.device == "cuda" and kind in self.capability.not_simulated:
            return self.capability.not_simulated[kind]
        return self.capability.nowhere.get((kind, self.device))

    @property
    def is_refused(self) -> bool:
        """True if the command does not serve this kind today."""
        return self.subject.kind in self.capability.not_yet

    @property
    def is_slow(self) -> bool:
        """True if the cell takes minutes."""
        return (self.subject.kind, self.device) in self.capability.slow


def run_on_cpu(
    folder: Path, words: Sequence[str], variables: Mapping[str, str]
) -> Answer:
    """Run ``autotune`` on this machine's CPU, in a folder."""
    here = ("--here",) if words[0] in MEASURING else ()
    environment = {**os.environ, **variables}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "autotune", *words, *here],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    return Answer(code=ended.returncode, out=ended.stdout, err=ended.stderr)
