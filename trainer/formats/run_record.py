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

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError

from trainer.formats.batch_split import BatchSplit
from trainer.formats.canonical_json import canonical_sha256
from trainer.formats.errors import BadConfig
from trainer.formats.events import EventRow
from trainer.formats.tables import StrictTable, parse_table, read_json

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

RunSchemaVersion = Literal[5]
RUN_SCHEMA_VERSION: RunSchemaVersion = 5
"""Version of the files of a run record; the type checker compares it with its type."""

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
    """Learning rate of this step."""
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
    """Share of non-padding tokens among all positions."""
    tokens_per_s: float
    """Non-padding tokens per second of all ranks."""
    tokens_per_s_per_rank: float
    """Non-padding tokens per second, divided by the number of ranks."""
    padded_tokens_per_s: float
    """Positions per second of all ranks, padding included."""
    padded_tokens_per_s_per_rank: float
    """Positions per second, padding included, divided by the number of ranks."""
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
    """Times so far that a micro-batch of rank 0 exceeded the fixed slots of the sparse
    MLM head, or the fixed segments of varlen attention, which costs time only."""
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
    """Rank with the longest data wait in the previous interval; None with a single
    rank."""
    gpu_busy_share: float | None = None
    """Share of time in which some kernel ran, even one that waits for another rank:
    NVML's GPU utilisation. Mean over the GPUs of the run, as all figures of GPU
    activity are. None if no GPU was read; ``gpu_activity_missing`` in ``run.json`` has
    the reason, unless two rows followed each other within half a second."""
    lowest_gpu_busy_share: float | None = None
    """Share of time in which some kernel ran on the GPU with the least; None if
    unknown."""
    lowest_gpu_busy_rank: int | None = None
    """Rank of that GPU; None if unknown."""
    memory_busy_share: float | None = None
    """Share of time in which device memory was read or written: NVML's memory
    utilisation; None if unknown."""
    sm_active_share: float | None = None
    """Share of SMs that were busy, from hardware counters (GPM, since Hopper); None if
    unknown."""
    tensor_active_share: float | None = None
    """Share of time in which SMs did Tensor Core operations, from hardware counters;
    None if unknown."""
    dram_active_share: float | None = None
    """Share of the peak memory bandwidth that was used, from hardware counters; None if
    unknown."""
    gpu_power_w: float | None = None
    """Power of a GPU, in watts; None if unknown."""
    sm_clock_mhz: float | None = None
    """Clock of the SMs, in MHz; None if unknown."""


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
    """Time to load the checkpoint that the run resumes from."""
    first_batch_s: float
    """Time to start data loading, until the first micro-batches have arrived."""
    compile_s: float
    """Time of one forward and backward pass before the first step, which compiles
    layers and warms up libraries."""
    first_step_s: float
    """Time of the first optimizer step."""
    total_s: float
    """Time from the start of the process until the end of the first step."""


class EvaluationRow(StrictTable):
    """Evaluation of the model on the validation split."""

    step: int
    """Optimizer steps finished before the evaluation."""
    loss: float | None
    """Mean cross-entropy per predicted token, in nats; None if not finite."""
    perplexity: float | None
    """Exponential of the loss; None if the loss is not finite."""
    masked_accuracy: float
    """Share of predicted tokens whose most likely prediction is correct."""
    predicted_tokens: int
    """Masked tokens that the model predicted."""
    rows: int
    """Sequences of the validation split that were evaluated."""
    seconds: float
    """Duration of the evaluation, in seconds."""


class RunHeader(BatchSplit):
    """Content of ``run.json``."""

    schema_version: RunSchemaVersion
    name: str
    """Name of the model."""
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
    """Time of this start in UTC, in ISO 8601."""
    config: dict[str, Any]
    """Settings of the trainer, in the form of the ``[train]`` table of a profile."""
    sources: dict[str, str]
    """Source of each setting's value by its dotted key, such as ``default``."""
    profile_sha256: str
    """SHA-256 of the profile's tables."""
    profile_modified: bool | None = None
    """True if the profile was edited after it was tuned; None if unknown, as in older
    records."""
    dataset_hash: str
    """Hash of the pre-tokenised dataset, from its manifest."""
    parameters: int
    """Number of the model's parameters."""
    attention: str
    """Kind of attention that was chosen, such as ``varlen``."""
    attention_reason: str
    """Reason why this kind of attention was chosen."""
    recipe_changes: list[str]
    """Changes of the model's recipe for speed, such as another attention dropout."""
    device: str
    """Name of rank 0's GPU, or ``cpu``."""
    driver: str | None = None
    """GPU driver version of rank 0; None on a CPU, or if NVML does not report it."""
    gpu_activity_missing: list[str] = Field(default_factory=list)
    """Reasons why logged rows have no GPU activity, or lack some figures of it; empty
    if they have all."""
    peak_flops_per_s: float | None
    """Dense peak of one GPU in the precision used, in FLOP/s: the basis of MFU. None if
    unknown."""
    versions: dict[str, str]
    """Versions of Python and of the libraries that results depend on."""
    hosts: list[str] = Field(default_factory=list)
    """Host of each rank; empty if unknown."""

    @property
    def config_sha256(self) -> str:
        """SHA-256 of the configuration, independent of where its values came from."""
        return canonical_sha256(self.config)


class RunExit(StrictTable):
    """Content of ``exit.json``."""

    exit_code: int
    """Exit code of the trainer, not that of torchrun."""
    reason: str
    """Reason of the exit, in a sentence."""
    requeue: bool
    """True if an unchanged restart resumes the run."""
    steps: int
    """Optimizer steps that the run has finished."""
    checkpoint: str | None
    """Newest checkpoint, from which the next start resumes; None if there is none."""
    seconds: float
    """Time from the start of the process to the exit, in seconds."""
    finished_utc: str
    """Time of the exit in UTC, in ISO 8601."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Run record as read from disk."""

    directory: Path
    header: RunHeader
    steps: tuple[StepRow, ...]
    """Logged steps in order, each step once."""
    evaluations: tuple[EvaluationRow, ...]
    """Evaluations in order, each step once."""
    events: tuple[EventRow, ...]
    """Events of all starts, in the order in which they were written."""
    startup: StartUp | None
    """Startup times of the last start; None if its first step has not ended."""
    end: RunExit | None
    """Exit of the last start; None if it is still running, or was killed."""


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
    """Return the rows of the training that led to the last one, each step once.

    After a rollback or a resume, training repeats steps. The first row that repeats a
    step replaces the earlier rows of that step and of all later ones.
    """
    kept: list[SteppedRowT] = []
    for row in rows:
        while kept and kept[-1].step >= row.step:
            kept.pop()
        kept.append(row)
    return tuple(kept)


def _read_rows(path: Path, kind: type[RowT]) -> list[RowT]:
    """Read one row per line, without an unfinished last line.

    Rows with a number that is not finite are left out: only other programs write them,
    and one NaN or infinity would make every mean and sum over rows useless.

    Raises:
        BadConfig: If a line is invalid.
    """
    if not path.is_file():
        return []
    rows: list[RowT] = []
    # The last line is empty, or has no end while it is written or if its writer was
    # killed.
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
    """Return whether all numbers of a row are finite."""
    return all(
        math.isfinite(value)
        for value in row.model_dump().values()
        if isinstance(value, float)
    )
