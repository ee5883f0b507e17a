"""``autotune report``: results, evidence and next steps, as HTML, Markdown and JSON."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from autotune.console.options import REPORTS, AsJson, ProfileData, Reports, profiles


def report(
    *,
    profile: Annotated[list[Path], typer.Argument(help="Profiles; several make one report.", autocompletion=profiles)],
    run: Annotated[list[Path] | None, typer.Option(help="A training run's directory; repeat for several.")] = None,
    data: ProfileData = None,
    out: Annotated[
        Path | None,
        typer.Option(help="HTML file; Markdown and JSON lie beside it. Default: reports/<profile>/report.html."),
    ] = None,
    reports: Reports = REPORTS,
    as_json: AsJson = False,
    form: Annotated[
        Literal["files", "pr"],
        typer.Option("--format", help="pr: print five lines of Markdown for a pull request, and write nothing."),
    ] = "files",
) -> None:
    """Report tuning and runs as HTML, Markdown and JSON."""
    from autotune.base.document import answer_json
    from autotune.report.stage import build_report, pull_request_text
    from autotune.trials.trial_log import report_directory

    if form == "pr":
        print(pull_request_text(profile, reports, runs=run or (), data=data))
        return
    place = out or report_directory(profile[0], reports) / "report.html"
    places = build_report(profile, reports, place, runs=run or (), data=data)
    if as_json:
        print(answer_json({name: str(path) for name, path in places.items()}))
    else:
        print(f"report: {places['html']}\nthe same as Markdown: {places['markdown']}\nfor programs: {places['json']}")
