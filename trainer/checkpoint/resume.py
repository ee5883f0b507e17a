"""Resuming: choose the run directory and the checkpoint to start from. No torch here.

Without ``--out``, ``--resume auto`` continues the run that the same SLURM job or
torchrun began before its restart.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint.changed_settings import check_fixed_settings, describe_changes
from trainer.checkpoint.checkpoint_choice import (
    check_newest,
    choose_own_checkpoint,
    list_put_aside_corrupt,
    newest_of_other_run,
    read_named_checkpoint,
)
from trainer.checkpoint.format import (
    CHECKPOINTS_DIRECTORY,
    MANIFEST_FILE,
    CheckpointManifest,
)
from trainer.checkpoint.job import find_run_of_job, is_restarted, job_name
from trainer.checkpoint.stored_checkpoints import list_checkpoints
from trainer.config.resolve import ResolvedConfig
from trainer.formats.errors import BadConfig, DiskTrouble, TrainingFailed
from trainer.formats.events import EventRow, new_event
from trainer.formats.files import PASSING_ERRORS
from trainer.formats.run_record import (
    RUN_FILE,
    RunExit,
    RunHeader,
    read_exit,
    read_first_header,
    read_header,
)
from trainer.formats.train_config import TrainConfig
from trainer.record.writer import RunWriter, default_run_directory

AUTO = "auto"
"""Value of ``--resume``: resume the run in the directory, if there is one."""
NEVER = "never"
"""Value of ``--resume``: reject a directory that contains a run."""
OnOpen = Callable[[RunWriter], None]
"""Callback that receives the writer of a run as soon as it is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Decision of rank 0 on how training starts."""

    checkpoint: Path | None = None
    """Checkpoint to start from; None to start from scratch."""
    manifest: CheckpointManifest | None = None
    """Manifest of the checkpoint; None without a checkpoint."""
    events: tuple[EventRow, ...] = ()
    """Events that report this decision, and corrupt checkpoints that were skipped."""
    finished: RunExit | None = None
    """Exit of a run that has already finished; None if there are steps left to
    train."""
    gave_up: bool = False
    """True if the previous start gave up and the configuration was changed since."""
    from_other_run: bool = False
    """True if the checkpoint belongs to another run."""

    @property
    def origin(self) -> str | None:
        """Name of the checkpoint, or its path if it belongs to another run.

        None if training starts from scratch.
        """
        if self.checkpoint is None:
            return None
        if self.from_other_run:
            return str(self.checkpoint.absolute())
        return self.checkpoint.name


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

    Returns:
        The run's writer, which has not written its header, and the decision.

    Raises:
        BadConfig: If the directory cannot be used, or its run does not match the
            configuration.
        DiskTrouble: If the file system fails.
        TrainingFailed: If the run gave up under this same configuration.
    """
    try:
        if out is None and resume == AUTO and is_restarted(environment):
            out = find_run_of_job(job_name(environment), resolved)
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


