"""Resuming: choose the run directory and the checkpoint to start from. No torch here.

Without ``--out``, ``--resume auto`` continues the run that the same SLURM job or
torchrun began before its restart.
"""

import contextlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint import format as disk
from trainer.checkpoint.changed_settings import check_fixed_settings, describe_changes
from trainer.config.resolve import ResolvedConfig
from trainer.config.train_config import TrainConfig
from trainer.errors import BadConfig, DiskTrouble, TrainingFailed
from trainer.files import PASSING_ERRORS
from trainer.health.events import EventRow, new_event
from trainer.record.run_record import (
    RUN_FILE,
    RunExit,
    read_exit,
    read_first_header,
    read_header,
)
from trainer.record.writer import RunWriter, default_run_directory

AUTO = "auto"
NEVER = "never"
OnOpen = Callable[[RunWriter], None]
_RESTART_COUNTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
"""Environment variables with the number of restarts of a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Decision of rank 0 on how training starts."""

    checkpoint: Path | None = None
    manifest: disk.CheckpointManifest | None = None
    events: tuple[EventRow, ...] = ()
    finished: RunExit | None = None
    """Exit of a run that has already finished; None if there are steps left to
    train."""
    gave_up: bool = False
    """True if the previous start gave up and the configuration was changed since."""
    from_other_run: bool = False
    """True if the checkpoint belongs to another run."""

    @property
    def origin(self) -> str | None:
        """Checkpoint as the run record names it.

        Its name, or its path if it belongs to another run.
        """
        if self.checkpoint is None:
            return None
        if self.from_other_run:
            return str(self.checkpoint.absolute())
        return self.checkpoint.name


def job_name(environment: Mapping[str, str]) -> str:
    """Return the name of this process's SLURM or torchrun job.

    It survives a restart. Empty without such a job.
    """
    if environment.get("SLURM_JOB_ID"):
        return f"slurm-{environment['SLURM_JOB_ID']}"
    if environment.get("TORCHELASTIC_RUN_ID"):
        torchrun = os.getppid()
        return f"torchrun-{socket.gethostname()}-{torchrun}-{_start_time(torchrun)}"
    return ""


def _start_time(process: int) -> str:
    """Return the start time of a process, as numbers of processes are used again."""
    stat = Path(f"/proc/{process}/stat").read_text()
    # The name, in parentheses, may contain spaces; see proc_pid_stat(5).
    _, _, fields = stat.rpartition(")")
    return fields.split()[19]


def choose_run(
    out: Path | None,
    resume: str,
    resolved: ResolvedConfig,
    environment: Mapping[str, str] = os.environ,
    *,
    on_open: OnOpen = lambda writer: None,
) -> tuple[RunWriter, Start]:
    """Open the run directory and choose the checkpoint to start from.

    Call it only on rank 0.

    Args:
        out: Run directory; None for a new one, or that of the restarted job.
        resume: ``AUTO``, ``NEVER``, or the path of a run or checkpoint.
        resolved: Configuration with which training starts.
        environment: Environment variables, which name the job.
        on_open: Receives the run's writer as soon as it exists, so that later failures
            can be recorded.

    Raises:
        BadConfig: If the directory cannot be used, or its run does not match the
            configuration.
        DiskTrouble: If the file system fails.
        TrainingFailed: If the run gave up under this same configuration.
    """
    try:
        if out is None and resume == AUTO and _is_restarted(environment):
            out = _find_run_of_job(job_name(environment), resolved)
        directory = out or default_run_directory(resolved.config.model.name)
        if resume not in {AUTO, NEVER}:
            return _resume_path(Path(resume), out, resolved, on_open)
        if resume == AUTO and (directory / RUN_FILE).is_file():
            return _resume_run(directory, resolved, on_open)
        return _open_writer(directory, on_open, exists=False), Start()
    except PermissionError as error:
        raise BadConfig(
            f"cannot use the run directory: {error}",
            next_step=(
                "Make it readable and writable for this user, or choose another --out."
            ),
        ) from error
    except OSError as error:
        raise DiskTrouble(
            f"cannot use the run directory: {error}",
            next_step=(
                "Run the same command again once the file system is available: it"
                " resumes."
            ),
        ) from error


