"""Write what a search found into a profile; read profiles and their trial logs back."""

from autotune.profiles.values import updated

from collections.abc import Mapping
from trainer.config.train_config import TrainConfig

from autotune.trials.trial_log import report_directory

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autotune.base.files import write_atomically
from autotune.trials.trial_log import TRIAL_LOG_DIRECTORY
from autotune.advice.values import SettingChange
from autotune.baseline.values import BaselineEvidence
from autotune.network.values import NetworkEvidence
from autotune.workers.values import WorkersEvidence
from autotune.memory.values import ProbeEvidence
from autotune.search.values import ExploreEvidence
from autotune.network.values import GradientSync
from autotune.profiles.values import Fingerprint, Profile, profile_from_tables, profile_to_toml
from autotune.profiles.values import TrialLogCheck
from autotune.profiles.decide.trial_log_check import check_trial_log, compare, records_of
from autotune.trials.trial_log import trial_log_sha256, own_records
from autotune.profiles.decide.follow_up import probe_command
from autotune.errors import AutotuneError, ProfileRejected, UsageError
from autotune.trials.decide.plausibility import check_profile
from autotune.trials.runner import TrialRunner
from autotune.trials.trial_log import read_trial_records
from autotune.trials.values import FinishedTrial
from trainer.config.train_config import DataSettings, Tag, TrainConfig, tagged
from trainer.data.dataset import MANIFEST_NAME
from trainer.errors import TrainerError
from trainer.health.events import utc_now
from trainer.config.resolve import find_data, read_profile_tables


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredProfile:
    """A profile and where it lies."""

    path: Path
    profile: Profile
    intact: bool
    """Whether its content still has the hash it was written with."""

    def data_dir(self, override: Path | None = None) -> Path:
        """Return its dataset's directory: ``override``, else AUTOTUNE_DATA, else where the profile says.

        Raises:
            BadConfig: If none of them names one.
        """
        return find_data(self.path, self.profile.train, override)[0]

    def data_here(self, override: Path | None = None) -> Path | None:
        """Return the same if a dataset is there; None otherwise."""
        try:
            directory = self.data_dir(override)
        except TrainerError:
            return None
        return directory if (directory / MANIFEST_NAME).is_file() else None


def read_profile(path: Path, tables: dict[str, Any] | None = None) -> StoredProfile:
    """Read and validate a profile, of which the file's tables may have been read.

    Raises:
        TrainerError, AutotuneError: If it cannot be used, with the reason.
    """
    profile, intact = profile_from_tables(tables or read_profile_tables(path), where=str(path))
    check_profile(profile)
    return StoredProfile(path=path, profile=profile, intact=intact)




def read_trials(
    profile_path: Path, profile: Profile, reports: Path
) -> tuple[tuple[FinishedTrial, ...], int, TrialLogCheck]:
    """Return every trial behind a profile, and since; how many lines of its trial log are none; and what that says of it.

    Raises:
        BadInput: If a file of the trial log is too large to be one.
    """
    records, damaged = read_trial_records(report_directory(profile_path, reports) / TRIAL_LOG_DIRECTORY)
    finished = tuple(record.finished() for record in records_of(profile, records))
    return finished, damaged, check_trial_log(profile, records)


def profile_paths(out: Path | None, names: Sequence[str], device_name: str) -> list[Path]:
    """Return where the profiles of these models go.

    Raises:
        UsageError: If two models, or several and one file, have the same place.
    """
    if len(set(names)) < len(names):
        raise UsageError("two models have the same name", next_step="Take them one at a time, each with its own --out.")
    if out is not None and len(names) == 1 and out.suffix == ".toml":
        return [out]
    if out is not None and (out.suffix == ".toml" or out.is_file()):
        what = f"names one file for {len(names)} models" if len(names) > 1 else "is not a .toml file"
        raise UsageError(f"--out {out} {what}", next_step="Name a directory, or a .toml file for a single model.")
    return [(out or Path("profiles")) / f"{name}-{device_name}.toml" for name in names]


def trial_log_provenance(runner: TrialRunner, made_on: Fingerprint, row_tokens: int) -> dict[str, Any]:
    """Return what ``[provenance]`` says of the trial log: of all the profile's trials up to now, whichever command's."""
    own = own_records(read_trial_records(runner.trial_log.directory)[0], made_on, row_tokens)
    until = max((record.time_utc for record in own), default=None)
    return {"trial_log_sha256": trial_log_sha256(own), "trial_log_until_utc": until}




