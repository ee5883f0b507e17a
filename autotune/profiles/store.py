"""Reading and writing of profiles."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.base.files import write_atomically
from autotune.errors import AutotuneError
from autotune.evidence.probe import ProbeEvidence
from autotune.evidence.profile import (
    Fingerprint,
    Profile,
    SubjectTable,
    lacks_train,
    update_profile,
)
from autotune.profiles.toml_file import profile_from_tables, profile_to_toml
from autotune.trials.decide.profile_rates import check_profile
from autotune.trials.values import FinishedTrial
from trainer.formats.errors import TrainerError
from trainer.formats.manifest import MANIFEST_NAME
from trainer.formats.profile_file import find_data, read_profile_tables
from trainer.formats.train_config import DataSettings, Tag, TrainConfig, tagged


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredProfile:
    """A profile with the path that it was read from."""

    path: Path
    profile: Profile
    intact: bool
    """True if the content still has the hash that it was written with."""

    def data_dir(self, override: Path | None = None) -> Path:
        """Return the directory of the dataset, which need not exist.

        It is ``override``, else the environment variable AUTOTUNE_DATA, else the path
        in the profile; the working directory if the subject has its own data.

        Raises:
            BadConfig: If none of the three names a dataset.
        """
        if not self.profile.has_train:
            return Path()
        directory, _ = find_data(self.path, self.profile.train, override)
        return directory

    def existing_data_dir(self, override: Path | None = None) -> Path | None:
        """Return ``data_dir``; None if no dataset is named, or there is none.

        It is None as well if the subject has its own data.
        """
        if not self.profile.has_train:
            return None
        try:
            directory = self.data_dir(override)
        except TrainerError:
            return None
        return directory if (directory / MANIFEST_NAME).is_file() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenProfile:
    """A profile that a command wrote, its path, and the command's trials."""

    path: Path
    profile: Profile
    trials: tuple[FinishedTrial, ...] = ()
    previous: Path | None = None
    """Path to which the previous profile was moved; None if there was none."""

    @property
    def probe(self) -> ProbeEvidence:
        """Evidence that a probe put into the profile."""
        assert self.profile.evidence.probe is not None, "a probe writes its evidence"
        return self.profile.evidence.probe


def read_profile(path: Path, tables: dict[str, Any] | None = None) -> StoredProfile:
    """Read and validate a profile.

    Args:
        path: Path of the profile.
        tables: Content of its file, if it was read before; None reads the file.

    Raises:
        BadConfig: If the file cannot be read.
        BadInput: If the profile is invalid.
        Undecided: If the profile has a rate that its GPU cannot reach.
        MachineLacks: If it has a rate of a GPU that takes no time to compute.
    """
    if tables is None:
        tables = read_tables(path)
    profile, intact = profile_from_tables(tables, where=str(path))
    check_profile(profile)
    return StoredProfile(path=path, profile=profile, intact=intact)


def read_trainer_profile(
    path: Path, command: str, *, next_step: str | None = None
) -> StoredProfile:
    """Read and validate a profile of the bundled trainer.

    It raises the errors of ``read_profile``, too.

    Args:
        path: Path of the profile.
        command: Command that requires settings of the trainer, for the message.
        next_step: Next step to name in place of the usual one.

    Raises:
        NotCheckable: If the profile is of another subject.
    """
    stored = read_profile(path)
    if not stored.profile.has_train:
        raise lacks_train(
            stored.profile.subject,
            f"autotune {command}",
            next_step or f"Use its values in your code: autotune profile show {path}",
        )
    return stored


def read_tables(path: Path) -> dict[str, Any]:
    """Read the tables of a profile of any subject, without validating them.

    Raises:
        BadConfig: If the file is no profile.
    """
    return read_profile_tables(path, "subject")


def known_profile(path: Path, here: Fingerprint) -> StoredProfile | None:
    """Return the profile at a path if it was measured here, with the same subject.

    Returns:
        The profile; None if there is none, or one of another subject or machine.
    """
    stored = _readable_profile(path)
    if stored is None or stored.profile.fingerprint != here:
        return None
    return stored