def _is_restarted(environment: Mapping[str, str]) -> bool:
    counts = [environment.get(name) or "0" for name in _RESTART_COUNTS]
    return any(int(count) > 0 for count in counts)


def _find_run_of_job(job: str, resolved: ResolvedConfig) -> Path | None:
    """Return the newest run of a job with this configuration, or None.

    The configuration is compared, as a job may train more than one model.
    """
    if not job:
        return None
    run_files = sorted(
        Path("runs").glob(f"*/{RUN_FILE}"),
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )
    for run_file in run_files:
        with contextlib.suppress(BadConfig):
            header = read_header(run_file.parent)
            if (header.job, header.config_sha256) == (job, resolved.config_sha256):
                return run_file.parent
    return None


def _resume_run(
    directory: Path, resolved: ResolvedConfig, on_open: OnOpen
) -> tuple[RunWriter, Start]:
    """Resume a run from its newest intact checkpoint.

    Without an intact checkpoint, start as the run's first start did.
    """
    header = read_header(directory)
    check_fixed_settings(header, resolved, directory)
    last_exit = read_exit(directory)
    gave_up = _has_given_up(last_exit)
    if gave_up and header.config_sha256 == resolved.config_sha256:
        raise _same_settings_gave_up(directory, last_exit)
    # From here on files change. All checks that reject a start are above.
    writer = _open_writer(directory, on_open, exists=True)
    checkpoint, corruption_events = _select_checkpoint(
        directory / disk.CHECKPOINTS_DIRECTORY, writer.attempt, gave_up=gave_up
    )
    if checkpoint is None:
        start = _repeat_first_start(
            directory, gave_up=gave_up, corruption_events=corruption_events
        )
        return writer, start
    step = checkpoint.manifest.state.step
    if _has_finished(last_exit, step, resolved.config):
        return writer, Start(finished=last_exit)
    changes = describe_changes(header, resolved)
    resumed_event = new_event(
        step,
        "resumed",
        "; ".join((f"resumed from {checkpoint.path.name}", *changes)),
        level="warning" if changes else "info",
    )
    start = Start(
        checkpoint=checkpoint.path,
        manifest=checkpoint.manifest,
        events=(*corruption_events, resumed_event),
        gave_up=gave_up,
    )
    return writer, start


def _has_given_up(last_exit: RunExit | None) -> bool:
    """Return whether a run's last start ended because nothing helped its training."""
    return last_exit is not None and last_exit.exit_code == TrainingFailed.exit_code


def _same_settings_gave_up(
    directory: Path, last_exit: RunExit | None
) -> TrainingFailed:
    """Return the error of a start that would only repeat a failure."""
    assert last_exit is not None
    return TrainingFailed(
        f"{directory} gave up before with the same settings: {last_exit.reason}",
        next_step=(
            "Change a setting, such as --set train.learning_rate=…; or start from"
            " scratch: another --out"
        ),
    )


def _has_finished(last_exit: RunExit | None, step: int, config: TrainConfig) -> bool:
    """Return whether a run ended well and has no steps left to train."""
    return (
        last_exit is not None and last_exit.exit_code == 0 and step >= config.max_steps
    )


def _select_checkpoint(
    root: Path, attempt: int, *, gave_up: bool
) -> tuple[disk.StoredCheckpoint | None, list[EventRow]]:
    """Find the checkpoint to resume from, and put aside those that cannot be used.

    Args:
        root: Directory of the run's checkpoints.
        attempt: Number of this start of the run.
        gave_up: Whether the last start gave up. Only a checkpoint from before its
            trouble, marked as good, is then of use.

    Returns:
        The checkpoint, None if there is none, and an event for every corrupt one.
    """
    disk.clear_leftovers(root)
    checkpoint, corrupt_checkpoints = disk.newest_checkpoint(root, only_good=gave_up)
    # Renamed only after the search, as nothing may change if it fails.
    corruption_events = [
        _put_aside_corrupt(corrupt, attempt) for corrupt in corrupt_checkpoints
    ]
    if gave_up:
        _put_aside_newer(root, checkpoint, attempt)
    if checkpoint is not None:
        disk.point_to_latest(root, checkpoint.path.name)
    return checkpoint, corruption_events


