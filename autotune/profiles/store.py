"""Reading and writing of profiles, and of the evidence and trial logs that belong to them."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autotune.base.files import write_atomically
from autotune.baseline.values import BaselineEvidence
from autotune.errors import AutotuneError, ProfileRejected, UsageError
from autotune.memory.values import ProbeEvidence
from autotune.network.values import NetworkEvidence
from autotune.profiles.decide.follow_up import probe_command
from autotune.profiles.decide.trial_log_check import (
    check_trial_log,
    compare_fingerprints,
    profile_records,
)
from autotune.profiles.values import (
    Fingerprint,
    Profile,
    TrialLogCheck,
    profile_from_tables,
    profile_to_toml,
    updated,
)
from autotune.search.values import ExploreEvidence
from autotune.trials import trial_log
from autotune.trials.decide.plausibility import check_profile
from autotune.trials.runner import TrialRunner
from autotune.trials.values import FinishedTrial
from autotune.workers.values import WorkersEvidence
from trainer.config.resolve import find_data, read_profile_tables
from trainer.config.train_config import DataSettings, Tag, TrainConfig, tagged
from trainer.data.dataset import MANIFEST_NAME
from trainer.errors import TrainerError
from trainer.health.events import utc_now

if TYPE_CHECKING:
    from autotune.integrations.values import OwnProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredProfile:
    """A profile and its path."""

    path: Path
    profile: Profile
    intact: bool
    """True if the content still has the hash that it was written with."""

    def data_dir(self, override: Path | None = None) -> Path:
        """Return the dataset: ``override``, else AUTOTUNE_DATA, else the profile's.

        Raise ``BadConfig`` without one.
        """
        return find_data(self.path, self.profile.train, override)[0]

    def data_here(self, override: Path | None = None) -> Path | None:
        """Return the dataset's directory if it holds a dataset; None otherwise."""
        try:
            directory = self.data_dir(override)
        except TrainerError:
            return None
        return directory if (directory / MANIFEST_NAME).is_file() else None


def read_profile(path: Path, tables: dict[str, Any] | None = None) -> StoredProfile:
    """Read and validate a profile, or the ``tables`` of its file.

    Raise an error with the reason if it is invalid.
    """
    profile, intact = profile_from_tables(
        tables or read_profile_tables(path), where=str(path)
    )
    check_profile(profile)
    return StoredProfile(path=path, profile=profile, intact=intact)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileTrials:
    """A profile's trials in the trial log."""

    finished: tuple[FinishedTrial, ...]
    """Trials of the profile, later ones included."""
    corrupt_lines: int
    """Number of corrupt lines of the trial log, which were left out."""
    check: TrialLogCheck


def read_trials(
    profile_path: Path, profile: "Profile | OwnProfile", reports: Path
) -> ProfileTrials:
    """Read a profile's trials and check the profile against them.

    Raises:
        BadInput: If a file of the trial log exceeds the size limit.
    """
    report_directory = trial_log.report_directory(profile_path, reports)
    directory = report_directory / trial_log.TRIAL_LOG_DIRECTORY
    records, corrupt_lines = trial_log.read_trial_records(directory)
    return ProfileTrials(
        finished=tuple(
            record.finished() for record in profile_records(profile, records)
        ),
        corrupt_lines=corrupt_lines,
        check=check_trial_log(profile, records),
    )


def profile_paths(
    out: Path | None, names: Sequence[str], device_name: str
) -> list[Path]:
    """Return where to write these models' profiles.

    Raises:
        UsageError: If ``out`` or the names do not allow it.
    """
    if len(set(names)) < len(names):
        raise UsageError(
            "two models have the same name",
            next_step="Run them one at a time, each with its own --out.",
        )
    if out is not None and len(names) == 1 and out.suffix == ".toml":
        return [out]
    if out is not None and (out.suffix == ".toml" or out.is_file()):
        what = (
            f"names one file for {len(names)} models"
            if len(names) > 1
            else "is not a .toml file"
        )
        raise UsageError(
            f"--out {out} {what}",
            next_step="Pass a directory, or a .toml file for a single model.",
        )
    return [(out or Path("profiles")) / f"{name}-{device_name}.toml" for name in names]


def trial_log_provenance(
    runner: TrialRunner, made_on: Fingerprint, seq_length_tokens: int | None
) -> dict[str, Any]:
    """Return the ``[provenance]`` fields of the trial log: hash and last time of the profile's trials so far."""
    own = trial_log.own_records(
        trial_log.read_trial_records(runner.trial_log.directory)[0],
        made_on,
        seq_length_tokens,
    )
    until = max((record.time_utc for record in own), default=None)
    return {
        "trial_log_sha256": trial_log.trial_log_sha256(own),
        "trial_log_until_utc": until,
    }


