"""Building of the report, as HTML, Markdown and JSON.

It has results, evidence and next steps.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autotune.advice.decide.rules import advise
from autotune.advice.read_context import (
    context_of_profile,
    context_of_run,
    other_settings_than,
    read_measured_run,
)
from autotune.base.files import write_atomically
from autotune.base.readable_json import readable_json
from autotune.errors import UsageError
from autotune.machine.host import Host, SystemHost
from autotune.profiles.approval import read_with_approval
from autotune.profiles.recorded_trials import read_trials
from autotune.profiles.reported_profile import ReportedProfile
from autotune.profiles.store import StoredProfile
from autotune.report.values import ReportedRun
from trainer.formats.errors import BadConfig
from trainer.formats.manifest import Manifest, read_manifest
from trainer.formats.nested_tables import reject_infinite

MOST_PROFILES, MOST_RUNS = 12, 24


def build_report(
    profiles: Sequence[Path],
    reports: Path,
    out: Path,
    *,
    runs: Sequence[Path] = (),
    data: Path | None = None,
) -> dict[str, Path]:
    """Write a report of profiles, their trials and training runs.

    It is written to ``out``, with its two other formats beside it. Trial logs and
    reviews are read from ``reports``.

    Returns:
        The three paths, by ``html``, ``markdown`` and ``json``.

    Raises:
        UsageError: If there are more profiles or runs than one report takes, or two of
            the same name.
        TrainerError: If a dataset or a run cannot be reported.
        AutotuneError: If a profile or a run cannot be reported.
    """
    # They load a library of charts, which other stages do without.
    from autotune.base.render_html import report_html
    from autotune.base.render_markdown import report_markdown
    from autotune.report.page import report_document, report_facts

    found = _read(profiles, reports, runs, data)
    document, told = report_document(*found), report_facts(*found)
    known = out.suffix.lower() in {".html", ".md", ".json"}
    html = out.with_suffix(".html") if known else out.with_name(f"{out.name}.html")
    places = {
        "html": html,
        "markdown": html.with_suffix(".md"),
        "json": html.with_suffix(".json"),
    }
    write_atomically(places["json"], readable_json(told))
    write_atomically(places["markdown"], report_markdown(document))
    write_atomically(places["html"], report_html(document))
    return places


def pull_request_text(
    profiles: Sequence[Path], reports: Path, *, runs: Sequence[Path], data: Path | None
) -> str:
    """Return the answer of each profile in five lines of Markdown.

    It raises the errors of ``build_report``.
    """
    from autotune.base.render_markdown import markdown_text
    from autotune.report.sections import pull_request

    reported, trained = _read(profiles, reports, runs, data)
    return "\n\n".join(markdown_text(pull_request(one, trained)) for one in reported)


def _read(
    profiles: Sequence[Path], reports: Path, runs: Sequence[Path], data: Path | None
) -> tuple[tuple[ReportedProfile, ...], tuple[ReportedRun, ...]]:
    if len(profiles) > MOST_PROFILES or len(runs) > MOST_RUNS:
        told = (
            f"{len(profiles)} profiles and {len(runs)} runs exceed the {MOST_PROFILES}"
            f" profiles and {MOST_RUNS} runs "
        )
        next_step = "Build several reports, each with its own --out."
        raise UsageError(f"{told}that one report takes", next_step=next_step)
    for names in (
        [path.stem for path in profiles],
        [directory.name for directory in runs],
    ):
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            next_step = "Rename one, or build a report of each with its own --out."
            raise UsageError(f"two inputs are named {twice!r}", next_step=next_step)
    host = SystemHost()
    reported = tuple(_reported_profile(path, reports, host, data) for path in profiles)
    return reported, tuple(
        _reported_run(directory, reported, host) for directory in runs
    )


def _reported_profile(
    path: Path, reports: Path, host: Host, data: Path | None
) -> ReportedProfile:
    """Return a profile with its trials, dataset and advice.

    If the dataset is missing, it has the reason; code of yours has its own data.
    """
    stored = read_with_approval(path, reports)
    trials = read_trials(path, stored.profile, reports)
    reported = ReportedProfile(
        path=path,
        profile=stored.profile,
        intact=stored.intact,
        content_sha256=stored.file_sha256,
        trials=trials.finished,
        corrupt_lines=trials.corrupt_lines,
        approval=stored.approval,
        trial_log=trials.check,
    )
    manifest, directory, lacking = None, None, ""
    if stored.profile.has_train:
        manifest, directory, lacking = _dataset_of(stored, data)
    now = context_of_profile(
        stored, trials.finished, host, data=None if manifest is None else directory
    )
    return replace(
        reported,
        dataset=manifest,
        dataset_lacking=lacking,
        data=None if manifest is None else directory,
        bottlenecks=() if now.bottleneck is None else (now.bottleneck,),
        advice=advise(now),
    )


def _dataset_of(
    stored: StoredProfile, data: Path | None
) -> tuple[Manifest | None, Path | None, str]:
    """Return a profile's dataset and its directory, or the reason why it is missing."""
    try:
        directory = stored.data_dir(data)
        manifest = read_manifest(directory)
    except BadConfig as error:
        return None, None, error.message
    if manifest.dataset_hash != stored.profile.fingerprint.dataset_hash:
        return None, directory, f"{directory} is another dataset"
    return manifest, directory, ""


def _reported_run(
    directory: Path, profiles: Sequence[ReportedProfile], host: Host
) -> ReportedRun:
    """Return a run, and which of these profiles it was started from."""
    run = read_measured_run(directory)
    for table in (run.startup, run.end):
        reject_infinite(None if table is None else table.model_dump(), str(directory))
    header = run.header
    by_hash = [one for one in profiles if one.content_sha256 == header.profile_sha256]
    same = header.dataset_hash, header.name
    alike = [
        one
        for one in profiles
        if (one.profile.fingerprint.dataset_hash, one.name) == same
    ]
    found = next(iter(by_hash + alike), None)
    stored = (
        None
        if found is None
        else StoredProfile(path=found.path, profile=found.profile, intact=found.intact)
    )
    otherwise = () if stored is None else tuple(other_settings_than(run, stored))
    if otherwise:
        stored = None  # figures of another step say nothing of this one
    # What is said of the profile already is left out.
    now = replace(
        context_of_run(run, host, stored=stored),
        profile=None,
        trials=(),
        spread=None,
        not_judged=(),
    )
    return ReportedRun(
        run=run,
        profile_path=None if found is None else found.path,
        matched_by=(
            None
            if found is None
            else "the profile's hash"
            if by_hash
            else "dataset and model"
        ),
        otherwise=otherwise,
        bottlenecks=() if now.bottleneck is None else (now.bottleneck,),
        advice=advise(now),
    )