def _put_aside_corrupt(corrupt: disk.CorruptCheckpoint, attempt: int) -> EventRow:
    """Rename a corrupt checkpoint, and return the event that reports it."""
    path = corrupt.path
    aside = path.with_name(f"{path.name}.corrupt-{attempt}")
    path.rename(aside)
    return new_event(
        0,
        "resumed",
        f"checkpoint {path.name} is corrupt and is skipped: {corrupt.reason}; kept as"
        f" {aside.name}",
        level="error",
    )


def _put_aside_newer(
    root: Path, checkpoint: disk.StoredCheckpoint | None, attempt: int
) -> None:
    """Rename a failed attempt's checkpoints that are newer than ``checkpoint``.

    If they kept their names, they would seem newer than those that this start saves.
    """
    for path in disk.list_checkpoints(root):
        if checkpoint is not None and path == checkpoint.path:
            break
        path.rename(path.with_name(f"{path.name}.given-up-{attempt}"))


def _repeat_first_start(
    directory: Path, *, gave_up: bool, corruption_events: Sequence[EventRow]
) -> Start:
    """Start as the run's first start did: from scratch, or from another run.

    Raises:
        BadConfig: If all of the run's own checkpoints are corrupt.
    """
    origin = read_first_header(directory).resumed_from
    # This start or an earlier one has renamed them.
    corrupt = list((directory / disk.CHECKPOINTS_DIRECTORY).glob("step-*.corrupt-*"))
    if corrupt and not gave_up and origin is None:
        raise BadConfig(
            f"all {len(corrupt)} checkpoints of {directory} are corrupt; they are kept"
            " as *.corrupt-*",
            next_step=("Check that disk, and start from scratch with another --out"),
        )
    reason = "no good checkpoint" if gave_up else "no intact checkpoint"
    if origin is None:
        from_scratch = new_event(
            0,
            "resumed",
            f"{directory} has {reason}; starting from scratch",
            level="warning",
        )
        return Start(events=(*corruption_events, from_scratch))
    checkpoint = _read_checkpoint(Path(origin))
    from_origin = new_event(
        checkpoint.manifest.state.step,
        "resumed",
        f"{directory} has {reason}; starting again from {checkpoint.path}",
    )
    return Start(
        checkpoint=checkpoint.path,
        manifest=checkpoint.manifest,
        events=(*corruption_events, from_origin),
        from_other_run=True,
    )


def _resume_path(
    path: Path, out: Path | None, resolved: ResolvedConfig, on_open: OnOpen
) -> tuple[RunWriter, Start]:
    """Resume a run in its directory, or start another run from its checkpoints.

    ``path`` is a run, its directory of checkpoints, or one of them.
    """
    is_checkpoint = (path / disk.MANIFEST_FILE).is_file()
    if is_checkpoint:
        root = path.parent
    elif path.name == disk.CHECKPOINTS_DIRECTORY:
        root = path
    else:
        root = path / disk.CHECKPOINTS_DIRECTORY
    run = root.parent
    if not is_checkpoint and not root.is_dir():
        raise BadConfig(
            f"--resume {path}: no checkpoint found there",
            next_step=(
                "Pass a run or a checkpoint, such as runs/NAME or"
                " runs/NAME/checkpoints/step-000001000"
            ),
        )
    if out is None or out.resolve() == run.resolve():
        if is_checkpoint:
            _check_newest(path, run)
        return _resume_run(run, resolved, on_open)
    return _start_from_path(
        path, root, out, resolved, on_open, is_checkpoint=is_checkpoint
    )