def add_evidence(
    profile: Profile,
    command: Literal["explore", "workers", "network", "baseline"],
    found: ExploreEvidence | WorkersEvidence | NetworkEvidence | BaselineEvidence,
    runner: TrialRunner,
    train: TrainConfig | None = None,
) -> Profile:
    """Return the profile with a command's evidence, replacing its earlier one, and with ``train`` if given."""
    resting = trial_log_provenance(
        runner, profile.fingerprint, profile.train.seq_length_tokens
    )
    return updated(
        profile,
        train or profile.train,
        command,
        {command: found},
        created_utc=utc_now(),
        **resting,
    )


def rebase_data_path(profile: Profile, old: Path, new: Path) -> Profile:
    """Return the profile for the path ``new``, with its dataset's path relative to that."""
    path = profile.train.data.path
    if path is None or old.parent.resolve() == new.parent.resolve():
        return profile
    train = with_data(
        profile.train, {"path": relative_data_path(old.parent / path, new)}
    )
    return profile.model_copy(update={"train": train})


def keep_workers(profile: Profile, path: Path) -> Profile:
    """Keep the DataLoader workers of the profile at ``path``, if they were measured with exactly these settings."""
    old = _lying_at(path)
    if (
        old is None
        or old.evidence.workers is None
        or old.fingerprint != profile.fingerprint
    ):
        return profile
    loader = {
        name: getattr(old.train.data, name) for name in tagged(DataSettings, Tag.LOADER)
    }
    train = with_data(profile.train, loader)
    return (
        updated(profile, train, "workers", {"workers": old.evidence.workers})
        if train == old.train
        else profile
    )


def write_profile(path: Path, profile: Profile) -> Path | None:
    """Write a profile.

    Keep a different one at that path as ``.previous.toml``, and return the path of this
    copy.

    Raise ``Undecided`` or ``MachineLacks`` if it holds a rate beyond its GPU's, or any
    rate of a pretended GPU.
    """
    check_profile(profile)
    kept = None
    old = _lying_at(path)
    if path.is_file() and (
        old is None
        or old.model_copy(update={"provenance": profile.provenance}) != profile
    ):
        kept = path.with_suffix(".previous.toml")
        write_atomically(kept, path.read_text(encoding="utf-8", errors="replace"))
    write_atomically(path, profile_to_toml(profile))
    return kept


def _lying_at(path: Path) -> Profile | None:
    """Return the profile at a path; None if there is none that can be read."""
    try:
        return read_profile(path).profile
    except (TrainerError, AutotuneError):
        return None


def relative_data_path(data_dir: Path, profile_path: Path) -> str:
    """Return a dataset's path relative to the profile, as profiles name it."""
    return os.path.relpath(data_dir.resolve(), profile_path.parent.resolve())


def require_local_probe(
    stored: StoredProfile, here: Fingerprint | None = None, *, replayed: bool = False
) -> ProbeEvidence:
    """Return a profile's probe evidence.

    Report minor differences from ``here`` (not the GPU's if ``replayed``).

    Raise ``ProfileRejected`` if it has no probe, exceeds it, or its machine, model or
    dataset does not match ``here``.
    """
    rows, path, probe = (
        stored.profile.train.micro_batch_size,
        stored.path,
        stored.profile.evidence.probe,
    )
    errors = []
    for check in (
        ()
        if here is None
        else compare_fingerprints(stored.profile.fingerprint, here, replayed=replayed)
    ):
        text = f"{check.field} is {check.here} here, {check.profile} in the profile"
        if check.found == "error":
            errors.append(text)
        else:
            sys.stderr.write(f"{check.found}: {text}\n")
    if here is not None and not stored.intact:
        sys.stderr.write(f"info: {path} was modified since it was written\n")
    if probe is None:
        why, first = (
            f"{path} has no probe result, which this command requires",
            "Probe first",
        )
    elif errors:
        why, first = f"{path} does not match: {'; '.join(errors)}", "Probe here first"
    elif rows > probe.feasible_max:
        why = (
            f"micro_batch_size = {rows} exceeds {probe.feasible_max}, the largest that"
            " was verified to fit"
        )
        first = f"Lower it in {path}, or probe again"
    else:
        return probe
    raise ProfileRejected(
        why, next_step=f"{first}: {probe_command(stored.profile, path)}"
    )


def with_data(config: TrainConfig, settings: Mapping[str, object]) -> TrainConfig:
    """Return the configuration with some ``data`` settings replaced."""
    return config.model_copy(update={"data": config.data.model_copy(update=settings)})