def _resume_run(
    directory: Path, resolved: ResolvedConfig, on_open: OnOpen
) -> tuple[RunWriter, Start]:
    """Resume a run from its newest intact checkpoint.

    Without an intact checkpoint, start as the run's first start did.
    """
    header = read_header(directory)
    check_fixed_settings(header, resolved, directory)
    last_exit = read_exit(directory)
    _reject_same_settings(directory, header, last_exit, resolved)
    gave_up = _has_given_up(last_exit)
    # From here on files change. All checks that reject a start are above.
    writer = _open_writer(directory, on_open, exists=True)
    checkpoint, corruption_events = choose_own_checkpoint(
        directory / CHECKPOINTS_DIRECTORY, writer.attempt, gave_up=gave_up
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
    """Return whether a run's last start gave up, as no rollback helped its training."""
    return last_exit is not None and last_exit.exit_code == TrainingFailed.exit_code


def _reject_same_settings(
    directory: Path,
    header: RunHeader,
    last_exit: RunExit | None,
    resolved: ResolvedConfig,
) -> None:
    """Reject a start that would only repeat the failure of the last one.

    Raises:
        TrainingFailed: If the last start gave up under the same settings.
    """
    if last_exit is None or not _has_given_up(last_exit):
        return
    if header.config_sha256 != resolved.config_sha256:
        return
    raise TrainingFailed(
        f"{directory} gave up before with the same settings: {last_exit.reason}",
        next_step=(
            "Change a setting, such as --set train.learning_rate=…; or start from"
            " scratch: another --out"
        ),
    )


def _has_finished(last_exit: RunExit | None, step: int, config: TrainConfig) -> bool:
    """Return whether a run ended with success and has no steps left to train.

    Args:
        last_exit: Exit of the last start; None if it was killed.
        step: Step of the newest checkpoint.
        config: Configuration with which the run would continue.
    """
    return (
        last_exit is not None and last_exit.exit_code == 0 and step >= config.max_steps
    )


def _repeat_first_start(
    directory: Path, *, gave_up: bool, corruption_events: Sequence[EventRow]
) -> Start:
    """Start as the run's first start did: from scratch, or from another run.

    Args:
        directory: Directory of the run, which has no checkpoint that can be used.
        gave_up: Whether the last start gave up.
        corruption_events: Events that report corrupt checkpoints.

    Raises:
        BadConfig: If all of the run's own checkpoints are corrupt, or if the other
            run's checkpoint is.
    """
    origin = read_first_header(directory).resumed_from
    reason = "no good checkpoint" if gave_up else "no intact checkpoint"
    if origin is None:
        if not gave_up:
            _reject_only_corrupt(directory)
        from_scratch = new_event(
            0,
            "resumed",
            f"{directory} has {reason}; starting from scratch",
            level="warning",
        )
        return Start(events=(*corruption_events, from_scratch))
    checkpoint = read_named_checkpoint(Path(origin))
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


def _reject_only_corrupt(directory: Path) -> None:
    """Reject to start a run from scratch whose checkpoints are all corrupt.

    Raises:
        BadConfig: If the run, which has no intact checkpoint, has corrupt ones.
    """
    corrupt = list_put_aside_corrupt(directory / CHECKPOINTS_DIRECTORY)
    if corrupt:
        raise BadConfig(
            f"all {len(corrupt)} checkpoints of {directory} are corrupt; they are kept"
            " as *.corrupt-*",
            next_step="Check that disk, and start from scratch with another --out",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _NamedOrigin:
    """Run or checkpoint that ``--resume PATH`` names."""

    path: Path
    """Path as it was passed."""
    is_checkpoint: bool
    """True if ``path`` is a checkpoint, False if it is a run or its checkpoints."""
    root: Path
    """Directory of the run's checkpoints."""

    @property
    def run(self) -> Path:
        """Directory of the run."""
        return self.root.parent


def _find_origin(path: Path) -> _NamedOrigin:
    """Find the run of a path: a run, its directory of checkpoints, or one of them.

    Raises:
        BadConfig: If there are no checkpoints.
    """
    if (path / MANIFEST_FILE).is_file():
        return _NamedOrigin(path=path, is_checkpoint=True, root=path.parent)
    root = path
    if path.name != CHECKPOINTS_DIRECTORY:
        root = path / CHECKPOINTS_DIRECTORY
    if not root.is_dir():
        raise BadConfig(
            f"--resume {path}: no checkpoint found there",
            next_step=(
                "Pass a run or a checkpoint, such as runs/NAME or"
                " runs/NAME/checkpoints/step-000001000"
            ),
        )
    return _NamedOrigin(path=path, is_checkpoint=False, root=root)


def _resume_path(
    path: Path, out: Path | None, resolved: ResolvedConfig, on_open: OnOpen
) -> tuple[RunWriter, Start]:
    """Resume a run in its directory, or start another run from its checkpoints."""
    origin = _find_origin(path)
    if out is not None and out.resolve() != origin.run.resolve():
        return _start_from(origin, out, resolved, on_open)
    if origin.is_checkpoint:
        check_newest(path, origin.run)
    return _resume_run(origin.run, resolved, on_open)


def _start_from(
    origin: _NamedOrigin, out: Path, resolved: ResolvedConfig, on_open: OnOpen
) -> tuple[RunWriter, Start]:
    """Start the run ``out`` from a checkpoint of another run: the named or newest one.

    If the same command has begun the run ``out`` before, it is resumed.
    """
    exists = (out / RUN_FILE).is_file()
    if exists:
        _check_started_from(out, origin.path)
        if list_checkpoints(out / CHECKPOINTS_DIRECTORY):
            # The run has saved checkpoints of its own, which are newer.
            return _resume_run(out, resolved, on_open)
    corruption_events: list[EventRow] = []
    if origin.is_checkpoint:
        checkpoint = read_named_checkpoint(origin.path)
    else:
        checkpoint, corruption_events = newest_of_other_run(origin.root)
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
    # A run contains its checkpoints, and ``path`` may be either.
    origin = read_first_header(directory).resumed_from
    if origin is not None and Path(origin).resolve().is_relative_to(path.resolve()):
        return
    raise BadConfig(
        f"{directory} already contains a run, which did not start from {path}",
        next_step="Choose another --out, or resume that run with --resume auto",
    )


def _open_writer(directory: Path, on_open: OnOpen, *, exists: bool) -> RunWriter:
    """Open a run for writing; ``exists`` tells whether the directory contains it."""
    try:
        writer = RunWriter(directory, may_resume=exists)
    except OSError as error:
        if error.errno in PASSING_ERRORS:
            raise
        raise BadConfig(
            f"cannot write {directory}: {error.strerror}",
            next_step="Choose another --out.",
        ) from error
    on_open(writer)
    return writer
