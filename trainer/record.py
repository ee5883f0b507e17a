"""The run record: what a run was, each step it took, and how it ended. No torch here.

runs/<UTC>-<name>/
  run.json      configuration with the source of each value, versions, ranks
  startup.json  what the time until the first step went into
  steps.jsonl   one JSON object per logged step
  events.jsonl  one per event: what was saved, what went wrong, and what was done about it
  evaluations.jsonl  one per evaluation on the validation split
  checkpoints/  the state of training; see trainer.checkpoint
  tensorboard/  the same numbers, where tensorboard is installed
  model/        the trained model, as transformers loads it
  exit.json     exit code and reason; torchrun itself returns 1 whatever its ranks return
  earlier/N/    run.json, startup.json and exit.json of the run's Nth start
  rank-00001.traceback.txt  where a rank was when it failed or hung

A run that is resumed appends: a step that is taken again, after a crash or a rollback, replaces the rows from there on.
"""

import contextlib
import datetime
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from trainer.attempt import wait_for_lock
from trainer.errors import BadConfig
from trainer.events import EventRow
from trainer.schema import Table, parse_table, read_json

RUN_FILE, STEPS_FILE, EXIT_FILE = "run.json", "steps.jsonl", "exit.json"
MODEL_DIRECTORY, TENSORBOARD_DIRECTORY = "model", "tensorboard"
EVALUATIONS_FILE, EVENTS_FILE, STARTUP_FILE = "evaluations.jsonl", "events.jsonl", "startup.json"
EARLIER_DIRECTORY, LOCK_FILE = "earlier", ".lock"
RUN_SCHEMA_VERSION: Literal[3] = 3
_LOCK_TIMEOUT_S = 30.0


RowT = TypeVar("RowT", bound=Table)


class StepRow(Table):
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
    skipped_steps: int
    """Steps so far whose update was left out; on a GPU without the last two, whose numbers have not arrived."""
    slowest_rank: int | None
    """The one whose forward and backward took longest in the interval before; None until that is known."""
    slowest_rank_ratio: float | None
    """Its time over the median of all ranks."""


class StartUp(Table):
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
    """Reading a checkpoint."""
    first_batch_s: float
    """Waiting for the loader's first micro-batch."""
    compile_s: float
    """Going forward and backward once, without a step: what compiles layers, and warms up libraries."""
    first_step_s: float
    total_s: float
    """From the start of the process until the end of the first step."""


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

    schema_version: Literal[3]
    name: str
    attempt: int
    """Number of the run's start, from 1."""
    resumed_from: str | None
    """The checkpoint that it went on from: a name in this run, or the path of another run's."""
    resumed_step: int
    """Optimizer steps taken before this start."""
    job: str
    """Names the job that started it, where one did."""
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
    requeue: bool
    """Whether starting it again, unchanged, goes on."""
    steps: int
    """Optimizer steps finished."""
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