def add_evidence(
    profile: Profile,
    command: Literal["explore", "workers", "network", "baseline"],
    found: ExploreEvidence | WorkersEvidence | NetworkEvidence | BaselineEvidence,
    runner: TrialRunner,
    train: TrainConfig | None = None,
) -> Profile:
    """Return the profile with what a command found, in place of what it found before, and with its settings if any."""
    resting = trial_log_provenance(runner, profile.fingerprint, profile.train.seq_length_tokens)
    return updated(profile, train or profile.train, command, {command: found}, created_utc=utc_now(), **resting)










def rebase_data_path(profile: Profile, old: Path, new: Path) -> Profile:
    """Return the profile as it is to be written elsewhere: its dataset is named from there."""
    path = profile.train.data.path
    if path is None or old.parent.resolve() == new.parent.resolve():
        return profile
    train = with_data(profile.train, {"path": relative_data_path(old.parent / path, new)})
    return profile.model_copy(update={"train": train})


def keep_workers(profile: Profile, path: Path) -> Profile:
    """Keep the loader workers of the profile that lies at ``path``, if they were counted for these very settings."""
    old = _lying_at(path)
    if old is None or old.evidence.workers is None or old.fingerprint != profile.fingerprint:
        return profile
    loader = {name: getattr(old.train.data, name) for name in tagged(DataSettings, Tag.LOADER)}
    train = with_data(profile.train, loader)
    return updated(profile, train, "workers", {"workers": old.evidence.workers}) if train == old.train else profile


def write_profile(path: Path, profile: Profile) -> Path | None:
    """Write a profile; one that is there already and says something else is kept beside it, at the returned path.

    Raises:
        Undecided, MachineLacks: If it keeps a rate that its GPU cannot reach, or any of a pretended GPU.
    """
    check_profile(profile)
    kept = None
    old = _lying_at(path)
    if path.is_file() and (old is None or old.model_copy(update={"provenance": profile.provenance}) != profile):
        kept = path.with_suffix(".previous.toml")
        write_atomically(kept, path.read_text(encoding="utf-8", errors="replace"))
    write_atomically(path, profile_to_toml(profile))
    return kept


def _lying_at(path: Path) -> Profile | None:
    """The profile at a place; None when there is none, or none that can be read."""
    try:
        return read_profile(path).profile
    except (TrainerError, AutotuneError):
        return None


def relative_data_path(data_dir: Path, profile_path: Path) -> str:
    """Return a dataset's path as a profile may name it: relative to the profile."""
    return os.path.relpath(data_dir.resolve(), profile_path.parent.resolve())


def require_local_probe(
    stored: StoredProfile, here: Fingerprint | None = None, *, replayed: bool = False
) -> ProbeEvidence:
    """Return the probe evidence of a profile; lesser differences from ``here`` are told on standard error.

    If a GPU's step is ``replayed``, the GPU itself does not matter.

    Raises:
        ProfileRejected: If it was never probed, or is another machine's, model's or dataset's than ``here``.
    """
    rows, path, probe = stored.profile.train.micro_batch_size, stored.path, stored.profile.evidence.probe
    refusals = []
    for check in () if here is None else compare(stored.profile.fingerprint, here, replayed=replayed):
        text = f"{check.field} was {check.profile}, here it is {check.here}"
        if check.found == "refuse":
            refusals.append(text)
        else:
            sys.stderr.write(f"{check.found}: {text}\n")
    if here is not None and not stored.intact:
        sys.stderr.write(f"inform: {path} was edited by hand since it was written\n")
    if probe is None:
        why, first = f"{path} has no probed micro-batch, at which everything else is measured", "Probe first"
    elif refusals:
        why, first = f"{path} was not probed here: {'; '.join(refusals)}", "Probe here first"
    elif rows > probe.feasible_max:
        why = f"micro_batch_size = {rows} is more than the {probe.feasible_max} that were shown to fit"
        first = f"Lower it in {path}, or probe again"
    else:
        return probe
    raise ProfileRejected(why, next_step=f"{first}: {probe_command(stored.profile, path)}")


def with_data(config: TrainConfig, settings: Mapping[str, object]) -> TrainConfig:
    """Return the configuration with other settings of its ``data``."""
    return config.model_copy(update={"data": config.data.model_copy(update=settings)})
