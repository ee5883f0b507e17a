"""Run record: configuration, steps, events and exit of a run.

runs/<UTC>-<name>/
  run.json      configuration with the source of each value, versions, ranks
  startup.json  breakdown of the time until the end of the first step
  steps.jsonl   one JSON object per logged step
  events.jsonl  one per event: saves, problems, and the action taken
  evaluations.jsonl  one per evaluation on the validation split
  checkpoints/  training state; see trainer.checkpoint.format
  tensorboard/  the same numbers, for TensorBoard
  wandb/        the same numbers, for W&B
  model/        the trained model, in transformers' format
  exit.json     exit code and reason; torchrun itself always returns 1 if a rank fails
  earlier/N/    run.json, startup.json and exit.json of the run's Nth start, if written
  rank-00001.traceback.txt  traceback of a rank that failed or hung

A resumed run appends; the row of a repeated step replaces all rows from that step on.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError

from trainer.config.tables import StrictTable, canonical_sha256, parse_table, read_json
from trainer.config.train_config import BatchSplit, TrainConfig
from trainer.errors import BadConfig, TrainerError
from trainer.health.events import EventRow

RUN_FILE = "run.json"
STARTUP_FILE = "startup.json"
STEPS_FILE = "steps.jsonl"
EVENTS_FILE = "events.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
EXIT_FILE = "exit.json"
LOCK_FILE = ".lock"
MODEL_DIRECTORY = "model"
TENSORBOARD_DIRECTORY = "tensorboard"
WANDB_DIRECTORY = "wandb"
EARLIER_DIRECTORY = "earlier"
RUN_SCHEMA_VERSION: Literal[5] = 5

RowT = TypeVar("RowT", bound=StrictTable)
SteppedRowT = TypeVar("SteppedRowT", "StepRow", "EvaluationRow")


class StepRow(StrictTable):
    """Metrics of one logged step, over all ranks.

    Times and rates are means since the last logged step.
    """

    step: int
    """Finished optimizer steps, including this one."""
    loss: float | None
    """Mean cross-entropy per predicted token, in nats; None if not finite."""
    grad_norm: float | None
    """L2 norm of the whole gradient before clipping; None if not finite."""
    learning_rate: float
    step_s: float
    """Wall time of a step, in seconds."""
    data_wait_s: float
    """Data-loading stall: time per step that rank 0's device was idle, waiting for
    data, in seconds."""
    compute_s: float
    """Time per step of forward and backward on rank 0, in seconds."""
    communication_s: float | None
    """Time per step that rank 0 waited for gradient synchronisation and token counts,
    in seconds; None if unknown."""
    optimizer_s: float
    """Time per step of clipping and the optimizer update on rank 0, in seconds."""
    non_padding_tokens: int
    """Non-padding tokens of a step, special tokens included."""
    padded_tokens: int
    """Positions in all sequences of a step, padding included."""
    packing_efficiency: float
    tokens_per_s: float
    tokens_per_s_per_rank: float
    padded_tokens_per_s: float
    padded_tokens_per_s_per_rank: float
    model_flops_per_s_per_rank: float
    """Model FLOPs per second and rank for non-padding tokens; padding and recomputation
    are not counted."""
    mfu: float | None
    """Model FLOPs utilisation, as a share of the device's dense peak; None if the peak
    is unknown."""
    mfu_6n: float | None
    """Model FLOPs utilisation by the 6 N convention: six FLOPs per parameter and
    non-padding token."""
    peak_memory_bytes: int
    """Peak memory so far of the rank with the most: reserved by the allocator on a GPU,
    resident on a CPU."""
    gradient_noise_scale_tokens: float | None
    """Gradient noise scale (McCandlish et al. 2018): batch size, in non-padding tokens,
    at which noise and signal are equal; None until known."""
    head_overflows: int
    """Micro-batches of rank 0 so far that exceeded the slots of the sparse MLM head,
    which costs time only."""
    recompilations: int
    """Graphs recompiled on rank 0 after the first steps."""
    skipped_steps: int
    """Skipped updates so far; on a GPU, the last two steps are not yet counted."""
    slowest_rank: int | None
    """Rank with the longest forward and backward in the previous interval; None if
    unknown."""
    slowest_rank_ratio: float | None
    """Ratio of the slowest rank's forward and backward time to the median rank; None if
    unknown."""
    longest_data_wait_s: float | None = None
    """Longest data wait of any rank per step of the previous interval, in seconds; None
    with a single rank. Its excess over rank 0's data wait is part of rank 0's
    communication time."""
    longest_data_wait_rank: int | None = None
    """Rank with the longest data wait in the previous interval."""


class StartUp(StrictTable):
    """Breakdown of the time until the end of the first step on rank 0, in seconds."""

    import_s: float
    """Time from the start of the process until all imports are done."""
    staging_s: float
    """Time to stage the dataset on local disk, or to wait for the rank that does."""
    process_group_s: float
    """Time until all ranks have joined the process group."""
    build_s: float
    """Time to build dataset, model and optimizer, and to run the checks before the
    first step."""
    restore_s: float
    first_batch_s: float
    compile_s: float
    """Time of one forward and backward pass before the first step, which compiles
    layers and warms up libraries."""
    first_step_s: float
    total_s: float
    """Time from the start of the process until the end of the first step."""


class EvaluationRow(StrictTable):
    """Evaluation of the model on the validation split."""

    step: int
    loss: float
    """Mean cross-entropy per predicted token, in nats."""
    perplexity: float
    masked_accuracy: float
    """Share of predicted tokens whose most likely prediction is correct."""
    predicted_tokens: int
    rows: int
    seconds: float


class RunHeader(BatchSplit):
    """Content of ``run.json``."""

    schema_version: Literal[5]
    name: str
    attempt: int = 1
    """Number of this start of the run, counted from 1."""
    resumed_from: str | None
    """Checkpoint that this start resumed from: a name in this run, or the path of
    another run's."""
    resumed_step: int
    """Optimizer steps finished before this start."""
    job: str
    """Name of the SLURM or torchrun job that started the run; empty without one."""
    started_utc: str
    config: dict[str, Any]
    sources: dict[str, str]
    profile_sha256: str
    profile_modified: bool | None = None
    """True if the profile was edited after it was tuned; None if unknown, as in older
    records."""
    dataset_hash: str
    parameters: int
    attention: str
    attention_reason: str
    recipe_changes: list[str]
    device: str
    driver: str | None = None
    """GPU driver version of rank 0; None on a CPU, or if NVML does not report it."""
    peak_flops_per_s: float | None
    """Dense peak of one GPU in the precision used, in FLOP/s: the basis of MFU. None if
    unknown."""
    versions: dict[str, str]
    hosts: list[str] = Field(default_factory=list)
    """Host of each rank; empty if unknown."""

    @property
    def config_sha256(self) -> str:
        """SHA-256 of the configuration, independent of where its values came from."""
        return canonical_sha256(self.config)