class RunWriter:
    """Writes a run record; on every rank but the first, all of it but the end does nothing.

    Args:
        directory: Of the run; made where it is not there.
        active: Whether this is the first rank.
        again: Whether a run that is there already is to go on.

    Raises:
        BadConfig: If the directory holds a run already and must not, or another process is at it: one record must not
            be mixed with another's.
    """

    def __init__(self, directory: Path, *, active: bool, again: bool = False) -> None:
        self.directory = directory
        self.attempt = 1
        self.last_step = 0
        self._active = active
        self._lock: int | None = None
        self._waiting: dict[str, bytes] = {}
        self.trouble: str | None = None
        """Why rows wait to be written, such as a full disk; they are written when it has gone."""
        if not active:
            return
        there = (directory / RUN_FILE).exists()
        if there and not again:
            raise BadConfig(
                f"{directory} holds a run already", next_step="Go on with it: --resume auto; or choose another --out."
            )
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(directory / LOCK_FILE)
        if there:
            self._put_earlier_aside()

    def _put_earlier_aside(self) -> None:
        place = self.directory / EARLIER_DIRECTORY
        place.mkdir(exist_ok=True)
        self.attempt = 2 + max((int(path.name) for path in place.iterdir() if path.name.isdecimal()), default=0)
        earlier = place / str(self.attempt - 1)
        earlier.mkdir()
        # A copy: as long as no other takes its place, this is what says that here is a run.
        shutil.copyfile(self.directory / RUN_FILE, earlier / RUN_FILE)
        for name in (STARTUP_FILE, EXIT_FILE):
            with contextlib.suppress(FileNotFoundError):
                (self.directory / name).rename(earlier / name)
        for name in (STEPS_FILE, EVALUATIONS_FILE, EVENTS_FILE):
            _cut_torn_tail(self.directory / name)

    def start(self, header: RunHeader) -> None:
        """Write ``run.json``."""
        self._write(RUN_FILE, header)

    def started(self, startup: StartUp) -> None:
        """Write ``startup.json``."""
        self._write(STARTUP_FILE, startup)

    def step(self, row: StepRow) -> None:
        """Append a step."""
        self.last_step = row.step
        self._append(STEPS_FILE, row)

    def event(self, row: EventRow) -> None:
        """Append an event."""
        self._append(EVENTS_FILE, row)

    def evaluation(self, row: EvaluationRow) -> None:
        """Append an evaluation."""
        self._append(EVALUATIONS_FILE, row)

    def finish(self, end: RunExit) -> None:
        """Write ``exit.json``; any rank may, as the first may be gone."""
        write_exit(self.directory, end)

    def _append(self, name: str, row: Table) -> None:
        if not self._active:
            return
        self._waiting[name] = self._waiting.get(name, b"") + row.model_dump_json().encode() + b"\n"
        self.trouble = None
        for waiting in list(self._waiting):
            try:
                _append_whole(self.directory / waiting, self._waiting[waiting])
                del self._waiting[waiting]
            except OSError as error:
                self.trouble = error.strerror or str(error)

    def _write(self, name: str, value: Table) -> None:
        if self._active:
            _write_whole(self.directory / name, value)


def write_exit(directory: Path, end: RunExit) -> None:
    """Write ``exit.json``, whole or not at all."""
    _write_whole(directory / EXIT_FILE, end)


def _append_whole(path: Path, content: bytes) -> None:
    """Append all of it, or nothing: a disk that fills up in the middle must not leave half a line."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        before = os.fstat(fd).st_size
        done = 0
        try:
            while done < len(content):
                done += os.write(fd, content[done:])
        except OSError:
            os.ftruncate(fd, before)
            raise
    finally:
        os.close(fd)


def _write_whole(path: Path, value: Table) -> None:
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    with partial.open("x", encoding="utf-8") as file:
        file.write(value.model_dump_json(indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _lock(path: Path) -> int | None:
    """Keep other processes away while this one lives; None on file systems that cannot."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        # A killed process's loaders hold on to its lock for the moment until they notice.
        if wait_for_lock(fd, _LOCK_TIMEOUT_S):
            return fd
    except OSError:
        os.close(fd)
        return None
    os.close(fd)
    raise BadConfig(
        f"another process is training in {path.parent}",
        next_step="Wait until it has ended, or choose another --out.",
    )


def _cut_torn_tail(path: Path) -> None:
    """Remove a last line that was not finished, so that the next one begins on its own."""
    with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def default_run_directory(name: str) -> Path:
    """``runs/<UTC>-<name>`` under the working directory."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    return Path("runs") / f"{stamp}-{name}"


def read_run(directory: Path) -> Run:
    """Read a run record; a torn last step line is left out.

    Raises:
        BadConfig: If the directory is not a run, or one of another schema version.
    """
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
    """What a run is.

    Raises:
        BadConfig: If the directory is not a run, or one of another schema version.
    """
    path = directory / RUN_FILE
    if not path.is_file():
        raise BadConfig(f"{directory} is not a run: it has no {RUN_FILE}", next_step="Name a directory under runs/.")
    return parse_table(RunHeader, read_json(path), where=str(path))


def read_origin(directory: Path) -> str | None:
    """The checkpoint that a run's first start went on from; None if it began afresh."""
    first = directory / EARLIER_DIRECTORY / "1"
    return read_header(first if (first / RUN_FILE).is_file() else directory).resumed_from


def read_exit(directory: Path) -> RunExit | None:
    """How a run ended; None while it goes on, or when it was killed."""
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
    rows: list[RowT] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            rows.append(kind.model_validate_json(line))
        except ValidationError:
            break  # a torn line: whatever follows it was not finished either
    return tuple(rows)
