"""The run record: what a run was, each step it took, and how it ended. No torch here.

runs/<UTC>-<name>/
  run.json      configuration with the source of each value, versions, ranks
  startup.json  what the time until the first step went into
  steps.jsonl   one JSON object per logged step
  events.jsonl  one per event: what was saved, what went wrong, and what was done about it
  evaluations.jsonl  one per evaluation on the validation split
  checkpoints/  the state of training; see trainer.checkpoint.format
  tensorboard/  the same numbers, where tensorboard is installed
  model/        the trained model, as transformers loads it
  exit.json     exit code and reason; torchrun itself returns 1 whatever its ranks return
  earlier/N/    run.json, startup.json and exit.json of the run's Nth start, as far as it came to write them
  rank-00001.traceback.txt  where a rank was when it failed or hung

A run that is resumed appends: a step that is taken again, after a crash or a rollback, replaces the rows from there on.
"""

import hashlib
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError

from trainer.config.tables import StrictTable, canonical_sha256, parse_table, read_json
from trainer.config.train_config import BatchSplit, TrainConfig
from trainer.errors import BadConfig, TrainerError
from trainer.health.events import EventRow, utc_now
from trainer.health.watchdog import REQUEUE


def code_sha256(package: Path = Path(__file__).parent) -> str:
    """Hash the sources below a package's directory, by default this one's."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


RUN_FILE, STEPS_FILE, EXIT_FILE = "run.json", "steps.jsonl", "exit.json"
MODEL_DIRECTORY, TENSORBOARD_DIRECTORY = "model", "tensorboard"
EVALUATIONS_FILE, EVENTS_FILE, STARTUP_FILE = "evaluations.jsonl", "events.jsonl", "startup.json"
EARLIER_DIRECTORY, LOCK_FILE = "earlier", ".lock"
RUN_SCHEMA_VERSION: Literal[5] = 5


RowT = TypeVar("RowT", bound=StrictTable)


class StepRow(StrictTable):
    """One optimizer step, over all ranks; times and rates are means since the last logged step."""

    step: int
    """Counted from 1: steps finished."""
    loss: float | None
    """Mean cross-entropy per predicted token, in nats; None where it was not finite."""
    grad_norm: float | None
    """L2 norm of the whole gradient before clipping; None where it was not finite."""
    learning_rate: float
    step_s: float
    """Wall time of a step."""
    data_wait_s: float
    """Part of it in which rank 0 waited for its loader, and its device had nothing left to do."""
    compute_s: float
    """Part of it in which rank 0 went forward and backward."""
    communication_s: float | None
    """Part of it in which rank 0 waited for others' token counts and gradients; None if nobody can tell."""
    optimizer_s: float
    """Part of it for clipping and the update."""
    non_padding_tokens: int
    """Tokens of a step that are not padding, special tokens included."""
    padded_tokens: int
    """All places of a step's rows, padding included."""
    packing_efficiency: float
    tokens_per_s: float
    tokens_per_s_per_rank: float
    padded_tokens_per_s: float
    padded_tokens_per_s_per_rank: float
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
    skipped_steps: int
    """Steps so far whose update was left out; on a GPU without the last two, whose numbers have not arrived."""
    slowest_rank: int | None
    """The one whose forward and backward took longest in the interval before; None until that is known."""
    slowest_rank_ratio: float | None
    """Its time over the median of all ranks."""
    longest_data_wait_s: float | None = None
    """Of the rank that waited longest for its loader, in the interval before; None until that is known, and of one rank
    alone. What it waits beyond rank 0, rank 0 waits for its gradient."""
    longest_data_wait_rank: int | None = None
    """That rank."""


class StartUp(StrictTable):
    """What the time until the end of the first step went into, on rank 0, in seconds."""

    import_s: float
    """From the start of the process until everything is imported."""
    staging_s: float
    """Copying the dataset to local disk, or waiting for who does."""
    process_group_s: float
    """Until all ranks had found each other."""
    build_s: float
    """Dataset, model and optimizer, and the checks before the first step."""
    restore_s: float
    first_batch_s: float
    compile_s: float
    """Going forward and backward once, without a step: what compiles layers, and warms up libraries."""
    first_step_s: float
    total_s: float
    """From the start of the process until the end of the first step."""


class EvaluationRow(StrictTable):
    """The model held against the validation split."""

    step: int
    loss: float
    """Mean cross-entropy per predicted token, in nats."""
    perplexity: float
    masked_accuracy: float
    """Share of predicted tokens whose likeliest prediction was right."""
    predicted_tokens: int
    rows: int
    seconds: float


class RunHeader(BatchSplit):
    """``run.json``."""

    schema_version: Literal[5]
    name: str
    attempt: int = 1
    """Number of the start, from 1."""
    resumed_from: str | None
    """The checkpoint that it went on from: a name in this run, or the path of another run's."""
    resumed_step: int
    """Optimizer steps taken before this start."""
    job: str
    """Names the job that started it, where one did."""
    started_utc: str
    config: dict[str, Any]
    sources: dict[str, str]
    profile_sha256: str
    dataset_hash: str
    parameters: int
    attention: str
    attention_reason: str
    recipe_changes: list[str]
    device: str
    driver: str | None = None
    """Version of the first rank's GPU driver; None on a CPU, or if NVML does not give it."""
    peak_flops_per_s: float | None
    """Of one device, dense, in the precision used; what MFU refers to."""
    versions: dict[str, str]
    hosts: list[str] = Field(default_factory=list)
    """On which each rank runs, by rank; empty in records that do not tell."""

    @property
    def config_sha256(self) -> str:
        """Names the configuration, whatever it came from."""
        return canonical_sha256(self.config)


