"""Resuming: choose the run directory and the checkpoint to start from. No torch here.

Without ``--out``, ``--resume auto`` continues the run that the same SLURM job or
torchrun began before its restart.
"""

import contextlib
import itertools
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

AUTO, NEVER = "auto", "never"
OnOpen = Callable[[RunWriter], None]
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
        """Checkpoint as the run record names it: its name, or its path if it belongs to another run."""
        if self.checkpoint is None:
            return None
        return (
            str(self.checkpoint.absolute())
            if self.from_other_run
            else self.checkpoint.name
        )


def job_name(environment: Mapping[str, str]) -> str:
    """Return the name of this process's SLURM or torchrun job, which survives a restart; empty without such a job."""
    if environment.get("SLURM_JOB_ID"):
        return f"slurm-{environment['SLURM_JOB_ID']}"
    if environment.get("TORCHELASTIC_RUN_ID"):
        parent = os.getppid()
        began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
        return f"torchrun-{socket.gethostname()}-{parent}-{began}"
    return ""


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

    ``on_open`` receives the run's writer as soon as it exists, so that later failures
    can be recorded. Raise ``BadConfig`` if the directory cannot be used, or its run
    does not match the configuration, ``DiskTrouble`` if the file system fails,
    ``TrainingFailed`` if the run gave up under this same configuration.
    """
    restarts = (
        environment.get(name) or 0
        for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
    )
    try:
        if out is None and resume == AUTO and any(int(count) > 0 for count in restarts):
            out = _run_of(job_name(environment), resolved)
        directory = out or default_run_directory(resolved.config.model.name)
        if resume not in {AUTO, NEVER}:
            return _from_path(Path(resume), out, resolved, on_open)
        if resume == AUTO and (directory / RUN_FILE).is_file():
            return _go_on(directory, resolved, on_open)
        return _writer(directory, on_open, again=False), Start()
    except OSError as error:
        next_step = (
            "Run the same command again once the file system is available: it resumes."
        )
        raise DiskTrouble(
            f"cannot use the run directory: {error}", next_step=next_step
        ) from error


def _run_of(job: str, resolved: ResolvedConfig) -> Path | None:
    """Return the newest run of a job with this configuration, or None: a job may train more than one model."""
    runs = sorted(
        Path("runs").glob(f"*/{RUN_FILE}"),
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )
    for path in runs if job else ():
        with contextlib.suppress(BadConfig):
            header = read_header(path.parent)
            if (header.job, header.config_sha256) == (job, resolved.config_sha256):
                return path.parent
    return None


def _go_on(
    directory: Path, resolved: ResolvedConfig, on_open: OnOpen
) -> tuple[RunWriter, Start]:
    """Resume a run from its newest intact checkpoint.

    Without one, start as ``_from_origin`` does.
    """
    before = read_header(directory)
    changes = _compare(before, resolved, directory)
    over = read_exit(directory)
    gave_up = over is not None and over.exit_code == TrainingFailed.exit_code
    if over is not None and gave_up and before.config_sha256 == resolved.config_sha256:
        next_step = (
            "Change a setting, such as --set train.learning_rate=…; or start from"
            " scratch: another --out"
        )
        raise TrainingFailed(
            f"{directory} gave up before with the same settings: {over.reason}",
            next_step=next_step,
        )
    writer = _writer(directory, on_open, again=True)
    root = directory / disk.CHECKPOINTS_DIRECTORY
    disk.clear_leftovers(root)
    events: list[EventRow] = []
    found, corrupt = disk.newest_checkpoint(root, good=gave_up)
    # Only now, as nothing may change if a checkpoint cannot be read.
    for path, why in corrupt:
        aside = path.with_name(f"{path.name}.corrupt-{writer.attempt}")
        path.rename(aside)
        message = (
            f"checkpoint {path.name} is corrupt and is skipped: {why}; kept as"
            f" {aside.name}"
        )
        events.append(new_event(0, "resumed", message, level="error"))
    if gave_up:
        # Checkpoints of the failed attempt, whose names would be newer than those saved
        # from here on.
        for newer in itertools.takewhile(
            lambda one: found is None or one != found[0], disk.list_checkpoints(root)
        ):
            newer.rename(newer.with_name(f"{newer.name}.given-up-{writer.attempt}"))
    if found is None:
        return writer, _from_origin(directory, gave_up=gave_up, events=events)
    path, manifest = found
    disk.point_to_latest(root, path.name)
    step = manifest.state.step
    if over is not None and over.exit_code == 0 and step >= resolved.config.max_steps:
        return writer, Start(finished=over)
    told = "; ".join((f"resumed from {path.name}", *changes))
    events.append(
        new_event(step, "resumed", told, level="warning" if changes else "info")
    )
    return writer, Start(
        checkpoint=path, manifest=manifest, events=tuple(events), gave_up=gave_up
    )


def _from_origin(
    directory: Path, *, gave_up: bool, events: Sequence[EventRow]
) -> Start:
    """Start again as the run's first start did.

    Raises:
        BadConfig: If all its own checkpoints are corrupt.
    """
    origin = read_first_header(directory).resumed_from
    # Renamed by this start or an earlier one.
    corrupt = [
        path.name
        for path in (directory / disk.CHECKPOINTS_DIRECTORY).glob("step-*.corrupt-*")
    ]
    if corrupt and not gave_up and origin is None:
        what = (
            f"all {len(corrupt)} checkpoints of {directory} are corrupt; they are kept"
            " as *.corrupt-*"
        )
        next_step = (
            "Check that disk. Start from scratch with another --out, or from another"
            " run: --resume PATH"
        )
        raise BadConfig(what, next_step=next_step)
    why = "no good checkpoint" if gave_up else "no intact checkpoint"
    if origin is None:
        told = new_event(
            0,
            "resumed",
            f"{directory} has {why}; starting from scratch",
            level="warning",
        )
        return Start(events=(*events, told))
    path, manifest = _read(Path(origin))
    told = new_event(
        manifest.state.step,
        "resumed",
        f"{directory} has {why}; starting again from {path}",
    )
    return Start(
        checkpoint=path, manifest=manifest, events=(*events, told), from_other_run=True
    )


def _from_path(
    path: Path, out: Path | None, resolved: ResolvedConfig, on_open: OnOpen
) -> tuple[RunWriter, Start]:
    """Resume a run in its directory, or start another run from one of its checkpoints."""
    is_checkpoint = (path / disk.MANIFEST_FILE).is_file()
    root = (
        path
        if path.name == disk.CHECKPOINTS_DIRECTORY
        else path / disk.CHECKPOINTS_DIRECTORY
    )
    run = path.parent.parent if is_checkpoint else root.parent
    if not is_checkpoint and not root.is_dir():
        next_step = (
            "Pass a run or a checkpoint, such as runs/NAME or"
            " runs/NAME/checkpoints/step-000001000"
        )
        raise BadConfig(
            f"--resume {path}: no checkpoint found there", next_step=next_step
        )
    in_place = out is None or out.resolve() == run.resolve()
    if in_place and is_checkpoint and disk.list_checkpoints(path.parent)[:1] != [path]:
        next_step = (
            "Start another run from it with --out DIR, or resume from the newest:"
            f" --resume auto --out {run}"
        )
        raise BadConfig(
            f"{run} has newer checkpoints than {path.name}", next_step=next_step
        )
    if in_place or out is None:
        return _go_on(run, resolved, on_open)
    again = (out / RUN_FILE).is_file()
    if again:
        origin = read_first_header(out).resumed_from
        if origin is None or not Path(origin).resolve().is_relative_to(path.resolve()):
            next_step = "Choose another --out, or resume that run with --resume auto"
            raise BadConfig(
                f"{out} already contains a run, which did not start from {path}",
                next_step=next_step,
            )
        if disk.list_checkpoints(out / disk.CHECKPOINTS_DIRECTORY):
            return _go_on(out, resolved, on_open)  # the same command was run again
    found, corrupt = (
        (_read(path), []) if is_checkpoint else disk.newest_checkpoint(root)
    )
    told = "a checkpoint is corrupt and is skipped: "
    events = [new_event(0, "resumed", told + why, level="error") for _, why in corrupt]
    if found is None:
        raise BadConfig(
            f"{root} has no intact checkpoint",
            next_step="Pass another run, or use --resume never",
        )
    directory, manifest = found
    changes = _compare(manifest.state, resolved, directory)
    events.append(
        new_event(
            manifest.state.step,
            "resumed",
            "; ".join((f"started from {directory}", *changes)),
        )
    )
    writer = _writer(out, on_open, again=again)
    return writer, Start(
        checkpoint=directory,
        manifest=manifest,
        events=tuple(events),
        from_other_run=True,
    )


def _read(path: Path) -> disk.Found:
    try:
        return path, disk.read_checkpoint(path)
    except disk.BadCheckpoint as error:
        next_step = "Pass an older one, or the run: --resume RUN"
        raise BadConfig(
            f"the checkpoint is corrupt: {error}", next_step=next_step
        ) from error


def _compare(
    before: RunHeader | disk.TrainingState, resolved: ResolvedConfig, where: Path
) -> list[str]:
    """Return the changed settings as text.

    Raises:
        BadConfig: If one makes the weights or positions invalid.
    """
    expected, found = resolved.config.data.dataset_hash, before.dataset_hash
    if expected not in (None, found):
        what = (
            f"dataset does not match {where}: its hash is {found[:12]}…, not"
            f" {str(expected)[:12]}…"
        )
        raise BadConfig(
            what,
            next_step=(
                "Resume with that run's profile, or start from scratch with another"
                " --out."
            ),
        )
    then, now = dotted(before.config), dotted(resolved.config.model_dump(mode="json"))
    for key in _SAME_DATA:
        if then.get(key) != now.get(key):
            shown = (
                f"train.{key} = {now.get(key)!r} does not match {where}, trained with"
                f" {then.get(key)!r}"
            )
            next_step = (
                "Resume with the same settings, or start from scratch: --resume never,"
                " with another --out"
            )
            raise BadConfig(
                shown if len(shown) < 200 else f"train.{key} does not match {where}",
                next_step=next_step,
            )
    changed = [
        key
        for key in now
        if (key in _RECIPE or key.startswith("health.")) and then.get(key) != now[key]
    ]
    return [f"train.{key} is now {now[key]}, it was {then.get(key)}" for key in changed]


def _writer(directory: Path, on_open: OnOpen, *, again: bool) -> RunWriter:
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