class RunExit(StrictTable):
    """Content of ``exit.json``."""

    exit_code: int
    reason: str
    requeue: bool
    """True if an unchanged restart resumes the run."""
    steps: int
    checkpoint: str | None
    """Newest checkpoint, from which the next start resumes."""
    seconds: float
    finished_utc: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Run record as read from disk.

    ``end`` is None if the run is still running, or was killed.
    """

    directory: Path
    header: RunHeader
    steps: tuple[StepRow, ...]
    evaluations: tuple[EvaluationRow, ...]
    events: tuple[EventRow, ...]
    startup: StartUp | None
    end: RunExit | None


def read_run(directory: Path) -> Run:
    """Read a run record, without a torn last line.

    Raises:
        BadConfig: If it is missing, invalid or of another schema version.
    """
    return Run(
        directory=directory,
        header=read_header(directory),
        steps=_without_replaced(_read_rows(directory / STEPS_FILE, StepRow)),
        evaluations=_without_replaced(
            _read_rows(directory / EVALUATIONS_FILE, EvaluationRow)
        ),
        events=tuple(_read_rows(directory / EVENTS_FILE, EventRow)),
        startup=_read_if_exists(directory / STARTUP_FILE, StartUp),
        end=read_exit(directory),
    )


def read_header(directory: Path) -> RunHeader:
    """Read a run's ``run.json``.

    Raises:
        BadConfig: If it is missing, invalid or of another schema version.
    """
    path = directory / RUN_FILE
    if not path.is_file():
        raise BadConfig(
            f"{directory} is not a run: {RUN_FILE} not found",
            next_step="Pass a run directory, such as runs/NAME.",
        )
    return parse_table(RunHeader, read_json(path), where=str(path))


def read_first_header(directory: Path) -> RunHeader:
    """Read the ``run.json`` of a run's first start that wrote one.

    Raises:
        BadConfig: As ``read_header`` does.
    """
    # A start may end before its header.
    starts = [
        path.parent
        for path in (directory / EARLIER_DIRECTORY).glob(f"*/{RUN_FILE}")
        if path.parent.name.isdecimal()
    ]
    first = min(starts, key=lambda path: int(path.name), default=directory)
    return read_header(first)


def read_exit(directory: Path) -> RunExit | None:
    """Read a run's ``exit.json``; None if the run is still running, or was killed."""
    return _read_if_exists(directory / EXIT_FILE, RunExit)


def _read_if_exists(path: Path, kind: type[RowT]) -> RowT | None:
    if not path.is_file():
        return None
    return parse_table(kind, read_json(path), where=str(path))


def _without_replaced(rows: Sequence[SteppedRowT]) -> tuple[SteppedRowT, ...]:
    """Return the rows that count.

    When training goes back to an earlier step, its row replaces all from that step on.
    """
    kept: list[SteppedRowT] = []
    for row in rows:
        while kept and kept[-1].step >= row.step:
            kept.pop()
        kept.append(row)
    return tuple(kept)


def _read_rows(path: Path, kind: type[RowT]) -> list[RowT]:
    """Read one row per line, without an unfinished last line.

    Raises:
        BadConfig: If a line is invalid.
    """
    if not path.is_file():
        return []
    rows: list[RowT] = []
    # The last line has no end while it is written, or if its writer was killed.
    *lines, _unfinished = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            row = kind.model_validate_json(line)
        except ValidationError as error:
            problem = error.errors(
                include_url=False, include_context=False, include_input=False
            )[0]
            raise BadConfig(
                f"{path}, line {number}: {problem['msg']}",
                next_step=(
                    "The run record is corrupt. Restore the file, or remove the lines"
                    " from there on."
                ),
            ) from error
        if _is_finite(row):
            rows.append(row)
    return rows


def _is_finite(row: StrictTable) -> bool:
    """Return whether all numbers are finite, as the trainer writes no others."""
    return all(
        math.isfinite(value)
        for value in row.model_dump().values()
        if isinstance(value, float)
    )


def settings_of(config: dict[str, Any]) -> TrainConfig | None:
    """Return the settings of a run record.

    Returns:
        None if they are invalid, as from another version of the trainer.
    """
    try:
        return parse_table(TrainConfig, config, where="settings")
    except TrainerError:
        return None


def code_sha256(package: Path = Path(__file__).parents[1]) -> str:
    """Return the SHA-256 of all Python sources in a package, by default the trainer."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = str(path.relative_to(package)).encode()
        digest.update(name + b"\0" + path.read_bytes())
    return digest.hexdigest()