class RunExit(StrictTable):
    """``exit.json``."""

    exit_code: int
    reason: str
    requeue: bool
    """Whether starting it again, unchanged, goes on."""
    steps: int
    checkpoint: str | None
    """The newest one, which a next start goes on from."""
    seconds: float
    finished_utc: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run read back; ``end`` is None while it goes on, or when it was killed."""

    directory: Path
    header: RunHeader
    steps: tuple[StepRow, ...]
    evaluations: tuple[EvaluationRow, ...]
    events: tuple[EventRow, ...]
    startup: StartUp | None
    end: RunExit | None


def read_run(directory: Path) -> Run:
    """Read a run record, without a torn last line; raises as ``read_header``, and for rows that are none."""
    return Run(
        directory=directory,
        header=read_header(directory),
        steps=_last_of_each_step(_rows(directory / STEPS_FILE, StepRow)),
        evaluations=_last_of_each_step(_rows(directory / EVALUATIONS_FILE, EvaluationRow)),
        events=_rows(directory / EVENTS_FILE, EventRow),
        startup=_optional(directory / STARTUP_FILE, StartUp),
        end=_optional(directory / EXIT_FILE, RunExit),
    )


def read_header(directory: Path) -> RunHeader:
    """Read what a run is; raise ``BadConfig`` if the directory is none, or one of another schema version."""
    path = directory / RUN_FILE
    if not path.is_file():
        raise BadConfig(f"{directory} is not a run: it has no {RUN_FILE}", next_step="Name a directory under runs/.")
    return parse_table(RunHeader, read_json(path), where=str(path))


def read_origin(directory: Path) -> str | None:
    """Return the checkpoint that a run's first start went on from; None if it began afresh."""
    earlier = [path.parent for path in (directory / EARLIER_DIRECTORY).glob(f"*/{RUN_FILE}")]
    numbered = [path for path in earlier if path.name.isdecimal()]
    first = min(numbered, key=lambda path: int(path.name), default=directory)  # a start may end before its header
    return read_header(first).resumed_from


def read_exit(directory: Path) -> RunExit | None:
    """Read how a run ended; None while it goes on, or when it was killed."""
    return _optional(directory / EXIT_FILE, RunExit)


def _optional(path: Path, kind: type[RowT]) -> RowT | None:
    return parse_table(kind, read_json(path), where=str(path)) if path.is_file() else None


StepT = TypeVar("StepT", StepRow, EvaluationRow)


def _last_of_each_step(rows: tuple[StepT, ...]) -> tuple[StepT, ...]:
    """Without those that were replaced when training went back to an earlier step."""
    kept: list[StepT] = []
    for row in rows:
        while kept and kept[-1].step >= row.step:
            kept.pop()
        kept.append(row)
    return tuple(kept)


def _rows(path: Path, kind: type[RowT]) -> tuple[RowT, ...]:
    """Read one row per line, without a last one that has no end; raise ``BadConfig`` for a line that is no such row."""
    rows: list[RowT] = []
    *lines, _ = path.read_bytes().split(b"\n") if path.is_file() else (b"",)
    for number, line in enumerate(lines, 1):
        try:
            row = kind.model_validate_json(line)
        except ValidationError as error:
            why = error.errors(include_url=False, include_context=False, include_input=False)[0]["msg"]
            raise BadConfig(
                f"{path}, line {number}: {why}",
                next_step="The run record is damaged. Restore the file from a copy, or remove what begins there.",
            ) from error
        # The trainer writes no figures that are not finite.
        if all(math.isfinite(value) for value in row.model_dump().values() if isinstance(value, float)):
            rows.append(row)
    return tuple(rows)


Phase = Literal["import", "staging", "process_group", "build", "restore", "first_batch", "compile", "first_step"]


class StartClock:
    """Counts seconds until the end of the first step, phase by phase."""

    def __init__(self, began_s: float | None = None) -> None:
        self._began_s = time.time() if began_s is None else began_s
        self._last_s = self._began_s
        self._seconds: dict[Phase, float] = {}
        self.monotonic_start_s = time.monotonic() - (time.time() - self._began_s)
        """The beginning, by ``time.monotonic``."""
        self.is_over = False
        """Whether the first step has ended."""

    def ended(self, phase: Phase) -> None:
        """Count the time since the last call, or the beginning, to a phase."""
        now_s = time.time()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now_s - self._last_s
        self._last_s = now_s

    @property
    def rehearsed(self) -> bool:
        """Whether a step was tried out before the first, so that every communicator has been made."""
        return "compile" in self._seconds

    def total_s(self) -> float:
        """Since the beginning."""
        return time.time() - self._began_s

    def exit(self, code: int, reason: str, steps: int, checkpoint: str | None) -> RunExit:
        """Return how a run ends at this moment."""
        return RunExit(
            exit_code=code,
            reason=reason,
            requeue=code == REQUEUE,
            steps=steps,
            checkpoint=checkpoint,
            seconds=self.total_s(),
            finished_utc=utc_now(),
        )

    def startup(self) -> StartUp:
        """All phases; those that did not happen took no time."""
        seconds = dict.fromkeys(StartUp.model_fields, 0.0)
        seconds |= {f"{phase}_s": value for phase, value in self._seconds.items()}
        return StartUp(**seconds | {"total_s": self._last_s - self._began_s})


def process_started_s() -> float:
    """When this process began, in seconds since 1970."""
    # The 22nd field; the second, the command's name, may hold blanks and brackets.
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def settings_of(config: dict[str, Any]) -> TrainConfig | None:
    """Return the settings that a record holds; None if another version of the trainer wrote them."""
    try:
        return parse_table(TrainConfig, config, where="settings")
    except TrainerError:
        return None
