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
from trainer.config.resolve import ResolvedConfig
from trainer.config.train_config import dotted
from trainer.errors import BadConfig, DiskTrouble, TrainingFailed
from trainer.files import PASSING_ERRORS
from trainer.health.events import EventRow, new_event
from trainer.record.run_record import (
    RUN_FILE,
    RunExit,
    RunHeader,
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
_SAME_DATA = (
    "model.config",
    "model.null_keys",
    "seq_length_tokens",
    "layout",
    "global_batch_size",
    "global_batch_tokens",
    "global_batch_samples",
    "seed",
)
"""Settings that must not change on resume, as weights or the position in the data would
be invalid."""
_RECIPE = (
    "learning_rate",
    "schedule",
    "warmup_steps",
    "decay_share",
    "final_learning_rate_share",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "max_steps",
    "masking_probability",
    "attention_dropout",
    "precision",
    "residual_dtype",
    "float8",
    "tf32",
    "max_epochs",
    "parallel.gradient_dtype",
)
"""Settings that may change on resume, as those of ``health`` may; a change is
reported."""
_MAX_MESSAGE_LENGTH = 200
"""Length from which a message leaves out values, as a model's configuration is long."""


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
            out = _run_of(job_name(environment), resolved)
        directory = out or default_run_directory(resolved.config.model.name)
        if resume not in {AUTO, NEVER}:
            return _resume_path(Path(resume), out, resolved, on_open)
        if resume == AUTO and (directory / RUN_FILE).is_file():
            return _resume_run(directory, resolved, on_open)
        return _open_writer(directory, on_open, again=False), Start()
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


def _run_of(job: str, resolved: ResolvedConfig) -> Path | None:
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

    Without one, start as ``_start_again`` does.
    """
    header = read_header(directory)
    changes = _compare_settings(header, resolved, directory)
    run_exit = read_exit(directory)
    gave_up = run_exit is not None and run_exit.exit_code == TrainingFailed.exit_code
    if (
        run_exit is not None
        and gave_up
        and header.config_sha256 == resolved.config_sha256
    ):
        raise TrainingFailed(
            f"{directory} gave up before with the same settings: {run_exit.reason}",
            next_step=(
                "Change a setting, such as --set train.learning_rate=…; or start from"
                " scratch: another --out"
            ),
        )
    writer = _open_writer(directory, on_open, again=True)
    root = directory / disk.CHECKPOINTS_DIRECTORY
    disk.clear_leftovers(root)
    checkpoint, corrupt_checkpoints = disk.newest_checkpoint(root, good=gave_up)
    # Renamed only now, as nothing may change if a checkpoint cannot be read.
    events: list[EventRow] = []
    for corrupt in corrupt_checkpoints:
        events.append(_put_aside(corrupt, writer.attempt))
    if gave_up:
        _put_aside_newer(root, checkpoint, writer.attempt)
    if checkpoint is None:
        return writer, _start_again(directory, gave_up=gave_up, events=events)
    disk.point_to_latest(root, checkpoint.path.name)
    step = checkpoint.manifest.state.step
    if (
        run_exit is not None
        and run_exit.exit_code == 0
        and step >= resolved.config.max_steps
    ):
        return writer, Start(finished=run_exit)
    events.append(
        new_event(
            step,
            "resumed",
            "; ".join((f"resumed from {checkpoint.path.name}", *changes)),
            level="warning" if changes else "info",
        )
    )
    return writer, Start(
        checkpoint=checkpoint.path,
        manifest=checkpoint.manifest,
        events=tuple(events),
        gave_up=gave_up,
    )


def _put_aside(corrupt: disk.CorruptCheckpoint, attempt: int) -> EventRow:
    """Rename a corrupt checkpoint, and return the event of it."""
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
    """Rename the checkpoints of a failed attempt that are newer than the one used.

    Otherwise they would be newer than those saved from here on.
    """
    for path in disk.list_checkpoints(root):
        if checkpoint is not None and path == checkpoint.path:
            break
        path.rename(path.with_name(f"{path.name}.given-up-{attempt}"))


def _start_again(
    directory: Path, *, gave_up: bool, events: Sequence[EventRow]
) -> Start:
    """Start again as the run's first start did: from scratch, or from another run.

    Raises:
        BadConfig: If all its own checkpoints are corrupt.
    """
    origin = read_first_header(directory).resumed_from
    # Renamed by this start or an earlier one.
    corrupt = list((directory / disk.CHECKPOINTS_DIRECTORY).glob("step-*.corrupt-*"))
    if corrupt and not gave_up and origin is None:
        raise BadConfig(
            f"all {len(corrupt)} checkpoints of {directory} are corrupt; they are kept"
            " as *.corrupt-*",
            next_step=(
                "Check that disk. Start from scratch with another --out, or from"
                " another run: --resume PATH"
            ),
        )
    reason = "no good checkpoint" if gave_up else "no intact checkpoint"
    if origin is None:
        from_scratch = new_event(
            0,
            "resumed",
            f"{directory} has {reason}; starting from scratch",
            level="warning",
        )
        return Start(events=(*events, from_scratch))
    checkpoint = _read_checkpoint(Path(origin))
    from_origin = new_event(
        checkpoint.manifest.state.step,
        "resumed",
        f"{directory} has {reason}; starting again from {checkpoint.path}",
    )
    return Start(
        checkpoint=checkpoint.path,
        manifest=checkpoint.manifest,
        events=(*events, from_origin),
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
        if is_checkpoint and disk.list_checkpoints(root)[:1] != [path]:
            raise BadConfig(
                f"{run} has newer checkpoints than {path.name}",
                next_step=(
                    "Start another run from it with --out DIR, or resume from the"
                    f" newest: --resume auto --out {run}"
                ),
            )
        return _resume_run(run, resolved, on_open)
    return _start_from_path(
        path, root, out, resolved, on_open, is_checkpoint=is_checkpoint
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

    It is ``path``, or the newest in ``root`` if that is not a checkpoint.
    """
    again = (out / RUN_FILE).is_file()
    if again:
        origin = read_first_header(out).resumed_from
        if origin is None or not Path(origin).resolve().is_relative_to(path.resolve()):
            raise BadConfig(
                f"{out} already contains a run, which did not start from {path}",
                next_step="Choose another --out, or resume that run with --resume auto",
            )
        if disk.list_checkpoints(out / disk.CHECKPOINTS_DIRECTORY):
            return _resume_run(out, resolved, on_open)  # the same command was run again
    events: list[EventRow] = []
    if is_checkpoint:
        checkpoint = _read_checkpoint(path)
    else:
        newest, corrupt_checkpoints = disk.newest_checkpoint(root)
        for corrupt in corrupt_checkpoints:
            message = f"a checkpoint is corrupt and is skipped: {corrupt.reason}"
            events.append(new_event(0, "resumed", message, level="error"))
        if newest is None:
            raise BadConfig(
                f"{root} has no intact checkpoint",
                next_step="Pass another run, or use --resume never",
            )
        checkpoint = newest
    state = checkpoint.manifest.state
    changes = _compare_settings(state, resolved, checkpoint.path)
    events.append(
        new_event(
            state.step,
            "resumed",
            "; ".join((f"started from {checkpoint.path}", *changes)),
        )
    )
    writer = _open_writer(out, on_open, again=again)
    return writer, Start(
        checkpoint=checkpoint.path,
        manifest=checkpoint.manifest,
        events=tuple(events),
        from_other_run=True,
    )


def _read_checkpoint(path: Path) -> disk.StoredCheckpoint:
    try:
        return disk.StoredCheckpoint(path=path, manifest=disk.read_checkpoint(path))
    except disk.BadCheckpoint as error:
        raise BadConfig(
            f"the checkpoint is corrupt: {error}",
            next_step="Pass an older one, or the run: --resume RUN",
        ) from error


def _compare_settings(
    before: RunHeader | disk.TrainingState, resolved: ResolvedConfig, where: Path
) -> list[str]:
    """Return the changed settings as text.

    Raises:
        BadConfig: If one makes the weights or positions invalid.
    """
    expected_hash = resolved.config.data.dataset_hash
    if expected_hash is not None and expected_hash != before.dataset_hash:
        raise BadConfig(
            f"dataset does not match {where}: its hash is {before.dataset_hash[:12]}…,"
            f" not {expected_hash[:12]}…",
            next_step=(
                "Resume with that run's profile, or start from scratch with another"
                " --out."
            ),
        )
    old_settings = dotted(before.config)
    settings = dotted(resolved.config.model_dump(mode="json"))
    for key in _SAME_DATA:
        value = settings.get(key)
        old_value = old_settings.get(key)
        if value != old_value:
            message = (
                f"train.{key} = {value!r} does not match {where}, trained with"
                f" {old_value!r}"
            )
            if len(message) >= _MAX_MESSAGE_LENGTH:
                message = f"train.{key} does not match {where}"
            raise BadConfig(
                message,
                next_step=(
                    "Resume with the same settings, or start from scratch: --resume"
                    " never, with another --out"
                ),
            )
    changes = []
    for key, value in settings.items():
        is_reported = key in _RECIPE or key.startswith("health.")
        if is_reported and value != old_settings.get(key):
            changes.append(
                f"train.{key} is now {value}, it was {old_settings.get(key)}"
            )
    return changes


def _open_writer(directory: Path, on_open: OnOpen, *, again: bool) -> RunWriter:
    """Open a run for writing; ``again`` if it exists already."""
    try:
        writer = RunWriter(directory, active=True, again=again)
    except OSError as error:
        if error.errno in PASSING_ERRORS:
            raise
        raise BadConfig(
            f"cannot write {directory}: {error.strerror}",
            next_step="Choose another --out.",
        ) from error
    on_open(writer)
    return writer