def _check_newest(checkpoint: Path, run: Path) -> None:
    """Check that a run has no newer checkpoint, as resuming would discard it.

    Raises:
        BadConfig: If it has one.
    """
    checkpoints = disk.list_checkpoints(checkpoint.parent)
    if checkpoints and checkpoints[0] == checkpoint:
        return
    raise BadConfig(
        f"{run} has newer checkpoints than {checkpoint.name}",
        next_step=(
            "Start another run from it with --out DIR, or resume from the newest:"
            f" --resume auto --out {run}"
        ),
    )


def _start_from_path(
    path: Path,
    root: Path,
    out: Path,
    resolved: ResolvedConfig,
    on_open: OnOpen,
    *,
    is_checkpoint: bool,
) -> tuple[RunWriter, Start]:
    """Start the run ``out`` from a checkpoint of another run.

    The checkpoint is ``path``, or the newest in ``root`` if ``path`` is not a
    checkpoint.
    """
    exists = (out / RUN_FILE).is_file()
    if exists:
        _check_started_from(out, path)
        if disk.list_checkpoints(out / disk.CHECKPOINTS_DIRECTORY):
            # The same command was run before, and its run has got further since.
            return _resume_run(out, resolved, on_open)
    corruption_events: list[EventRow] = []
    if is_checkpoint:
        checkpoint = _read_checkpoint(path)
    else:
        checkpoint, corruption_events = _newest_of_other_run(root)
    state = checkpoint.manifest.state
    check_fixed_settings(state, resolved, checkpoint.path)
    changes = describe_changes(state, resolved)
    started_event = new_event(
        state.step,
        "resumed",
        "; ".join((f"started from {checkpoint.path}", *changes)),
    )
    writer = _open_writer(out, on_open, exists=exists)
    start = Start(
        checkpoint=checkpoint.path,
        manifest=checkpoint.manifest,
        events=(*corruption_events, started_event),
        from_other_run=True,
    )
    return writer, start


def _check_started_from(directory: Path, path: Path) -> None:
    """Check that an existing run started from a checkpoint in ``path``.

    Raises:
        BadConfig: If it started from scratch, or from elsewhere.
    """
    origin = read_first_header(directory).resumed_from
    if origin is not None and Path(origin).resolve().is_relative_to(path.resolve()):
        return
    raise BadConfig(
        f"{directory} already contains a run, which did not start from {path}",
        next_step="Choose another --out, or resume that run with --resume auto",
    )


def _newest_of_other_run(
    root: Path,
) -> tuple[disk.StoredCheckpoint, list[EventRow]]:
    """Find the newest intact checkpoint of another run, whose files stay as they are.

    Returns:
        The checkpoint, and an event for every newer one that is corrupt.

    Raises:
        BadConfig: If no checkpoint is intact.
    """
    checkpoint, corrupt_checkpoints = disk.newest_checkpoint(root)
    if checkpoint is None:
        raise BadConfig(
            f"{root} has no intact checkpoint",
            next_step="Start from scratch with another --out, or pass another run",
        )
    corruption_events = [
        new_event(
            0,
            "resumed",
            f"a checkpoint is corrupt and is skipped: {corrupt.reason}",
            level="error",
        )
        for corrupt in corrupt_checkpoints
    ]
    return checkpoint, corruption_events


def _read_checkpoint(path: Path) -> disk.StoredCheckpoint:
    """Read and check the checkpoint that was asked for by its path.

    Raises:
        BadConfig: If it is corrupt.
    """
    try:
        return disk.StoredCheckpoint(path=path, manifest=disk.read_checkpoint(path))
    except disk.BadCheckpoint as error:
        raise BadConfig(
            f"the checkpoint is corrupt: {error}",
            next_step="Pass an older one, or the run: --resume RUN",
        ) from error


def _open_writer(directory: Path, on_open: OnOpen, *, exists: bool) -> RunWriter:
    """Open a run for writing; ``exists`` tells whether the directory contains it."""
    try:
        writer = RunWriter(directory, active=True, again=exists)
    except OSError as error:
        if error.errno in PASSING_ERRORS:
            raise
        raise BadConfig(
            f"cannot write {directory}: {error.strerror}",
            next_step="Choose another --out.",
        ) from error
    on_open(writer)
    return writer