def keep_workers(profile: Profile, path: Path) -> Profile:
    """Return the new profile with the worker sweep of the profile at ``path``.

    So a repeated probe does not lose the sweep. The sweep is kept only if it was
    measured on this machine, with exactly the settings of the new profile.
    """
    stored = known_profile(path, profile.fingerprint)
    if stored is None:
        return profile
    workers = stored.profile.evidence.workers
    # Workers that suffice for one step may not for a faster one.
    with_sweep = _with_loader_of(profile, stored.profile)
    if workers is None or with_sweep is None:
        return profile
    return update_profile(with_sweep, command="workers", evidence={"workers": workers})


def _with_loader_of(profile: Profile, old: Profile) -> Profile | None:
    """Return the profile with the loader, and the loader's settings, of an older one.

    Returns:
        None if other settings than the loader's differ.
    """
    if profile.has_train:
        loader_settings = {
            name: getattr(old.train.data, name)
            for name in tagged(DataSettings, Tag.LOADER)
        }
        train = with_data(profile.train, loader_settings)
        return profile.with_train(train) if train == old.train else None
    if {**old.settings, **profile.settings} != old.settings:
        return None
    subject = with_functions(old.subject, profile.subject)
    return profile.model_copy(update={"settings": old.settings, "subject": subject})


def with_functions(subject: SubjectTable, newer: SubjectTable) -> SubjectTable:
    """Return a subject with the functions and sources that a newer one names.

    So a sweep adds a loader to the step that was probed, and a repeated probe keeps it.
    """
    return subject.model_copy(
        update={
            "table": {**subject.table, **newer.table},
            "has_loader": subject.has_loader or newer.has_loader,
            "sources": {**subject.sources, **newer.sources},
        }
    )


def before_sweep(profile: Profile) -> TrainConfig:
    """Return the settings of a profile without what a worker sweep chose.

    A phase that is repeated begins with them. So it asks for the same windows as the
    first time, and finds them in the trial log. A setting that was edited since the
    sweep stays.
    """
    workers = profile.evidence.workers
    if workers is None:
        return profile.train
    defaults = DataSettings()
    before = {
        name: getattr(defaults, name)
        for name, chosen in workers.loader_settings.items()
        if getattr(profile.train.data, name) == chosen
    }
    return with_data(profile.train, before)


def with_loader_settings(profile: Profile, settings: Mapping[str, Any]) -> Profile:
    """Return the profile with the loader settings that a worker sweep chose.

    They take the place of those that an earlier sweep chose.
    """
    if profile.has_train:
        return profile.with_train(with_data(before_sweep(profile), settings))
    return profile.model_copy(update={"settings": {**profile.settings, **settings}})


def write_profile(path: Path, profile: Profile) -> Path | None:
    """Write a profile, and keep a different one at that path as ``.previous.toml``.

    Returns:
        Path of the kept profile; None if none was kept.

    Raises:
        Undecided: If the profile has a rate that its GPU cannot reach.
        MachineLacks: If it has a rate of a GPU that takes no time to compute.
    """
    check_profile(profile)
    previous_path = None
    if path.is_file() and not _has_content(path, profile):
        previous_path = path.with_suffix(".previous.toml")
        previous_text = path.read_text(encoding="utf-8", errors="replace")
        write_atomically(previous_path, previous_text)
    write_atomically(path, profile_to_toml(profile))
    return previous_path


def _has_content(path: Path, profile: Profile) -> bool:
    """Return whether a file has the content of a profile, whatever its provenance."""
    stored = _readable_profile(path)
    if stored is None:
        return False
    old = stored.profile
    # The provenance has the time of writing, which always differs.
    return old.model_copy(update={"provenance": profile.provenance}) == profile


def _readable_profile(path: Path) -> StoredProfile | None:
    """Return the profile at a path; None if there is none that can be read."""
    try:
        return read_profile(path)
    except (TrainerError, AutotuneError):
        return None


def with_data(config: TrainConfig, settings: Mapping[str, object]) -> TrainConfig:
    """Return the configuration with some ``data`` settings replaced."""
    return config.model_copy(update={"data": config.data.model_copy(update=settings)})
