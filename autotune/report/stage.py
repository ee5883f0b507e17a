"""Building of a report: reads its profiles and runs, and writes its three files.

``build_report`` writes HTML, Markdown and JSON; ``pull_request_text`` returns the short
form.
"""

from collections import Counter
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
from autotune.report.values import MatchedBy, ReportedRun
from trainer.formats.errors import BadConfig
from trainer.formats.manifest import read_manifest
from trainer.formats.nested_tables import reject_infinite
from trainer.formats.run_record import Run

MOST_PROFILES = 12
"""Number of profiles that one report takes."""
MOST_RUNS = 24
"""Number of training runs that one report takes."""


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
    # These modules load a library for charts, which other stages do without.
    from autotune.base.render_html import report_html
    from autotune.base.render_markdown import report_markdown
    from autotune.report.page import report_document, report_facts

    reported_profiles, reported_runs = _read(profiles, reports, runs, data)
    document = report_document(reported_profiles, reported_runs)
    facts = report_facts(reported_profiles, reported_runs)
    if out.suffix.lower() in {".html", ".md", ".json"}:
        html = out.with_suffix(".html")
    else:
        html = out.with_name(f"{out.name}.html")
    paths = {
        "html": html,
        "markdown": html.with_suffix(".md"),
        "json": html.with_suffix(".json"),
    }
    write_atomically(paths["json"], readable_json(facts))
    write_atomically(paths["markdown"], report_markdown(document))
    write_atomically(paths["html"], report_html(document))
    return paths


def pull_request_text(
    profiles: Sequence[Path], reports: Path, *, runs: Sequence[Path], data: Path | None
) -> str:
    """Return the answer of each profile in five lines of Markdown.

    Raises:
        The errors of ``build_report``.
    """
    from autotune.base.render_markdown import markdown_text
    from autotune.report.sections import pull_request

    reported_profiles, reported_runs = _read(profiles, reports, runs, data)
    texts = [
        markdown_text(pull_request(reported, reported_runs))
        for reported in reported_profiles
    ]
    return "\n\n".join(texts)


def _read(
    profiles: Sequence[Path], reports: Path, runs: Sequence[Path], data: Path | None
) -> tuple[tuple[ReportedProfile, ...], tuple[ReportedRun, ...]]:
    if len(profiles) > MOST_PROFILES or len(runs) > MOST_RUNS:
        raise UsageError(
            f"{len(profiles)} profiles and {len(runs)} runs exceed the {MOST_PROFILES}"
            f" profiles and {MOST_RUNS} runs that one report takes",
            next_step="Build several reports, each with its own --out.",
        )
    _reject_equal_names([path.stem for path in profiles])
    _reject_equal_names([directory.name for directory in runs])
    host = SystemHost()
    reported_profiles = tuple(
        _reported_profile(path, reports, host, data) for path in profiles
    )
    reported_runs = tuple(
        _reported_run(directory, reported_profiles, host) for directory in runs
    )
    return reported_profiles, reported_runs


def _reject_equal_names(names: Sequence[str]) -> None:
    """Raise an error if two profiles or two runs would have the same name."""
    for name, uses in Counter(names).items():
        if uses > 1:
            raise UsageError(
                f"two inputs are named {name!r}",
                next_step="Rename one, or build a report of each with its own --out.",
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
    if stored.profile.has_train:
        reported = _with_dataset(reported, stored, data)
    context = context_of_profile(stored, trials.finished, host, data=reported.data)
    return replace(
        reported,
        bottlenecks=() if context.bottleneck is None else (context.bottleneck,),
        advice=advise(context),
    )


def _with_dataset(
    reported: ReportedProfile, stored: StoredProfile, data: Path | None
) -> ReportedProfile:
    """Return the profile with its dataset, or with the reason why it has none."""
    try:
        directory = stored.data_dir(data)
        manifest = read_manifest(directory)
    except BadConfig as error:
        return replace(reported, dataset_lacking=error.message)
    if manifest.dataset_hash != stored.profile.fingerprint.dataset_hash:
        return replace(reported, dataset_lacking=f"{directory} is another dataset")
    return replace(reported, dataset=manifest, dataset_lacking="", data=directory)


def _reported_run(
    directory: Path, profiles: Sequence[ReportedProfile], host: Host
) -> ReportedRun:
    """Return a run, and which of these profiles it was started from.

    Raises:
        AutotuneError: If the run's record cannot be read.
    """
    run = read_measured_run(directory)
    for table in (run.startup, run.end):
        reject_infinite(None if table is None else table.model_dump(), str(directory))
    origin, matched_by = _profile_of_run(run, profiles)
    stored = None
    other_settings: tuple[str, ...] = ()
    if origin is not None:
        stored = StoredProfile(
            path=origin.path, profile=origin.profile, intact=origin.intact
        )
        other_settings = tuple(other_settings_than(run, stored))
    # Figures of a step with other settings say nothing about this run.
    context = context_of_run(run, host, stored=None if other_settings else stored)
    # The report gives the advice on the profile itself elsewhere.
    context = replace(context, profile=None, trials=(), spread=None, not_judged=())
    return ReportedRun(
        run=run,
        profile_path=None if origin is None else origin.path,
        matched_by=matched_by,
        other_settings=other_settings,
        bottlenecks=() if context.bottleneck is None else (context.bottleneck,),
        advice=advise(context),
    )


def _profile_of_run(
    run: Run, profiles: Sequence[ReportedProfile]
) -> tuple[ReportedProfile | None, MatchedBy | None]:
    """Return the profile that a run was started from, and what they have in common.

    A run with changed settings has another hash, but the same dataset and model.
    """
    header = run.header
    for reported in profiles:
        if reported.content_sha256 == header.profile_sha256:
            return reported, "the profile's hash"
    for reported in profiles:
        is_same_dataset = (
            reported.profile.fingerprint.dataset_hash == header.dataset_hash
        )
        if is_same_dataset and reported.name == header.name:
            return reported, "dataset and model"
    return None, None
