"""``autotune report build``: what was found, the evidence, and what to do next."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.commands.options import REPORTS, Reports

if TYPE_CHECKING:
    from autotune.show.report import ReportedProfile


def build(
    *,
    profile: Annotated[list[Path], typer.Argument(help="Profiles; several make one report.")],
    run: Annotated[list[Path] | None, typer.Option(help="A training run's directory; repeat for several.")] = None,
    out: Annotated[Path | None, typer.Option(help="Markdown file. Default: reports/<profile>/report.md.")] = None,
    reports: Reports = REPORTS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with the report's place.")] = False,
) -> None:
    """Write a Markdown report of profiles, their trials and training runs."""
    from autotune.search.profiles import report_directory
    from autotune.show.report import ReportedRun, report_markdown
    from autotune.store import write_atomically
    from trainer.record import read_run

    reported = [_reported(path, reports) for path in profile]
    by_dataset_and_model = {
        (one.profile.fingerprint.dataset_hash, one.profile.train.model.name): one.path for one in reported
    }
    runs = []
    for directory in run or []:
        record = read_run(directory)
        runs.append(
            ReportedRun(
                run=record, profile_path=by_dataset_and_model.get((record.header.dataset_hash, record.header.name))
            )
        )
    path = out or report_directory(profile[0], reports) / "report.md"
    write_atomically(path, report_markdown(reported, runs))
    print(json.dumps({"report": str(path)}) if as_json else f"report: {path}")


def _reported(path: Path, reports: Path) -> "ReportedProfile":
    from autotune.core.trial import TrialRecord
    from autotune.search.profiles import read_profile, report_directory
    from autotune.show.report import ReportedProfile
    from autotune.store import read_ledger

    stored = read_profile(path)
    content = read_ledger(report_directory(path, reports) / "ledger")
    records = [TrialRecord.of(record) for record in content.records]
    trials = tuple(record.finished() for record in records if record is not None)
    return ReportedProfile(
        path=path,
        profile=stored.profile,
        intact=stored.intact,
        trials=trials,
        damaged_lines=content.damaged_lines + records.count(None),
    )
