"""The run record: what a run was, each step it took, and how it ended. No torch here.

runs/<UTC>-<name>/
  run.json      configuration with the source of each value, versions, ranks
  steps.jsonl   one JSON object per logged step
  evaluations.jsonl  one per evaluation on the validation split
  tensorboard/  the same numbers, where tensorboard is installed
  model/        the trained model, as transformers loads it
  exit.json     exit code and reason; torchrun itself returns 1 whatever its ranks return
"""

import datetime
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from trainer.errors import BadConfig
from trainer.schema import Table, parse_table, read_json

RUN_FILE, STEPS_FILE, EXIT_FILE = "run.json", "steps.jsonl", "exit.json"
MODEL_DIRECTORY, TENSORBOARD_DIRECTORY = "model", "tensorboard"
EVALUATIONS_FILE = "evaluations.jsonl"
RUN_SCHEMA_VERSION: Literal[2] = 2


RowT = TypeVar("RowT", bound=Table)


class StepRow(Table):
    """One optimizer step, over all ranks; times and rates are means since the last logged step."""

    step: int
    """Counted from 1: steps finished."""
    loss: float
    """Mean cross-entropy per predicted token, in nats."""
    grad_norm: float
    """L2 norm of the whole gradient before clipping."""
    learning_rate: float
    step_s: float
    """Wall time of a step."""
    data_wait_s: float
    """Part of it in which rank 0 waited for its loader."""
    compute_s: float
    """Part of it in which rank 0 went forward and backward."""
    communication_s: float | None
    """Part of it in which rank 0, its own gradient done, waited for others; None where nobody can tell."""
    optimizer_s: float
    """Part of it for clipping and the update."""
    real_tokens: int
    """Tokens of a step that are not padding, special tokens included."""
    slot_tokens: int
    """All places of a step's rows, padding included."""
    packing_efficiency: float
    """Real over slot tokens."""
    real_tokens_per_s: float
    real_tokens_per_s_per_rank: float
    slot_tokens_per_s: float
    slot_tokens_per_s_per_rank: float
    model_flops_per_s_per_rank: float
    """What the mathematics of the real tokens asks for; padding and recomputation do not count."""
    mfu: float | None
    """Of the device's dense peak; None where that is not known."""
    mfu_6n: float | None
    """The same by the other convention: six times all parameters for each real token."""
    peak_memory_bytes: int
    """The highest so far, of the rank that needs most: on a GPU what the allocator holds, on a CPU the process."""
    gradient_noise_scale_tokens: float | None
    """Real tokens of a batch whose gradient is half noise (McCandlish et al. 2018); None until it can be told."""
    head_overflows: int
    """Micro-batches of rank 0 so far that had more tokens to predict than head slots."""
    recompilations: int
    """Graphs compiled on rank 0 after the first steps."""


class EvaluationRow(Table):
    """The model held against the validation split."""

    step: int
    """Steps finished."""
    loss: float
    """Mean cross-entropy per predicted token, in nats."""
    perplexity: float
    """Its exponential."""
    masked_accuracy: float
    """Share of predicted tokens whose likeliest prediction was right."""
    predicted_tokens: int
    rows: int
    seconds: float


class RunHeader(Table):
    """``run.json``."""

    schema_version: Literal[2]
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
    global_batch_rows: int
    parameters: int
    layout: str
    attention: str
    """How it is computed."""
    attention_reason: str
    recipe_changes: list[str]
    """What the configuration changed of the model's recipe."""
    device: str
    peak_flops_per_s: float | None
    """Of one device, dense, in the precision used; what MFU refers to."""
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
    evaluations: tuple[EvaluationRow, ...]
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
        self._append(STEPS_FILE, row)

    def evaluation(self, row: EvaluationRow) -> None:
        """Append an evaluation."""
        self._append(EVALUATIONS_FILE, row)

    def finish(self, end: RunExit) -> None:
        """Write ``exit.json``."""
        self._write(EXIT_FILE, end)

    def _append(self, name: str, row: Table) -> None:
        if self._active:
            with (self.directory / name).open("a", encoding="utf-8") as file:
                file.write(row.model_dump_json() + "\n")

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
    steps = _rows(directory / STEPS_FILE, StepRow)
    evaluations = _rows(directory / EVALUATIONS_FILE, EvaluationRow)
    end_path = directory / EXIT_FILE
    end = parse_table(RunExit, read_json(end_path), where=str(end_path)) if end_path.is_file() else None
    return Run(directory=directory, header=header, steps=steps, evaluations=evaluations, end=end)


def _rows(path: Path, kind: type[RowT]) -> tuple[RowT, ...]:
    rows: list[RowT] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            rows.append(kind.model_validate_json(line))
        except ValidationError:
            break  # a torn line: whatever follows it was not finished either
    return tuple(rows)
