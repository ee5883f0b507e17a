"""Put together what a report is built from: profiles with their ledgers, runs, what limits them, advice, sign-off."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autotune.decide.advice import advise
from autotune.measure.host import Host
from autotune.search.ledgers import read_trials
from autotune.search.profiles import StoredProfile
from autotune.search.reviews import read_reviewed
from autotune.search.situation import other_than, read_measured_run, situation_of_profile, situation_of_run
from autotune.show.report.inputs import ReportedProfile, ReportedRun
from trainer.dataset import Manifest, read_manifest
from trainer.errors import BadConfig
from trainer.schema import refuse_infinite


def reported_profile(path: Path, reports: Path, host: Host, *, data: Path | None = None) -> ReportedProfile:
    """Return a profile with what lies around it.

    Args:
        path: Of the profile.
        reports: Where its ledger and its reviews lie.
        host: Describes the file system that the data lies on.
        data: Its dataset; None looks where the profile says.

    Raises:
        TrainerError, AutotuneError: If it cannot be reported, with the reason.
    """
    stored = read_reviewed(path, reports)
    trials = read_trials(path, stored.profile, reports)
    dataset, lacking = _dataset(stored, data)
    known = None if dataset is None else stored.data_dir(data)
    now = situation_of_profile(stored, trials.finished, host, data=known)
    return ReportedProfile(
        path=path,
        profile=stored.profile,
        intact=stored.intact,
        content_sha256=stored.file_sha256,
        trials=trials.finished,
        damaged_lines=trials.damaged_lines,
        dataset=dataset,
        dataset_lacking=lacking,
        bottlenecks=() if now.bottleneck is None else (now.bottleneck,),
        advice=advise(now),
        standing=stored.standing,
        ledger=trials.check,
    )


def reported_run(directory: Path, profiles: Sequence[ReportedProfile], host: Host) -> ReportedRun:
    """Return a run, and which of these profiles it was started from.

    Raises:
        TrainerError, AutotuneError: If it is no run, one of another schema, or holds rates that its GPU cannot reach.
    """
    run = read_measured_run(directory)
    for table in (run.startup, run.end):
        refuse_infinite(None if table is None else table.model_dump(), str(directory))
    header = run.header
    by_hash = next((one for one in profiles if one.content_sha256 == header.profile_sha256), None)
    alike = (
        one
        for one in profiles
        if (one.profile.fingerprint.dataset_hash, one.name) == (header.dataset_hash, header.name)
    )
    found = by_hash or next(alike, None)
    stored = None if found is None else StoredProfile(path=found.path, profile=found.profile, intact=found.intact)
    otherwise = () if stored is None else tuple(other_than(run, stored))
    if otherwise:
        stored = None  # figures of another step say nothing of this one
    # What is said of the profile already is left out.
    now = replace(situation_of_run(run, host, stored=stored), profile=None, trials=(), spread=None, missing=())
    return ReportedRun(
        run=run,
        profile_path=None if found is None else found.path,
        matched_by=None if found is None else "the profile's hash" if by_hash else "dataset and model",
        otherwise=otherwise,
        bottlenecks=() if now.bottleneck is None else (now.bottleneck,),
        advice=advise(now),
    )


def _dataset(stored: StoredProfile, data: Path | None) -> tuple[Manifest | None, str]:
    """Return the dataset's manifest, or why there is none; a report is built without it."""
    dataset_hash = stored.profile.fingerprint.dataset_hash
    try:
        directory = stored.data_dir(data)
        manifest = read_manifest(directory)
    except BadConfig as error:
        return None, error.message
    if dataset_hash is not None and manifest.dataset_hash != dataset_hash:
        return None, f"{directory} is another dataset"
    return manifest, ""
