"""The run record: what a run was, each step it took, and how it ended. No torch here.

runs/<UTC>-<name>/
  run.json      configuration with the source of each value, versions, ranks
  steps.jsonl   one JSON object per logged step
  tensorboard/  the same numbers, where tensorboard is installed
  model/        the trained model, as transformers loads it
  exit.json     exit code and reason; torchrun itself returns 1 whatever its ranks return
"""

import datetime
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from trainer.errors import BadConfig
from trainer.schema import Table, parse_table, read_json

RUN_FILE, STEPS_FILE, EXIT_FILE = "run.json", "steps.jsonl", "exit.json"
MODEL_DIRECTORY, TENSORBOARD_DIRECTORY = "model", "tensorboard"
RUN_SCHEMA_VERSION: Literal[1] = 1


class StepRow(Table):
    """One optimizer step, over all ranks."""

    step: int
    """Counted from 1: steps finished."""
    loss: float
    """Mean cross-entropy per predicted token, in nats."""
    grad_norm: float
    learning_rate: float
    step_s: float
    """Wall time since the last logged step, per step."""
    data_wait_s: float
    """Part of ``step_s`` in which rank 0 waited for its loader."""
    real_tokens: int
    """Tokens of the step that are not padding, special tokens included."""
    slot_tokens: int
    """All places of the step's rows, padding included."""
    real_tokens_per_s: float


class RunHeader(Table):
    """``run.json``."""

    schema_version: Literal[1]
    name: str
    started_utc: str
    config: dict[str, Any]
    sources: dict[str, str]
    config_sha256: str
    profile_sha256: str
    dataset_hash: str
    world_size: int
    accumulation_steps: int
    rows_per_microbatch_per_rank: int
    parameters: int
    attention: str
    device: str
    versions: dict[str, str]


class RunExit(Table):
    """``exit.json``."""

    exit_code: int
    reason: str
    steps: int
    seconds: float
    finished_utc: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run read back; ``end`` is None while it goes on, or when it was killed."""

    directory: Path
    header: RunHeader
    steps: tuple[StepRow, ...]
    end: RunExit | None


class RunWriter:
    """Writes a run record; on every rank but the first, all of it does nothing.

    Raises:
        BadConfig: If the directory holds a run already: its record must not be mixed with another's.
    """

    def __init__(self, directory: Path, *, active: bool) -> None:
        self.directory = directory
        self._active = active
        self.last_step = 0
        if active and (directory / RUN_FILE).exists():
            raise BadConfig(f"{directory} holds a run already", next_step="Choose another --out.")
        if active:
            directory.mkdir(parents=True, exist_ok=True)

    def start(self, header: RunHeader) -> None:
        """Write ``run.json``."""
        self._write(RUN_FILE, header)

    def step(self, row: StepRow) -> None:
        """Append a step."""
        self.last_step = row.step
        if self._active:
            with (self.directory / STEPS_FILE).open("a", encoding="utf-8") as file:
                file.write(row.model_dump_json() + "\n")

    def finish(self, end: RunExit) -> None:
        """Write ``exit.json``."""
        self._write(EXIT_FILE, end)

    def _write(self, name: str, value: Table) -> None:
        if not self._active:
            return
        path = self.directory / name
        partial = path.with_name(f".{name}.{secrets.token_hex(4)}.partial")
        with partial.open("x", encoding="utf-8") as file:
            file.write(value.model_dump_json(indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)


def utc_now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def default_run_directory(name: str) -> Path:
    """``runs/<UTC>-<name>`` under the working directory."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    return Path("runs") / f"{stamp}-{name}"


def read_run(directory: Path) -> Run:
    """Read a run record; a torn last step line is left out.

    Raises:
        BadConfig: If the directory is not a run, or one of another schema version.
    """
    if not (directory / RUN_FILE).is_file():
        raise BadConfig(f"{directory} is not a run: it has no {RUN_FILE}", next_step="Name a directory under runs/.")
    header = parse_table(RunHeader, read_json(directory / RUN_FILE), where=str(directory / RUN_FILE))
    steps: list[StepRow] = []
    path = directory / STEPS_FILE
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            steps.append(StepRow.model_validate_json(line))
        except ValidationError:
            break  # a torn line: whatever follows it was not finished either
    end_path = directory / EXIT_FILE
    end = parse_table(RunExit, read_json(end_path), where=str(end_path)) if end_path.is_file() else None
    return Run(directory=directory, header=header, steps=tuple(steps), end=end)
